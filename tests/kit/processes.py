"""Processes of a test: groups that connect through a file or a store, and single ones to kill."""

from __future__ import annotations

import multiprocessing
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess, run
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist

LIMIT = 900
"""Seconds after which a process is killed."""
PRELOADED = (
    "pytest",
    "torchkiln.testing",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch._dynamo",  # imported by the first call of FSDP2 and DDP
)
"""Modules that most of the processes import."""

START = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
rank, size, path, device = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
if device == "cuda":
    torch.cuda.set_device(rank)
    torch.set_default_device(f"cuda:{rank}")
dist.init_process_group(
    "nccl" if device == "cuda" else "gloo",
    rank=rank,
    world_size=size,
    store=dist.FileStore(path, size),
    timeout=timedelta(seconds=float(sys.argv[5])),
)


def require_refused(calls, kinds=ValueError):
    for call, message in calls:
        try:
            call()
        except kinds as error:
            assert message in str(error), error
        else:
            raise AssertionError(message)
"""

# Ends a process after its checks. If a thread of torch's gloo releases the last tensor of a
# collective while the interpreter ends, Python ends the thread within a C++ destructor, which calls
# std::terminate. The group of a DeviceMesh has such threads after destroy_process_group(), too.
LEAVE = """
import os, sys
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
"""

END = f"""
dist.barrier()
dist.destroy_process_group()
{LEAVE}"""


def execute(code: str, words: list[str], folder: str, variables: dict[str, str]) -> None:
    """In the new process: execute code with these variables, its output in files of this folder."""
    for name, standard in (("out", 1), ("err", 2)):
        file = os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT)
        os.dup2(file, standard)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = ["-c", *words]
    exec(compile(code, "<forked>", "exec"), {"__name__": "__main__"})


def fork_server() -> multiprocessing.context.ForkServerContext:
    """Starts processes that have imported torch and torchkiln already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def forked(code: str, *words: object, **variables: str) -> CompletedProcess[str]:
    """Run code in a new process that has imported torch and torchkiln already.

    A fork server has imported them, which takes seconds, and forks the process. The environment is
    this process's with the given variables added.
    """
    with TemporaryDirectory() as folder:
        given = (code, list(map(str, words)), folder, os.environ | variables)
        process = fork_server().Process(target=execute, args=given)
        process.start()
        process.join(LIMIT)
        if process.is_alive():
            process.kill()
            process.join()
        out, err = (Path(folder, name).read_text() for name in ("out", "err"))
        assert process.exitcode is not None
        return CompletedProcess(code, process.exitcode, out, err)


def processes_on(device: torch.device, most: int) -> int:
    """The size of a group: ``most`` on a CPU, at most the number of GPUs; skips on a single GPU."""
    if device.type == "cpu":
        return most
    count = min(most, torch.cuda.device_count())
    if count < 2:
        pytest.skip("needs 2 GPUs")
    return count


def outcomes(
    script: str, device: torch.device, size: int, folder: Path, *, timeout: float = 300.0
) -> list[CompletedProcess[str]]:
    """Runs a script in each process of a group; returns exit statuses and output by rank.

    The script can use ``rank``, ``size`` and ``device``, a name; its tensors are created there.
    ``require_refused`` calls functions, each of which must raise an error with a given text.
    """

    def process(rank: int) -> CompletedProcess[str]:
        code = START + script + END
        words = [str(word) for word in (rank, size, folder / "store", device.type, timeout)]
        if device.type == "cpu":
            return forked(code, *words)
        command = [sys.executable, "-c", code, *words]
        return run(command, capture_output=True, text=True, timeout=LIMIT, check=False)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(process, range(size)))


def run_processes(script: str, device: torch.device, most: int, folder: Path) -> None:
    """Run a script in up to ``most`` processes of one group, which must all succeed."""
    for done in outcomes(script, device, processes_on(device, most), folder):
        assert done.returncode == 0, done.stderr[-3000:]


def leaving(program: Path, folder: Path) -> Path:
    """A script that runs the program, then ends at once, without Python's shutdown."""
    script = folder / "leaving.py"
    find_it = f"import runpy, sys\nsys.path.insert(0, {str(program.parent)!r})\n"
    run_it = f"runpy.run_path({str(program)!r}, run_name='__main__')\n"
    script.write_text(find_it + run_it + LEAVE, encoding="utf-8")
    return script


def launched(program: Path, device: torch.device, size: int, folder: Path, *words: str) -> str:
    """Runs a program in ``size`` processes, and returns its output.

    On a GPU torchrun starts them, unless ``size`` is 1. On the CPU they are forked, which saves the
    import of torch, and several processes get torchrun's variables.
    """
    script = leaving(program, folder)
    words = ("--device", device.type, *words)
    if device.type == "cpu":
        ended = torchrun_on_cpu(script.read_text(encoding="utf-8"), size, words)
    else:
        start = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}")
        command = [sys.executable, *(start if size > 1 else ()), str(script), *words]
        ended = [run(command, capture_output=True, text=True, timeout=LIMIT, check=False)]
    for done in ended:
        assert done.returncode == 0, done.stderr[-3000:]
    return "".join(done.stdout for done in ended)


def torchrun_on_cpu(code: str, size: int, words: tuple[str, ...]) -> list[CompletedProcess[str]]:
    """Runs code in ``size`` processes with torchrun's variables and a store in this process.

    The system chooses a free port when the store opens it, so no other process can take it before.
    """
    if size == 1:
        return [forked(code, *words)]
    host = "127.0.0.1"
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    shared = {"MASTER_ADDR": host, "MASTER_PORT": str(store.port), "WORLD_SIZE": str(size)}
    shared["TORCHELASTIC_USE_AGENT_STORE"] = "True"

    def process(rank: int) -> CompletedProcess[str]:
        return forked(code, *words, RANK=str(rank), LOCAL_RANK=str(rank), **shared)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(process, range(size)))
