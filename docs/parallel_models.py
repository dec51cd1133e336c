"""The model of docs/examples/parallel.py with its loss, with torchkiln's modules or with torch's.

All have equal weights and attention. The first two MODULES also have equal placements of weights
and activations.
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
from torchkiln.typing import Precision

ENGINES = ("one", "ddp", "fsdp", "tp", "fsdp+tp")
"""One device, DDP, FSDP2, tensor with sequence and loss parallel, and both on a mesh."""
MODULES = ("torch", "torchkiln")
BLOCKS = ("blocks", "blocks fp8")
"""The layers as torchkiln.nn.TransformerBlock and all logits at once; not with tensor parallel."""
COLUMNS = (*MODULES, "fp8", *BLOCKS)
"""Modules, those of torchkiln with linear layers in FP8, and the blocks."""
LLAMA = Sizes(128256, 4096, 14336, 32, 8, 4, 4, 4096)
"""Four layers with the sizes of Llama 3 8B."""
TINY = Sizes(256, 1024, 512, heads=8, kv_heads=4, blocks=1, sequences=4, length=16)
"""Each of four processes of tensor parallel has whole blocks of 128 features."""
TINY_FOR_EIGHT = Sizes(256, 128, 64, heads=8, kv_heads=8, blocks=1, sequences=8, length=8)
"""Each of eight processes has a head and a sequence."""

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


class Own(torchkiln.nn.TransformerBlock):
    """The block with merged projections and the weights of another."""

    def __init__(self, block: nn.Module, sizes: Sizes, precision: Precision | None) -> None:
        assert isinstance(block, Block)
        heads = sizes.heads, sizes.kv_heads
        super().__init__(sizes.width, *heads, None, sizes.hidden, precision=precision)
        rope = block.attention.rope
        assert isinstance(rope, torchkiln.nn.RotaryEmbedding)
        self.rope: torchkiln.nn.RotaryEmbedding = rope
        self.attention_norm.eps = self.mlp_norm.eps = None  # that of the other blocks
        q, k, v, out = (getattr(block.attention, name).weight for name in ("q", "k", "v", "out"))
        gate, up, down = (getattr(block.mlp, name).weight for name in ("gate", "up", "down"))
        merged = {"attention.qkv": (q, k, v), "attention.out": (out,)}
        for name, parts in (merged | {"mlp.gate_up": (gate, up), "mlp.down": (down,)}).items():
            self.get_submodule(name).weight = nn.Parameter(torch.cat([p.detach() for p in parts]))

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """The output and the residual, as those of the other blocks."""
        cos, sin = (table[: x.shape[1]] for table in (self.rope.cos, self.rope.sin))
        return super().forward(x, residual, cos, sin)


def in_fp8(block: nn.Module) -> None:
    """Replaces the linear layers of a block."""
    assert isinstance(block, Block)
    for part in (block.attention, block.mlp):
        for name, layer in list(part.named_children()):
            if isinstance(layer, nn.Linear):
                sizes = layer.in_features, layer.out_features
                setattr(part, name, torchkiln.nn.LinearFP8(*sizes, bias=False, device="meta"))
                getattr(part, name).weight = layer.weight


class WithLoss(Model):
    """Tokens and the next tokens to the mean loss; a group has the classes distributed."""

    def __init__(self, sizes: Sizes, modules: str) -> None:
        super().__init__(sizes)
        self.of_torch, self.has_blocks = modules == "torch", modules in BLOCKS
        self.group: dist.ProcessGroup | None = None
        self.mesh: DeviceMesh | None = None
        if modules == "fp8":
            for block in self.blocks:
                in_fp8(block)
        if self.has_blocks:
            precision: Precision | None = "fp8" if modules == "blocks fp8" else None
            self.blocks = nn.ModuleList(Own(block, sizes, precision) for block in self.blocks)
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
            if self.has_blocks:
                logits = self.head(x).flatten(0, 1)
                return torchkiln.cross_entropy(logits, target.flatten(), inplace_backward=True)
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
