"""Skip tests that need a CUDA device where there is none, and keep each of several test processes to one core.

- Processes share one numba cache in `build/numba`.
- Loading a model sets torch's threads for a whole process, so each test begins with one. Threads that wait do not spin.
- httpx reads all certificates for each client, 30 to 80 ms. No test uses them, so there are none to read.
- Python's garbage collector does not look at the millions of objects that imports and the collection made.
- What is drawn without a generator of the test's own is the same whichever tests ran before.
- A failed test has no timeout any more (pytest-timeout lets a debugger in), so its teardown has one of its own.
- hypothesis draws the same in every run where CI is set. Elsewhere it follows a seed that the run's end names.
"""

import atexit
import faulthandler
import gc
import os
import random
import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

from tests import lazy_files

ROOT = Path(__file__).parents[1]
SEED_VARIABLE = "TANDEM_TEST_SEED"
_stderr = 2

settings.register_profile("ci", derandomize=True, print_blob=True, deadline=None)
settings.register_profile("random", print_blob=True, deadline=None)


@pytest.hookimpl(tryfirst=True)  # before hypothesis looks for its options
def pytest_configure(config: pytest.Config) -> None:
    global _stderr
    _stderr = os.dup(2)  # not captured yet: what is captured goes with a process that is ended
    os.environ.pop("SSL_CERT_FILE", None)
    os.environ["SSL_CERT_DIR"] = os.devnull
    is_ci = bool(os.environ.get("CI"))
    settings.load_profile("ci" if is_ci else "random")
    if not is_ci and config.getoption("--hypothesis-seed") is None:
        seed = os.environ.setdefault(SEED_VARIABLE, str(secrets.randbelow(2**32)))  # processes of xdist inherit it
        config.option.hypothesis_seed = int(seed)
    if not config.pluginmanager.is_registered(lazy_files):  # `lab/tests` configures by this function as well
        config.pluginmanager.register(lazy_files)
    if config.getoption("numprocesses", None):  # read when numpy and torch are loaded, so for processes still to come
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    if os.environ.get("PYTEST_XDIST_WORKER") is not None:
        os.environ["NUMBA_CACHE_DIR"] = str(ROOT / "build" / "numba")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        atexit.register(gc.unfreeze)  # what the interpreter's end does not collect, Triton's extension lists as leaked


@pytest.hookimpl(tryfirst=True)  # before fixtures, whatever their scope
def pytest_runtest_setup() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _heap_is_frozen() -> None:
    if gc.get_freeze_count() == 0:  # programs that end here thaw their own
        gc.freeze()


@pytest.fixture(autouse=True)
def _torch_begins_with_one_thread() -> None:
    if os.environ.get("PYTEST_XDIST_WORKER"):
        torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    faulthandler.dump_traceback_later(float(item.config.getini("timeout") or 0) or 300, exit=True, file=_stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    seed = config.getoption("--hypothesis-seed")
    terminalreporter.write_line("hypothesis: CI, derandomised" if seed is None else f"--hypothesis-seed={seed}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from tests.file_order import FromBothEnds

    return FromBothEnds(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; torch finds none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
