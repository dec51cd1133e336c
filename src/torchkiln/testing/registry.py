"""Finds specs by the names of their ops, also in other packages."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from torchkiln.ops.names import ALIASES
from torchkiln.testing import SPECS, OpSpec

COVERED = {"addcmul": "muladd", "conv_bn_act": "bn_act"}
"""Functions without a spec, each with the op whose kernels it runs in addition to torch's."""


def find(where: str, argument: str, name: str, specs: Sequence[OpSpec] = SPECS) -> OpSpec:
    """The spec of an op; the error about an unknown name begins with similar names."""
    known = {spec.name: spec for spec in specs}
    alias = ALIASES.get(name, name)
    if name in known or alias in known:
        return known[name if name in known else alias]
    close = get_close_matches(name, known, n=3)
    hint = f" (did you mean {' or '.join(close)}?)" if close else ""
    if name in COVERED:
        hint = f" (its kernels are those of {COVERED[name]})"
    raise ValueError(f"{where}: {argument}: got {name!r}{hint}, expected one of {', '.join(known)}")


def _imported(module: str) -> ModuleType:
    """Imports a module by file or by name, also from the current folder.

    As with ``python FILE`` and ``python -m``, the module may import modules of its folder.
    """
    file = Path(module).resolve()
    is_file = file.suffix == ".py"
    folder = str(file.parent if is_file else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if not is_file:
        return import_module(module)
    # Imported by path, because another module may have the same name.
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    found = module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def specs_of(where: str, argument: str, module: str) -> tuple[OpSpec, ...]:
    """Load the variable SPECS of a module of another package, by module name or file path."""
    try:
        found = tuple(_imported(module).SPECS)
    except Exception as error:  # a user's module may raise any error
        first = next(iter(str(error).splitlines()), "")
        raise ValueError(
            f"{where}: {argument}: got {module!r} ({type(error).__name__}: {first}), expected a "
            "module or its .py file with SPECS, a tuple of torchkiln.testing.OpSpec"
        ) from error
    if not found or not all(isinstance(spec, OpSpec) for spec in found):
        raise ValueError(
            f"{where}: {argument}: got {module!r} with SPECS = {found!r}, expected a tuple of "
            "torchkiln.testing.OpSpec"
        )
    return found
