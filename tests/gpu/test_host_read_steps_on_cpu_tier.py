"""Hop steps over the tier that serves: compiled attention in host memory, tables of hashed keys, waiting device graphs.

A segment of its own takes 2,048 tokens; what comes after it goes into an open tail, which is read exactly.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from cpu.cpu_tier import open_tier
from gpu.decode import link_reads, steps
from tests.gpu.reference_model import document_prompt
from tests.gpu.test_host_read_steps import host_reader_of
from tests.gpu.twin_runners import DEFAULT_DENSE, NUM_HEADS, Twins, furthest, tier_shape
from tests.tolerances import HOP_LOGITS_ALL_SAMPLED, HOP_LOGITS_FLOAT32
from transfer.reading import Reading

MIB = 2**20
LENGTHS = (2600, 300, 2300, 190, 2450)
PROMPTS = [document_prompt(length, length) for length in LENGTHS]
NUM_STEPS = 70  # an offload block of each context is offloaded among them
ALL = (1, 64)  # bits and tables with which every key is sampled, but those opposite to the query
FEW = (7, 40)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ON_DEVICES = [("cpu", 2), *(pytest.param("cuda", rows, marks=pytest.mark.gpu) for rows in (1, 2, 5))]


@contextmanager
def twins_on_cpu_tier(
    device: str, reading: Reading, tables: tuple[int, int], sizes: tuple[int, ...] = (), dtype: str = "float32",
    **options: Any,
) -> Iterator[Twins]:  # fmt: skip
    tier = open_tier(
        tier_shape(DEFAULT_DENSE, *tables), getattr(torch, dtype), 512 * MIB, num_threads=1, is_pinned=device == "cuda"
    )
    try:
        yield Twins(
            device=device, dtype=dtype, graph_batch_sizes=sizes, reading=reading, tier=tier, max_context=2816,
            num_pages=5 * 2816 // 16, **options,
        )  # fmt: skip
    finally:
        tier.shutdown()


@pytest.mark.parametrize(("device", "num_rows"), ON_DEVICES)
@pytest.mark.parametrize("reading", [Reading.WHOLE, Reading.SAMPLE])
def test_logits_are_those_of_the_exact_profile(device: str, num_rows: int, reading: Reading) -> None:
    with twins_on_cpu_tier(device, reading, ALL, (1, 4, 5) if device == "cuda" else ()) as twins:
        twins.prefill(PROMPTS[:num_rows])
        slots = list(range(num_rows))
        bound = HOP_LOGITS_ALL_SAMPLED if reading is Reading.SAMPLE else HOP_LOGITS_FLOAT32
        for _ in range(NUM_STEPS):
            assert not twins.step(slots).failures
            assert furthest(twins, slots) < bound
        counts = twins.tier.stats().attention
        if reading is Reading.SAMPLE:
            assert counts.rows_read > 0.5 * counts.tokens_covered
            assert twins.tier.stats().tables_built > 0
        else:
            assert counts.rows_read < 0.5 * counts.tokens_covered  # a row is read once for the heads that share it


@pytest.mark.parametrize(("device", "num_rows"), ON_DEVICES)
@pytest.mark.parametrize("share", [0.4, 0.9])
def test_logits_are_those_of_the_exact_profile_where_the_device_reads_a_part(
    device: str, num_rows: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_reads, "LEAST_TOKENS", 256)
    sizes = (1, 4, 5) if device == "cuda" else ()
    with twins_on_cpu_tier(device, Reading.WHOLE, ALL, sizes, link_share=share) as twins:
        twins.prefill(PROMPTS[:num_rows])
        slots = list(range(num_rows))
        num_steps = NUM_STEPS if share < 0.5 else 8
        for _ in range(num_steps):
            assert not twins.step(slots).failures
            assert furthest(twins, slots) < HOP_LOGITS_FLOAT32
        twins.offloading.decode_steps.drain()
        counts, steps = twins.tier.stats().attention, num_steps * len(twins.tier.shape.layers)
        asked = counts.tokens_covered / steps / NUM_HEADS  # of the CPU, of all rows in a step
        assert asked < (1 - share) * sum(twins.sequences[slot].released for slot in slots) + 272 * num_rows


@pytest.mark.parametrize("change", [16, -16])
def test_that_comparison_sees_what_both_read_or_nobody(change: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_reads, "LEAST_TOKENS", 256)
    cut = link_reads.cut_chunks
    monkeypatch.setattr(link_reads, "cut_chunks", lambda table, front, end: cut(table, front + change, end))
    with twins_on_cpu_tier("cpu", Reading.WHOLE, ALL, link_share=0.5) as twins:
        twins.prefill(PROMPTS[:1])
        twins.step([0])
        assert furthest(twins, [0]) > HOP_LOGITS_FLOAT32


def test_a_step_that_is_too_large_reads_nothing_over_the_link_whatever_the_one_before_it_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_reads, "LEAST_TOKENS", 256)
    with twins_on_cpu_tier("cpu", Reading.WHOLE, ALL, link_share=0.5) as twins:
        twins.prefill(PROMPTS[:3])
        host_reader_of(twins).halving.always = 2
        for most in (16, 1, 16):
            monkeypatch.setattr(steps, "MOST_LINKED_ROWS", most)
            assert not twins.step([0, 1, 2]).failures
            assert furthest(twins, [0, 1, 2]) < HOP_LOGITS_FLOAT32


def test_what_the_device_reads_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_reads, "LEAST_TOKENS", 256)
    with twins_on_cpu_tier("cpu", Reading.WHOLE, ALL, link_share=0.5, check_coverage=True) as twins:
        twins.prefill(PROMPTS[:2])
        for _ in range(3):
            assert not twins.step([0, 1]).failures


@pytest.mark.parametrize("device", DEVICES)
def test_that_comparison_sees_a_few_keys_left_out(device: str) -> None:
    with twins_on_cpu_tier(device, Reading.SAMPLE, FEW) as twins:
        twins.prefill(PROMPTS[:1])
        twins.step([0])
        assert furthest(twins, [0]) > HOP_LOGITS_ALL_SAMPLED


@pytest.mark.gpu
@pytest.mark.parametrize("reading", [Reading.WHOLE, Reading.SAMPLE])
@pytest.mark.usefixtures("products_by_library")
def test_on_cuda_graphs_give_the_bits_of_eager_segments(reading: Reading) -> None:
    logits = []
    for sizes in ((), (3, 5)):
        with twins_on_cpu_tier("cuda", reading, FEW, sizes, "bfloat16") as twins:
            host_reader_of(twins).halving.always = 2
            twins.prefill(PROMPTS[:3])
            for _ in range(8):
                twins.step([0, 1, 2])
            logits.append(np.stack([twins.logits(slot)[0].numpy() for slot in range(3)]))
    np.testing.assert_array_equal(logits[0], logits[1])


@pytest.mark.gpu
def test_prompts_that_were_offloaded_as_they_were_computed_decode_the_same_on_cuda_graphs() -> None:
    with twins_on_cpu_tier("cuda", Reading.WHOLE, ALL, (1, 2)) as twins:
        twins.prefill_down(0, PROMPTS[0])
        twins.prefill_down(1, PROMPTS[2])
        for _ in range(NUM_STEPS):
            assert not twins.step([0, 1]).failures
            assert furthest(twins, [0, 1]) < HOP_LOGITS_FLOAT32
