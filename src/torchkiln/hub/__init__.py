"""torchkiln in other packages: a kernel of Hugging Face's ``kernels``, a callback of trainers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from torchkiln.hub import layers

DEVICES = ("cuda", "cpu")


@dataclass(frozen=True)
class Layer:
    """A layer by name, in the form of a repository of ``kernels``."""

    layer_name: str

    def load(self) -> type[nn.Module]:
        """The class of the layer."""
        found: type[nn.Module] = getattr(layers, self.layer_name)
        return found


def mapping() -> dict[str, dict[str, Any]]:
    """Returns all layers, for ``kernels.use_kernel_mapping`` and ``register_kernel_mapping``.

    Each is registered for training and inference, with and without ``torch.compile``.
    """
    from kernels import Mode  # noqa: PLC0415  an optional package

    modes = (
        Mode.TRAINING,
        Mode.INFERENCE,
        Mode.TRAINING | Mode.TORCH_COMPILE,
        Mode.INFERENCE | Mode.TORCH_COMPILE,
    )
    return {
        name: {device: dict.fromkeys(modes, Layer(name)) for device in DEVICES}
        for name in layers.__all__
    }


def path() -> Path:
    """Returns the folder of a local kernel, for ``kernels.get_local_kernel``."""
    return Path(__file__).parent / "kernel"


def trainer_callback(**options: Any) -> Any:
    """Returns a callback of ``transformers.Trainer`` that replaces modules of its model.

    It does so when the trainer is made, before FSDP and ``torch.compile``; so pass it in
    ``callbacks``. If it is added later, or the trainer has a ``model_init``, it does so when
    training begins; then a model that is sharded raises a RuntimeError. ``callback.report`` is the
    report for the last model.

    Args:
        options: those of ``torchkiln.replace``.
    """
    from torchkiln.hub.transformers import ReplaceCallback  # noqa: PLC0415  an optional package

    return ReplaceCallback(**options)


__all__ = ["Layer", "layers", "mapping", "path", "trainer_callback"]
