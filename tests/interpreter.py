"""A plugin: Triton's interpreter replaces what it does of the language once a launch, not at every call in a kernel.

At each call of a function inside a kernel it looks through the whole of `triton.language` once more, 1 to 2 ms and a
third of all its time. A launch has replaced what the kernel's own module names, and the first function of a module that
names another part replaces that. Nothing that is computed changes.
"""

from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction

_replaced: set[int] = set()
_launch = GridExecutor.__call__


def _begin_launch(executor: GridExecutor, *arguments: Any, **named: Any) -> Any:
    _replaced.clear()
    return _launch(executor, *arguments, **named)


def _call(function: InterpretedFunction, *arguments: Any, **named: Any) -> Any:
    wanted = _parts(function.fn)
    if not wanted <= _replaced:
        interpreter._patch_lang(function.fn)
        _replaced.update(wanted)
    return function.rewrite()(*arguments, **named)


@cache
def _parts(function: Any) -> frozenset[int]:
    """Of the language, those that a function's module names."""
    return frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)


GridExecutor.__call__ = _begin_launch
InterpretedFunction.__call__ = _call
