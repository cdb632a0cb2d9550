"""List the formats of calls and reasoning that the families name, and choose one by a chat template."""

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from gpu.model.answers.formats import CallFormat, ReasoningFormat
from gpu.model.family import family_folders

AUTO, NONE = "auto", "none"
Format = TypeVar("Format", CallFormat, ReasoningFormat)


def call_formats() -> dict[str, CallFormat]:
    """Return the formats of calls by name, sorted."""
    return _by_name(found for family in family_folders().values() for found in family.calls)


def reasoning_formats() -> dict[str, ReasoningFormat]:
    """Return the formats of reasoning by name, sorted."""
    return _by_name(found for family in family_folders().values() for found in family.reasoning)


def choose_by_sign(formats: Mapping[str, Format], template: str) -> Format | None:
    """Return the format whose sign a chat template matches, and which no other that matches goes before.

    Of several, the first by name. None if no sign is found.
    """
    found = [one for one in formats.values() if one.sign is not None and re.search(one.sign, template)]
    behind = {name for one in found for name in one.before}
    return next((one for one in found if one.name not in behind), None)


def _by_name(formats: Iterable[Format]) -> dict[str, Format]:
    found: dict[str, Format] = {}
    for one in formats:
        assert one.name not in (AUTO, NONE), f"a format is called {one.name!r}, which is a setting"
        assert found.setdefault(one.name, one) is one, f"two formats are called {one.name!r}"
    return dict(sorted(found.items()))
