"""How a context in host memory is read decides what is kept of it, what it costs, and what is estimated."""

import pytest

from transfer.host_memory import shape_for
from transfer.reading import Reading, join_readings
from transfer.tier_shape import TierShape

SHAPE = TierShape((0, 1), 4, 2, 64, "bfloat16", 10, 150)


@pytest.mark.parametrize(
    ("readings", "joined"),
    [
        ([], Reading.NONE),
        ([Reading.NONE, Reading.NONE], Reading.NONE),
        ([Reading.WHOLE, Reading.NONE], Reading.WHOLE),
        ([Reading.NONE, Reading.BLOCKS], Reading.BLOCKS),
        ([Reading.SAMPLE, Reading.NONE], Reading.SAMPLE),
    ],
)
def test_a_profile_reads_as_the_method_that_offloads(readings: list[Reading], joined: Reading) -> None:
    assert join_readings(readings) is joined


def test_hash_tables_are_kept_for_samples_alone() -> None:
    assert {reading: shape_for(SHAPE, reading).num_tables for reading in Reading} == {
        Reading.NONE: 0,
        Reading.WHOLE: 0,
        Reading.SAMPLE: 150,
        Reading.BLOCKS: 0,
        Reading.INDEXED: 0,
    }


def test_the_cpu_reads_a_sample_only_by_tables() -> None:
    assert [Reading.SAMPLE.on_cpu(tables) for tables in (0, 150)] == [Reading.WHOLE, Reading.SAMPLE]
    assert {reading.on_cpu(150) for reading in (Reading.WHOLE, Reading.BLOCKS, Reading.INDEXED)} == {Reading.WHOLE}


def test_only_predicted_blocks_drop_tokens_and_only_samples_and_an_index_estimate() -> None:
    assert [reading for reading in Reading if reading.drops_rest] == [Reading.BLOCKS]
    assert [reading for reading in Reading if reading.is_estimate] == [Reading.SAMPLE, Reading.INDEXED]
    assert [reading for reading in Reading if reading.reads_all] == [Reading.NONE, Reading.WHOLE]


def test_a_sampled_token_costs_the_host_least() -> None:
    assert sorted((Reading.WHOLE, Reading.SAMPLE), key=lambda one: one.cost_order)[0] is Reading.SAMPLE
    assert Reading.BLOCKS.cost_order == Reading.WHOLE.cost_order
