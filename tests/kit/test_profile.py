"""torchkiln profile: reads the output of ncu, and explains why ncu could not run."""

from __future__ import annotations

import json
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torchkiln.cli import main, op_arguments
from torchkiln.doctor import runtime
from torchkiln.profile import ncu, ranges
from torchkiln.profile.report import METRICS, Figures, number, read
from torchkiln.testing import SPECS

# Output of `ncu --import REPORT --csv --page=raw --print-units=base` of Nsight Compute 2025.3.1 for
# F.layer_norm and torch.add on an H200, 8192 x 8192 in bfloat16, profiled with the command of
# torchkiln.profile.ncu. The file has those of its 630 columns that are read, and a few others.
RECORDED = Path(__file__).with_name("ncu-raw.csv")

# A kernel of torchkiln in the same format, with messages around it. The figures are made up.
NAMES = (
    *("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream"),
    *("Block Size", "Grid Size", "Device", "CC"),
    *("dram__bytes_read.sum", "dram__bytes_write.sum"),
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__time_duration.sum",
    *("l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum", "l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum"),
    *("launch__occupancy_limit_registers", "launch__occupancy_limit_shared_mem"),
    *("launch__occupancy_limit_warps", "launch__registers_per_thread"),
    "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__maximum_warps_per_active_cycle_pct",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_selected_per_issue_active.ratio",
)
UNITS = (
    *[""] * 11,
    *("byte", "byte", "%", "ns", "byte", "byte", "block", "block", "block", "register/thread"),
    *("%", "%", "%", "%", "inst", "inst", "inst"),
)
KERNEL = (
    "void torchkiln::cuda::(anonymous namespace)::norm_rows<torchkiln::rowwise::RowTile<torchkiln::"
    "rowwise::RowVectors<__nv_bfloat16, (int)8, (bool)1>, (int)4>, float, (bool)0>(torchkiln::Norm"
    ", torchkiln::rowwise::TeamShape)"
)
CELLS = (
    *("0", "4711", "python3.12", "127.0.0.1", KERNEL, "1", "7", "(256, 1, 1)", "(4096, 1, 1)"),
    *("0", "9.0", "268,435,456", "267386880", "91.25", "128,640", "0", "0", "4", "10", "8", "56"),
    *("60.5", "50", "31.5", "47.25", "0.5", "9.75", "1"),
)
SECOND = ("1", *CELLS[1:4], "void other<float>(float *)", *CELLS[5:13], "n/a", "", *CELLS[15:])


def page(*rows: tuple[str, ...]) -> str:
    lines = [",".join(f'"{cell}"' for cell in cells) for cells in (NAMES, UNITS, *rows)]
    return "\n".join(["==PROF== Connected to process 4711", *lines, "==PROF== Disconnected", ""])


def test_the_rows_have_equal_lengths() -> None:
    assert len(NAMES) == len(UNITS) == len(CELLS) == len(SECOND)


def test_reading() -> None:
    first, second = read(page(CELLS, SECOND))
    assert (first.kernel, first.read, first.written) == (KERNEL, 268435456, 267386880)
    assert first.seconds == pytest.approx(128.64e-6)
    assert (first.dram, first.l2) == pytest.approx((0.9125, 0.605))
    assert (first.compute, first.occupancy) == pytest.approx((0.315, 0.4725))
    assert (first.possible_occupancy, first.limiter) == (0.5, "registers")
    assert (first.registers, first.local) == (56, 0)
    assert first.stall == "waiting for data from memory"
    assert second.kernel.startswith("void other")
    assert second.dram is second.seconds is None
    assert second.read == 268435456


def test_a_recording() -> None:
    norm, add = read(RECORDED.read_text())
    assert norm.seconds == pytest.approx(109.696e-6)
    assert (norm.read, norm.written) == (229465856, 114848000)
    assert norm.dram == pytest.approx(0.6524)
    assert (norm.registers, norm.local, norm.limiter) == (32, 0, "registers")
    assert norm.stall == add.stall == "waiting for data from memory"
    assert norm.lines()[0] == "vectorized_layer_norm_kernel<BFloat16, float, 0>"
    assert add.lines()[0].startswith("vectorized_elementwise_kernel<8, CUDAFunctorOnSelf_add<")
    assert "no data" in RECORDED.read_text()


def test_in_words() -> None:
    (figures,) = read(page(CELLS))
    assert figures.lines() == [
        "norm_rows<RowTile<RowVectors<bfloat16, 8, 1>, 4>, float, 0>",
        "  128.6 us by ncu",
        "  DRAM: 268 MB read, 267 MB written, 91.2% of its peak",
        "  L2: 60.5% of its peak",
        "  multiprocessors: 31.5% of their peak",
        "  occupancy: 47.2% of 50% possible, limited by registers",
        "  56 registers per thread, no spills",
        "  warps mostly stall: waiting for data from memory",
    ]
    nothing = Figures("k", *[None] * 12)
    assert nothing.lines() == ["k"]


@pytest.mark.parametrize("text", ["", "==PROF== nothing\n", '"ID",\n'])
def test_nothing_to_read(text: str) -> None:
    assert read(text) == []


