"""Outputs of transformers' models whose logits are computed when they are read."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import fields
from typing import Any, ClassVar

from torch.compiler import is_compiling

from torchkiln.patch.source.logits import Logits

OUTPUT = "_kiln_output"
"""The helper in rewritten source: a returned value, in which tensors are not computed yet."""

LAZY: dict[type, type] = {}
"""Classes of outputs, each with the subclass whose values are computed when they are read."""


def output_of(value: Any, *, drops: bool) -> Any:
    """The result of a forward; ``drops`` says whether logits without a use become None."""
    if type(value) is tuple:
        return tuple(settled(x, drops=drops) for x in value)
    if type(value) is dict:
        return {name: settled(x, drops=drops) for name, x in value.items()}
    if type(value) not in LAZY:
        return settled(value, drops=drops)
    items = {name: OrderedDict.__getitem__(value, name) for name in value}
    waiting = [x for x in items.values() if isinstance(x, Logits)]
    if not waiting:
        return value
    if not drops and all(x.call.has_loss for x in waiting):
        return LAZY[type(value)](**items)
    return type(value)(**{name: settled(x, drops=drops) for name, x in items.items()})


def settled(value: Any, *, drops: bool) -> Any:
    """Logits as a tensor, or None if they are dropped; other values are returned unchanged."""
    if not isinstance(value, Logits):
        return value
    return None if drops and value.call.has_loss else value.tensor()


class Waiting(OrderedDict[str, Any]):
    """An output with logits to compute. After all are computed, it has its original class again."""

    _kiln_class: ClassVar[Any]

    def _read(self, names: Any) -> Any:
        """The output, with tensors for the logits of these names."""
        output: Any = self
        for name in names:
            value = OrderedDict.__getitem__(output, name)
            if isinstance(value, Logits):
                made = value.read()
                OrderedDict.__setitem__(output, name, made)
                vars(output)[name] = made
        has_more = any(isinstance(value, Logits) for value in OrderedDict.values(output))
        if not has_more and not is_compiling():
            output.__class__ = type(self)._kiln_class
        return output

    def _read_all(self) -> Any:
        """The output, with all logits computed."""
        return self._read(list(self))

    def __getitem__(self, key: Any) -> Any:
        names: Any = tuple(self)
        if isinstance(key, str):
            if key in names:
                return OrderedDict.__getitem__(self._read([key]), key)
            return type(self)._kiln_class.__getitem__(self._read_all(), key)
        wanted = names[key]
        found = self._read((wanted,) if isinstance(wanted, str) else wanted)
        values = tuple(OrderedDict.__getitem__(found, name) for name in names)
        return values[key]

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of a key, with computed logits."""
        return self[key] if key in tuple(self) else default

    def items(self) -> Any:
        """Names and values, with computed logits."""
        return OrderedDict.items(self._read_all())

    def values(self) -> Any:
        """The values, with computed logits."""
        return OrderedDict.values(self._read_all())

    def copy(self) -> Any:
        """A copy, with computed logits."""
        return self._read_all().copy()

    def to_tuple(self) -> Any:
        """All values, with computed logits."""
        return tuple(OrderedDict.values(self._read_all()))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._read_all().__reduce_ex__(protocol)


def field_of(name: str) -> property:
    """The attribute for a field of an output."""

    def read(output: Any) -> Any:
        value = vars(output).get(name)
        return vars(output._read([name]))[name] if isinstance(value, Logits) else value

    def write(output: Any, value: Any) -> None:
        vars(output)[name] = value

    return property(read, write)


def prepare(cls: type) -> None:
    """Make the subclass for a class of outputs."""
    if cls in LAZY:
        return
    scope = {field.name: field_of(field.name) for field in fields(cls)}
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_kiln_class": cls}
    LAZY[cls] = type(cls)(cls.__name__, (Waiting, cls), {**scope, **names})


def is_output(cls: Any) -> bool:
    """Whether a value is a class of transformers' outputs."""
    if not isinstance(cls, type) or not issubclass(cls, OrderedDict):
        return False
    return any(base.__name__ == "ModelOutput" for base in cls.__mro__) and hasattr(
        cls, "__dataclass_fields__"
    )
