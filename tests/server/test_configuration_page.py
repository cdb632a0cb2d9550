"""The configuration reference is what the models say."""

import re
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo

from gpu.methods.registry import list_methods
from server.commands.configuration_page import describe_default, list_sections, write_page
from server.deployment import Deployment, ServerConfig
from server.http.request_scope import OPEN_PATHS
from tests.gpu.toy_method import add_toy
from transfer.reading import Reading

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "CONFIGURATION.md"
# Pages of what is no method of a slot, or has its settings in a section of the deployment.
SECTIONS = {"a3": "documents", "offloaded": "host", "sampled": "host.sampled", "drafts": "profiles.draft"}
WORDS_FOR_DERIVED = {
    "memory_limit_gib": "half of the host",
    "dense_layers": "0 and the middle one",
    "link_share": "measured",
}


def test_the_page_is_current() -> None:
    what_to_do = "python -m server.commands.configuration_page > docs/CONFIGURATION.md, which make docs runs"
    assert PAGE.read_text() == write_page(), what_to_do


def test_every_method_is_on_the_page_with_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("exact", "offloaded", "sampled"):
        assert f"### `{name}`" in write_page()
    add_toy(tmp_path, monkeypatch, "reuse", Reading.NONE)
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
    files = {path for path in OPEN_PATHS if path.startswith(("/docs/", "/page/"))}
    assert set(re.findall(r"/[a-z.]*", description)) == OPEN_PATHS - files


def find_settings(page: str) -> dict[str, FieldInfo]:
    """Return the settings that a method's page is about, by key."""
    if page in SECTIONS:
        return dict(list_sections(Deployment, ""))[SECTIONS[page]].model_fields
    return list_methods()[page].settings.model_fields


def test_every_method_has_a_page() -> None:
    pages = {path.stem for path in (DOCS / "methods").glob("*.md")}
    missing = {name for name in list_methods() if "+" not in name} - pages
    assert not missing, f"write docs/methods/NAME.md, with a table of settings and defaults, of {missing}"


@pytest.mark.parametrize("page", sorted(path.stem for path in (DOCS / "methods").glob("*.md")))
def test_a_methods_page_shows_the_defaults_that_hold(page: str) -> None:
    text = (DOCS / "methods" / f"{page}.md").read_text()
    shown = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text, re.MULTILINE))
    fields = find_settings(page)
    assert shown.keys() <= fields.keys()
    assert bool(shown) is bool(fields), "a page has a table of settings, `key` and default, if there are any"
    for key, default in shown.items():
        assert default == (describe_default(fields[key]) or WORDS_FOR_DERIVED[key]), key
