"""Usage: install_tree.py TREE NEWEST

Makes Python import the torch that fetch_torches.py unpacked into the folder TREE, without a second
copy of it. All fetched torches share the CUDA libraries that the torch in NEWEST requires, and
curand, which older ones need.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from importlib.metadata import Distribution
from pathlib import Path


def requirements(tree: Path) -> list[str]:
    """The packages that a torch requires on Linux, without its extras."""
    (info,) = tree.glob("torch-*.dist-info")
    lines = Distribution.at(info).requires or []
    return [line.partition(";")[0] for line in lines if "extra ==" not in line]


def pip_install(*arguments: str, **environment: str) -> None:
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-compile")
    subprocess.run([*pip, *arguments], check=True, env=os.environ | environment)


def main() -> None:
    tree, newest = map(Path, sys.argv[1:])
    required = requirements(newest)
    cuda = [line for line in required if line.startswith(("cuda-t", "nvidia"))]
    pip_install(*(line for line in required if not line.startswith(("cuda-", "nvidia-", "triton"))))
    libraries = tree.parent / "cuda"
    if cuda and not libraries.exists():
        # pip unpacks into a temporary folder first; /tmp may be memory, which 3 GB would fill.
        target = ("--target", str(libraries))
        pip_install(*target, *(c.replace("[", "[curand,") for c in cuda), TMPDIR=str(tree.parent))
    link = tree / "nvidia"
    if cuda and not link.exists():
        link.symlink_to(libraries / "nvidia")
    Path(sysconfig.get_path("purelib"), "torch-tree.pth").write_text(f"{tree}\n")


if __name__ == "__main__":
    main()
