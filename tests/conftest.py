"""Tests that need a CUDA device are skipped where there is none, and say so."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; torch finds none")
    for item in items:
        if "gpu" in item.keywords and item.get_closest_marker("gpu"):
            item.add_marker(skip)
