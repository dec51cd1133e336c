"""Usage: fetch_torches.py FOLDER

Unpacks every torch version that the published wheel supports into FOLDER/<minor version>, unless it
exists, and prints these folders in the format of TORCHKILN_TORCHES. The wheels are those for the
Python that runs the script. TORCHKILN_WHEEL_TORCHES="2.11 2.15" limits the versions.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


def fetch(folder: Path, version: str) -> Path:
    tree = folder / version.rpartition(".")[0]
    if not list(tree.glob(f"torch-{version}*.dist-info")):
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile")
        # The versions are exact: no constraint that pip is configured with must exclude one.
        subprocess.run(
            [*pip, "--upgrade", "--target", str(tree), f"torch=={version}"],
            env={**os.environ, "PIP_CONSTRAINT": os.devnull},
            check=True,
            stdout=sys.stderr,
        )
    return tree


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    with PYPROJECT.open("rb") as file:
        versions = tomllib.load(file)["tool"]["torchkiln"]["torches"]
    if wanted := os.environ.get("TORCHKILN_WHEEL_TORCHES", "").split():
        versions = [version for version in versions if version.rpartition(".")[0] in wanted]
    print(";".join(str(fetch(folder, version)) for version in versions))


if __name__ == "__main__":
    main()
