"""Trains a small model by GRPO on the CPU, and prints the curve of its rewards.

The prompt is a digit, the task to count on from it: the reward of a completion is the share of its
tokens that are right. Usage: python grpo.py [STEPS]
"""

from __future__ import annotations

import sys

import torch
from post_training import grpo  # type: ignore[import-not-found]
from torch import Tensor, nn

import torchkiln

DIGITS, WIDTH, LENGTH = 10, 64, 6
PROMPTS, GROUP, UPDATES = 16, 16, 2


class Model(nn.Module):
    """A recurrent model; its head is a weight, which the loss multiplies with the hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(DIGITS, WIDTH)
        self.recurrence = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Parameter(torch.randn(DIGITS, WIDTH) / WIDTH**0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """The hidden states."""
        hidden: Tensor = self.recurrence(self.embedding(tokens))[0]
        return hidden

    def score(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each token of the completions."""
        return torchkiln.linear_logprob(
            self(tokens[:, :-1]), self.head, tokens[:, 1:], entropy=True
        )

    @torch.no_grad()
    def complete(self, prompts: Tensor, generator: torch.Generator) -> Tensor:
        """Draws a completion for each prompt."""
        tokens = prompts.unsqueeze(1)
        for _ in range(LENGTH):
            p = torch.softmax(self(tokens)[:, -1] @ self.head.T, -1)
            tokens = torch.cat([tokens, torch.multinomial(p, 1, generator=generator)], 1)
        return tokens


def rewards_of(tokens: Tensor) -> Tensor:
    """The share of right tokens of each completion."""
    right = (tokens[:, :1] + torch.arange(1, LENGTH + 1)) % DIGITS
    return (tokens[:, 1:] == right).double().mean(1)


def main(steps: int = 150) -> list[float]:
    """Trains, prints the mean reward of each tenth of the steps, and returns that of each step."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model, reference = Model(), Model()
    reference.load_state_dict(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    curve: list[float] = []
    for step in range(1, steps + 1):
        prompts = torch.randint(DIGITS, (PROMPTS,), generator=generator).repeat_interleave(GROUP)
        tokens = model.complete(prompts, generator)
        rewards = rewards_of(tokens).view(PROMPTS, GROUP)
        spread = rewards.std(1, keepdim=True) + 1e-4
        advantage = ((rewards - rewards.mean(1, keepdim=True)) / spread).float().flatten()
        with torch.no_grad():
            (old, _), (ref, _) = model.score(tokens), reference.score(tokens)
        for _ in range(UPDATES):
            logp, entropy = model.score(tokens)
            mask = torch.ones_like(logp)
            loss = grpo(logp, old, ref, entropy, advantage, mask, beta=1e-3, bonus=1e-3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        curve.append(float(rewards.mean()))
        part = max(1, steps // 10)
        if step % part == 0:
            reward = sum(curve[-part:]) / part
            print(f"step {step:4}  reward {reward:.2f}  {'#' * round(50 * reward)}")
    return curve


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 150)