def test_units_old_and_new() -> None:
    assert number("1,024", "byte") == 1024
    assert number("2.5", "Mbyte") == 2.5e6
    assert number("2.5", "usecond") == number("2.5", "us") == pytest.approx(2.5e-6)
    assert number("n/a", "ns") is None
    assert number("(256, 1, 1)", "") is None


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a fake ncu that comes first on PATH; a test writes its program."""
    path = tmp_path / "bin" / "ncu"
    path.parent.mkdir()
    monkeypatch.setenv("PATH", str(path.parent))
    return path


def write(fake: Path, body: str) -> None:
    fake.write_text(f"#!{sys.executable}\nimport sys\nfrom pathlib import Path\n{body}")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)


WORKING = """
if "--import" in sys.argv:
    print(Path(sys.argv[sys.argv.index("--import") + 1]).read_text())
else:
    Path(sys.argv[sys.argv.index("-o") + 1] + ".ncu-rep").write_text({page!r})
    Path({log!r}).write_text("\\n".join(sys.argv[1:]))
"""


def test_a_run(fake: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    write(fake, WORKING.format(page=page(CELLS), log=str(log)))
    report = tmp_path / "folder" / "r.ncu-rep"
    (figures,) = read(ncu.run(report, ["relu", "--shape=8x8"]))
    assert figures.registers == 56
    assert report.is_file()
    words = log.read_text().splitlines()
    assert words[-5:] == [sys.executable, "-m", "torchkiln.profile.target", "relu", "--shape=8x8"]
    assert "--profile-from-start=off" in words
    assert "--section=WarpStateStats" in words
    assert f"--metrics={','.join(METRICS)}" in words


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            'print("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission"); sys.exit(1)',
            (
                "sudo env PATH=",
                "torchkiln.profile.target relu",
                "NVreg_RestrictProfilingToAdminUsers=0",
                "--cap-add=SYS_ADMIN",
            ),
        ),
        ('print("==WARNING== No kernels were profiled.")', ("ncu saw no kernel",)),
        (
            'print("==ERROR== Failed to initialize the profiler: LibraryNotLoaded"); sys.exit(9)',
            ("ncu failed (exit status 9)", "LibraryNotLoaded"),
        ),
        ("sys.exit(3)", ("ncu failed (exit status 3)",)),
    ],
)
def test_a_refusal(fake: Path, tmp_path: Path, body: str, expected: tuple[str, ...]) -> None:
    write(fake, body)
    with pytest.raises(ncu.Unavailable) as raised:
        ncu.run(tmp_path / "r.ncu-rep", ["relu"])
    for words in expected:
        assert words in str(raised.value)


def test_an_ncu_that_cannot_be_run(fake: Path, tmp_path: Path) -> None:
    fake.write_bytes(b"\x7fELF of another machine")
    fake.chmod(0o755)
    with pytest.raises(ncu.Unavailable, match="cannot be run"):
        ncu.run(tmp_path / "r.ncu-rep", ["relu"])


def test_no_ncu_at_all(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "NCU_PLACES", (f"{fake.parent}/nowhere/*/ncu",))
    with pytest.raises(ncu.Unavailable, match=r"ncu was not found on PATH.*\n.*is part of"):
        ncu.find()
    (fake.parent / "2025.3").mkdir()
    elsewhere = fake.parent / "2025.3" / "ncu"
    elsewhere.touch()
    monkeypatch.setattr(runtime, "NCU_PLACES", (f"{fake.parent}/*/ncu",))
    assert ncu.find() == str(elsewhere)


def test_the_command_on_a_cpu(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.json"
    assert main(["profile", "relu", "--device=cpu", "--shape=64x64", f"--json={path}"]) == 0
    out, err = capfd.readouterr()
    assert "by the benchmark's clock" in out
    assert "no counters: ncu reads the counters of GPUs only" in out
    assert "relu: " in out.split("adds microseconds to the time of each op:")[1]
    assert err == ""  # also empty: what torch's profiler writes to the file descriptor
    content = json.loads(path.read_text())
    assert content["schema"] == "torchkiln.profile/1"
    assert content["kernels"] == []
    assert content["missing"].startswith("ncu reads")
    assert content["clock"]["seconds"] > 0
    words = ["profile", "relu", "--device=cpu", "--shape=64x64", "--direction=both", "--json"]
    assert main(words) == 0
    content = json.loads(capfd.readouterr().out)
    assert content["direction"] == "step"
    assert content["bytes"] == 5 * 64 * 64 * 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["rleu"], "torchkiln.profile: OP: got 'rleu' (did you mean relu"),
        (["relu", "--variant=x"], "torchkiln.profile: --variant: got 'x', expected none"),
    ],
)
def test_a_refused_command(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--device=cpu", "--shape=8x8", *given]) == 2
    assert message in capsys.readouterr().err


def test_an_op_without_gradients(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = replace(next(spec for spec in SPECS if spec.name == "add"), differentiable=())
    monkeypatch.setattr(op_arguments, "find", lambda *_: spec)
    words = ["profile", "add", "--device=cpu", "--shape=8x8", "--direction=backward"]
    assert main(words) == 2
    assert "--direction: got backward, expected forward: add has no" in capsys.readouterr().err


def test_ranges_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []

    class Ranges:
        def __enter__(self) -> None:
            entered.append(True)

        def __exit__(self, *_: object) -> None:
            entered.append(False)

    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", Ranges)
    with ranges():
        assert entered == [True]
    assert entered == [True, False]


@pytest.mark.cuda
def test_the_command_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The output has a time and the kernel's name, whether or not ncu may read counters."""
    given = ["profile", "rms_norm", "--dtype=bfloat16", "--shape=4096x4096"]
    assert main([*given, f"--out={tmp_path / 'r'}"]) == 0
    assert "norm_rows" in capsys.readouterr().out
