"""Times from an edit to a result: torchkiln.jit and torch.utils.cpp_extension.load, in one run.

Prints tables. Every start is a new process. A measurement begins after the import of torch and the
start of CUDA, and ends with the results of a kernel in three dtypes; without a GPU it ends with the
machine code. The extension needs nvcc, g++ and ninja; --without-extension leaves it out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

KERNEL = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <class T>
__global__ void scaled_relu(const T* x, T* y, long long n, float bias) {
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) y[i] = T(fmaxf(float(x[i]) * BY + bias, 0.0f));
}
"""

HOST = """
#include <c10/cuda/CUDAStream.h>
#include <torch/extension.h>

template <class T>
void launch(const at::Tensor& x, const at::Tensor& y, double bias) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  scaled_relu<T><<<(x.numel() + 255) / 256, 256, 0, stream>>>(
      static_cast<const T*>(x.data_ptr()), static_cast<T*>(y.data_ptr()), x.numel(), bias);
}

void run(const at::Tensor& x, const at::Tensor& y, double bias) {
  if (x.scalar_type() == at::kFloat) launch<float>(x, y, bias);
  if (x.scalar_type() == at::kHalf) launch<__half>(x, y, bias);
  if (x.scalar_type() == at::kBFloat16) launch<__nv_bfloat16>(x, y, bias);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.def("run", &run); }
"""

TYPES = {
    torch.float32: "float",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
}
ROUTES = ("jit.load", "jit.elementwise", "cpp_extension.load")
TARGETS = {"cold": 1.0, "warm": 0.05, "changed": 0.5}
STEPS = {
    "cold": "an empty cache",
    "warm": "another process, a filled cache",
    "changed": "in that process, a changed source",
    "saved": "in one process, a saved file (reload=True)",
}
Run = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def source(by: float) -> str:
    """The kernel with its factor."""
    return KERNEL.replace("BY", f"{by}f")


