"""One spec for each op. A module of this folder holds the specs of a family and is found here."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from torchkiln.ops.names import OPS
from torchkiln.testing.spec import OpSpec


def _order(spec: OpSpec) -> int:
    """The position of an op in the list of all names."""
    return OPS.index(spec.name) if spec.name in OPS else len(OPS)


def _family(module: str) -> tuple[OpSpec, ...]:
    """The specs that a module of this folder defines."""
    values = vars(import_module(f"{__name__}.{module}")).values()
    return tuple(sorted({value for value in values if isinstance(value, OpSpec)}, key=_order))


_FOUND = {module.name: _family(module.name) for module in iter_modules(__path__)}

FAMILIES = dict(sorted(_FOUND.items(), key=lambda found: _order(found[1][0])))
"""Specs by the name of their module, in the order of :mod:`torchkiln.ops.names`."""

SPECS = tuple(spec for family in FAMILIES.values() for spec in family)
