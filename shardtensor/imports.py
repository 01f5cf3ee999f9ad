"""Run code on a module of torch as soon as a program imports it, and not before: some are slow to import."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def when_imported(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call ``act(module)`` now if the module is imported already, else right after it is.

    Example:
        >>> when_imported("math", lambda module: print(module.floor(2.5)))
        2
    """
    if name in sys.modules:
        act(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, act))


class _Finder:
    """Finds one module as Python would, and calls a function after it has run."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name, self._act = name, act

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of the one module, and None for all others."""
        if name != self._name:
            return None
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]  # the old list is being read
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_act(module: ModuleType) -> None:
            run(module)
            self._act(module)

        spec.loader.exec_module = run_and_act  # type: ignore[method-assign]
        return spec
