"""Packages of torchkiln with one fault each, made from one build folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fault import Fault

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src" / "torchkiln"
INSTALLED = ("include", "lib", "share", "_build_info.json")
MODULE = f"cpp/_C{sysconfig.get_config_var('EXT_SUFFIX')}"
LIBRARIES = (
    "cuda/libtorchkiln_kernels.so",
    "cpp/libtorchkiln.so",
    "cpp/libtorchkiln_cuda.so",
    MODULE,
)
LIMIT = 1200
"""Time limit of a command of the build, in seconds."""


def isa() -> str:
    """The variant of the CPU kernels that runs on this machine."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return "avx512" if "avx512bw" in flags else "avx2" if " avx2 " in flags else "baseline"


def link_tree(source: Path, target: Path) -> None:
    """Copy a folder by hard links, which is fast and takes no space."""

    def link(one: str, other: str) -> None:
        try:
            os.link(one, other)
        except OSError:  # another file system needs copies
            shutil.copy2(one, other)

    shutil.copytree(source, target, copy_function=link)


def replace_file(path: Path, text: str) -> None:
    """Write a new file; hard links to the old one keep the old text."""
    path.unlink()
    path.write_text(text)


def shell(command: str, folder: Path) -> None:
    """Run a command of the build; raises ValueError if it fails."""
    done = subprocess.run(
        command, shell=True, cwd=folder, check=False, capture_output=True, text=True, timeout=LIMIT
    )
    if done.returncode != 0:
        raise ValueError(f"does not compile: {(done.stderr or done.stdout)[-800:]}")


class Build:
    """A build folder of Ninja."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        cache = (self.folder / "CMakeCache.txt").read_text()
        self.tools = dict(re.findall(r"^(CMAKE_\w+):\w+=(.+)$", cache, re.MULTILINE))
        self.commands: list[dict[str, str]] = json.loads(
            self.run("CMAKE_MAKE_PROGRAM", "-t", "compdb")
        )
        outputs = {command["output"] for command in self.commands}
        self.links = {name: self.link_of(name) for name in LIBRARIES if name in outputs}

    def run(self, tool: str, *arguments: str) -> str:
        """The output of a tool of the CMake build, run in the build folder."""
        done = subprocess.run(
            [self.tools[tool], *arguments],
            cwd=self.folder,
            check=True,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        return done.stdout

    def link_of(self, library: str) -> str:
        """The command that links a library."""
        commands = self.run("CMAKE_MAKE_PROGRAM", "-t", "commands", library)
        return commands.strip().splitlines()[-1]

    def install(self, package: Path) -> None:
        """Write the package without a fault: the Python files of the sources, and what is built."""

        def left_out(folder: str, names: list[str]) -> list[str]:
            at_top = INSTALLED if Path(folder) == SOURCES else ()
            return [n for n in names if n in at_top or n == "__pycache__" or n.endswith(".so")]

        shutil.rmtree(package, ignore_errors=True)
        shutil.copytree(SOURCES, package, ignore=left_out)
        self.run("CMAKE_COMMAND", "--install", ".", "--prefix", str(package))

    def compiles(self, unit: str) -> list[dict[str, str]]:
        """The commands that compile a source file, of the tree or the build, for this machine."""
        sources = {os.path.realpath(folder / unit) for folder in (ROOT, self.folder)}
        found = [
            c
            for c in self.commands
            if c["output"].endswith(".o") and os.path.realpath(self.folder / c["file"]) in sources
        ]
        several = [c for c in found if f"torchkiln_cpu_{isa()}.dir" in c["output"]]
        return several or found


def changed_sources(fault: Fault, copy: Path) -> Path:
    """Copy the sources with the fault; returns the path of the changed file."""
    for name in ("cuda", "cpp", "src"):
        link_tree(ROOT / name, copy / name)
    path = copy / fault.file
    text = path.read_text()
    if text.count(fault.old) != fault.times:
        found = f"{text.count(fault.old)} times in {fault.file}"
        raise ValueError(f"got the old text {found}, expected {fault.times}")
    replace_file(path, text.replace(fault.old, fault.new))
    return path


def compile_fault(build: Build, fault: Fault, folder: Path) -> dict[str, str]:
    """Compile the changed file; returns each new object by the name of the build's object."""
    copy = folder / "source"
    objects: dict[str, str] = {}
    for command in build.compiles(fault.unit or fault.file):
        made = str(folder / Path(command["output"]).name) + f".{len(objects)}.o"
        words = command["command"].replace(command["output"], made)
        for name in ("cuda", "cpp"):
            words = re.sub(rf"{re.escape(str(ROOT))}/{name}\b", str(copy / name), words)
        shell(words, build.folder)
        objects[command["output"]] = made
    return objects


def link_fault(build: Build, objects: dict[str, str], package: Path) -> None:
    """Link the library that contains these objects."""
    for library, command in build.links.items():
        if not any(f" {old} " in command for old in objects):
            continue
        words = command
        target = package / ("" if library == MODULE else "lib") / Path(library).name
        target.unlink()
        # First, because the linker takes an inline function from the first object that has it.
        for old in objects:
            words = words.replace(f" {old} ", " ")
        made = " ".join(objects.values())
        shell(words.replace(f"-o {library} ", f"-o {target} {made} "), build.folder)
        return
    raise ValueError(f"no library has {sorted(objects)}, of a build without TORCHKILN_UNITY")


def plant(build: Build, clean: Path, fault: Fault, folder: Path) -> Path:
    """Make a package with the fault; returns the folder for Python's path."""
    shutil.rmtree(folder, ignore_errors=True)
    path = changed_sources(fault, folder / "source")
    package = folder / "package" / "torchkiln"
    link_tree(clean, package)
    if path.suffix == ".py":
        replace_file(package / path.relative_to(folder / "source/src/torchkiln"), path.read_text())
    else:
        link_fault(build, compile_fault(build, fault, folder), package)
    return package.parent
