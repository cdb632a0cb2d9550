"""Tests that need a CUDA device are skipped where there is none, and say so. One of several processes keeps to a core.

numba takes no lock to write its file cache: each process of the suite, with those that it starts, has one of its own.
"""

import os
from pathlib import Path

import pytest


def pytest_configure() -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        return
    os.environ["NUMBA_CACHE_DIR"] = str(Path(__file__).parents[1] / "build" / "numba" / worker)
    os.environ["OMP_NUM_THREADS"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; torch finds none")
    for item in items:
        if "gpu" in item.keywords and item.get_closest_marker("gpu"):
            item.add_marker(skip)
