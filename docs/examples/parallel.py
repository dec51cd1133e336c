"""Trains a small language model on several devices, with the losses of one.

The mesh has two dimensions: data parallel (FSDP2) and tensor parallel. Along the second one the
projections are sharded by heads and hidden features, the norms and residuals by tokens (sequence
parallel), the loss by the vocabulary. Usage:

    torchrun --standalone --nproc-per-node 4 parallel.py --steps 20 --save checkpoint
    torchrun --standalone --nproc-per-node 2 parallel.py --steps 40 --load checkpoint
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput, parallelize_module

import torchkiln
from torchkiln.distributed import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    vocab_parallel_cross_entropy,
)


@dataclass(frozen=True)
class Sizes:
    """Of a model and its batch."""

    vocabulary: int = 64
    width: int = 64
    hidden: int = 192
    heads: int = 4
    kv_heads: int = 2
    blocks: int = 2
    sequences: int = 8
    length: int = 32

    @property
    def head(self) -> int:
        """Numbers of a head."""
        return self.width // self.heads


class Attention(nn.Module):
    """Causal attention; each device has some of the heads."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head, width, kv_width = sizes.head, sizes.width, sizes.kv_heads * sizes.head
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, kv_width, bias=False) for _ in range(2))
        self.rope: nn.Module = torchkiln.nn.RotaryEmbedding(sizes.head, sizes.length)

    def forward(self, x: Tensor) -> Tensor:
        """The output for normed tokens."""
        q, k, v = (
            part(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        q, k = self.rope(q, k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        output: Tensor = self.out(y.transpose(1, 2).flatten(-2))
        return output


class FeedForward(nn.Module):
    """A gated layer; each device has some of the hidden features."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(sizes.width, sizes.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The output for normed tokens."""
        y: Tensor = self.down(torchkiln.swiglu(self.gate(x), self.up(x)))
        return y


class Block(nn.Module):
    """Attention and a gated layer, each after a norm that also adds the residual."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.before: nn.Module = torchkiln.nn.AddRMSNorm(sizes.width)
        self.between: nn.Module = torchkiln.nn.AddRMSNorm(sizes.width)
        self.attention, self.mlp = Attention(sizes), FeedForward(sizes)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The output, which the next block adds to the residual, and the residual."""
        normed, residual = self.before(x, residual)
        normed, residual = self.between(self.attention(normed), residual)
        return self.mlp(normed), residual


class Model(nn.Module):
    """Tokens to logits of the vocabulary, or of a part of it."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.blocks))
        self.norm: nn.Module = torchkiln.nn.AddRMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def features(self, tokens: Tensor) -> Tensor:
        """The normed tokens of this process."""
        x = self.embedding(tokens)
        residual = torch.zeros_like(x)
        for block in self.blocks:
            x, residual = block(x, residual)
        normed: Tensor = self.norm(x, residual)[0]
        return normed

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of this process's classes."""
        logits: Tensor = self.head(self.features(tokens))
        return logits


def shard_tensors(model: Model, mesh: DeviceMesh) -> None:
    """Shard projections, norms and classes."""
    tokens = Shard(1)
    norm = SequenceParallel(use_local_output=True)
    whole = PrepareModuleInput(input_layouts=tokens, desired_input_layouts=Replicate())
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=tokens)
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
        "norm": norm,
        "head": ColwiseParallel(input_layouts=tokens),
    }
    for i in range(len(model.blocks)):
        plan |= {f"blocks.{i}.before": norm, f"blocks.{i}.between": norm}
        plan |= {f"blocks.{i}.attention": whole, f"blocks.{i}.mlp": whole}
        plan |= {f"blocks.{i}.attention.{name}": columns for name in "qkv"}
        plan |= {f"blocks.{i}.mlp.{name}": columns for name in ("gate", "up")}
        plan |= {f"blocks.{i}.attention.out": rows, f"blocks.{i}.mlp.down": rows}
    parallelize_module(model, mesh, plan)


def shard_data(model: Model, mesh: DeviceMesh) -> None:
    """Shard weights, gradients and the optimizer's state."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def batch(step: int, sizes: Sizes, mesh: DeviceMesh, device: torch.device) -> tuple[Tensor, Tensor]:
    """The tokens of this process, which count up by another step in each sequence, and the next."""
    generator = torch.Generator(device).manual_seed(step)
    count = (sizes.sequences, 1)
    first = torch.randint(sizes.vocabulary, count, generator=generator, device=device)
    by = torch.randint(1, 5, count, generator=generator, device=device)
    tokens = (first + by * torch.arange(sizes.length + 1, device=device)) % sizes.vocabulary
    mine = tokens.chunk(mesh.size())[mesh.get_local_rank()]
    return mine[:, :-1], mine[:, 1:]


def train(options: argparse.Namespace, report: Callable[[int, float], None]) -> None:
    """Train in this process of a group."""
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    size = dist.get_world_size()
    tensor = min(options.tensor_parallel, size)
    if size % tensor or Sizes.sequences % (size // tensor):
        raise SystemExit(f"got {size} processes, expected {tensor} times a divisor of 8")
    names = ("data", "tensor")
    mesh = init_device_mesh(device.type, (size // tensor, tensor), mesh_dim_names=names)
    torch.manual_seed(0)  # equal weights everywhere
    sizes = Sizes()
    model = Model(sizes).to(device, getattr(torch, options.dtype))
    shard_tensors(model, mesh["tensor"])
    shard_data(model, mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = load(options.load, model, optimizer) if options.load else 0
    for step in range(first, options.steps):
        tokens, target = batch(step, sizes, mesh["data"], device)
        loss = vocab_parallel_cross_entropy(model(tokens), target, mesh["tensor"].get_group())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / mesh["data"].size()
        dist.all_reduce(mean, group=mesh["data"].get_group())
        report(step, mean.item())
    if options.save:
        save(options.save, options.steps, model, optimizer)


def save(folder: str, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint, each process its shards."""
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states, "step": step}
    state_dict_saver.save(state, checkpoint_id=folder)


def load(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Read a checkpoint of any number of processes; returns the step."""
    weights, states = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": states, "step": 0}
    state_dict_loader.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return int(state["step"])


def main() -> None:
    """Train by the command line, under torchrun or as one process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tensor-parallel", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--save", help="folder for a checkpoint")
    parser.add_argument("--load", help="folder of a checkpoint, which is continued")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # nothing here writes over outputs
    backend = "nccl" if options.device == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, rank=0, world_size=1, store=store)

    def report(step: int, loss: float) -> None:
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.10f}", flush=True)

    train(options, report)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
