"""A ``torchkiln`` for shell scripts that starts in milliseconds.

Its process is forked from one that has imported torch, which would take two seconds.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingMixIn, UnixStreamServer
from threading import Thread

from processes import LIMIT, fork_server

from torchkiln_command import main

# What the shell starts: it sends its call and its standard streams, and ends with the same status.
CLIENT = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({place!r})
    socket.send_fds(server, [b"!"], [0, 1, 2])
    server.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode())
    server.shutdown(socket.SHUT_WR)
    sys.exit(int(server.recv(8)))
"""


def execute(
    words: list[str], folder: str, variables: dict[str, str], streams: list[Connection]
) -> None:
    """In the forked process: the command, with the streams of the one that the shell started."""
    for standard, stream in enumerate(streams):
        os.dup2(stream.fileno(), standard)
        stream.close()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    warnings.simplefilter("ignore")
    sys.argv = ["torchkiln", *words]
    sys.exit(main())


class Command(StreamRequestHandler):
    """Runs one command, and answers with its exit status."""

    def handle(self) -> None:
        _, handles, *_ = socket.recv_fds(self.request, 1, 3)
        streams = [Connection(handle) for handle in handles]
        words, folder, variables = json.load(self.rfile)
        process = fork_server().Process(target=execute, args=(words, folder, variables, streams))
        process.start()
        for stream in streams:  # so that a reader sees the end of a pipe when the process ends
            stream.close()
        process.join(LIMIT)
        if process.is_alive():
            process.kill()
            process.join()
        assert process.exitcode is not None
        self.wfile.write(str(process.exitcode % 256).encode())


class Server(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True


@contextmanager
def served(folder: Path) -> Iterator[Path]:
    """A folder for PATH with ``torchkiln``, which works as long as the context is open."""
    place = str(folder / "server")
    tool = folder / "torchkiln"
    tool.write_text(CLIENT.format(python=sys.executable, place=place), encoding="utf-8")
    tool.chmod(0o755)
    with Server(place, Command) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield folder
        finally:
            server.shutdown()
            thread.join()
