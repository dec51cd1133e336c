"""Runs the programs that were built with this package."""

import subprocess
from pathlib import Path

for program in ("with_kernels", "with_torch"):
    subprocess.run([Path(__file__).with_name(program)], check=True)
