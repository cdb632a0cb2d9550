"""Loading a model whole: what goes wrong on the way is one line that says what to change."""

import pytest
import torch

from gpu.config import GpuConfig, ModelConfig
from gpu.cpu_step.step_kernel import COMPILED
from gpu.load import shortage_in_one_line
from gpu.model.architecture import ModelError
from tests.gpu.small_runner import load_small
from transfer.simd.compilation import find_callees


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


def test_what_is_compiled_for_a_model_is_no_part_of_loading_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, float]] = []

    def runner(*_: object, **__: object) -> None:
        told.append(("made", 1.0))
        raise ModelError("far enough")

    monkeypatch.setattr("gpu.load.Runner", runner)
    with pytest.raises(ModelError, match="far enough"):
        load_small(
            ModelConfig(random_weights="tiny"),
            GpuConfig(device="cpu"),
            on_progress=lambda *report: told.append(report),
            max_running=1,
            max_context_tokens=64,
            max_hidden_tokens=64,
            num_pages=8,
        )
    assert told[-2:] == [("kernels", 0.0), ("made", 1.0)]


def test_what_numba_compiles_for_a_model_is_told_of_function_by_function() -> None:
    names = {one.__name__ for one in find_callees(*COMPILED)}
    assert {"work", "multiply_rows", "attend", "project", "normalise"} <= names
