from collections.abc import Callable
from typing import Any

has_cuda: bool

def __getattr__(op: str) -> Callable[..., Any]: ...
