"""torchkiln.replace of functions that compute log-probabilities, entropies or losses of tokens."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torchkiln
from torchkiln.patch.formula.recorder import DispatchMode

# Formulas of TRL and verl, and similar functions.
SOURCE = '''
import torch
import torch.nn.functional as F

calls = []


def pick_logps(logits, index):
    """In float32 from a log-sum-exp for each sequence, else from a log-softmax of each."""
    at = index.unsqueeze(-1)
    if logits.dtype in (torch.float32, torch.float64):
        sums = torch.stack([torch.logsumexp(rows, -1) for rows in logits])
        return torch.gather(logits, -1, at).squeeze(-1) - sums
    found = [F.log_softmax(rows, -1).gather(-1, i).squeeze(-1) for rows, i in zip(logits, at)]
    return torch.stack(found)


def entropies(logits, chunk_size=128):
    """A chunk of rows at a time."""
    flat = logits.reshape(-1, logits.shape[-1])
    found = []
    for rows in flat.split(chunk_size):
        logs = F.log_softmax(rows, -1)
        found.append(-(torch.exp(logs) * logs).sum(-1))
    return torch.cat(found).reshape(logits.shape[:-1])


def logps_of_labels(logits, labels, in_place=True):
    """From the loss, in float32."""
    rows = F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction="none")
    return -rows.view(labels.shape)


def entropies_of_sums(logits):
    """The log-sum-exp minus the mean logit."""
    logits = logits.float()
    return torch.logsumexp(logits, -1) - (F.softmax(logits, -1) * logits).sum(-1)


def chunked_loss(hidden, weight, labels, chunk_size=64):
    """The mean over tokens with a label."""
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    total = 0
    for rows, some in zip(hidden.split(chunk_size), labels.split(chunk_size)):
        total = total + F.cross_entropy((rows @ weight.t()).float(), some, reduction="sum")
    return total / (labels != -100).sum()


def hot(logits, index):
    """Another temperature."""
    return F.log_softmax(logits / 2, -1).gather(-1, index.unsqueeze(-1)).squeeze(-1)


def negative(logits):
    """Minus the entropy."""
    return (F.softmax(logits, -1) * F.log_softmax(logits, -1)).sum(-1)


def bounded(logits, index):
    """Equal for probable tokens."""
    logs = F.log_softmax(logits, -1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return logs.clamp(min=-1e9)


def counted(logits):
    """With a side effect."""
    calls.append(len(logits))
    logs = F.log_softmax(logits, -1)
    return -(logs.exp() * logs).sum(-1)


def without_gradient(logits):
    """Of a detached tensor."""
    logs = F.log_softmax(logits.detach(), -1)
    return -(logs.exp() * logs).sum(-1)


def of_sequences(hidden, weight, labels):
    """The mean of the means of sequences."""
    logits = (hidden @ weight.t()).float()
    losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    mask = (labels != -100).float()
    per = (losses.view(labels.shape) * mask).sum(-1) / mask.sum(-1)
    return per.sum() / per.numel()


def without_pads(logits, labels, pad=50256):
    """0 for a class that no compared call has."""
    logs = F.log_softmax(logits, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return logs * (labels != pad)


def another_ignored(logits, labels):
    """With another class that is ignored."""
    rows = logits.float().flatten(0, -2)
    found = F.cross_entropy(rows, labels.flatten(), ignore_index=-1, reduction="none")
    return -found.view(labels.shape)


def of_sizes(logits, index):
    """Another formula for large vocabularies."""
    logits = logits if logits.shape[-1] < 100 else logits / 2
    return F.log_softmax(logits, -1).gather(-1, index.unsqueeze(-1)).squeeze(-1)


TEMPERATURE = 1.0


def of_a_global(logits, index):
    """A number that may change."""
    logs = F.log_softmax(logits / TEMPERATURE, -1)
    return logs.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def unrelated(values):
    """No softmax: it does not run."""
    calls.append("unrelated")
    return values


def trained(logits, index):
    """Calls the others by their names in the module."""
    return pick_logps(logits, index), entropies(logits), entropies(logits, 3)
'''

OURS = {
    "pick_logps": "logprob(logits, target)",
    "entropies": "logprob(logits, entropy=True)",
    "logps_of_labels": "logprob(logits, target)",
    "entropies_of_sums": "logprob(logits, entropy=True)",
    "chunked_loss": "linear_cross_entropy(x, weight, target)",
}


@pytest.fixture
def library(tmp_path: Path) -> ModuleType:
    """The functions above as a module with a file, like a library's helpers."""
    file = tmp_path / "helpers.py"
    file.write_text(SOURCE)
    module = types.ModuleType("helpers")
    module.__file__ = str(file)
    exec(compile(SOURCE, str(file), "exec"), vars(module))
    return module


