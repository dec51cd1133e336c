"""Plants each fault in a copy of the sources and checks that a test fails.

    python tests/mutation --build build/nox/tests --package <where torchkiln is installed>

needs a Ninja build folder without batches of files (-DTORCHKILN_UNITY=OFF) and the package
installed from it. For each fault it compiles only the
changed file, with the command of the build, and links only its library. It does not change the
sources or the build. Faults that need other hardware are left out.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

from faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
MODULE = f"cpp/_C{sysconfig.get_config_var('EXT_SUFFIX')}"
LIBRARIES = (
    "cuda/libtorchkiln_kernels.so",
    "cpp/libtorchkiln.so",
    "cpp/libtorchkiln_cuda.so",
    MODULE,
)
PAGE = ROOT / "docs" / "mutation.md"


class Finding(NamedTuple):
    """The result of one fault."""

    fault: Fault
    result: str
    """caught, missed, or an error."""
    by: str
    seconds: float


def isa() -> str:
    """The variant of the CPU kernels that runs on this machine."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return "avx512" if "avx512bw" in flags else "avx2" if " avx2 " in flags else "baseline"


class Build:
    """A build folder, and the package that was installed from it."""

    def __init__(self, folder: Path, package: Path) -> None:
        self.folder = folder.resolve()
        self.package = package.resolve()
        database = self.run("ninja", "-t", "compdb")
        self.commands: list[dict[str, str]] = json.loads(database)

    def run(self, *command: str) -> str:
        """The output of a command in the build folder."""
        done = subprocess.run(
            command, cwd=self.folder, check=True, capture_output=True, text=True, timeout=600
        )
        return done.stdout

    def compiles(self, unit: str) -> list[dict[str, str]]:
        """The commands that compile a source file for this machine."""
        source = str(ROOT / unit)
        found = [
            c
            for c in self.commands
            if c["output"].endswith(".o")
            and os.path.realpath(self.folder / c["file"]) == os.path.realpath(source)
        ]
        several = [c for c in found if f"torchkiln_cpu_{isa()}.dir" in c["output"]]
        return several or found

    @cache  # noqa: B019  # there is one build
    def links(self, library: str) -> str:
        """The command that links a library."""
        return self.run("ninja", "-t", "commands", library).strip().splitlines()[-1]


def build_fault(build: Build, fault: Fault, folder: Path) -> Path:
    """The package with the fault in it; the folder to put on the path."""
    copy = folder / "source"
    for name in ("cuda", "cpp", "src"):
        shutil.copytree(ROOT / name, copy / name)
    path = copy / fault.file
    text = path.read_text()
    if text.count(fault.old) != fault.times:
        found = f"{text.count(fault.old)} times in {fault.file}"
        raise ValueError(f"got the old text {found}, expected {fault.times}")
    path.write_text(text.replace(fault.old, fault.new))

    package = folder / "package" / "torchkiln"
    shutil.copytree(build.package, package)
    if path.suffix == ".py":
        shutil.copy(path, package / path.relative_to(copy / "src" / "torchkiln"))
        return package.parent
    objects: dict[str, str] = {}
    for command in build.compiles(fault.unit or fault.file):
        made = str(folder / Path(command["output"]).name) + f".{len(objects)}.o"
        words = command["command"].replace(command["output"], made)
        for name in ("cuda", "cpp"):
            words = re.sub(rf"{re.escape(str(ROOT))}/{name}\b", str(copy / name), words)
        shell(words, build.folder)
        objects[command["output"]] = made
    for library in LIBRARIES:
        words = build.links(library)
        if not any(f" {old} " in words for old in objects):
            continue
        target = package / ("" if library == MODULE else "lib") / Path(library).name
        target.unlink()
        # In front: of a function of a header that several objects have, the linker takes the first.
        for old in objects:
            words = words.replace(f" {old} ", " ")
        made = " ".join(objects.values())
        words = words.replace(f"-o {library} ", f"-o {target} {made} ")
        shell(words, build.folder)
        return package.parent
    raise ValueError(f"no library has {sorted(objects) or fault.unit}")


def shell(command: str, folder: Path) -> None:
    """Run one command of the build."""
    done = subprocess.run(
        command, shell=True, cwd=folder, check=False, capture_output=True, text=True, timeout=1200
    )
    if done.returncode != 0:
        raise ValueError(f"does not compile: {(done.stderr or done.stdout)[-800:]}")


