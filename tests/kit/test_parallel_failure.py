"""A process is killed while it trains with others, which must end with an error."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parallel_training import training
from processes import outcomes, processes_on, run_processes

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="this torch has no torch.distributed"
)

TIMEOUTS = {"cpu": 300.0, "cuda": 30.0}
"""Seconds until NCCL reports the loss; gloo detects a closed connection at once."""
# Which error gloo has depends on the load: a connection with unread data is reset.
ERRORS = {"cpu": r"Connection (closed|reset) by peer|Broken pipe", "cuda": "DistBackendError"}

DIE = """
import os, signal
step(0)
parallel.save(FOLDER, 1, model, optimizer)
if rank == size - 1:
    os.kill(os.getpid(), signal.SIGKILL)
step(1)
"""

CONTINUE = """
assert parallel.load(FOLDER, model, optimizer) == 1
assert optimizer.state_dict()["state"]
step(1)
"""


def test_the_others_end_with_an_error_and_the_checkpoint_loads(
    device: torch.device, tmp_path: Path
) -> None:
    train = training(tmp_path / "checkpoint")
    size = processes_on(device, 2)
    timeout = TIMEOUTS[device.type]
    *others, last = outcomes(train + DIE, device, size, tmp_path, timeout=timeout)
    assert last.returncode == -signal.SIGKILL, last.stderr[-3000:]
    for other in others:
        assert other.returncode != 0
        assert re.search(ERRORS[device.type], other.stderr), other.stderr[-3000:]
    (tmp_path / "alone").mkdir()
    run_processes(train + CONTINUE, torch.device("cpu"), 1, tmp_path / "alone")
