"""Files that are collected when their turn comes run the tests that they would have run otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

FILES = {
    "test_first.py": """
import pytest
@pytest.mark.long
def test_left_out():
    pass
def test_one(kept):
    assert kept
""",
    "test_all_long.py": """
import pytest
pytestmark = pytest.mark.long
def test_two():
    pass
""",
    "below/test_other.py": "def test_three(kept):\n    assert not kept, 'fails'\n",
    "below/test_broken.py": "raise ValueError('not importable')\n",
    "conftest.py": """
import pytest
from tests import lazy_files
def pytest_configure(config):
    config.pluginmanager.register(lazy_files)
@pytest.fixture(scope="session")
def kept():
    yield True
""",
}


def run_in(folder: Path, *options: str) -> str:
    command = [sys.executable, "-m", "pytest", "-n", "1", "--dist", "loadfile", "--no-loadscope-reorder", "-vv"]
    done = subprocess.run(
        [*command, "-c", str(ROOT / "pyproject.toml"), "--rootdir", ".", "-p", "no:cacheprovider", ".", *options],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "below").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_each_test_that_is_asked_for_runs_once_and_what_cannot_be_imported_is_an_error(folder: Path) -> None:
    said = run_in(folder)
    assert said.count("PASSED test_first.py::test_one") == 1, said
    assert "FAILED below/test_other.py::test_three" in said
    assert "ValueError: not importable" in said
    assert "1 failed, 1 passed, 1 error" in said
    assert "test_left_out" not in said
    assert "test_two" not in said


def test_tests_are_chosen_by_marks_and_names_and_their_files_are_not(folder: Path) -> None:
    said = run_in(folder, "-m", "long", "-k", "two", "--ignore", "below")
    assert "PASSED test_all_long.py::test_two" in said, said
    assert "1 passed" in said
