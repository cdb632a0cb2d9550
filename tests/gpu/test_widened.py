"""Matrices that prefill has widened are kept within their bounds, and are those that were asked for."""

from types import SimpleNamespace

import pytest
import torch

from gpu.layers import widened
from gpu.layers.widened import Widened
from gpu.operations.linear.packed_linear import widen
from gpu.operations.linear.packed_matrix import Packed
from tests.gpu.packed_oracle import draw_packed

BYTES = 64 * 128 * 4  # of each, widened
CPU = torch.device("cpu")


@pytest.fixture
def matrices() -> list[Packed]:
    return [draw_packed("int4", 64, 128, group, 1, True, False, torch.float32, "cpu").packed for group in (16, 32, 64)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses of the words of what was widened."""
    seen: list[int] = []

    def counted(packed: Packed, out: torch.Tensor | None = None) -> torch.Tensor:
        seen.append(packed.words.data_ptr())
        return widen(packed, out)

    monkeypatch.setattr(widened, "widen", counted)
    return seen


def test_what_is_kept_is_the_matrix_that_was_asked_for(matrices: list[Packed], calls: list[int]) -> None:
    kept = Widened(3 * BYTES, CPU)
    for _ in range(2):
        for packed in matrices:
            assert torch.equal(kept(packed), widen(packed))
    assert len(calls) == 3


def test_no_more_is_kept_than_there_is_room_for_and_the_oldest_goes_first(matrices, calls) -> None:
    kept, (first, second, third) = Widened(2 * BYTES, CPU), matrices
    for packed in (first, second, first, third, second, first, second, first):
        assert torch.equal(kept(packed), widen(packed))
        assert sum(one.nbytes for _, one in kept._kept.values()) <= 2 * BYTES
    assert calls == [one.words.data_ptr() for one in (first, second, third, first, second)]


def test_matrices_of_other_sizes_take_the_place_of_those_that_they_overlap(calls: list[int]) -> None:
    """A large one at the end of the room begins at its start, over two small ones, and leaves the third
    until the next one comes."""
    sizes = {"a": 16, "b": 16, "c": 64, "large": 32, "d": 16}
    drawn = {name: draw_packed("int4", rows, 128, 32, 1, True, False, torch.float32, "cpu").packed
             for name, rows in sizes.items()}  # fmt: skip
    kept, asked = Widened(96 * 128 * 4, CPU), ("a", "b", "c", "large", "c", "d", "large", "c")
    for name in asked:
        assert torch.equal(kept(drawn[name]), widen(drawn[name])), name
    names = {packed.words.data_ptr(): name for name, packed in drawn.items()}
    assert [names[call] for call in calls] == ["a", "b", "c", "large", "d", "c"]


def test_in_place_each_matrix_is_widened_anew_and_nothing_is_known_afterwards(matrices, calls) -> None:
    kept, (first, second, _) = Widened(2 * BYTES, CPU), matrices
    kept(first)
    with kept.in_place():
        one = kept(second)
        assert one.data_ptr() == kept(second).data_ptr() == kept(first).data_ptr()
    assert torch.equal(kept(second), widen(second))
    kept.forget()
    assert torch.equal(kept(second), widen(second))
    assert len(calls) == 6


def test_what_is_larger_than_the_room_is_widened_each_time(matrices: list[Packed], calls: list[int]) -> None:
    kept = Widened(BYTES - 1, CPU)
    for _ in range(2):
        assert torch.equal(kept(matrices[0]), widen(matrices[0]))
    assert len(calls) == 2


def test_nothing_is_kept_for_another_stream_than_the_one_it_was_made_on(matrices, calls, monkeypatch) -> None:
    """Whoever asks first."""
    streams = {name: SimpleNamespace(name=name, device=torch.device("cuda")) for name in ("own", "other")}
    now = {"stream": streams["own"], "is_captured": False}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: now["stream"])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now["is_captured"])
    kept = Widened(3 * BYTES, torch.device("cuda"))
    for stream, is_captured, num_calls in (("other", False, 2), ("own", True, 4), ("own", False, 5)):
        now |= {"stream": streams[stream], "is_captured": is_captured}
        for _ in range(2):
            kept(matrices[0])
        assert len(calls) == num_calls
