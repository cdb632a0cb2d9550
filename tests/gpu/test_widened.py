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


def laid_out(matrices: list[Packed], most_bytes: int) -> Widened:
    kept = Widened(most_bytes, CPU)
    kept.lay_out(matrices)
    return kept


def test_what_is_kept_is_the_matrix_that_was_asked_for(matrices: list[Packed], calls: list[int]) -> None:
    kept = laid_out(matrices, 3 * BYTES)
    for _ in range(2):
        for packed in matrices:
            assert torch.equal(kept(packed), widen(packed))
    assert len(calls) == 3


def drawn(**sizes: int) -> dict[str, Packed]:
    return {name: draw_packed("int4", rows, 128, 32, 1, True, False, torch.float32, "cpu").packed
            for name, rows in sizes.items()}  # fmt: skip


def test_the_largest_of_a_layer_are_kept_and_the_others_share_what_is_left(calls: list[int]) -> None:
    """Room for 84 of 92 rows: the larger two have places, the others the room behind them."""
    layer = drawn(a=20, b=48, c=16, d=8)
    kept, names = laid_out([*layer.values()], 84 * 128 * 4), {one.words.data_ptr(): name for name, one in layer.items()}
    for _ in range(2):
        for name in "abcd":
            assert torch.equal(kept(layer[name]), widen(layer[name])), name
    assert "".join(names[call] for call in calls) == "abcdcd"


def test_another_layers_matrices_take_the_places_that_they_overlap(calls: list[int]) -> None:
    first, second = drawn(a=16, b=32), drawn(c=32, d=8)
    kept = laid_out([*first.values()], 48 * 128 * 4)
    kept.lay_out([*second.values()])
    names = {one.words.data_ptr(): name for name, one in (first | second).items()}
    for name in "abcdab":
        packed = (first | second)[name]
        assert torch.equal(kept(packed), widen(packed)), name
    assert "".join(names[call] for call in calls) == "abcdab"


def test_a_graph_reads_what_is_made_ready_in_front_of_it(calls: list[int]) -> None:
    """What shares its room is widened in the graph, and what was there is forgotten."""
    layer, other = drawn(a=64, b=16, c=24), drawn(e=80)
    kept = laid_out([*layer.values()], 88 * 128 * 4)
    kept.lay_out([*other.values()])
    noted: list[Packed] = []
    with kept.noted(noted):
        memory = {name: kept(packed) for name, packed in layer.items()}
    assert [one.words.data_ptr() for one in noted] == [one.words.data_ptr() for one in layer.values()]
    assert len(calls) == 2, "b and c, into one place"
    for _ in range(2):
        kept(other["e"])
        for packed in noted:
            kept.make_ready(packed)
        assert torch.equal(memory["a"], widen(layer["a"]))
        assert torch.equal(kept(layer["a"]), widen(layer["a"]))
    assert len(calls) == 6


def test_what_is_larger_than_the_room_is_widened_each_time(matrices: list[Packed], calls: list[int]) -> None:
    kept = laid_out(matrices, BYTES - 1)
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
    kept.lay_out(matrices)
    for stream, is_captured, num_calls in (("other", False, 2), ("own", True, 4), ("own", False, 5)):
        now |= {"stream": streams[stream], "is_captured": is_captured}
        for _ in range(2):
            kept(matrices[0])
        assert len(calls) == num_calls
