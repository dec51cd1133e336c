"""torch.compile, torch.export and AOTInductor."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchkiln.aoti import aoti_options
from torchkiln.testing.check import UnavailableError, check
from torchkiln.testing.compare import (
    Where,
    gradients,
    outputs,
    require,
    require_gradients,
    require_values,
)
from torchkiln.testing.contract.gradients import incoming
from torchkiln.testing.contract.values import TINY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchkiln.testing.sample import Result, Sample
    from torchkiln.testing.spec import OpSpec


class Call(nn.Module):
    """The op as a module whose arguments are the tensors of a call, for export."""

    def __init__(self, spec: OpSpec, sample: Sample) -> None:
        super().__init__()
        # A traced function must not seed the generators.
        self.op = replace(sample, seed=None).bind(spec.op, sample.positions)

    def forward(self, *tensors: Tensor) -> Any:
        """Call the op."""
        return self.op(*tensors)


def require_compiled(spec: OpSpec, function: Any, sample: Sample, where: Where) -> None:
    """Check values and gradients of a compiled function at one sample."""
    leaves = spec.leaves(sample)
    results = outputs(leaves.call(function))
    wanted = spec.wanted(sample)
    grads = incoming(spec, results)
    found = gradients(results, leaves.take(wanted), grads)
    require_values(results, sample, where)
    require_gradients(found, sample, wanted, grads, where)


def flattened(groups: Sequence[Sequence[Any]]) -> list[Any]:
    """All items in one list."""
    return [item for group in groups for item in group]


def require_compiled_together(
    spec: OpSpec, backend: str, samples: Sequence[Sample], check_name: str
) -> None:
    """Check many samples in one graph, because compilation takes longer than the calls."""

    def every(calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Result]:
        return [spec.op(*args, **kwargs) for args, kwargs in calls]

    torch.compiler.reset()
    function = torch.compile(every, fullgraph=True, dynamic=True, backend=backend)
    leaves = [spec.leaves(sample) for sample in samples]
    samples[0].start_generators()
    called = function([call.arguments(spec.op) for call in leaves])
    results = [outputs(result) for result in called]
    inputs = [list(call.take(spec.wanted(call))) for call in leaves]
    grads = [incoming(spec, result) for result in results]
    flat = iter(gradients(flattened(results), flattened(inputs), flattened(grads)))
    for sample, result, grad, some in zip(samples, results, grads, inputs, strict=True):
        where = Where(spec, check_name, sample)
        require_values(result, sample, where)
        found = [next(flat) for _ in some]
        require_gradients(found, sample, spec.wanted(sample), grad, where)


def require_dynamic(
    spec: OpSpec, device: torch.device, dtype: torch.dtype, backend: str, check_name: str
) -> None:
    """Check that one compilation is used for other sizes, too, without a graph break."""
    torch.compiler.reset()
    function = torch.compile(spec.op, fullgraph=True, dynamic=True, backend=backend)
    sample = spec.typical(device, dtype)
    where = Where(spec, check_name, sample)
    require_compiled(spec, function, sample, where)
    with torch.compiler.set_stance("fail_on_recompile"):
        larger = spec.grown(sample)
        require_compiled(spec, function, larger, where.at("sizes doubled"))
        require_compiled(spec, function, spec.grown(larger), where.at("sizes times four"))


@check(dtypes=(torch.float32, torch.bfloat16))
def compile_aot_eager(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """torch.compile(fullgraph=True, dynamic=True) is right, forward and backward, at new sizes."""
    require_dynamic(spec, device, dtype, "aot_eager", "compile_aot_eager")
    small = [sample for sample in spec.samples(device, dtype) if sample.numel <= TINY]
    # The second random op of a graph draws other numbers than a single call, so each graph has one.
    groups = [small] if all(s.seed is None for s in small) else [[s] for s in small[:3]]
    for group in groups:
        require_compiled_together(spec, "aot_eager", group, "compile_aot_eager")


GROWTHS = 5


@check()
def no_recompilation_storm(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """torch.compile with its defaults makes one graph for the first sizes, one for all others."""
    graphs = 0

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch.compiler.reset()
    function = torch.compile(spec.op, fullgraph=True, backend=backend)
    sample = spec.typical(device, dtype)
    where = Where(spec, "no_recompilation_storm", sample)
    for _ in range(GROWTHS):
        sample.call(function)
        sample = spec.grown(sample)
    require(graphs <= 2, where, f"{GROWTHS} sizes took {graphs} graphs, expected at most 2")


@check(needs="opaque")
def compile_policy(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """A compiled graph holds the op where the spec calls it opaque, and ATen's ops where not."""
    seen: set[str] = set()

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch.compiler.reset()
    sample = spec.typical(device, dtype)
    sample.call(torch.compile(spec.op, fullgraph=True, backend=backend))
    kept = any(target.startswith(f"{spec.overload.namespace}.") for target in seen)
    where = Where(spec, "compile_policy", sample)
    wanted = "an opaque op" if spec.opaque else "none of the op's namespace"
    require(kept == spec.opaque, where, f"the graph has {sorted(seen)}, expected {wanted}")


