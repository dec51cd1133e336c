"""Trains a character-level transformer twice, with fused blocks and with torch's ops; writes text.

The text is synthetic: sums of two numbers, so a model that generates right ones has learnt more
than frequencies. Usage: python transformer.py [--steps N] [--device D] [--compile] [--picture P]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchkiln
from torchkiln.typing import Precision

WIDTH, HEADS, KV_HEADS, HIDDEN, BLOCKS = 64, 4, 2, 128, 2
HEAD = WIDTH // HEADS
SEQUENCES, LENGTH = 16, 48
CHARACTERS = "0123456789+=\n"


class PlainBlock(nn.Module):
    """A block in torch's ops, with the parameters of a TransformerBlock."""

    def __init__(self, parameters: torchkiln.nn.TransformerBlock) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = parameters.attention_norm, parameters.mlp_norm
        self.attention = parameters.attention
        self.mlp: Any = parameters.mlp

    def forward(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The result of the feed-forward layer, and the residual."""
        total = x if residual is None else x + residual
        normed = F.rms_norm(total, (WIDTH,), self.attention_norm.weight, 1e-6)
        heads = self.attention.qkv(normed).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), 1)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        total = self.attention.out(mixed.transpose(1, 2).flatten(-2)) + total
        normed = F.rms_norm(total, (WIDTH,), self.mlp_norm.weight, 1e-6)
        gate, up = self.mlp.gate_up(normed).chunk(2, -1)
        return self.mlp.down(F.silu(gate) * up), total


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotary embedding in torch's ops."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Model(nn.Module):
    """Maps characters to the logits of the next one."""

    def __init__(self, fused: bool, precision: Precision | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(CHARACTERS), WIDTH)
        sizes: dict[str, Any] = {"hidden_features": HIDDEN, "precision": precision}
        blocks = [
            torchkiln.nn.TransformerBlock(WIDTH, HEADS, KV_HEADS, **sizes) for _ in range(BLOCKS)
        ]
        self.blocks = nn.ModuleList(blocks if fused else map(PlainBlock, blocks))
        self.rotary = torchkiln.nn.RotaryEmbedding(HEAD, LENGTH)
        self.norm = (torchkiln.nn.AddRMSNorm if fused else nn.RMSNorm)(WIDTH, 1e-6)
        self.head = nn.Linear(WIDTH, len(CHARACTERS), bias=False)
        self.fused = fused

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [batch, LENGTH] to logits [batch, LENGTH, characters]."""
        x, residual = self.embedding(tokens), None
        for block in self.blocks:
            x, residual = block(x, residual, self.rotary.cos, self.rotary.sin)
        return self.head(self.norm(x, residual)[0] if self.fused else self.norm(x + residual))

    @torch.no_grad()
    def generate(self, prompt: str) -> str:
        """Continues a prompt to LENGTH characters, one at a time, from the caches."""
        device = self.head.weight.device
        caches = [
            torchkiln.nn.KVCache(1, LENGTH, KV_HEADS, HEAD, device=device) for _ in self.blocks
        ]
        text = [CHARACTERS.index(c) for c in prompt]
        for place in range(LENGTH - 1):
            at = torch.tensor([place], device=device)
            x, residual = (
                self.embedding(torch.tensor([text[place : place + 1]], device=device)),
                None,
            )
            for block, cache in zip(self.blocks, caches, strict=True):
                x, residual = block(
                    x, residual, self.rotary.cos, self.rotary.sin, cache=cache, positions=at
                )
            if place + 1 == len(text):
                text.append(int(self.head(self.norm(x, residual)[0]).argmax()))
        return "".join(CHARACTERS[i] for i in text)


def batch(generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """Characters, and the next one at each position."""
    rows = []
    for _ in range(SEQUENCES):
        text = ""
        while len(text) <= LENGTH:
            a, b = torch.randint(5, (2,), generator=generator).tolist()
            text += f"{a}+{b}={a + b}\n"
        rows.append([CHARACTERS.index(c) for c in text[: LENGTH + 1]])
    tokens = torch.tensor(rows, device=device)
    return tokens[:, :-1], tokens[:, 1:]


@dataclass
class Run:
    """The losses, the time and the memory of a training."""

    losses: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    kept: int = 0
    """Bytes that one forward keeps for backward."""

    @property
    def middle(self) -> float:
        """The median time of a step."""
        return sorted(self.milliseconds)[len(self.milliseconds) // 2]


def train(model: Model, steps: int, device: torch.device, compiled: bool = False) -> Run:
    """Trains with AdamW, on the same batches in every run."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    call = torch.compile(model) if compiled else model
    loss_of = torchkiln.cross_entropy if model.fused else F.cross_entropy
    run = Run()
    for _ in range(steps):
        tokens, following = batch(generator, device)
        start = time.perf_counter()
        loss = loss_of(call(tokens).flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.losses.append(loss.item())
        run.milliseconds.append(1e3 * (time.perf_counter() - start))
    run.kept = bytes_kept(model, tokens)
    return run


def bytes_kept(model: Model, tokens: Tensor) -> int:
    """Bytes of the tensors that a forward keeps for backward, parameters not included."""
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = model(tokens)  # keeps the tensors alive, so that no address is used twice
    del result
    return sum(kept.values())


def draw(runs: dict[str, Run], path: Path) -> None:
    """Draws losses, times and memory."""
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, (curve, times, memory) = plt.subplots(1, 3, figsize=(11, 3), layout="constrained")
    for index, (name, run) in enumerate(runs.items()):
        curve.plot(run.losses, label=name, linestyle=("-", "--", ":", "-.")[index])
        times.bar(name, run.middle)
        memory.bar(name, run.kept / 1024)
    curve.set(title="loss", xlabel="step")
    curve.legend()
    times.set(title="ms per step")
    memory.set(title="KiB kept for backward")
    figure.savefig(path)
    plt.close(figure)


def main(
    steps: int = 150, device_name: str = "", compiled: bool = False, picture: Path | None = None
) -> tuple[dict[str, Run], str]:
    """Trains both models, prints losses, times and memory, and writes sums from the cache."""
    device = torch.device(device_name or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.manual_seed(0)
    fused, plain = Model(True).to(device), Model(False).to(device)
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    runs = {}
    for name, model in (("torchkiln", fused), ("torch", plain)):
        for by_compile in (False, True) if compiled else (False,):
            model.load_state_dict(start)  # the parameters have the same names and shapes
            label = f"{name}, compiled" if by_compile else name
            runs[label] = train(model, steps, device, by_compile)
    print(f"{steps} steps on {device}")
    for name, run in runs.items():
        losses = f"loss {run.losses[0]:.3f} -> {run.losses[-1]:.3f}"
        print(f"{name:20} {losses}, {run.middle:.1f} ms per step, {run.kept / 1024:.0f} KiB kept")
    text = fused.generate("3+4=")
    print(text)
    if picture is not None:
        draw(runs, picture)
    return runs, text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--device", default="")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    main(given.steps, given.device, given.compile, given.picture)
