"""Usage: check_without_python.py PROGRAM ARGUMENT...

Runs a program in an environment without Python, and fails if the dynamic loader searches for one of
Python's libraries, at the start or later.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path


def main() -> None:
    program, *arguments = sys.argv[1:]
    done = subprocess.run(
        [program, *arguments],
        env={
            "LD_DEBUG": "files",
            "PATH": "/nowhere",
            "HOME": "/nowhere",
            "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", ""),
        },
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    print(done.stdout, end="")
    loaded = {Path(name).name for name in re.findall(r"file=(\S+)", done.stderr)}
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if not re.match(r"\s+\d+:\s", line)]
        raise SystemExit("\n".join([*said, f"{program}: exit {done.returncode}"]))
    if "libtorch_cpu.so" not in loaded:
        raise SystemExit(f"{program}: the loader did not tell of libtorch_cpu.so, expected it")
    if pythons := sorted(name for name in loaded if "python" in name.lower()):
        raise SystemExit(f"{program}: loaded {', '.join(pythons)}, expected no Python")
    print(f"{len(loaded)} libraries, none of Python's")


if __name__ == "__main__":
    main()
