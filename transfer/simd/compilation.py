"""Report how far numba has compiled a set of functions and their callees.

The fraction rises and stays below 1. If all functions are in numba's cache, nothing is reported.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import event
from numba.core.dispatcher import Dispatcher


def find_callees(*roots: Any) -> set[Any]:
    """Return these functions and all functions of ours that they call, directly or not, found by their globals' names.
    Functions that are inlined into their callers are left out.
    """
    found, left = set(), list(roots)
    while left:
        one = left.pop()
        if isinstance(one, Dispatcher) and one not in found:
            found.add(one)
            function = one.py_func
            left += [function.__globals__.get(name) for name in function.__code__.co_names]
    return {one for one in found if one.targetoptions.get("inline") != "always"}


@contextmanager
def reporting_compilation(roots: tuple[Any, ...], on_progress: Callable[[float], None]) -> Iterator[None]:
    """Call `on_progress(fraction)` whenever another callee of these functions is compiled inside the block."""
    listener = _Listener(find_callees(*roots), on_progress)
    with event.install_listener("numba:compile", listener):
        yield


class _Listener(event.Listener):
    def __init__(self, functions: set[Any], on_progress: Callable[[float], None]) -> None:
        self._left, self._all, self._on_progress = set(functions), len(functions), on_progress

    def on_start(self, compiled: Any) -> None:
        pass

    def on_end(self, compiled: Any) -> None:
        function = compiled.data["dispatcher"]
        if function in self._left:
            self._left.remove(function)
            self._on_progress((self._all - len(self._left)) / (self._all + 1))  # + 1 for their caller
