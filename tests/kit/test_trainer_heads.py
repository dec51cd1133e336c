"""The recipes that take the place of trainers' losses from hidden states.

Each is compared with its formula in float64, and with the published trainer where it is installed.
"""

from __future__ import annotations

import importlib.util
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_linear_kl import formula as divergence
from test_post_training import recipes  # noqa: F401 - a fixture
from torch import Tensor

NEEDS_TRL = pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
OUTPUTS = ("log_probs", "entropy")
ROWS, CLASSES = 9, 13


def layer(features: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Hidden states, weight and bias."""
    shapes = ((ROWS, features), (CLASSES, features), (CLASSES,))
    return [torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes]


def capped(own: list[Tensor], softcap: float | None, scale: float) -> Tensor:
    """Logits with a scale, then a softcap."""
    logits = F.linear(*own) * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def unused(*args: Any) -> Any:
    """Stands for a trainer's function that must not run."""
    raise AssertionError(args)


def require_equal(found: Any, expected: Any, leaves: list[Tensor], close: float = 1e-10) -> None:
    """Compares results, and gradients for other incoming gradients of each row."""
    assert len(found) == len(expected)
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if a is not None or b is not None]
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=close, atol=close)
    pairs = [(a, b) for a, b in pairs if b.requires_grad]
    grads = [torch.randn_like(b) for _, b in pairs]
    ours, theirs = (torch.autograd.grad(each, leaves, grads) for each in zip(*pairs, strict=True))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=close, atol=10 * close)


OF_TRL: tuple[tuple[Any, ...], ...] = (
    (1.0, 64, None, 1.0, OUTPUTS),
    (0.7, 64, 2.5, 1.7, OUTPUTS),
    (1.3, 64, None, 0.4, ("log_probs",)),
)
"""Temperature, size of chunks, softcap, scale and outputs."""


@pytest.mark.parametrize("options", OF_TRL)
def test_trls_log_probabilities(options: tuple[Any, ...], recipes: ModuleType) -> None:  # noqa: F811
    temperature, _, softcap, scale, outputs = options
    leaves, target = layer(5), torch.randint(CLASSES, (ROWS,))
    logs = F.log_softmax(capped(leaves, softcap, scale) / temperature, -1)
    logp, entropy = logs.gather(1, target.unsqueeze(1)).squeeze(1), -(logs.exp() * logs).sum(-1)
    expected = (logp, entropy if "entropy" in outputs else None, None, None, None)
    found = recipes.trl_logprob(unused)(*leaves, target, *options)
    require_equal(found, expected, leaves)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_trls_divergence(beta: float, recipes: ModuleType) -> None:  # noqa: F811
    student, teacher = layer(5), layer(6)
    z, u = F.linear(*student) / 1.3, F.linear(*teacher).detach() / 1.3
    direction: Any = {0.0: "forward", 1.0: "reverse"}.get(beta, "js")
    entropy = torch.distributions.Categorical(logits=z.detach()).entropy()
    expected = (divergence(z, u, direction, beta or 0.5), entropy)
    given = (*student, *teacher, beta, 1.3, 1.0, None, 1.0, None)
    found = recipes.trl_divergence(unused)(*given)
    assert not found[1].requires_grad
    options: dict[str, Any] = {"allow_unused": True, "retain_graph": True}
    assert not any(g is not None for g in torch.autograd.grad(found[0].sum(), teacher, **options))
    require_equal(found, expected, student)


def test_verls_log_probabilities(recipes: ModuleType) -> None:  # noqa: F811
    x, weight, _ = layer(5)
    target = torch.randint(CLASSES, (ROWS,), dtype=torch.int32)
    logs = F.log_softmax(F.linear(x, weight) / 0.7, -1)
    logp = logs.gather(1, target.long().unsqueeze(1)).squeeze(1)
    found = recipes.verl_logprob(None, x, weight, target, 0.7)
    require_equal(found, (logp, -(logs.exp() * logs).sum(-1)), [x, weight])


