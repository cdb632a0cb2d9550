"""Keep a start alive whose numba cache cannot be written: what is compiled then stays in memory.

numba ends an import with a RuntimeError where no cache folder can be written, and a compilation with an OSError where a
file cannot. Both become one warning a process. Invariant: what is read from the cache is what numba wrote there.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import caching

log = logging.getLogger(__name__)

_NOWHERE = "/nonexistent"
_is_told = False


class NoFolder(caching.UserProvidedCacheLocator):
    """The last of numba's locators: there is no folder, so nothing is found in it and nothing can be saved."""

    def __init__(self, py_func: Any, py_file: str) -> None:
        self._py_file, self._lineno, self._cache_path = py_file, py_func.__code__.co_firstlineno, _NOWHERE

    def ensure_cache_path(self) -> None:
        """Raises OSError."""
        raise OSError("no folder can be written; NUMBA_CACHE_DIR names another")

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> "NoFolder":
        return cls(py_func, py_file)


def go_on_without_cache() -> None:
    """Have numba compile in memory wherever its cache fails it. Called once, before anything is compiled."""
    caching.Cache._guard_against_spurious_io_errors = _guard
    caching.CacheImpl._locator_classes = [*caching.CacheImpl._locator_classes, NoFolder]


@contextmanager
def _guard(cache: Any) -> Iterator[None]:
    """Stands around each load and each save of numba's; a load that ends so finds nothing."""
    global _is_told
    try:
        yield
    except OSError as error:
        if not _is_told:
            log.warning(
                "numba_cache_failed folder=%s reason=%s effect=each start compiles anew", cache.cache_path, error
            )
        _is_told = True
