"""``torchkiln new``: writes a package, or an op of this repository, that works before any edit.

In ``templates``, ``common`` has the files of every package, and the other folders have the files
of one template. Names in capitals, such as ``PACKAGE`` and ``OPNAME``, are placeholders; file names
that begin with ``dot_`` begin with a dot in the package.
"""

from torchkiln.new.template import TEMPLATES, files
from torchkiln.new.write import write_hub_kernel, write_package

__all__ = ["TEMPLATES", "files", "write_hub_kernel", "write_package"]
