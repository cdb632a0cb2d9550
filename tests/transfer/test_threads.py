"""numba's threads start without a word to torch: each library has the number that it was told."""

import os
import subprocess
import sys

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "2", "NUMBA_NUM_THREADS": "3"}


def words_of(program: str) -> list[str]:
    """What a process of its own prints."""
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_an_import_that_starts_numbas_threads_leaves_torch_its_own():
    program = """
import numba, torch
before = torch.get_num_threads()
import gpu.runner
print(bool(numba.threading_layer()), numba.get_num_threads(), before, torch.get_num_threads())
"""
    assert words_of(program) == ["True", "3", "2", "2"]


def test_a_parallel_function_with_more_threads_leaves_torch_its_own():
    program = """
import torch
before = torch.get_num_threads()
from cpu.memory_rates import measure_read_rate
assert measure_read_rate(3, 2**20) > 0
print(before, torch.get_num_threads())
"""
    assert words_of(program) == ["2", "2"]
