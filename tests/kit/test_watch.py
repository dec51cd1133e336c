"""Tests of ``torchkiln watch``: its output after each save of a file, and how it ends."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torchkiln.cli import main
from torchkiln.cli.watch_run import compile_and_test, has_tests

pytestmark = pytest.mark.usefixtures("own_cache", "nvrtc")

KERNEL = "__global__ void add(float* x) { x[threadIdx.x] += 1; }\n"
TESTS = """
from pathlib import Path
from torchkiln import jit

def test_its_parameter():
    kernel = jit.load(Path(__file__).with_name("my.cu")).add
    assert str(kernel.signature) == "add(float* x)"
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file of kernels, with a file of tests."""
    (tmp_path / "my.cu").write_text(KERNEL)
    (tmp_path / "test_my.py").write_text(TESTS)
    return tmp_path / "my.cu"


class Watch:
    """``torchkiln watch`` in a new process."""

    def __init__(self, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "torchkiln", "watch", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stdout:
            for line in stdout:
                self.lines.put(line)

    def rest(self) -> list[str]:
        """The lines printed since the last call, without waiting."""
        return [self.lines.get() for _ in range(self.lines.qsize())]

    def until(self, words: str, seconds: float = 300) -> str:
        """Waits for a line that matches ``words``, and returns the output up to it."""
        end, found = time.monotonic() + seconds, ""
        while not re.search(words, found):
            try:
                found += self.lines.get(timeout=max(end - time.monotonic(), 0.01))
            except queue.Empty:
                raise AssertionError(f"no {words!r} in:\n{found}") from None
        return found


@pytest.fixture
def watch(source: Path) -> Iterator[Watch]:
    """The command in a new process, which watches the file and runs its tests."""
    command = Watch(source, "--test", source.with_name("test_my.py"))
    yield command
    command.process.kill()
    command.process.wait()
    command.reader.join()


WAITING = "waiting for the next save"


def save(path: Path, text: str) -> None:
    """Replaces a file at once, as editors do, so that no poll reads a part of it."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def test_saves_are_tried_until_ctrl_c(watch: Watch, source: Path) -> None:
    first = watch.until(WAITING)
    assert re.search(r"my\.cu: compiled in \d+\.\d\d s, for sm_", first)
    assert re.search(r"passed: test_my\.py, \d+\.\d\d s", first)
    save(source, "\n" + KERNEL.replace("1", "wrong"))
    broken = watch.until(WAITING)
    assert 'my.cu(2): error: identifier "wrong" is undefined' in broken
    assert "FAILED: my.cu does not compile" in broken
    save(source, KERNEL.replace("float", "double"))
    failed = watch.until(WAITING)
    assert "add(double* x)" in failed  # from pytest
    assert "FAILED: test_my.py" in failed
    test = source.with_name("test_my.py")
    save(test, "import os\nos.kill(os.getpid(), 11)")  # like a bad pointer on the host
    assert "killed by SIGSEGV" in watch.until(WAITING)
    save(test, "import time\nprint('begun', flush=True)\ntime.sleep(1000)")
    watch.until("begun")
    save(test, "print('instead of it')")
    assert "instead of it" in watch.until(WAITING)
    test.unlink()
    time.sleep(0.5)
    save(test, "print('back')")
    watch.until("back(.|\n)*" + WAITING)
    save(test, "import os, time\nprint('pid', os.getpid(), flush=True)\ntime.sleep(1000)")
    match = re.search(r"pid (\d+)", watch.until(r"pid \d+"))
    assert match is not None
    watch.process.send_signal(signal.SIGINT)
    assert watch.process.wait(60) == 0
    watch.reader.join()
    assert "Traceback" not in "".join(watch.rest())
    with pytest.raises(ProcessLookupError):
        os.kill(int(match[1]), 0)


def test_a_run_with_a_script(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = source.with_name("script.py")
    script.write_text("import helper\nassert helper.RIGHT, 'so not'")
    source.with_name("helper.py").write_text("RIGHT = False")
    assert not has_tests(script)
    assert compile_and_test(source, script) == 1
    out = capsys.readouterr().out
    assert "AssertionError: so not" in out
    assert "FAILED: script.py" in out
    script.write_text("import sys\nsys.exit(0)")
    assert compile_and_test(source, script) == 0
    out = capsys.readouterr().out
    assert re.search(r"my\.cu: cached, \d+\.\d+ s, for sm_", out)
    assert torch.cuda.is_available() or "no GPU" in out
    assert compile_and_test(source, None) == 0


def test_missing_files(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "nowhere.cu"]) == 2
    assert "FILE: got nowhere.cu, expected a file" in capsys.readouterr().err
    assert main(["watch", str(source), "--test", "nowhere.py"]) == 2
    assert "--test: got nowhere.py, expected a file" in capsys.readouterr().err


@pytest.mark.cuda
def test_kernels_are_timed(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = source.with_name("script.py")
    script.write_text(
        "import torch\nfrom torchkiln import jit\nx = torch.zeros(2**26, device='cuda')\n"
        "copy = jit.inline('__global__ void copy(float* x) {'\n"
        "  'x[blockIdx.x * blockDim.x + threadIdx.x] += 1; }').copy\n"
        "for _ in range(5): copy[2**18, 256](x)\n"
        "assert x.sum().item() == 5 * 2**26"
    )
    assert compile_and_test(source, script) == 0
    match = re.search(r"copy\[262144, 256\]: (\d+\.\d) us, best of 5", capsys.readouterr().out)
    assert match is not None
    assert 50 < float(match[1]) < 5000  # us for 512 MiB of traffic
