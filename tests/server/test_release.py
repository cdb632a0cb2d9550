"""The release that the server names, installed or run from its sources."""

import importlib.metadata

import pytest

from server import release


def test_a_project_that_is_not_installed_still_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(release, "version", find_nothing)
    release.release.cache_clear()
    assert release.release() == "source"
    monkeypatch.undo()
    release.release.cache_clear()
    assert release.release() == importlib.metadata.version("tandem")