def test_other_calls_are_the_trainers(recipes: ModuleType) -> None:  # noqa: F811
    def other(*args: Any) -> Any:
        return args

    logprob, divergence = recipes.trl_logprob(other), recipes.trl_divergence(other)
    call = (*layer(5), None, 1.0, 64, None, 1.0, ("log_probs", "is_top1"))
    assert logprob(*call) == call
    for changes in ((2.0, None, 1.0, None), (1.0, None, 1.0, 30.0)):
        given = (*layer(5), *layer(6), 0.0, 1.0, *changes)
        assert divergence(*given) == given


@pytest.fixture
def model() -> Any:
    """A small causal model with TRL's head; its logits have a softcap."""
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.Gemma2Config(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1, final_logit_softcapping=3.0,
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(config)


@NEEDS_TRL
@pytest.mark.filterwarnings("ignore")  # of imports of trl
def test_the_head_of_trl(
    model: Any,
    recipes: ModuleType,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through add_fused_lm_head, as the trainers of GRPO and RLOO call it."""
    from trl.kernels import ChunkedLogProbFunction as Head  # noqa: PLC0415 - takes seconds
    from trl.trainer.utils import add_fused_lm_head  # noqa: PLC0415

    add_fused_lm_head(model, temperature=0.8, outputs=OUTPUTS)
    tokens = torch.randint(50, (2, 7))
    labels = tokens.masked_fill(torch.arange(7) < 3, -100)
    results = []
    for is_ours in (False, True):
        if is_ours:
            monkeypatch.setattr(Head, "apply", recipes.trl_logprob(Head.apply))
        model.zero_grad()
        found = model(tokens, labels=labels, fused_lm_head=True)
        (found.loss + 0.1 * found.entropy.sum()).backward()
        head = model.get_output_embeddings().weight
        results.append((found.log_probs, found.entropy, found.loss, head.grad.clone()))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@NEEDS_TRL
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_divergence_of_trl(
    beta: float,
    recipes: ModuleType,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through the loss of its trainer of distillation."""
    from trl.kernels.chunked_divergence import (  # noqa: PLC0415
        ChunkedDivergenceFunction as Divergence,
    )
    from trl.trainer.distillation_trainer import _chunked_divergence_loss  # noqa: PLC0415

    student, teacher = layer(5, torch.float32), layer(6, torch.float32)
    (x, weight, bias), (y, weight_y, bias_y) = student, teacher
    mask = (torch.arange(ROWS) > 2).unsqueeze(0)
    results = []
    for is_ours in (False, True):
        if is_ours:
            monkeypatch.setattr(Divergence, "apply", recipes.trl_divergence(Divergence.apply))
        loss, entropy, _ = _chunked_divergence_loss(
            *(x.unsqueeze(0), y.unsqueeze(0), weight, weight_y, mask, beta),
            student_lm_head_bias=bias,
            teacher_lm_head_bias=bias_y,
            temperature=1.3,
        )
        results.append((loss.detach(), entropy, *torch.autograd.grad(loss, student)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_head_of_verl(recipes: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Its file is loaded by itself, as verl imports Ray."""
    package = find_spec("verl")
    if package is None or package.origin is None:
        pytest.skip("verl is not installed")
    path = Path(package.origin).parent / "utils" / "experimental" / "torch_functional.py"
    spec = importlib.util.spec_from_file_location("verl_torch_functional", path)
    assert spec is not None
    assert spec.loader is not None
    verl = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(verl)
    x, weight, _ = layer(5, torch.float32)
    target = torch.randint(CLASSES, (ROWS,))
    names = {"hidden_states": x, "vocab_weights": weight, "input_ids": target}
    expected = verl.FusedLinearForPPO().forward(**names, temperature=0.7)
    monkeypatch.setattr(verl.FusedLinearForPPO, "forward", recipes.verl_logprob)
    found = verl.FusedLinearForPPO().forward(**names, temperature=0.7)
    require_equal(found, expected, [x, weight], 1e-5)
