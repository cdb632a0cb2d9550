"""The CPU's decode step is compiled by a child process, and the steps of any model find its code."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpu.compile_step import compile_step
from gpu.cpu_step.cpu_step import CpuStep
from gpu.decode import step_code
from gpu.decode.step_code import COMPILE, StepCode, is_cached
from gpu.model.architecture import named_shape
from tests.gpu.cpu_decoder import cpu_decoder
from transfer.simd.numba_cache import cached_signatures

SETTINGS = '{"device": "cpu", "dtype": "float32", "threads": 1}'
LONG_S = 60
DTYPES = torch.float32, torch.float32


def wait_for(code: StepCode) -> bool:
    ends = time.monotonic() + LONG_S
    while code._child is not None and time.monotonic() < ends:
        time.sleep(0.02)
        code.is_ready()
    return code.is_ready()


def test_the_child_s_code_is_that_of_a_step_of_another_model():
    """With that in the cache, another model in more threads adds no signature to it."""
    compile_step(SETTINGS)
    assert is_cached(DTYPES)
    before = set(cached_signatures(step_code.WORK))
    shape = replace(named_shape("tiny"), num_layers=1, hidden=384, intermediate=320)
    decoder = cpu_decoder(shape, torch.float32, num_pages=4, max_slots=1, max_pages=4)
    ids = torch.zeros(1, dtype=torch.int64).numpy()
    CpuStep(decoder).run(ids.astype("int32"), ids, ids)
    assert set(cached_signatures(step_code.WORK)) == before


def test_a_child_that_ends_by_itself_leaves_steps_as_they_are(monkeypatch, caplog):
    monkeypatch.setattr(step_code, "is_cached", lambda dtype: False)
    monkeypatch.setattr(step_code, "COMPILE", (sys.executable, "-c", "import os; os.abort()"))
    code = StepCode(DTYPES, SETTINGS)
    assert not code.is_ready()
    assert not wait_for(code)
    assert "not_compiled status=-6" in caplog.text


def test_code_that_a_child_made_is_used_from_then_on(monkeypatch, tmp_path):
    made = tmp_path / "made"
    monkeypatch.setattr(step_code, "is_cached", lambda dtype: made.exists())
    monkeypatch.setattr(step_code, "COMPILE", (sys.executable, "-c", f"open({str(made)!r}, 'w')"))
    code = StepCode(DTYPES, SETTINGS)
    assert not code.is_ready()
    assert wait_for(code)


@pytest.mark.parametrize("settings", [None, SETTINGS])
def test_no_child_where_code_can_be_kept_nowhere_or_none_is_asked_for(monkeypatch, settings):
    monkeypatch.setattr(step_code, "is_cached", lambda dtype: False)
    monkeypatch.setattr(step_code, "can_save", lambda function: settings is None)
    code = StepCode(DTYPES, settings)
    assert code._child is None
    assert code.is_ready()


def test_the_child_ends_with_who_started_it(tmp_path):
    """Its input ends then, and nothing is in the cache that it is given."""
    command = [*COMPILE, SETTINGS, "[]"]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    child = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, cwd=Path(__file__).parents[2])
    child.stdin.close()
    assert child.wait(LONG_S) == 1
    assert list(tmp_path.iterdir()) == []
