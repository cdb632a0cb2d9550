"""Let processes share numba's cache, and compile in memory if the cache cannot be written.

numba raises a RuntimeError on import if no cache folder can be written, and an OSError on compilation if a file cannot.
Both become one warning per process here. numba also writes a function's index before the code that it names, without a
lock, so a second process could read the code of another function. Here each load and save holds a lock. A C function
takes many seconds to compile: if several processes need it at once, one compiles it, and the others wait.
"""

import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from hashlib import sha256
from typing import Any

from numba.core import caching
from numba.core.ccallback import CFunc

log = logging.getLogger(__name__)

_NOWHERE = "/nonexistent"
_is_told = False


class NoFolder(caching.UserProvidedCacheLocator):
    """The last of numba's cache locators. It has no folder, so nothing is found in it and nothing can be saved."""

    def __init__(self, py_func: Any, py_file: str) -> None:
        self._py_file, self._lineno, self._cache_path = py_file, py_func.__code__.co_firstlineno, _NOWHERE

    def ensure_cache_path(self) -> None:
        """Raise OSError, because there is no folder."""
        raise OSError("numba cache: no folder is writable; set NUMBA_CACHE_DIR to one that is")

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> "NoFolder":
        return cls(py_func, py_file)


def go_on_without_cache() -> None:
    """Make numba lock its cache, and compile in memory if the cache fails. Call it once, before any compilation."""
    caching.Cache._guard_against_spurious_io_errors = _guard
    for name in ("load", "save"):
        setattr(caching.IndexDataCacheFile, name, _with_lock(getattr(caching.IndexDataCacheFile, name)))
    caching.CacheImpl._locator_classes = [*caching.CacheImpl._locator_classes, NoFolder]
    setattr(CFunc, "compile", _one_at_a_time(CFunc.compile))  # noqa: B010, whose type is numba's own


def can_save(function: Any) -> bool:
    """Return whether a cached function's code can be saved, so that other processes find it."""
    return os.access(function._cache.cache_path, os.W_OK)


def cached_signatures(function: Any) -> list[tuple[Any, ...]]:
    """Return the signatures for which the cache has a function's code, for these sources and this machine."""
    cache = function._cache
    _, *ours = cache._index_key((), function.targetctx.codegen())
    try:
        kept = cache._cache_file._load_index()
    except OSError:
        return []
    return [signature for signature, *key in kept if key == ours]


@contextmanager
def _guard(cache: Any) -> Iterator[None]:
    """Log the first OSError of numba's loads and saves, and continue; a load that fails finds nothing."""
    global _is_told
    try:
        yield
    except OSError as error:
        if not _is_told:
            log.warning(
                "numba_cache_failed folder=%s reason=%s effect=each start compiles anew", cache.cache_path, error
            )
        _is_told = True


def _with_lock(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(cache_file: Any, *arguments: Any) -> Any:
        with _locked(cache_file._cache_path, ""):
            return method(cache_file, *arguments)

    return call


def _one_at_a_time(compile_: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wait for a process that compiles the same function for the same processor; then its code is found."""

    @wraps(compile_)
    def call(function: Any) -> None:
        cache, target = function._cache, function._targetdescr.target_context
        if cache.cache_path is None:
            compile_(function)
            return
        key = cache._impl.filename_base, cache._index_key(function._sig, target.codegen())
        with _locked(cache.cache_path, sha256(repr(key).encode()).hexdigest()[:16]):
            compile_(function)

    return call


@contextmanager
def _locked(folder: str, name: str) -> Iterator[None]:
    """Hold a lock in a folder, unless it cannot be written."""
    if not os.access(folder, os.W_OK):
        yield
        return
    with open(os.path.join(folder, f"{name}.lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        yield
