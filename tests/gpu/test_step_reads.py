"""What a decode step reads on the device, counted by hand."""

import pytest

from gpu.batching.step_reads import StepReads
from gpu.model.named_shapes import named_shape
from gpu.step import HostRead

HEADS_BYTES = 2 * 8 * 256  # keys and values of a token in a layer of an 8B


def reads_of(shape: str, num_offloaded_layers: int = 0, kv: str = "bfloat16") -> StepReads:
    return StepReads(named_shape(shape), 2, False, kv, num_offloaded_layers)


def test_of_a_context_that_is_offloaded_the_device_reads_the_rest_and_its_dense_layers_all() -> None:
    reads = reads_of("llama-3.1-8b", 30)
    assert reads.context(10_000, None) == 10_000 * 32 * HEADS_BYTES
    assert reads.context(10_000, HostRead(0, 16, 9_016)) == (10_000 * 32 - 9_000 * 30) * HEADS_BYTES
    assert reads_of("llama-3.1-8b", 30, "int8").context(10_000, None) == 10_000 * 32 * 2 * 8 * 132


def test_layers_with_a_window_read_it_alone() -> None:
    full = sum(layer % 6 == 5 for layer in range(34))
    assert reads_of("gemma-3-4b").context(50_000, None) == (full * 50_000 + (34 - full) * 1024) * 2 * 4 * 512


def test_halves_read_weights_twice_and_of_experts_what_the_rows_of_each_take() -> None:
    weights = 2 * (32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14_336 + 2 * 4096) + 128_256 * 4096 + 4096)
    plain = reads_of("llama-3.1-8b")
    assert plain.weights(0) == 0
    assert plain.weights(1) == plain.weights(5) == weights
    assert plain.weights_of_halves(5) == 2 * weights
    assert plain.weights_of_halves(1) == weights
    mixture = reads_of("qwen3-30b-a3b")
    assert mixture.weights(5) < mixture.weights_of_halves(5) == mixture.weights(3) + mixture.weights(2)
    assert mixture.weights_of_halves(5) < 2 * mixture.weights(5)


def test_what_halves_read_again_is_a_share_of_weights_and_contexts() -> None:
    reads = reads_of("llama-3.1-8b", 30)
    contexts = (10_000 * 32 + 10_000 * 32 - 9_000 * 30) * HEADS_BYTES
    share = reads.reread_share([9_999, 9_999], [None, HostRead(0, 16, 9_016)])
    assert share == pytest.approx(reads.weights(2) / (reads.weights(2) + contexts), rel=1e-12)
