"""A folder to configure a build in: its own Python, a torch of a few files, fake toolkits that only
print a version, and no network. Its path contains a space."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CUDA = "13.9"  # a version that a real toolkit of this machine cannot have
PARTS = ("nvidia_cuda_runtime", "nvidia_nvvm", "nvidia_cuda_crt", "nvidia_cuda_cccl")
NOWHERE = "http://127.0.0.1:9"


@dataclass(frozen=True)
class Outcome:
    """The result of a run of CMake."""

    ended_well: bool
    text: str

    def says(self, *parts: str) -> bool:
        """Whether the output contains all of these texts, ignoring line breaks."""
        words = " ".join(self.text.split())
        missing = [part for part in parts if " ".join(part.split()) not in words]
        assert not missing, f"does not say {missing}:\n{self.text}"
        return True


@dataclass
class Ground:
    """The folder, which at first contains only a C++ compiler."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prefix, self.bin = self.folder / "python", self.folder / "bin"
        venv.create(self.prefix, with_pip=False, symlinks=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.site = self.prefix / "lib" / version / "site-packages"
        self.build = self.folder / "build"
        self.bin.mkdir()

    def write(self, path: Path, content: str = "") -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        return path

    def program(self, path: Path, script: str) -> Path:
        self.write(path, f"#!/bin/sh\n{script}\n").chmod(0o755)
        return path

    def torch(self, cuda: str | None = CUDA, version: str = "2.13.0") -> Path:
        """Creates the files of a torch that CMake reads; returns its folder."""
        folder = self.site / "torch"
        for name in ("__init__.py", "include/torch/csrc/api/include/torch/torch.h"):
            self.write(folder / name)
        self.write(folder / "version.py", f"__version__ = {version!r}\ncuda = {cuda!r}\n")
        self.write(folder / "share/cmake/Torch/TorchConfig.cmake", "CXX_STANDARD 17\n")
        return folder

    def nvcc(self, path: Path, version: str = CUDA) -> Path:
        """A fake nvcc that prints its version and architectures and compiles nothing."""
        answers = f"--version) echo 'release {version}, V{version}.7' ;;"
        listed = "--list-gpu-arch) printf 'compute_80\\ncompute_90\\n' ;;"
        return self.program(path, f"case $1 in {answers} {listed} *) exit 1 ;; esac")

    def registry(self, **versions: str | None) -> Path:
        """Creates a toolkit as pip unpacks it: several wheels in one folder. Returns its nvcc."""
        root = self.site / "nvidia" / "cu13"
        for name in ("include/cuda.h", "nvvm/bin/cicc", "lib/libcudart.so.13", "bin/nvcc.profile"):
            self.write(root / name)
        for part, version in (dict.fromkeys(PARTS, f"{CUDA}.7") | versions).items():
            if version:
                (self.site / f"{part}-{version}.dist-info").mkdir()
        return self.nvcc(root / "bin" / "nvcc")

    def gpu(self) -> None:
        self.program(self.bin / "nvidia-smi", "echo 'GPU 0: of this test'")

    def configure(self, *options: str, sources: Path = ROOT, cmake: str = "cmake") -> Outcome:
        ninja = shutil.which("ninja")
        assert ninja, "found no ninja, needed it to configure a build"
        system = os.environ["PATH"].split(os.pathsep)
        without_nvcc = [folder for folder in system if not (Path(folder) / "nvcc").exists()]
        environment = {
            "PATH": os.pathsep.join([str(self.bin), *without_nvcc]),
            "HOME": str(self.folder),
            "CUDAARCHS": "90",
            **dict.fromkeys(("http_proxy", "https_proxy", "ALL_PROXY"), NOWHERE),
        }
        program = shutil.which(cmake)
        assert program, f"found no {cmake}, needed it to configure a build"
        done = subprocess.run(
            [
                *(program, "-S", sources, "-B", self.build, "-G", "Ninja"),
                *(f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DPython_EXECUTABLE={self.python}"),
                *options,
            ],
            env=environment | self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return Outcome(done.returncode == 0, done.stdout)

    @property
    def python(self) -> Path:
        return self.prefix / "bin" / "python"

    def files(self) -> set[tuple[str, int, int]]:
        """All installed files, with times and sizes."""
        paths = [path for path in self.prefix.rglob("*") if "__pycache__" not in path.parts]
        found = [(str(path), path.lstat()) for path in paths]
        return {(name, status.st_mtime_ns, status.st_size) for name, status in found}


def gpu_is_visible() -> bool:
    """Whether this machine has a GPU, by the same files as the build checks."""
    places = ("proc/driver/nvidia/gpus/*", "dev/nvidia[0-9]*", "usr/lib/wsl/lib/libcuda.so*")
    return any(list(Path("/").glob(place)) for place in places) or bool(shutil.which("nvidia-smi"))


@dataclass(frozen=True)
class Toolkit:
    """A real CUDA toolkit, which can compile."""

    root: Path
    version: str


def real_toolkit() -> Toolkit | None:
    """A toolkit of this machine or Python, with the parts that CMake needs; None without one."""
    folders = [Path(folder).parent for folder in os.environ["PATH"].split(os.pathsep)]
    folders += [Path("/usr/local/cuda"), *Path("/usr/local").glob("cuda-*")]
    folders += [path for site in sys.path for path in Path(site).glob("nvidia/cu*")]
    for root in folders:
        if (root / "bin" / "nvcc.profile").is_file() and (root / "bin" / "nvcc").is_file():
            answer = subprocess.run(
                [root / "bin" / "nvcc", "--version"], capture_output=True, text=True, check=False
            )
            if match := re.search(r"release (\d+\.\d+)", answer.stdout):
                return Toolkit(root.resolve(), match[1])
    return None