def require_compiler(device: torch.device) -> None:
    """Raise UnavailableError without g++, which compiles the code of Inductor for the CPU."""
    if device.type == "cpu" and shutil.which("g++") is None:
        raise UnavailableError("inductor needs g++")


@check(slow=True)
def compile_inductor(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """torch.compile with its default backend is right, forward and backward, at new sizes."""
    require_compiler(device)
    require_dynamic(spec, device, dtype, "inductor", "compile_inductor")


def exported(spec: OpSpec, sample: Sample) -> torch.export.ExportedProgram:
    """The exported op with every size dynamic."""
    tensors = sample.take(sample.positions)
    auto = tuple(dict.fromkeys(range(t.dim()), torch.export.Dim.AUTO) for t in tensors)
    return torch.export.export(Call(spec, sample), tensors, dynamic_shapes=(auto,))


def call_exported(module: Any, sample: Sample) -> Result:
    """Call an exported op with the tensors of a sample."""
    sample.start_generators()
    result: Result = module(*sample.take(sample.positions))
    return result


@check()
def export(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """torch.export with dynamic sizes, saved and loaded, gives the values at two sizes."""
    sample = spec.typical(device, dtype)
    where = Where(spec, "export", sample)
    program = exported(spec, sample)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "op.pt2"
        torch.export.save(program, path)
        with warnings.catch_warnings():
            # Torch warns about the constants of a graph on a GPU.
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            module = torch.export.load(path).module()
    for call in (sample, spec.grown(sample)):
        require_values(call_exported(module, call), call, where)


CONTROL = """
import sys, tempfile, torch
class Control(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)
with tempfile.TemporaryDirectory() as folder, torch.no_grad():
    program = torch.export.export(Control(), (torch.ones(2, device=sys.argv[1]),))
    path = torch._inductor.aoti_compile_and_package(program, package_path=folder + "/control.pt2")
    torch._inductor.aoti_load_package(path)(torch.ones(2, device=sys.argv[1]))
"""


@functools.cache
def aot_inductor_works(device: str) -> bool:
    """Whether an AOTInductor package of torch.relu loads: some installations of torch crash."""
    command = [sys.executable, "-W", "ignore", "-c", CONTROL, device]
    return subprocess.run(command, capture_output=True, timeout=300, check=False).returncode == 0


@check(slow=True)
def aot_inductor(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """An AOTInductor package that calls the C function gives the values at two sizes."""
    require_compiler(device)
    if not aot_inductor_works(device.type):
        raise UnavailableError(f"AOTInductor on {device.type} fails with torch.relu alone here")
    sample = spec.typical(device, dtype)
    where = Where(spec, "aot_inductor", sample)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = str(Path(folder) / "op.pt2")
        torch._inductor.aoti_compile_and_package(
            exported(spec, sample),
            package_path=path,
            inductor_configs=aoti_options(),
        )
        package = torch._inductor.aoti_load_package(path)
        for call in (sample, spec.grown(sample)):
            require_values(call_exported(package, call), call, where)
