"""What an engine's counts come to as fractions, by hand: device tokens and dense layers are read in full."""

from dataclasses import replace

import pytest

from evals.meter import served_fractions
from gpu.config import Composition
from gpu.methods.mac import try_bytes
from gpu.model.architecture import read_architecture
from gpu.profiles import resolve_profiles
from scheduler.engine.decode_reads import DecodeReads
from tests.evals.test_serving import MODEL
from tests.tolerances import EXACT_FRACTION
from transfer.host_config import HostConfig

SHAPE = replace(read_architecture(MODEL), num_layers=4, num_heads=4, num_kv_heads=2, dim=64)
STEPS = DecodeReads(100 + 60, host_tokens=(80 + 40) * 3 * 4, host_keys=360, host_bytes=40_000)
"""One step over two contexts, of which the host has 80 and 40 tokens in three of four layers."""


def test_fractions_are_those_counted_by_hand() -> None:
    found = served_fractions(STEPS, SHAPE, 3)
    resident = 100 + 60 - 80 - 40
    keys = resident * 4 * 3 + 360  # heads, layers
    data = resident * 2 * 256 * 3 + 40_000  # KV heads, bytes of a row, layers
    assert found.head_handled == pytest.approx(keys / (160 * 4 * 3), rel=EXACT_FRACTION)
    assert found.bytes_handled == pytest.approx(data / (160 * 2 * 256 * 3), rel=EXACT_FRACTION)
    assert found.head_all == pytest.approx((keys + 160 * 4) / (160 * 4 * 4), rel=EXACT_FRACTION)
    assert found.bytes_all == pytest.approx((data + 160 * 2 * 256) / (160 * 2 * 256 * 4), rel=EXACT_FRACTION)


def test_one_key_more_is_seen() -> None:
    found, more = served_fractions(STEPS, SHAPE, 3), served_fractions(replace(STEPS, host_keys=361), SHAPE, 3)
    assert more.head_handled != pytest.approx(found.head_handled, rel=EXACT_FRACTION)
    assert more.head_all != pytest.approx(found.head_all, rel=EXACT_FRACTION)


def test_a_profile_that_keeps_all_on_the_device_reads_all() -> None:
    found = served_fractions(DecodeReads(160, 0, 0, 0), SHAPE, 0)
    assert set(found.to_json().values()) == {1.0}


def test_where_nothing_was_decoded_nothing_is_known() -> None:
    assert served_fractions(DecodeReads(0, 0, 0, 0), SHAPE, 3) is None
    assert DecodeReads(0, 0, 0, 0) == STEPS - STEPS


def test_what_is_reused_is_read_by_nobody_and_its_rings_are_read() -> None:
    """One step over a context of 160, in four layers, nothing down: three of four heads take over 100 tokens each, so
    that of two KV heads one is spared 100 rows; rings cost bytes, too.
    """
    part = resolve_profiles({"mac": Composition.model_validate({"reuse": "mac"})}, None)["mac"].parts[0]
    tries, each = 4 * 4, try_bytes(part.settings, SHAPE)
    looked = {"reuse_tries": [tries], "reuse_hits": [3 * 4], "reuse_context_cells": [160 * 4 * 4]}
    skipped = {"reuse_skipped_cells": [300 * 4], "reuse_kv_cells": [(2 * 160 - 100) * 4]}
    reads = DecodeReads(160, 0, 0, 0, methods=looked | skipped)
    found = served_fractions(reads, SHAPE, 0, [part])
    assert found.head_all == pytest.approx(1 - 300 / (160 * 4), rel=EXACT_FRACTION)
    assert found.bytes_all == pytest.approx(
        (4 * (2 * 160 - 100) * 256 + tries * each) / (4 * 2 * 160 * 256), rel=EXACT_FRACTION
    )
    assert found.shares == {"acceptance": 0.75, "skipped_fraction": 300 / 640}
    down = replace(reads, host_tokens=3 * 40, host_keys=7, host_bytes=900)
    found_down = served_fractions(down, SHAPE, 0, [part])
    assert found_down.bytes_all > found.bytes_all, "rows that the host stands for are spared already; it read some"
    assert found_down.head_all < found.head_all


def test_rows_in_host_memory_that_two_methods_count_are_spared_once() -> None:
    """One step over a context of 160, 80 of it with an index, in four layers: three of four heads take over 100 tokens
    each; the other one reads 10 by index beside the 80 on the device, which a neighbour that hit reads 60 of.
    """
    both = Composition.model_validate({"reuse": "mac", "host": {"method": "indexed"}})
    parts = resolve_profiles({"both": both}, HostConfig())["both"].parts
    mac, index = parts
    tries, dim = 4 * 4, SHAPE.dim
    counts = {
        "reuse_tries": [tries], "reuse_hits": [3 * 4], "reuse_context_cells": [160 * 4 * 4],
        "reuse_skipped_cells": [300 * 4], "reuse_kv_cells": [(80 + 60) * 4], "index_offloaded_tokens": [80 * 4],
        "index_read_tokens": [10 * 4], "index_scored_tokens": [80 * 4],
        "index_audited_heads": [0], "index_audit_beyond": [0], "index_fetched_rows": [4 * 4],
    }  # fmt: skip
    found = served_fractions(DecodeReads(160, 0, 0, 0, methods=counts), SHAPE, 0, parts)
    assert found.head_all == pytest.approx((3 * 60 + 80 + 10) / (160 * 4), rel=EXACT_FRACTION)
    own = tries * try_bytes(mac.settings, SHAPE) + 80 * 4 * (index.settings.token_bytes(dim) + 2 * dim // 32)
    rows = 4 * (80 + 60 + 10) * 256
    assert found.bytes_all == pytest.approx((rows + own) / (4 * 2 * 160 * 256), rel=EXACT_FRACTION)
    assert found.read is None, "mac counts rows on the device, too"
    assert found.shares["index_read"] == 10 / 80
    assert found.shares["index_fetched"] == 4 / 10


def test_what_is_read_is_of_rows_that_are_not_of_sink_window_or_dense_layers() -> None:
    """Of 120 tokens in host memory in three of four layers 30 rows of each KV head are read on the CPU; beside them an
    index of 200 tokens a layer has 10 read.
    """
    part = resolve_profiles({"near": Composition.model_validate({"host": "indexed"})}, HostConfig())["near"].parts[0]
    counts = {name: [0] for name, counter in part.method.counters.items() if not counter.by_layer}
    counts |= {name: [0] * 4 for name, counter in part.method.counters.items() if counter.by_layer}
    reads = replace(STEPS, host_rows=30 * 2 * 3)
    assert served_fractions(reads, SHAPE, 3).read == pytest.approx(30 / 120)
    counts |= {"index_offloaded_tokens": [200 * 2 * 3], "index_read_tokens": [10 * 2 * 3]}
    found = served_fractions(replace(reads, methods=counts), SHAPE, 3, [part])
    assert found.read == pytest.approx((30 + 10) / (120 + 200))
    assert found.to_json()["read_fraction"] == found.read
    assert found.to_json()["index_read"] == 10 / 200
    assert served_fractions(DecodeReads(160, 0, 0, 0), SHAPE, 0).read is None
