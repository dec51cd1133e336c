"""The model of docs/examples/parallel.py with its loss, with torchkiln's modules or with torch's.

Both have equal weights and attention, and equal placements of weights and activations.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from examples.parallel import Block, FeedForward, Model, Sizes, shard_data, shard_tensors
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

import torchkiln
from torchkiln.distributed import vocab_parallel_cross_entropy

ENGINES = ("one", "ddp", "fsdp", "tp", "fsdp+tp")
"""One device, DDP, FSDP2, tensor with sequence and loss parallel, and both on a mesh."""
MODULES = ("torch", "torchkiln")
LLAMA = Sizes(128256, 4096, 14336, 32, 8, 4, 4, 4096)
"""Four layers with the sizes of Llama 3 8B."""
TINY = Sizes(vocabulary=256, heads=8, kv_heads=4, length=16, sequences=4)

Step = Callable[[Tensor, Tensor], Tensor]
"""Forward and backward for tokens and the next tokens; the loss."""


class AddNorm(nn.RMSNorm):
    """The sum and its norm with torch's functions."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """The normed sum, and the sum."""
        total = x + residual
        return super().forward(total), total


class Rotation(nn.Module):
    """Rotary positions as in the models of transformers."""

    cos: Tensor
    sin: Tensor

    def __init__(self, rope: nn.Module) -> None:
        super().__init__()
        for name in ("cos", "sin"):
            half = getattr(rope, name)
            self.register_buffer(name, torch.cat((half, half), -1), persistent=False)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated queries and keys."""
        return self.rotated(q), self.rotated(k)

    def rotated(self, x: Tensor) -> Tensor:
        """X * cos + (second half negated, first half) * sin."""
        first, second = x.chunk(2, -1)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        return x * cos + torch.cat((-second, first), -1) * sin


class Gated(FeedForward):
    """The gated layer with torch's functions."""

    def forward(self, x: Tensor) -> Tensor:
        """The output for normed tokens."""
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class WithLoss(Model):
    """Tokens and the next tokens to the mean loss; a group has the classes distributed."""

    def __init__(self, sizes: Sizes, modules: str) -> None:
        super().__init__(sizes)
        self.of_torch = modules == "torch"
        self.group: dist.ProcessGroup | None = None
        self.mesh: DeviceMesh | None = None
        if not self.of_torch:
            return
        self.norm = AddNorm(sizes.width)
        for block in self.blocks:
            assert isinstance(block, Block)
            block.before, block.between = (AddNorm(sizes.width) for _ in range(2))
            block.attention.rope = Rotation(block.attention.rope)
            mlp = Gated(sizes)
            mlp.load_state_dict(block.mlp.state_dict())
            block.mlp = mlp

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        """The loss."""
        x = self.features(tokens)
        if self.group is None:
            if self.of_torch:
                return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())
            return torchkiln.linear_cross_entropy(x, self.head.weight, target)
        logits = self.head(x)
        if not self.of_torch:
            return vocab_parallel_cross_entropy(logits, target, self.group)
        assert self.mesh is not None
        whole = DTensor.from_local(logits, self.mesh, [Shard(2)], run_check=False)
        return F.cross_entropy(whole.flatten(0, 1), target.flatten())


def prepared(model: WithLoss, mesh: DeviceMesh, engine: str) -> Step:
    """A step of the model under an engine; the mesh has the dimensions data and tensor."""
    call: nn.Module = model
    context: Callable[[], AbstractContextManager[None]] = nullcontext
    if "tp" in engine:
        shard_tensors(model, mesh["tensor"])
        model.group, model.mesh = mesh["tensor"].get_group(), mesh["tensor"]
        context = loss_parallel if model.of_torch else nullcontext
    if "fsdp" in engine:
        shard_data(model, mesh["data"])
    if engine == "ddp":
        call = DistributedDataParallel(model, process_group=mesh["data"].get_group())

    def step(tokens: Tensor, target: Tensor) -> Tensor:
        with context():
            loss: Tensor = call(tokens, target)
            loss.backward()
        found = loss.detach()
        return found.full_tensor() if isinstance(found, DTensor) else found

    return step


def shape_of(engine: str, size: int, tensor: int) -> tuple[int, int]:
    """Processes along the dimensions data and tensor."""
    if engine == "tp":
        return 1, size
    along = tensor if engine == "fsdp+tp" else 1
    return size // along, along
