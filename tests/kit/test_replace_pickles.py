"""Files of replaced models contain no name of a private module, and load in later versions."""

from __future__ import annotations

import copy
import pickle
import pickletools
import zipfile
from typing import Any

import pytest
import torch
from pickled_model import FILE, KINDS, Net, Rms, example
from torch import nn

import torchkiln
from torchkiln.patch.attention import Counted
from torchkiln.patch.fp8 import LinearInFP8, PairInFP8
from torchkiln.patch.graph.channels_last import ChannelsLast
from torchkiln.patch.plan import SAVED, plan_of


def names_in(data: bytes) -> set[str]:
    """The names of torchkiln's modules in a pickle, in its globals and strings."""
    texts = [arg for _, arg, _ in pickletools.genops(data) if isinstance(arg, str)]
    return {text for text in texts if "torchkiln." in text}


def test_a_file_of_this_minor_version_loads() -> None:
    with zipfile.ZipFile(FILE) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        assert names_in(archive.read(name)) == {"torchkiln.patch _restore"}
    found = torch.load(FILE, weights_only=False)
    model, x = found["model"], example()
    assert isinstance(model, Net)
    plans = {type(plan_of(m)) for m in model.modules()} - {type(None)}
    # Plans for transformers, for layers on a GPU, and for what is faster on an example, which
    # test_replace_fp8.py and test_replace_channels_last.py pickle.
    others = {Counted, LinearInFP8, PairInFP8, ChannelsLast}
    assert plans == set(SAVED.values()) - others
    torch.testing.assert_close(model(x), found["output"])
    plain = Net().eval()
    plain.load_state_dict(model.state_dict(), assign=True)  # the file has an expanded scalar
    torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_pickles_name_the_public_module_only(protocol: int) -> None:
    model = Net()
    torchkiln.replace(model, only=KINDS)
    data = pickle.dumps(model, protocol)
    assert {name.replace(" ", ".") for name in names_in(data)} <= {
        "torchkiln.patch",
        "torchkiln.patch._restore",
    }
    loaded = pickle.loads(data)
    assert [type(m) for m in loaded.modules()] == [type(m) for m in model.modules()]


@pytest.mark.parametrize("change", ["kind", "version", "settings"])
def test_what_cannot_be_restored_runs_the_original_forward(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(Rms(8))
    torchkiln.replace(model)
    x = torch.randn(3, 8)
    expected = model(x)
    data = pickle.dumps(model)
    for cls in list(SAVED.values()):
        if change == "kind":
            monkeypatch.delitem(SAVED, cls.saved_as)
        elif change == "version":
            monkeypatch.setattr(cls, "version", 2)
        else:
            monkeypatch.setattr(cls, "loaded", refuse)
    with pytest.warns(UserWarning, match=r"torchkiln\.replace: Rms: got a pickle with .* 'norm'"):
        loaded = pickle.loads(data)
    assert type(loaded[0]) is Rms
    torch.testing.assert_close(loaded(x), expected)


def refuse(_: Any) -> Any:
    raise TypeError("a field that this version does not have")


class Rebuilt(Rms):
    """A norm that is copied by calling its class."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size

    def __reduce__(self) -> Any:
        return Rebuilt, (self.size,), self.__dict__


class Sized(Rms):
    """A norm whose ``__new__`` has an argument."""

    def __new__(cls, size: int) -> Any:
        made = super().__new__(cls)
        made.__dict__["size"] = size
        return made

    def __getnewargs__(self) -> tuple[Any]:
        return (self.size,)


@pytest.mark.parametrize("cls", [Rebuilt, Sized])
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]
)
def test_classes_that_make_their_copies_in_another_way(cls: Any, copied: Any) -> None:
    module, x = cls(8), torch.randn(3, 8)
    with torch.no_grad():
        module.weight.normal_()
    assert torchkiln.replace(module).changed
    found = copied(module)
    assert isinstance(found, cls)
    assert found.size == 8
    torch.testing.assert_close(found(x), module(x))


def test_a_copy_of_a_later_class_has_that_class() -> None:
    module, x = Rms(8), torch.randn(3, 8)
    torchkiln.replace(module)
    module.__class__ = type("Later", (type(module),), {"forward": lambda _, x: x + 1})
    assert torch.equal(copy.deepcopy(module)(x), x + 1)
