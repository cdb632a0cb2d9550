"""Pieces of files: each is read whole, into its place or by way of staging, and placed once, in order."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu.model.architecture import read_architecture
from gpu.weights import placing
from gpu.weights.checkpoint import load_weights
from gpu.weights.file_reader import NUM_BUFFERS, FileRange, ReadError, read_ranges
from gpu.weights.weights import Weights
from tests.gpu.family_checkpoints import CONFIGS, checkpoint
from tests.gpu.test_families_on_gpu import parts_of

CPU = torch.device("cpu")
DEVICES = [pytest.param(CPU, id="cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu, id="cuda")]
NUM_RANGES = 3 * NUM_BUFFERS + 1


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[int, np.ndarray]]:
    """A file of random bytes, by its number, and what is in it."""
    data = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)
    (tmp_path / "file").write_bytes(data.tobytes())
    with (tmp_path / "file").open("rb", buffering=0) as file:
        yield file.fileno(), data


@pytest.mark.parametrize("device", DEVICES)
def test_ranges_of_any_length_are_done_in_order_each_with_its_own_bytes(
    device: torch.device, opened: tuple[int, np.ndarray]
) -> None:
    file, data = opened
    ends = np.sort(np.random.default_rng(1).choice(np.arange(1, len(data)), NUM_RANGES, replace=False))
    targets = {number: torch.full((ends[number] - ends[number - 1],), 7, dtype=torch.uint8)
               for number in range(1, NUM_RANGES, 3)}  # fmt: skip
    copies: list[torch.Tensor] = []
    ranges = [
        FileRange(
            file, "file", int(begin), int(end - begin), targets.get(number),
            lambda read: copies.append(read.to(device, non_blocking=True, copy=True)),
        )
        for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]  # fmt: skip
    assert list(read_ranges(ranges, device)) == [one.num_bytes for one in ranges]
    for number, (file_range, copy) in enumerate(zip(ranges, copies, strict=True)):
        wanted = data[file_range.offset : file_range.offset + file_range.num_bytes]
        assert np.array_equal(copy.cpu().numpy(), wanted)
        assert number not in targets or np.array_equal(targets[number].numpy(), wanted)


def test_a_file_that_ends_early_or_cannot_be_read_is_named(opened: tuple[int, np.ndarray]) -> None:
    file, data = opened
    early = FileRange(file, "a/file", len(data) - 10, 25, None, lambda read: None)
    with pytest.raises(ReadError, match=r"^a/file ends 15 bytes early; fetch it again$"):
        list(read_ranges([early], CPU))
    only_written = os.open("/dev/null", os.O_WRONLY)
    with pytest.raises(ReadError, match=r"^a/file cannot be read \(Bad file descriptor\)$"):
        list(read_ranges([FileRange(only_written, "a/file", 0, 1, None, lambda read: None)], CPU))
    os.close(only_written)


def flat(weights: Weights) -> list[torch.Tensor]:
    return [weights.embedding, weights.final_norm, weights.logits, *parts_of(weights)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "qwen2 with yarn"])
def test_weights_are_the_same_in_pieces_of_a_row_as_whole(
    name: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every family: fused, interleaved, with offsets and gains; to another type and to the same one."""
    folder = checkpoint(name).folder
    shape = read_architecture(folder)
    whole = flat(load_weights(folder, shape, dtype, CPU, lambda fraction: None))
    told: list[float] = []
    monkeypatch.setattr(placing, "RANGE_BYTES", 1000)
    in_pieces = flat(load_weights(folder, shape, dtype, device, told.append))
    if shape.has_normed_embedding:  # normed where it lies, in another order of sums on a card
        torch.testing.assert_close(
            in_pieces.pop(0).cpu(), whole.pop(0), rtol=1e-6 if dtype == torch.float32 else 0, atol=0
        )
    for ours, wanted in zip(in_pieces, whole, strict=True):
        assert ours.dtype == wanted.dtype
        assert torch.equal(ours.cpu(), wanted)
    assert told == sorted(told)
    assert told[-1] == 1
    assert len(told) > 100
