"""A cache that cannot be written costs one line, and what is compiled runs all the same."""

import errno
import fcntl
import logging
import re
import tempfile
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numba
import pytest
from numba.core import caching
from numba.core.ccallback import CFunc

from transfer.simd import numba_cache

ROOT = Path(__file__).parents[2]
PACKAGES = ("cpu", "gpu", "scheduler", "transfer")
SOURCE = """import numba

@numba.njit(cache=True)
def add(x):
    return x + 1

@numba.cfunc("int64(int64)", cache=True)
def double(x):
    return 2 * x
"""


def fail(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", fail)


def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching.IndexDataCacheFile, "_save_index", fail)


def no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching.IndexDataCacheFile, "_save_data", fail)


def unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching.IndexDataCacheFile, "_load_index", fail)


@pytest.mark.parametrize("breaks", [no_folder, no_index, no_code, unreadable])
def test_whatever_the_cache_fails_at_code_is_compiled_and_one_line_says_so(
    breaks: Callable[[pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(numba_cache, "_is_told", False)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    name = f"compiled_{breaks.__name__}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    breaks(monkeypatch)
    with caplog.at_level(logging.WARNING):
        module = import_module(name)
        assert (module.add(1), module.add(1.5), module.double.ctypes(4)) == (2, 2.5, 8)
    (line,) = [record.getMessage() for record in caplog.records if "numba" in record.getMessage()]
    assert "\n" not in line
    assert "No space left" in line or "no folder is writable" in line


def test_every_module_that_caches_code_is_one_that_goes_on_without() -> None:
    caching_modules = [
        path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if "cache=True" in path.read_text()
    ]
    assert len(caching_modules) > 5
    for path in caching_modules:
        if path.parent.name != "simd":
            assert re.search(r"^(from|import) (transfer\.simd|cpu\.)", path.read_text(), re.MULTILINE), path


def test_a_second_process_waits_while_the_first_saves(tmp_path: Path) -> None:
    """A load between a save's index and its code would read what another function left there."""
    file = caching.IndexDataCacheFile(str(tmp_path), "add", "stamp")
    loaded: list[object] = []
    reader = threading.Thread(target=lambda: loaded.append(file.load("key")))
    with (tmp_path / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        reader.start()
        reader.join(0.2)
        assert reader.is_alive()
    reader.join(10)
    assert loaded == [None]


def test_a_second_process_waits_for_a_function_that_the_first_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each function by itself; what is there when it has waited is not compiled again."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    for name, factor in (("compiled_alone", 2), ("compiled_beside", 3)):
        (tmp_path / f"{name}.py").write_text(SOURCE.replace("2 * x", f"{factor} * x"))
    first = import_module("compiled_alone").double
    assert first.cache_hits == 0
    (path,) = (tmp_path / "cache").glob("*/?*.lock")
    second = CFunc(first._pyfunc, (first._sig.args, first._sig.return_type), {}, {})
    second.enable_caching()
    waits = threading.Thread(target=second.compile)
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waits.start()
        assert import_module("compiled_beside").double.ctypes(4) == 12
        waits.join(0.2)
        assert waits.is_alive()
    waits.join(10)
    assert second.cache_hits == 1
    assert second.ctypes(4) == 8
