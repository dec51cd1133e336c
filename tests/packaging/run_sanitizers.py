"""Usage: run_sanitizers.py cpu|gpu [PYTEST ARGUMENTS]

Runs the contract under AddressSanitizer and UBSan (a build with TORCHKILN_SANITIZE), or under the
four tools of compute-sanitizer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

# Checks left out on the CPU: those that run compilers, which a preloaded sanitizer breaks, and
# those whose calls another check makes, too.
LEFT_OUT = (
    *("compile", "recompilation", "export", "opcheck", "no_memory_growth", "determinism"),
    "gradient_strides",
)
# Checks by instruction set. Sanitizers do not see masked vector loads and stores; the baseline
# instructions have none, so checks with irregular addresses run with them, too.
ON_THE_CPU = {
    "best": f"not ({' or '.join(LEFT_OUT)}) and (values or bfloat16 or not (float64 or float16))",
    "baseline": "(values or strides or every_element) and (float32 or bfloat16)",
}
ON_THE_GPU = "(values or gradient_values or graph_capture) and (float32 or bfloat16)"
OURS = ("--kernel-name=kernel_substring=torchkiln",)
# For each tool, the kernels that it watches and the checks that it cannot run. initcheck must also
# watch the kernels of torch and CUB that write our inputs. racecheck itself fails at warpgroup
# products of half precision ("failed to handle a hardware exception").
TOOLS: dict[str, tuple[tuple[str, ...], str]] = {
    "memcheck": (OURS, ""),
    "racecheck": (OURS, " and not ((matmul or linear) and bfloat16)"),
    "initcheck": ((), ""),
    "synccheck": (OURS, ""),
}
# Runs pytest and ends the process at once, with pytest's status. In a regular shutdown of the
# interpreter, autograd's thread, which the tools slow down, could still release a tensor: that
# would call std::terminate.
PROGRAM = """
import os, sys
import pytest, torch
status = pytest.main()
if torch.cuda.is_initialized():
    torch.cuda.synchronize()
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
"""
PYTEST = (sys.executable, "-c", PROGRAM)
CONTRACT = (*PYTEST, "tests/contract/test_contract.py", "-q", "-p", "no:cacheprovider", "-n", "0")


def run(*command: str, **environment: str) -> None:
    done = subprocess.run(command, env=os.environ | environment, check=False)
    if done.returncode != 0:
        raise SystemExit(f"run_sanitizers: exit {done.returncode} of {' '.join(command)}")


def library(name: str) -> str:
    """The path of a runtime library of g++, such as libasan.so."""
    command = ("g++", f"-print-file-name={name}")
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def on_the_cpu(arguments: Sequence[str]) -> None:
    preload = ":".join(map(library, ("libasan.so", "libubsan.so", "libstdc++.so.6")))
    for instructions, checks in ON_THE_CPU.items():
        run(
            # A sanitizer writes to stderr and ends the process, so pytest must not capture it.
            *(*CONTRACT, "--capture=sys", "-m", "not slow and not large and not cuda"),
            *("-k", checks, *arguments),
            LD_PRELOAD=preload,
            ASAN_OPTIONS="detect_leaks=0",  # CPython does not free all memory at exit
            UBSAN_OPTIONS="print_stacktrace=1",
            TORCHKILN_CPU_ISA=instructions,
        )


def on_the_gpu(arguments: Sequence[str]) -> None:
    for tool, (kernels, left_out) in TOOLS.items():
        run(
            *("compute-sanitizer", f"--tool={tool}", "--error-exitcode=86", *kernels, *CONTRACT),
            *("-m", "cuda and not slow and not large", "-k", ON_THE_GPU + left_out, *arguments),
            PYTORCH_NO_CUDA_MEMORY_CACHING="1",
        )


if __name__ == "__main__":
    {"cpu": on_the_cpu, "gpu": on_the_gpu}[sys.argv[1]](sys.argv[2:])