def test(path: Path, fault: Fault, device: str) -> tuple[int, str]:
    """Exit status of the tests, and the first that failed."""
    kind = "cuda" if "cuda" in fault.device else "cpu"
    names = [name.partition("@") for name in fault.checks.split(" or ")]
    chosen = " or ".join(f"[{fault.op}-{name}-{kind}{'-' * bool(at)}{at}" for name, _, at in names)
    options = ("-x", "-q", "--no-header", "--tb=line", "--no-showlocals", "-p", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", fault.tests, *options, "-k", chosen],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(path), "CUDA_VISIBLE_DEVICES": device},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    failed = re.search(r"^(?:FAILED|ERROR) \S+\[(.+?)\]", done.stdout, re.MULTILINE)
    said = done.stdout.strip().splitlines()[-1:] or [done.stderr[-300:]]
    return done.returncode, failed[1] if failed else said[0]


def find(build: Build, fault: Fault, scratch: Path, device: str) -> Finding:
    """Plant one fault."""
    start = time.perf_counter()
    folder = scratch / re.sub(r"\W+", "-", fault.name)
    shutil.rmtree(folder, ignore_errors=True)
    result, by = "missed", ""
    try:
        path = build_fault(build, fault, folder)
        status, by = test(path, fault, device)
        if status == 1:
            result = "caught"
        elif status < 0:
            result, by = "caught", f"signal {-status}"
        elif status != 0:
            result = f"pytest ended with {status}"
    except (ValueError, subprocess.SubprocessError) as error:
        result, by = "not planted", str(error)
    shutil.rmtree(folder, ignore_errors=True)
    return Finding(fault, result, by, time.perf_counter() - start)


def control(build: Build, fault: Fault, device: str) -> str:
    """Failures of the selected tests without the fault; empty if they pass."""
    status, said = test(build.package.parent, fault, device)
    return "" if status == 0 and "passed" in said else f"without the fault: {said}"


def devices() -> list[str]:
    """The GPUs that torch sees."""
    import torch  # noqa: PLC0415  # slow, and not needed for --list

    return [str(i) for i in range(torch.cuda.device_count())]


def shown_here(fault: Fault, gpus: list[str]) -> bool:
    """Whether this machine can show it."""
    return len(gpus) >= {"cpu": 0, "cuda": 1, "2 x cuda": 2}[fault.device]


def table(findings: list[Finding], machine: str, old: str) -> str:
    """The part of the page that one machine fills; faults that were not tried keep their lines."""
    rows = {
        line.split(" | ")[0].removeprefix("| "): line
        for line in old.splitlines()
        if line.startswith("| ") and not line.startswith("| fault")
    }
    for finding in findings:
        fault = finding.fault
        by = f"`{finding.by}`" if finding.result == "caught" else f"**{finding.result}**"
        rows[fault.name] = f"| {fault.name} | `{fault.file}` | {by} |"
    known = [rows[fault.name] for fault in FAULTS if fault.name in rows]
    caught = sum("**" not in line for line in known)
    today = dt.datetime.now(dt.UTC).date().isoformat()
    head = f"{caught} of {len(known)} caught on {machine}, {today}."
    return "\n".join([head, "", "| fault | in | caught by |", "|---|---|---|", *known])


def write(page: Path, part: str, findings: list[Finding], machine: str) -> None:
    """Replace the part of the page between its two marks."""
    marks = f"<!-- {part} -->", f"<!-- /{part} -->"
    before, rest = page.read_text().split(marks[0], 1)
    old, after = rest.split(marks[1], 1)
    text = table(findings, machine, old)
    page.write_text(f"{before}{marks[0]}\n{text}\n{marks[1]}{after}")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="tests/mutation", description=__doc__.split("\n")[0])
    parser.add_argument("--build", type=Path, required=True, help="a build folder of Ninja")
    parser.add_argument("--package", type=Path, required=True, help="the installed torchkiln")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", default="", help="faults whose name has this in it")
    parser.add_argument("--jobs", type=int, default=1, help="faults at the same time")
    parser.add_argument("--scratch", type=Path, default=Path("build/mutation"))
    parser.add_argument("--no-control", action="store_true", help="do not try the tests before")
    parser.add_argument("--page", type=Path, help=f"write the result into {PAGE.name}")
    return parser.parse_args()


def main() -> int:
    """Try the faults of one device."""
    options = arguments()
    build = Build(options.build, options.package)
    gpus = devices()
    chosen = [f for f in FAULTS if options.device in f.device and options.only in f.name]
    faults = [fault for fault in chosen if shown_here(fault, gpus)]
    for fault in chosen:
        if fault not in faults:
            print(f"left out: {fault.name}: needs {fault.device}")
    seen = {(fault.op, fault.checks): fault for fault in faults}
    start = time.perf_counter()
    device = ",".join(gpus)
    with ThreadPoolExecutor(options.jobs) as pool:
        clean = [] if options.no_control else list(seen.values())
        for said in pool.map(lambda fault: control(build, fault, device), clean):
            if said:
                print(said)
                return 1
        print(f"{len(clean)} selections pass without a fault, {time.perf_counter() - start:.0f} s")
        findings = []
        scratch = options.scratch.resolve()
        for finding in pool.map(lambda fault: find(build, fault, scratch, device), faults):
            findings.append(finding)
            print(f"{finding.result}: {finding.fault.name} ({finding.by}), {finding.seconds:.0f} s")
    if options.page:
        machine = "the CPU" if options.device == "cpu" else gpu_name()
        write(options.page, options.device, findings, machine)
    return int(any(finding.result != "caught" for finding in findings))


def gpu_name() -> str:
    """The name of the GPU."""
    import torch  # noqa: PLC0415

    return torch.cuda.get_device_name(0)


if __name__ == "__main__":
    sys.exit(main())
