"""Usage: fetch_torches.py FOLDER [DIGESTS]

Unpacks every torch version that the published wheel supports into FOLDER/<minor version>, unless it
exists, and prints these folders in the format of TORCHKILN_TORCHES. The wheels are those for the
Python that runs the script. TORCHKILN_WHEEL_TORCHES="2.11 2.15" limits the versions.

DIGESTS is a folder with a requirements file per version; pip then rejects all other files.
TORCHKILN_TORCH_INDEX is the index of another CUDA version, whose files have other digests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


def fetch(folder: Path, version: str, digests: Path | None) -> Path:
    tree = folder / version.rpartition(".")[0]
    source = [f"torch=={version}"]
    if index := os.environ.get("TORCHKILN_TORCH_INDEX"):
        source += ["--index-url", index]
    elif digests:
        source = ["--require-hashes", "--requirement", str(digests / f"{version}.txt")]
    if not list(tree.glob(f"torch-{version}*.dist-info")):
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile")
        # Without pip's configured constraints, which could exclude one of these exact versions.
        subprocess.run(
            [*pip, "--upgrade", "--target", str(tree), *source],
            env={**os.environ, "PIP_CONSTRAINT": os.devnull},
            check=True,
            stdout=sys.stderr,
        )
    return tree


def main() -> None:
    folder, *digests = (Path(argument).resolve() for argument in sys.argv[1:])
    with PYPROJECT.open("rb") as file:
        versions = tomllib.load(file)["tool"]["torchkiln"]["torches"]
    if wanted := os.environ.get("TORCHKILN_WHEEL_TORCHES", "").split():
        versions = [version for version in versions if version.rpartition(".")[0] in wanted]
    trees = (fetch(folder, version, digests[0] if digests else None) for version in versions)
    print(";".join(map(str, trees)))


if __name__ == "__main__":
    main()
