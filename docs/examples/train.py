"""Trains a small language model twice from the same weights: with fused layers and with torch's.

The text is synthetic: each sequence counts up by its own step, modulo the vocabulary, so the next
token follows from the two before it.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchkiln

VOCABULARY, WIDTH, HIDDEN, HEADS, BLOCKS = 17, 48, 128, 4, 2
SEQUENCES, LENGTH = 32, 24


class FusedBlock(nn.Module):
    """Attention and a gated layer, each after a norm that also adds the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.before = torchkiln.nn.AddRMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.between = torchkiln.nn.AddRMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.gate = torchkiln.nn.SwiGLU()  # silu of one half times the other
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The output, which the next block adds to the residual, and the residual."""
        normed, residual = self.before(x, residual)  # sum and norm in one pass
        normed, residual = self.between(attention(self, normed), residual)
        return self.down(self.gate(self.up(normed))), residual


class PlainBlock(nn.Module):
    """The same block with torch's layers; the parameters have the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.between = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The output and the residual."""
        residual = x + residual
        residual = attention(self, self.before(residual)) + residual
        gate, up = self.up(self.between(residual)).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up), residual


def attention(block: FusedBlock | PlainBlock, x: Tensor) -> Tensor:
    """Causal attention, by torch."""
    q, k, v = (
        part.unflatten(-1, (HEADS, -1)).transpose(-3, -2) for part in block.qkv(x).chunk(3, dim=-1)
    )
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return block.out(mixed.transpose(-3, -2).flatten(-2))


class Model(nn.Module):
    """Maps tokens to the logits of the next token."""

    def __init__(self, block: Callable[[], nn.Module], norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))
        self.norm = norm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [..., LENGTH] to logits [..., LENGTH, VOCABULARY]."""
        x = self.embedding(tokens) + self.position
        residual = torch.zeros_like(x)
        for block in self.blocks:
            x, residual = block(x, residual)
        return self.head(self.norm(x + residual))


def batch(generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """Sequences, and the next token at each position but the first, where it is unknown."""
    start = torch.randint(VOCABULARY, (SEQUENCES, 1), generator=generator)
    step = torch.randint(1, VOCABULARY, (SEQUENCES, 1), generator=generator)
    tokens = (start + step * torch.arange(LENGTH + 1)) % VOCABULARY
    following = tokens[:, 1:].clone()
    following[:, 0] = -100
    return tokens[:, :-1].to(device), following.to(device)


@dataclass
class Run:
    """The losses and the time of a training."""

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0


def train(
    model: Model, loss_of: Callable[[Tensor, Tensor], Tensor], steps: int, device: torch.device
) -> Run:
    """Trains with Adam, on the same batches in every run."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    run, start = Run(), time.perf_counter()
    for _ in range(steps):
        tokens, following = batch(generator, device)
        loss = loss_of(model(tokens).flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.losses.append(loss.item())
    run.seconds = time.perf_counter() - start
    return run


def main(steps: int = 200, device_name: str = "") -> dict[str, Run]:
    """Trains both models and prints their losses and times."""
    device = torch.device(device_name or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.manual_seed(0)
    plain = Model(PlainBlock, nn.RMSNorm).to(device)
    fused = Model(FusedBlock, torchkiln.nn.RMSNorm).to(device)
    fused.load_state_dict(plain.state_dict())  # the parameters have torch's names and shapes
    runs = {
        "torchkiln": train(fused, torchkiln.cross_entropy, steps, device),
        "torch": train(plain, F.cross_entropy, steps, device),
    }
    print(f"{steps} steps on {device}; the loss of a random guess is {math.log(VOCABULARY):.2f}")
    for name, run in runs.items():
        first, last, each = run.losses[0], run.losses[-1], 1e3 * run.seconds / steps
        print(f"{name:10} loss {first:.3f} -> {last:.3f}, {each:.1f} ms per step")
    return runs


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", nargs="?", type=int, default=200)
    parser.add_argument("device", nargs="?", default="", help="such as cpu or cuda:0")
    given = parser.parse_args()
    main(given.steps, given.device)
