"""Checkpoints of four processes, from which other numbers of processes and layouts continue."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parallel_training import training
from processes import outcomes

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="this torch has no torch.distributed"
)

STATE = """
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor

WHOLE = FOLDER + ".pt"


def state():
    \"\"\"Weights and the states of the optimizer, as whole tensors on the CPU.\"\"\"
    weights, states = get_state_dict(model, optimizer)
    found = dict(weights)
    for name, values in states["state"].items():
        found |= {f"{name} {key}": value for key, value in values.items()}
    return {
        key: (value.full_tensor() if isinstance(value, DTensor) else value).cpu().clone()
        for key, value in found.items()
    }
"""

SAVE = """
for number in range(2):
    step(number)
parallel.save(FOLDER, 2, model, optimizer)
whole = state()
loss = step(2)
if rank == 0:
    torch.save((whole, loss), WHOLE)
"""

LOAD = """
whole, loss = torch.load(WHOLE)
started = state()
assert parallel.load(FOLDER, model, optimizer) == 2
found = state()
assert len(whole) > len(list(model.parameters()))
for key, value in whole.items():
    assert torch.equal(found[key], value), key
# The weights of norms start at 1; steps have moved all of them.
assert not any(torch.equal(started[name], whole[name]) for name, _ in model.named_parameters())
again = step(2)
assert abs(again - loss) < 1e-9 * loss, (again, loss)
"""


def run(script: str, device: torch.device, size: int, folder: Path) -> None:
    folder.mkdir()
    for done in outcomes(script, device, size, folder):
        assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_four_processes_to_two_and_one(device: torch.device, tensor: int, tmp_path: Path) -> None:
    """Two processes in another layout, and one process, continue from a checkpoint of four."""
    if device.type == "cuda" and torch.cuda.device_count() < 4:
        pytest.skip("needs 4 GPUs")
    place = tmp_path / "checkpoint"
    run(training(place, tensor=tensor) + STATE + SAVE, device, 4, tmp_path / "four")
    load = STATE + LOAD
    other = 2 if tensor == 1 else 1
    run(training(place, tensor=other, seed=1) + load, device, 2, tmp_path / "two")
    run(training(place, seed=1) + load, device, 1, tmp_path / "one")
    if device.type == "cuda":
        cpu = torch.device("cpu")
        run(training(place, tensor=2, seed=1) + load, cpu, 2, tmp_path / "cpu")