def test_helpers_are_found_by_their_formula(library: ModuleType) -> None:
    before = dict(vars(library))
    report = torchkiln.replace(library)
    assert {row.name: row.now for row in report.changed} == OURS
    assert all(getattr(library, name) is not before[name] for name in OURS)
    assert library.calls == []
    reasons = {row.name: row.reason for row in report.rows if not row.changed}
    assert reasons == {
        "hot": "another formula",
        "negative": "another formula",
        "bounded": "it calls clamp",
        "counted": "it calls list.append",
        "without_gradient": "another formula",
        "of_sequences": "another formula",
        "without_pads": "it calls ne with 50256",
        "another_ignored": "it calls nll_loss_forward with -1",
        "of_sizes": "it names 100",
        "of_a_global": "it reads TEMPERATURE, which may change",
    }
    assert "5 of 15 functions replaced" in str(report)
    report.undo()
    assert all(getattr(library, name) is before[name] for name in before)


def arguments(name: str, dtype: torch.dtype, device: torch.device) -> list[Any]:
    """The arguments of a call of a function above."""
    torch.manual_seed(3)
    target = torch.randint(50, (3, 6), device=device)
    if name == "chunked_loss":
        target[0, :4] = -100
        x, weight = (torch.randn(*size, 9, device=device).to(dtype) for size in ((3, 6), (50,)))
        return [x.requires_grad_(), weight.requires_grad_(), target]
    logits = (3 * torch.randn(3, 6, 50, device=device)).to(dtype).requires_grad_()
    return [logits, target][: 1 if name.startswith("entropies") else 2]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OURS)
def test_results_and_gradients_stay(
    name: str, dtype: torch.dtype, library: ModuleType, device: torch.device
) -> None:
    given = arguments(name, dtype, device)
    inputs = [x for x in given if x.requires_grad]
    expected = getattr(library, name)(*given)
    factors = torch.randn_like(expected)
    truth = torch.autograd.grad(expected, inputs, factors)
    torchkiln.replace(library)
    found = getattr(library, name)(*given)
    assert found.dtype == expected.dtype
    results = [found, *torch.autograd.grad(found, inputs, factors)]
    close = 0.02 if dtype == torch.bfloat16 else 1e-5
    for one, other in zip(results, [expected, *truth], strict=True):
        size = other.detach().abs().max().item()
        torch.testing.assert_close(one, other, rtol=0.0, atol=close * size)


def test_callers_in_the_module_call_the_op(library: ModuleType) -> None:
    logits, index = arguments("pick_logps", torch.float32, torch.device("cpu"))
    expected = library.trained(logits, index)
    torchkiln.replace(library)
    seen: list[str] = []

    class Seen(DispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func._schema.name)
            return func(*args, **kwargs or {})

    with Seen():
        found = library.trained(logits, index)
    torch.testing.assert_close(found, expected)
    assert sum("logprob" in name for name in seen) == 2
    # Another chunk size was not compared with the op, so the function itself runs.
    assert "aten::_log_softmax" in seen


@pytest.mark.parametrize(
    "call",
    [
        lambda f, logits, index: f(logits, index=index),
        lambda f, logits, index: f(logits=logits, index=index),
        lambda f, logits, index: f(logits.unsqueeze(0), index.unsqueeze(0))[0],
        lambda f, logits, index: f(logits, index.int().long()),
    ],
)
def test_other_ways_to_call(call: Callable[..., Any], library: ModuleType) -> None:
    logits, index = arguments("pick_logps", torch.float32, torch.device("cpu"))
    expected = F.log_softmax(logits, -1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
    torchkiln.replace(library)
    torch.testing.assert_close(call(library.pick_logps, logits, index), expected)


def test_autocast_runs_the_function_itself(library: ModuleType) -> None:
    logits, index = arguments("logps_of_labels", torch.bfloat16, torch.device("cpu"))
    torchkiln.replace(library)
    with torch.autocast("cpu", torch.bfloat16):
        expected = library.logps_of_labels.__wrapped__(logits, index)
        assert torch.equal(library.logps_of_labels(logits, index), expected)


def test_dry_run_skip_and_only(library: ModuleType) -> None:
    before = dict(vars(library))
    report = torchkiln.replace(library, dry_run=True, skip=["chunked*"])
    assert {row.name for row in report.changed} == set(OURS) - {"chunked_loss"}
    assert {row.outcome for row in report.changed} == {"would replace"}
    assert not torchkiln.replace(library, only="norm").rows
    assert all(getattr(library, name) is before[name] for name in OURS)


def test_twice_and_undo_after_a_change(library: ModuleType) -> None:
    report = torchkiln.replace(library)
    again = torchkiln.replace(library)
    assert {again[name].reason for name in OURS} == {"replaced before"}
    vars(library)["entropies"] = library.negative
    with pytest.raises(RuntimeError, match=r"undo: got another helpers\.entropies"):
        report.undo()


@pytest.mark.parametrize(
    "option",
    [
        *({"exact": True}, {"head": True}, {"precision": "fp8"}, {"recompute": True}),
        {"example": torch.ones(2)},
    ],
)
def test_options_of_models_are_refused(option: dict[str, Any], library: ModuleType) -> None:
    name = next(iter(option))
    with pytest.raises(ValueError, match=rf"{name}: got a value beside a Python module"):
        torchkiln.replace(library, **option)
