"""Loading a model whole: what goes wrong on the way is one line that says what to change."""

import pytest
import torch

from gpu.load import shortage_in_one_line
from gpu.model.architecture import ModelError


def ask_too_much_of_the_host() -> None:
    torch.empty(2**60)


def ask_too_much_of_a_card() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free.\nSee manual")


@pytest.mark.parametrize("ask", [ask_too_much_of_the_host, ask_too_much_of_a_card])
def test_memory_that_runs_out_is_one_line_with_the_key_to_change(ask) -> None:
    with (
        pytest.raises(ModelError, match=r"^gpu.memory_limit_gib: memory ran out .*([Tt]ried)") as caught,
        shortage_in_one_line(),
    ):
        ask()
    assert "\n" not in str(caught.value)


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes"), shortage_in_one_line():
        raise RuntimeError("shapes do not match")
