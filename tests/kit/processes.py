"""Several processes of one test, which find each other through a file."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import run

START = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
rank, size, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
patience = timedelta(seconds=90)
store = dist.FileStore(path, size)
dist.init_process_group("gloo", rank=rank, world_size=size, store=store, timeout=patience)
"""

END = """
dist.barrier()
dist.destroy_process_group()
"""


def run_processes(script: str, size: int, folder: Path) -> None:
    """Run a script in ``size`` processes of one group; it knows ``rank`` and ``size``."""

    def process(rank: int) -> tuple[int, str]:
        words = [
            sys.executable,
            "-c",
            START + script + "\ndist.barrier()\ndist.destroy_process_group()\n",
        ]
        words += [str(rank), str(size), str(folder / f"store{size}")]
        done = run(words, capture_output=True, text=True, timeout=240, check=False)
        return done.returncode, done.stderr

    with ThreadPoolExecutor(size) as pool:
        for code, error in pool.map(process, range(size)):
            assert code == 0, error[-3000:]
