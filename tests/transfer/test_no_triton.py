"""What stands for Triton in a process without a GPU: whole numbers as Triton's own, and kernels that refuse."""

import subprocess
import sys

import pytest
import torch
import triton

from transfer import no_triton


def test_its_numbers_are_those_of_triton() -> None:
    for number in range(1025):
        assert no_triton.next_power_of_2(number) == triton.next_power_of_2(number)
        assert no_triton.cdiv(number, 7) == triton.cdiv(number, 7)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="Triton stays where there may be a GPU")
def test_a_kernel_is_declared_with_it_and_refuses_to_run_by_name() -> None:
    code = """
from transfer.no_triton import leave_out_triton
leave_out_triton()
import torch, triton
from gpu.operations import rms_norm
from gpu.methods.indexed import building
try:
    rms_norm._rms_norm_kernel[(1,)](torch.zeros(1))
except RuntimeError as error:
    print(error)
try:
    triton.autotune
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    launched, asked = done.stdout.splitlines()
    assert launched.startswith("_rms_norm_kernel: a kernel of Triton, in a process whose torch was built without GPUs")
    assert asked.startswith("triton.autotune: Triton is left out of a process whose torch was built without GPUs; set ")


def test_triton_stays_where_it_was_imported() -> None:
    no_triton.leave_out_triton()
    assert sys.modules["triton"] is triton
    assert hasattr(triton, "compile")
