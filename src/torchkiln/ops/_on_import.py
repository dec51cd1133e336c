"""Calls a function when a module of torch is imported: torchkiln need not import it for that."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class OnImport(MetaPathFinder):
    """Finds a module as Python does, and calls a function after the module has been executed."""

    def __init__(self, name: str, function: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.function = function

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """The module's spec; None for all other modules."""
        if fullname != self.name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            sys.meta_path.remove(self)
            self.function(module)

        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


def when_imported(name: str, function: Callable[[ModuleType], None]) -> None:
    """Calls the function now if the module is imported, else after its import."""
    if name in sys.modules:
        function(sys.modules[name])
    else:
        sys.meta_path.insert(0, OnImport(name, function))
