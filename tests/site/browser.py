"""A headless Chromium, controlled by its DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PATIENCE = 60
NAMES = ("chromium", "chromium-browser", "google-chrome")


def find() -> str | None:
    """The path of Chromium, or None."""
    return next((found for found in map(shutil.which, NAMES) if found), None)


class Browser:
    """One page of a browser; as a context manager it ends the process.

    Chromium reads messages from descriptor 3 and writes its answers and events to 4, each as JSON
    that ends with a zero byte.
    """

    def __init__(self, program: str, profile: Path) -> None:
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        options = (
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--no-first-run", "--hide-scrollbars", "--allow-file-access-from-files"),
            *("--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"),
        )
        self._process = subprocess.Popen(
            ["bash", "-c", 'exec "$@" 3<&"$IN" 4>&"$OUT"', "bash", program, *options],
            env=os.environ | {"IN": str(theirs_in), "OUT": str(theirs_out)},
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer = b""
        self._count = 0
        self._events: list[dict[str, Any]] = []
        self._session = ""
        target = self._page()
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)  # for access to the clipboard

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait(10)
        os.close(self._to)
        os.close(self._from)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._from], [], [], PATIENCE)[0]:
                raise TimeoutError(f"Chromium said nothing for {PATIENCE} s")
            part = os.read(self._from, 1 << 16)
            if not part:
                raise RuntimeError(f"{self._process.args!r} ended, exit {self._process.wait()}")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Run a command of the DevTools protocol; returns its result."""
        self._count += 1
        message: dict[str, object] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self._count:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']['message']}")
                result: dict[str, Any] = found["result"]
                return result
            self._events.append(found)

    def _page(self) -> str:
        """Waits for the page that Chromium opens after its start."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            for one in self.call("Target.getTargets")["targetInfos"]:
                if one["type"] == "page":
                    return str(one["targetId"])
            time.sleep(0.1)
        raise TimeoutError(f"Chromium opened no page within {PATIENCE} s")

    def wait_for(self, event: str) -> dict[str, Any]:
        """Wait for the next event of this name; returns it."""
        while True:
            for at, found in enumerate(self._events):
                if found.get("method") == event:
                    del self._events[: at + 1]
                    parameters: dict[str, Any] = found["params"]
                    return parameters
            self._events.append(self._read())

    def complaints(self) -> list[str]:
        """Errors of scripts, and files that failed to load, since the page was opened."""
        self.evaluate("1")  # the answer follows all earlier events
        found = []
        for event in self._events:
            parameters = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(parameters["exceptionDetails"]["text"])
            elif event.get("method") == "Network.loadingFailed":
                found.append(parameters["errorText"])
            elif (
                event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error"
            ):
                found.append(parameters["entry"]["text"])
        return found

    def size(self, width: int, height: int = 900) -> None:
        """Set the size of the window, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def prefer(self, scheme: str) -> None:
        """Set the preferred color scheme: light or dark."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def open(self, address: str) -> None:
        """Load a page, and wait for its load event."""
        self._events.clear()
        self.call("Page.navigate", url=address)
        self.wait_for("Page.loadEventFired")

    def evaluate(self, code: str) -> Any:
        """Evaluate JavaScript and await a promise; returns the value."""
        found = self.call(
            "Runtime.evaluate",
            expression=code,
            returnByValue=True,
            awaitPromise=True,
            userGesture=True,
        )
        if "exceptionDetails" in found:
            raise RuntimeError(f"{code}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write a PNG of the visible part, or of the whole page."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))
