"""A simulated machine: packages, programs and a driver, each intact or broken as a test needs."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchkiln._loader import python_version
from torchkiln.doctor import Finding
from torchkiln.doctor.environment import Environment
from torchkiln.doctor.facts import Facts, gather

H200 = ("NVIDIA H200", (9, 0))
NEW_STRING = b"...NSt7__cxx1112basic_string..."


@dataclass
class Libcuda:
    """A fake libcuda: its functions store results through references, as ctypes passes them."""

    gpus: tuple[tuple[str, tuple[int, int]], ...] = (H200,)
    cuda: int = 13000
    code: int = 0

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        version._obj.value = self.cuda
        return 0

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.code if flags == 0 else 1

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.gpus)
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        device._obj.value = index
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: int) -> int:  # noqa: N802
        name.value = self.gpus[device][0].encode()[:size]
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:  # noqa: N802
        value._obj.value = self.gpus[device][1][{75: 0, 76: 1}[attribute]]
        return 0


def no_libcuda(name: str) -> Any:
    raise OSError(f"{name}: cannot open shared object file: No such file or directory")


@dataclass
class Machine:
    """A simulated machine whose files are in one folder."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    load_library: Callable[[str], Any] = no_libcuda

    def __post_init__(self) -> None:
        self.site = self.folder / "site packages"
        self.bin = self.folder / "bin"
        self.root = self.folder / "root"
        self.home = self.folder / "home"
        for folder in (self.site, self.bin, self.root / "tmp", self.home):
            folder.mkdir(parents=True)
        self.variables["PATH"] = str(self.bin)
        self.imports()

    def write(self, path: Path, content: str | bytes = "") -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def program(
        self, path: Path | str, out: str = "", error: str = "", end: str = "exit 0"
    ) -> Path:
        """Creates a program that prints this output for any arguments."""
        script = f"#!/bin/sh\n/bin/cat <<'END'\n{out}\nEND\n"
        if error:
            script += f"/bin/cat >&2 <<'END'\n{error}\nEND\n"
        written = self.write(self.bin / path, script + end + "\n")
        written.chmod(0o755)
        return written

    def imports(self, **found: Any) -> None:
        """Creates a python that reports a successful import of the package."""
        answer = {"devices": {}, "libraries": []} | found
        self.program("python", f"torch is there\n{json.dumps(answer)}")

    def nvcc(self, path: Path | str, version: str) -> Path:
        said = f"Cuda compilation tools, release {version}, V{version}.88"
        return self.program(path, said)

    def torch(self, version: str, cuda: str | None) -> Path:
        facts = f"__version__ = {version!r}\ncuda = {cuda!r}\n"
        folder = self.write(self.site / "torch" / "version.py", facts).parent
        self.write(folder / "lib" / "libc10.so", NEW_STRING)
        return folder

    def build(self, **record: Any) -> Path:
        """Creates the package, built for torch 2.99 with CUDA 13.0."""
        facts = {
            "version": "0.1.0",
            "torches": [{"version": "2.99.0", "cuda": "13.0", "folder": "."}],
            "cuda": "13.0",
            "cuda_architectures": ["80", "90"],
            "cuda_ptx": [],
            "python": python_version(),
            "platform": sysconfig.get_platform(),
        }
        package = self.site / "torchkiln"
        self.write(package / "_C.so", NEW_STRING)
        return self.write(package / "_build_info.json", json.dumps(facts | record)).parent

    def healthy(self) -> Machine:
        """Creates a GPU, a driver and all programs and packages; returns the machine."""
        self.torch("2.99.0+cu130", "13.0")
        self.build()
        self.program("g++", "12.2.0")
        self.program("cmake", "cmake version 4.4.4")
        self.program("ncu")
        self.nvcc("nvcc", "13.0")
        self.program("nvidia-smi", "580.159.04, NVIDIA H200")
        toolkit = self.site / "nvidia" / "cu13"
        for name in ("lib/libnvrtc.so.13", "include/cuda_fp16.h", "include/nv/target"):
            self.write(toolkit / name)
        self.gpu()
        self.imports(devices={"cuda:0": None})
        return self

    def gpu(self, *gpus: tuple[str, tuple[int, int]], **how: int) -> None:
        library = Libcuda(gpus or (H200,), **how)
        self.load_library = lambda _: library

    def environment(self) -> Environment:
        torch, package = self.site / "torch", self.site / "torchkiln"
        return Environment(
            python=str(self.bin / "python"),
            site=(self.site,),
            torch=torch if torch.is_dir() else None,
            package=package if package.is_dir() else None,
            variables=self.variables,
            home=self.home,
            root=self.root,
            load_library=self.load_library,
        )

    def find(self, look: Callable[[Environment, Facts], list[Finding]]) -> list[Finding]:
        """The findings of one check on this machine."""
        environment = self.environment()
        return look(environment, gather(environment))

    def find_one(
        self, look: Callable[[Environment, Facts], list[Finding]], state: str
    ) -> tuple[str, str]:
        """Text and commands of the only finding of a check, which must have this state."""
        (found,) = self.find(look)
        assert found.state == state, found
        return found.words, " | ".join(found.remedies)
