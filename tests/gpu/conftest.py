"""Fixtures of tests of the device side."""

import pytest

from gpu.layers.projections import Projections


@pytest.fixture
def products_by_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply several tokens by the vendor's library in captured steps too, as eager steps do: no tiles are chosen."""
    monkeypatch.setattr(Projections, "choose_tiles", lambda *_: None)
