"""Usage: check_consumer.py

Copies the installed package into a new folder in the current one, builds tests/consumer with it,
and runs its programs.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import torchkiln

PROJECT = Path(__file__).resolve().parents[1] / "consumer"


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True)


def main() -> None:
    package = Path(torchkiln.cmake_prefix_path).parents[1]
    moved, build = Path.cwd() / "moved away", Path.cwd() / "build"
    for folder in (moved, build):
        shutil.rmtree(folder, ignore_errors=True)
    for name in ("include", "lib", "share"):
        shutil.copytree(package / name, moved / name)
    prefix = f"-DCMAKE_PREFIX_PATH={moved};{package.parent}"
    run("cmake", "-G", "Ninja", "-S", PROJECT, "-B", build, prefix)
    run("cmake", "--build", build)
    for program in ("first", "with_kernels", "with_torch", "with_sdk"):
        run(build / program)
    if (build / "with_torch_package").exists():
        run(build / "with_torch_package")
    else:
        print("with_torch_package needs a torch without CUDA: it was not built")
    python = (sys.executable, "-W", "ignore")
    run(*python, PROJECT / "export_model.py", "model.pt2")
    run(
        *python,
        PROJECT.parent / "packaging" / "check_without_python.py",
        build / "with_exported",
        "model.pt2",
    )


if __name__ == "__main__":
    main()