def with_load(folder: Path, by: float, *, reload: bool = False) -> Run:
    """Through torchkiln.jit.load."""
    from torchkiln import jit  # noqa: PLC0415  the import is timed separately

    file = folder / "my.cu"
    file.write_text(source(by))
    module = jit.load(file, reload=reload)

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kernel = module[f"scaled_relu<{TYPES[x.dtype]}>"]
        if x.is_cuda:
            kernel[-(-x.numel() // 256), 256](x, y, x.numel(), 1.0)
        else:
            module.binary("sm_90a", kernel.signature.name)
        return y

    return run


def with_elementwise(folder: Path, by: float) -> Run:
    """Through torchkiln.jit.elementwise, which allocates its results."""
    from torchkiln import jit  # noqa: PLC0415

    del folder
    op = jit.elementwise(f"relu(x * {by} + bias)", "x, bias: float")

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            return op(x, 1.0)
        op._kernel_forward.module([x.dtype] * 2, 16 // x.itemsize, ["vector"] * 2)
        return y

    return run


def with_extension(folder: Path, by: float) -> Run:
    """Through torch.utils.cpp_extension.load."""
    from torch.utils import cpp_extension  # noqa: PLC0415

    file = folder / "extension.cu"
    text = source(by) + HOST
    # torch builds again if the file is newer than the build.
    if not file.exists() or file.read_text() != text:
        file.write_text(text)
    build = folder / "build"
    build.mkdir(exist_ok=True)
    # torch disables the conversions of the kernel: float(half) and half(float).
    flags = [f"-U__CUDA_NO_{kind}_CONVERSIONS__" for kind in ("HALF", "BFLOAT16")]
    module = cpp_extension.load(
        "scaled_relu", [str(file)], build_directory=str(build), extra_cuda_cflags=flags
    )

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            module.run(x, y, 1.0)
        return y

    return run


MAKERS: dict[str, Callable[[Path, float], Run]] = {
    "jit.load": with_load,
    "jit.elementwise": with_elementwise,
    "cpp_extension.load": with_extension,
}


class Problem:
    """Tensors of three dtypes, and a check of the results."""

    def __init__(self) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.pairs = []
        for dtype in TYPES:
            x = torch.full((1000,), 2.0, device=self.device, dtype=dtype)
            self.pairs.append((x, torch.zeros_like(x)))
        self.results: list[torch.Tensor] = []
        self.wait()

    def wait(self) -> None:
        """Waits for the results."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def solve(self, run: Run) -> None:
        """Runs the kernel for all dtypes."""
        self.results = [run(x, y) for x, y in self.pairs]
        self.wait()

    def require(self, by: float) -> None:
        """Raises unless the results have this factor."""
        for y in self.results:
            if self.device == "cuda" and y.float().tolist() != [2 * by + 1] * 1000:
                raise RuntimeError(f"jit_costs: got {y[0].item()}, expected {2 * by + 1}")


def relu(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """A torch op, for comparison."""
    return torch.relu(x)


def host_time(run: Run) -> float:
    """Host time of a call in microseconds, with a tensor so small that the GPU keeps up."""
    x, y = torch.ones(256, device="cuda"), torch.ones(256, device="cuda")
    times = []
    for _ in range(30):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(100):
            run(x, y)
        times.append((time.perf_counter() - begin) / 100)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def start(route: str, folder: Path) -> dict[str, float]:
    """One process: the first measures a cold start, the second a warm one and a changed source."""
    begin = time.perf_counter()
    import_module("torch.utils.cpp_extension" if route == ROUTES[2] else "torchkiln.jit")
    found = {"import": time.perf_counter() - begin}
    problem = Problem()
    done = folder / f"{route}.done"
    for step, by in (("warm", 2.0), ("changed", 7.0)) if done.exists() else (("cold", 2.0),):
        begin = time.perf_counter()
        run = MAKERS[route](folder, by)
        problem.solve(run)
        found[step] = time.perf_counter() - begin
        problem.require(by)
    if done.exists() and torch.cuda.is_available():
        found["call"] = host_time(run)
    done.touch()
    return found


def saves(folder: Path, rounds: int) -> dict[str, Any]:
    """The times from a save to the results, in one process."""
    problem = Problem()
    run = with_load(folder, 0.5, reload=True)
    problem.solve(run)
    found = []
    for i in range(rounds):
        by = 3.0 + i
        begin = time.perf_counter()
        (folder / "my.cu").write_text(source(by))
        problem.solve(run)
        found.append(time.perf_counter() - begin)
        problem.require(by)
    calls = {}
    if torch.cuda.is_available():
        time.sleep(0.2)  # after that only time and size of the file are checked
        calls["jit.load, reload=True"] = host_time(run)
        calls["torch.relu"] = host_time(relu)
    return {"seconds": found, "calls": calls}


def child(*words: object, folder: Path) -> dict[str, Any]:
    """The figures that a new process prints."""
    environment = {**os.environ, "TORCHKILN_CACHE": str(folder / "cache")}
    if not torch.cuda.is_available():
        environment.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
    command = [sys.executable, "-W", "ignore", __file__, "--process", *map(str, words), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"jit_costs: {' '.join(map(str, words))}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(route: str, rounds: int, folder: Path) -> dict[str, list[float]]:
    """The times of all starts of a route, in seconds."""
    found: dict[str, list[float]] = defaultdict(list)
    for i in range(rounds):
        own = folder / f"{route}{i}"
        own.mkdir()
        for _ in ("first", "second"):
            for step, seconds in child(route, folder=own).items():
                found[step].append(seconds)
    return found


def processor() -> str:
    """A short description of the machine."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{name}, {os.cpu_count()} CPU cores, torch {torch.__version__}"


def markdown(found: dict[str, Any]) -> str:
    """The tables, with medians."""
    routes = [route for route in ROUTES if route in found["starts"]]
    lines = [found["machine"], "", "| | target | " + " | ".join(routes) + " |"]
    lines.append("|---|---:|" + "---:|" * len(routes))
    for step, words in {**STEPS, "import": "the import before that"}.items():
        cells = []
        for route in routes:
            seconds = found["starts"][route].get(step)
            cells.append(f"{statistics.median(seconds):.3f} s" if seconds else "")
        target = TARGETS.get(step, TARGETS["changed"] if step == "saved" else None)
        lines.append(f"| {words} | {f'{target} s' if target else ''} | {' | '.join(cells)} |")
    if found["calls"]:
        lines += ["", "| host time of a call | |", "|---|---:|"]
        lines += [f"| {name} | {us:.1f} us |" for name, us in found["calls"].items()]
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="starts of each JIT route (default: 5)")
    add("--without-extension", action="store_true", help="measure the JIT alone, in seconds")
    add("--json", type=Path, metavar="FILE", help="write all figures to a file")
    add("--process", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args()


def process(words: list[str]) -> dict[str, Any]:
    """The work of a process that main starts."""
    if words[0] == "saves":
        return saves(Path(words[2]), int(words[1]))
    return start(words[0], Path(words[1]))


def main() -> None:
    """Measures all routes, the extension last."""
    options = arguments()
    if options.process:
        print(json.dumps(process(options.process)))
        return
    starts: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for route in ROUTES[:2]:
            starts[route] = measure(route, options.rounds, folder)
        saved = child("saves", options.rounds, folder=folder / f"{ROUTES[0]}0")
        starts[ROUTES[0]]["saved"] = saved["seconds"]
        if not options.without_extension:
            print("jit_costs: the extension is built twice", file=sys.stderr, flush=True)
            starts[ROUTES[2]] = measure(ROUTES[2], 1, folder)
    calls = saved["calls"]
    for route, steps in starts.items():
        if "call" in steps:
            calls[route] = statistics.median(steps.pop("call"))
    found = {"machine": processor(), "starts": starts, "calls": calls}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(markdown(found))


if __name__ == "__main__":
    main()
