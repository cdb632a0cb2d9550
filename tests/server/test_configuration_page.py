"""The configuration reference is what the models say."""

from pathlib import Path

from server.config import Deployment
from server.configuration_page import list_sections, write_page

PAGE = Path(__file__).parents[2] / "docs" / "CONFIGURATION.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == write_page(), "write it anew: make docs"


def test_every_key_is_on_the_page() -> None:
    page = write_page()
    sections = list_sections(Deployment, "")
    assert [name for name, _ in sections][:2] == ["model", "gpu"]
    nested = {name for name, _ in sections}
    for name, model in sections:
        assert f"## `{name}`" in page
        for key in model.model_fields:
            assert f"{name}.{key}" in nested or f"| `{key}` |" in page
