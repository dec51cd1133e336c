"""Usage: check_import.py MINOR

Imports the installed package with torch of that minor version, and with fake versions of torch that
it does not support: older, newer, with another CUDA, none. Prints the time of the import.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = """
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import torchkiln
end = time.perf_counter()
assert torchkiln.square(torch.full((3,), 3.0)).sum().item() == 27
assert torchkiln.build_info()["torch"].startswith("{minor}."), torchkiln.build_info()
assert torch.__version__.startswith("{minor}."), torch.__version__
print(f"{{middle - start:.3f}} {{end - middle:.3f}}")
"""
# With these versions of torch, the import must fail before it loads a library.
FALSE_TORCHES = (
    ("2.10.0", "13.0", "but found torch 2.10.0 ("),
    ("2.16.0", "13.3", "but found torch 2.16.0 ("),
    ("3.0.0", None, "but found torch 3.0.0 ("),
    ("{minor}.9", "12.6", "but found torch {minor}.9 with CUDA 12.6 ("),
)


def run(program: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = os.environ | ({"PYTHONPATH": str(path)} if path else {})
    words = (sys.executable, "-W", "ignore", "-c", program)
    return subprocess.run(words, capture_output=True, text=True, check=False, env=env)


def main() -> None:
    minor = sys.argv[1]
    seconds = []
    for _ in range(3):
        done = run(PROGRAM.format(minor=minor))
        if done.returncode != 0:
            raise SystemExit(f"import beside torch {minor}: exit {done.returncode}\n{done.stderr}")
        seconds.append(tuple(map(float, done.stdout.split())))
    torch, ours = map(min, zip(*seconds, strict=True))
    print(f"import torch {torch * 1000:.0f} ms, import torchkiln {ours * 1000:.0f} ms more")

    import torchkiln  # noqa: PLC0415

    with_cuda = torchkiln.build_info()["cuda"] is not None
    for version, cuda, words in FALSE_TORCHES:
        if cuda == "12.6" and not with_cuda:
            continue
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "torch").mkdir()
            facts = f"__version__ = {version.format(minor=minor)!r}\ncuda = {cuda!r}\n"
            (Path(folder) / "torch" / "version.py").write_text(facts)
            (Path(folder) / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
            done = run("import torchkiln", Path(folder))
        said = done.stderr.strip()
        print(
            f"--- torch {version.format(minor=minor)}, CUDA {cuda}\n{said.partition('Error: ')[2]}"
        )
        if words.format(minor=minor) not in said or "Type\n" not in said:
            raise SystemExit(f"expected {words.format(minor=minor)!r}, got:\n{said}")


if __name__ == "__main__":
    main()
