"""The configuration reference is what the models say."""

import re
from pathlib import Path

import pytest

from server.commands.configuration_page import list_sections, write_page
from server.config import Deployment, ServerConfig
from server.request_scope import OPEN_PATHS
from tests.gpu.toy_method import add_toy

PAGE = Path(__file__).parents[2] / "docs" / "CONFIGURATION.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == write_page(), "write it anew: make docs"


def test_every_method_is_on_the_page_with_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("exact", "offloaded", "sampled"):
        assert f"### `{name}`" in write_page()
    add_toy(tmp_path, monkeypatch, "reuse", None)
    _, _, toy = write_page().partition("### `toy`")
    assert "Fills the slot `reuse`. Plays." in toy
    assert "| `size` | integer, at least 1 | 3 | how large the toy is |" in toy


def test_every_key_is_on_the_page() -> None:
    page = write_page()
    sections = list_sections(Deployment, "")
    assert [name for name, _ in sections][:2] == ["model", "gpu"]
    nested = {name for name, _ in sections}
    for name, model in sections:
        assert f"## `{name}`" in page
        for key in model.model_fields:
            assert f"{name}.{key}" in nested or f"| `{key}` |" in page


def test_the_page_names_every_route_that_needs_no_key() -> None:
    description = ServerConfig.model_fields["api_keys"].description or ""
    below_docs = {path for path in OPEN_PATHS if path.startswith("/docs/")}
    assert set(re.findall(r"/[a-z.]+", description)) == OPEN_PATHS - below_docs
