"""``torchkiln new``: a package, or an op of this repository, that works before the first edit.

The files lie in ``templates``: ``common`` has those of every package, a folder of its own has what
makes a template, ``checkout`` what an op of this repository has besides. They are read as what they
become, with ``PACKAGE``, ``OPNAME`` and ``KILN_VERSION`` in place of names; ``dot_`` begins the
names of those that begin with a dot.
"""

from torchkiln.new.template import TEMPLATES, files
from torchkiln.new.write import write_package

__all__ = ["TEMPLATES", "files", "write_package"]
