"""CPU kernels are built for several instruction sets; each set passes the contract."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchkiln
from torchkiln.testing import SPECS, OpSpec
from torchkiln.testing.sample import FLOATING
from torchkiln.testing.validation import with_forms

# Checks that run kernels. Autograd and dispatch do not depend on the instruction set.
CHECKS = """
import torch
from torchkiln import testing
names = {{"values", "strides", "gradient_values"}}
cases = [c for c in testing.cases(testing.SPECS, torch.device("cpu")) if c.check.name in names]
cases = [c for c in cases if c.dtype == {dtype} and c.check.name not in c.spec.excluded]
for case in cases:
    case.run()
print(len(cases))
"""

# The last bits of some of these differ with and without fused multiply-add.
BITS = """
import torch, torchkiln
torch.manual_seed(0)
x, bias = torch.randn(64, 64, dtype=torch.float64), torch.randn(64, dtype=torch.float64)
print(torchkiln.bias_act(x, bias, scale=0.1).sum(0).tolist())
"""


def run(code: str, instructions: str) -> str:
    """The output of a new interpreter that is limited to this instruction set."""
    environment = {**os.environ, "TORCHKILN_CPU_ISA": instructions}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def needs(*instructions: str) -> None:
    """Skips if the build has no CPU kernels for these instruction sets."""
    built = torchkiln.build_info()["cpu_instructions"]
    if missing := set(instructions) - set(built):
        pytest.skip(f"built for {', '.join(built)}, not for {', '.join(sorted(missing))}")


def checks_of(spec: OpSpec) -> set[str]:
    """The checks of values, strides and gradients that the spec does not exclude."""
    names = {"values", "strides"} | ({"gradient_values"} if spec.differentiable else set())
    return names - spec.excluded.keys()


@pytest.mark.rotates("dtype", len(FLOATING))
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("instructions", ["baseline", "avx2"])
def test_contract(instructions: str, dtype: torch.dtype) -> None:
    """All checks of all ops pass, in one process, as the set is chosen at import."""
    needs(instructions)
    count = int(run(CHECKS.format(dtype=dtype), instructions))
    specs = [spec for spec in with_forms(SPECS) if "cpu" in spec.devices and dtype in spec.dtypes]
    assert count == sum(len(checks_of(spec)) for spec in specs)


def test_the_choice_is_made() -> None:
    needs("baseline", "avx2")
    cpuinfo = Path("/proc/cpuinfo").read_text()
    if platform.machine() != "x86_64" or " fma" not in cpuinfo or " avx2" not in cpuinfo:
        pytest.skip("this processor has the baseline instructions only")
    assert run(BITS, "baseline") != run(BITS, "avx2")
