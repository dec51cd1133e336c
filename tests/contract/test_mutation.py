"""The list of planted faults fits the sources: each replaced text and each named test exists."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest
from fault import Fault
from faults import FAULTS
from kernel_faults import KERNELS
from page import Finding, table
from trials import failed_first, is_named, of_device

from torchkiln import testing
from torchkiln.testing.contract import CHECKS

ROOT = Path(__file__).resolve().parents[2]
NAMES = {spec.name for spec in testing.SPECS}
FAMILIES = (
    *("norm", "batch_norm", "group_norm", "softmax", "cross_entropy", "matmul", "rope", "rowwise"),
    "gemm",
)
"""Families of kernels for which faults are listed."""


def require_test(name: str) -> None:
    """Require that a file of tests/ops has a function."""
    file, _, function = name.partition("::")
    tree = ast.parse((ROOT / "tests" / "ops" / file).read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def by_dtype() -> set[Path]:
    """The source files per dtype that cuda/by_dtype.cmake generates."""
    headers = (ROOT / "cuda" / "ops").glob("*/*_by_dtype.cuh")
    names = {f"{header.parent.name}_{header.stem}" for header in headers}
    dtypes = ("float32", "float16", "bfloat16")
    return {Path(f"cuda/by_dtype/{name}_{dtype}.cu") for name in names for dtype in dtypes}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text()
    assert text.count(fault.old) == fault.times
    assert fault.old != fault.new
    unit = Path(fault.unit or fault.file)
    made = unit.parent == Path("cuda/by_dtype")  # generated in the build folder
    assert unit in by_dtype() if made else (ROOT / unit).is_file()
    assert unit.suffix in (".cpp", ".cu", ".py")
    assert fault.op in NAMES
    for check in fault.checks.split(" or "):
        if "::" in check:
            require_test(check)
            continue
        name, at, dtype = check.partition("@")
        known = [str(one).removeprefix("torch.") for one in CHECKS[name].dtypes]
        assert not at or (dtype in known and len(known) > 1)


def test_there_are_enough_of_each_kind() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(names) == len(set(names))
    assert {fault.device for fault in FAULTS} == {"cpu", "cuda", "2 x cuda"}
    folders = Counter(Path(fault.file).parent.name for fault in KERNELS)
    assert sum(folders.values()) >= 25
    assert set(FAMILIES) <= set(folders)


def test_the_tests_of_a_fault() -> None:
    """A fault selects checks by op, device and dtype, and functions of tests/ops by name."""
    fault = next(fault for fault in FAULTS if fault.name == "relu loses NaN")
    contract = "tests/contract/test_contract.py::test_contract"
    values = f"{contract}[relu-not_finite-cpu-float32]"
    others = [
        f"{contract}[relu-not_finite-cpu-float16]",
        f"{contract}[relu6-not_finite-cpu-float32]",
    ]
    assert [t for t in (values, *others) if is_named(fault, t)] == [values]
    assert is_named(fault._replace(checks="values or not_finite"), others[0])
    named = fault._replace(checks="test_norm.py::test_sums", device="cuda")
    assert is_named(named, "tests/ops/test_norm.py::test_sums[cuda-(3, 4)]")
    assert not is_named(named, "tests/ops/test_norm.py::test_sums_of_rows")
    on = [f"tests/ops/test_norm.py::test_sums{end}" for end in ("", "[cpu]", "[3-cuda]")]
    assert of_device(named, on) == [on[0], on[2]]


def test_the_test_that_failed() -> None:
    """The first test in the summary or, if the process died, the last test that began."""
    first, second = "tests/ops/test_norm.py::test_a[cuda-(3, 4)]", "tests/ops/test_norm.py::test_b"
    passed = f"{first} PASSED [ 50%]\n"
    assert failed_first(f"{passed}{second} FAILED [100%]\nFAILED {second} - error") == second
    assert failed_first(f"{passed}{second} Fatal Python error: Aborted\n\nThread 0x1") == second
    assert failed_first(f"{first} Fatal Python error: Aborted") == first


def test_a_table_keeps_the_lines_of_faults_that_were_not_tried() -> None:
    old, new = FAULTS[:2]
    finding = Finding(
        new.name, "", "caught", "full", "tests/ops/test_a.py::test_b", 1, "GPU", "now"
    )
    lines = table(
        [finding], f"old head\n\n| {old.name} | `file` | **missed** | full |"
    ).splitlines()
    assert lines[0] == (
        "The default run finds 0 of 2, the full run 1: GPU, now; 1 of them in an earlier run."
    )
    assert lines[-2] == f"| {old.name} | `file` | **missed** | full |"
    assert lines[-1] == f"| {new.name} | `{new.file}` | `test_a.py::test_b` | full |"
