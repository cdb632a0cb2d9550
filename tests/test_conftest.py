"""What all tests stand on: that a run ends, whatever a test does."""

import subprocess
import sys
from pathlib import Path

import torch

from tests.conftest import ROOT

HANGS = """
import pytest, time

@pytest.fixture
def hangs():
    yield
    time.sleep(600)

def test_fails(hangs):
    assert False

def test_behind_it():
    pass
"""


def test_a_run_ends_where_the_teardown_of_a_test_that_failed_does_not(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_configure, pytest_runtest_teardown\n")
    (tmp_path / "test_hangs.py").write_text(HANGS)
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-o", "timeout=3", "-o", f"pythonpath={ROOT}"]
    command += ["-p", "no:schemathesis", "-p", "no:cacheprovider", "-n", "1", "--rootdir", str(tmp_path), "."]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "crashed while running 'test_hangs.py" in run.stdout
    assert "2 failed" in run.stdout, "the test and the file, whose other tests are not run"
    assert 'test_hangs.py", line 7 in hangs' in run.stdout + run.stderr


def test_what_a_test_draws_does_not_depend_on_those_that_ran_before() -> None:
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))
