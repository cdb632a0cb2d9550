"""Matrices that prefill has widened are kept within their bounds, and are those that were asked for."""

import pytest
import torch

from gpu.kernels.packed import Packed
from gpu.kernels.packed_linear import widen
from gpu.model import widened
from gpu.model.widened import Widened
from tests.gpu.packed_oracle import draw_packed

BYTES = 64 * 128 * 4  # of each, widened


@pytest.fixture
def matrices() -> list[Packed]:
    return [draw_packed("int4", 64, 128, group, 1, True, False, torch.float32, "cpu").packed for group in (16, 32, 64)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses of the words of what was widened."""
    seen: list[int] = []

    def counted(packed: Packed) -> torch.Tensor:
        seen.append(packed.words.data_ptr())
        return widen(packed)

    monkeypatch.setattr(widened, "widen", counted)
    return seen


def test_what_is_kept_is_the_matrix_that_was_asked_for(matrices: list[Packed], calls: list[int]) -> None:
    kept = Widened(3 * BYTES)
    for _ in range(2):
        for packed in matrices:
            assert torch.equal(kept(packed), widen(packed))
    assert len(calls) == 3


def test_no_more_is_kept_than_there_is_room_for_and_the_oldest_goes_first(matrices, calls) -> None:
    kept, (first, second, third) = Widened(2 * BYTES), matrices
    for packed in (first, second, first, third, first, second, first, second):
        assert torch.equal(kept(packed), widen(packed))
        assert sum(one.nbytes for one in kept._kept.values()) <= 2 * BYTES
    assert calls == [one.words.data_ptr() for one in (first, second, third, second)]


def test_what_is_larger_than_the_room_is_widened_each_time(matrices: list[Packed], calls: list[int]) -> None:
    kept = Widened(BYTES - 1)
    for _ in range(2):
        assert torch.equal(kept(matrices[0]), widen(matrices[0]))
    assert len(calls) == 2
