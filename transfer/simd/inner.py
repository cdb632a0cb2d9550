"""Compile functions that only compiled code calls, without Python and C wrappers, which saves a quarter of the time."""

from collections.abc import Callable
from typing import Any

import numba
from numba.core.registry import CPUDispatcher


class Inner(CPUDispatcher):
    """A function that Python must not call: it has no wrapper, and numba would jump to an invalid address."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Raise TypeError, always."""
        raise TypeError(f"{self.__name__}: compiled for compiled code alone; call it from a function of numba's")


def inner(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorate a function, with options of `numba.njit` or none. It does not hold the GIL."""
    if function is None:
        return lambda later: inner(later, **options)
    made = numba.njit(function, nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)
    made.__class__ = Inner
    return made
