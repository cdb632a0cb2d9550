"""Experts in host memory come to the card as they are, once, and when they are wanted."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from gpu.layers.staged_experts import StagedExperts
from gpu.model.matrix_format import MatrixFormat
from gpu.model.spec import ModelError
from gpu.operations.experts.fetch_experts import list_experts
from gpu.operations.linear.packed_matrix import Packed, Stored, unpack_reference
from gpu.weights.expert_shares import STAGED_STACKS
from gpu.weights.host_experts import HostExperts, pinned_like, tensors_of, with_tensors
from gpu.weights.weight_allocation import allocate_packed
from tests.gpu.kernel_oracles import DEVICES

EXPERTS, ON_CARD, WIDTH, HIDDEN = 7, 2, 64, 256
FORMATS = {
    "bfloat16": None,
    "float32": None,
    "int4": MatrixFormat("int4", 64, has_zeros=True),
    "fp8 blocks": MatrixFormat("fp8", 64, scale_bytes=4, row_block=32),
    "int8 runs": MatrixFormat("int8", 16, run=64),
}


def stack(rows: int, inner: int, name: str) -> Stored:
    stored = FORMATS[name]
    dtype = torch.float32 if name == "float32" else torch.bfloat16
    if stored is None:
        return torch.empty(rows, inner, dtype=dtype)
    return allocate_packed(rows, inner, stored, dtype, torch.device("cpu"), torch.bfloat16)


def draw_layer(seed: int, name: str, count: int = EXPERTS - ON_CARD, device: str = "cpu") -> HostExperts:
    """Bytes that mean no number that is not finite."""
    made = HostExperts(count, stack(count * 2 * WIDTH, HIDDEN, name), stack(count * HIDDEN, WIDTH, name))
    draw = np.random.default_rng(seed)
    matrices = []
    for matrix in (made.gate_up, made.down):
        filled = []
        for tensor in tensors_of(matrix):
            raw = torch.tensor(draw.integers(0, 60, tensor.nbytes, dtype=np.uint8)).view(tensor.dtype)
            raw = raw.view(tensor.shape)
            filled.append(raw.pin_memory() if device == "cuda" else raw)
        matrices.append(with_tensors(matrix, iter(filled)))
    return HostExperts(count, *matrices)


def numbers(stored: Stored) -> torch.Tensor:
    if isinstance(stored, Packed):
        return unpack_reference(with_tensors(stored, iter([t.cpu() for t in tensors_of(stored)])), torch.float32)
    return stored.float().cpu()


def check_rows(got: Stored, wanted: Stored, experts: Sequence[int], count: int) -> None:
    """Slots in front hold these of `count` experts."""
    rows = numbers(wanted).view(count, -1)[list(experts)]
    assert torch.equal(numbers(got).view(-1, rows.shape[1])[: len(experts)], rows)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("device", DEVICES)
def test_fetched_experts_multiply_as_those_in_host_memory(device: str, name: str) -> None:
    layer = draw_layer(1, name, device=device)
    staged = StagedExperts([layer], [ON_CARD], torch.device(device))
    chosen = torch.tensor([[6, 1, 3], [0, 3, 4]], dtype=torch.int32, device=device)
    slots = staged.fetch_listed(0, list_experts(chosen, ON_CARD, EXPERTS, 5))
    check_rows(slots.gate_up, layer.gate_up, [1, 2, 4], 5)
    check_rows(slots.down, layer.down, [1, 2, 4], 5)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_layer_is_copied_whole(device: str, name: str) -> None:
    layers = [None, draw_layer(1, name, device=device), draw_layer(2, name, device=device)]
    staged = StagedExperts(layers, [ON_CARD] * 3, torch.device(device))
    for number in (1, 2, 1):
        slots, layer = staged.copy_layer(number), layers[number]
        assert slots.places.tolist() == [0, 1, ~0, ~1, ~2, ~3, ~4]
        check_rows(slots.gate_up, layer.gate_up, range(5), 5)
        check_rows(slots.down, layer.down, range(5), 5)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[HostExperts]:
    """What is copied whole, in turn."""
    found: list[HostExperts] = []
    copy = HostExperts.copy

    def note(self: HostExperts, *args: object) -> None:
        found.append(self)
        copy(self, *args)

    monkeypatch.setattr(HostExperts, "copy", note)
    return found


def make_staged(count: int) -> tuple[StagedExperts, list[HostExperts]]:
    layers = [draw_layer(seed, "bfloat16") for seed in range(count)]
    return StagedExperts(layers, [ON_CARD] * count, torch.device("cpu")), layers


def test_a_copy_that_was_started_with_the_layer_in_front_is_used_and_starts_no_other() -> None:
    staged, layers = make_staged(4)
    assert not staged.is_copied_next(0)
    staged.copy_layer(0)
    assert [staged.is_copied_next(layer) for layer in range(4)] == [True, True, False, False]
    before = staged.num_copied
    for _ in range(2):  # two units of the layer
        assert staged.is_copied_next(1)
        check_rows(staged.copy_layer(1, starts_next=False).down, layers[1].down, range(5), 5)
    assert staged.num_copied == before
    assert not staged.is_copied_next(2)


def test_what_was_fetched_is_never_told_to_be_less_than_before() -> None:
    """Lanes tell by themselves, and the one that counted first may tell last."""
    staged, _ = make_staged(1)
    assert staged.num_fetched == 0
    for told, known in ((7, 7), (5, 7), (9, 9)):
        staged._host_count.fill_(told)
        assert staged.num_fetched == known


def numbers_of(copied: list[HostExperts], layers: list[HostExperts]) -> list[int]:
    return [next(number for number, one in enumerate(layers) if one is layer) for layer in copied]


def test_a_prompt_in_chunks_copies_each_layer_once_and_ahead(copied: list[HostExperts]) -> None:
    staged, layers = make_staged(4)
    for layer in range(4):
        for _ in range(3):
            check_rows(staged.copy_layer(layer).down, layers[layer].down, range(5), 5)
            ahead = min(layer + 1, 3)
            assert numbers_of(copied, layers) == list(range(ahead + 1))


def test_two_prompts_in_turn_copy_nothing_twice_while_they_stay_in_their_layers(copied: list[HostExperts]) -> None:
    staged, layers = make_staged(6)
    for layer in (0, 1, 4):
        staged.copy_layer(layer)
    copied.clear()
    for _ in range(3):
        staged.copy_layer(1), staged.copy_layer(4)
    assert not copied
    staged.copy_layer(5)
    assert numbers_of(copied, layers) == [5]


def test_what_a_small_step_fetches_takes_the_place_that_was_used_longest_ago(copied: list[HostExperts]) -> None:
    staged, layers = make_staged(4)
    staged.copy_layer(1), staged.copy_layer(3)
    copied.clear()
    listed = list_experts(torch.tensor([[5, 0]], dtype=torch.int32), ON_CARD, EXPERTS, 2)
    check_rows(staged.fetch_listed(0, listed).down, layers[0].down, [3], 5)
    check_rows(staged.copy_layer(3).down, layers[3].down, range(5), 5)
    assert not copied
    check_rows(staged.copy_layer(1).down, layers[1].down, range(5), 5)
    assert numbers_of(copied, layers) == [1]


def test_the_buffers_are_what_is_planned() -> None:
    staged, layers = make_staged(3)
    assert sum(buffer.memory.nbytes for buffer in staged._buffers) == STAGED_STACKS * layers[0].num_bytes(5)
    raw = sum(tensor.nbytes for matrix in (layers[0].gate_up, layers[0].down) for tensor in tensors_of(matrix))
    assert layers[0].num_bytes(5) == raw, "in bf16 every tensor is of whole lines"


def test_matrices_of_the_meta_device_get_memory_of_their_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = []
    monkeypatch.setattr("transfer.host_pages.pin_for_life", lambda pages: pinned.append(pages.nbytes))
    meta = torch.device("meta")
    wanted = [
        torch.empty(6, 40, dtype=torch.bfloat16, device=meta),
        allocate_packed(64, 128, MatrixFormat("int4", 64, has_zeros=True), torch.bfloat16, meta, torch.bfloat16),
    ]
    made = pinned_like(wanted)
    for ours, theirs in zip(made, wanted, strict=True):
        for tensor, shape in zip(tensors_of(ours), tensors_of(theirs), strict=True):
            assert (tensor.shape, tensor.dtype, tensor.device.type) == (shape.shape, shape.dtype, "cpu")
    assert sum(pinned) == sum(tensor.nbytes for matrix in made for tensor in tensors_of(matrix))


def test_memory_that_the_host_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pages: np.ndarray) -> None:
        raise OSError(2, "cudaHostRegister failed with CUDA error 2; locked memory is 64 KiB (ulimit -l)")

    monkeypatch.setattr("transfer.host_pages.pin_for_life", refuse)
    with pytest.raises(
        ModelError, match=r"^gpu.experts_gib: 0.00 GiB of experts .* refused: .*64 KiB.*memlock"
    ) as error:
        pinned_like([torch.empty(6, 40, device="meta")])
    assert "\n" not in str(error.value)


@pytest.mark.gpu
def test_pinned_memory_is_read_in_a_graph_and_given_back() -> None:
    """Pages from the system, registered, read by a captured step; and registered again at the same place later."""
    for seed in range(3):
        matrices = pinned_like([torch.empty(5 * 2 * WIDTH, HIDDEN, dtype=torch.bfloat16, device="meta"),
                                torch.empty(5 * HIDDEN, WIDTH, dtype=torch.bfloat16, device="meta")])  # fmt: skip
        drawn = draw_layer(seed, "bfloat16")
        for ours, theirs in zip(matrices, (drawn.gate_up, drawn.down), strict=True):
            assert isinstance(ours, torch.Tensor)
            ours.copy_(theirs)
        layer = HostExperts(5, *matrices)
        staged = StagedExperts([layer], [ON_CARD], torch.device("cuda"))
        chosen = torch.zeros(1, 3, dtype=torch.int32, device="cuda")

        def step(staged: StagedExperts = staged, chosen: torch.Tensor = chosen) -> torch.Tensor:
            slots = staged.fetch_listed(0, list_experts(chosen, ON_CARD, EXPERTS, 3))
            assert isinstance(slots.down, torch.Tensor)
            return slots.down.clone()

        with torch.cuda.stream(torch.cuda.Stream()):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = step()
        for row in ([2, 6, 0], [5, 4, 3], [6, 2, 4]):
            chosen.copy_(torch.tensor([row], dtype=torch.int32))
            graph.replay()
            check_rows(got, drawn.down, sorted(one - ON_CARD for one in row if one >= ON_CARD), 5)
        del graph, got, layer, matrices, staged, step


@pytest.mark.gpu
def test_copies_ahead_never_overtake_what_is_read() -> None:
    layers = [draw_layer(seed, "bfloat16", 64, "cuda") for seed in range(5)]
    staged = StagedExperts(layers, [ON_CARD] * 5, torch.device("cuda"))
    wanted = [numbers(layer.down).double().sum().item() for layer in layers]
    draw, sums, asked = np.random.default_rng(1), [], []
    for _ in range(40):
        layer = int(draw.integers(0, 5))
        for number in range(layer, min(layer + 3, 5)):
            slots = staged.copy_layer(number)
            assert isinstance(slots.down, torch.Tensor)
            sums.append(slots.down.double().sum())
            asked.append(number)
    assert [one.item() for one in sums] == pytest.approx([wanted[number] for number in asked], rel=1e-12)
