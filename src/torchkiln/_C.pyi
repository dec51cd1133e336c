from collections.abc import Callable
from typing import Any

def note(words: str) -> None: ...
def start_recording() -> None: ...
def stop_recording() -> list[
    tuple[
        str,
        int,
        str,
        str,
        tuple[int, ...],
        list[tuple[str, str, int, tuple[int, ...], tuple[int, ...]]],
    ]
]: ...
def __getattr__(op: str) -> Callable[..., Any]: ...
