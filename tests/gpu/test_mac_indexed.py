"""MAC over an index: what hits spare it, what misses ask it, and what a ring keeps of that.

The twin that offloads serves rows that hold a ring of each method; the other one is exact.
"""

from typing import Any

import numpy as np
import pytest
import torch

from gpu.attention.step_rows import StepRows
from gpu.methods.device_side import LayerReads
from gpu.methods.indexed.device import Indexed
from gpu.methods.mac.device import Mac
from gpu.operations.decode_attention.paged_decode_attention import DevicePartials
from gpu.step import RingWrite, StepPlan
from tests.gpu.kernel_oracles import wide
from tests.gpu.method_counts import counts_of
from tests.gpu.reference_model import document_prompt
from tests.gpu.ring_twins import RingTwins, ring_parts
from tests.gpu.test_host_read_graphs import Recorded, fake_graphs
from tests.gpu.test_indexed_serving import ALL, FEW
from tests.gpu.test_mac_serving import LOOSE, SMALL, STRICT
from tests.gpu.twin_runners import DIM, NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS, check_steps, furthest
from tests.tolerances import HOP_LOGITS_FLOAT32, MAC_SUMMARY_ATOL
from transfer.partial import Partial
from transfer.reading import Reading

PROMPT = document_prompt(300, 1)
GROUP = NUM_HEADS // NUM_KV_HEADS
SOME = SMALL | {"tau": 0.6, "max_prefix_share": 0.3}  # some heads match, and some do not


class BothTwins(RingTwins):
    def __init__(
        self, mac: dict[str, Any], index: dict[str, Any], ringed: tuple[int, ...] = (0,), swaps: bool = False,
        **more: Any,
    ) -> None:  # fmt: skip
        """swaps: whether the parts are given in the other order."""
        parts = ring_parts(reuse={"method": "mac", **mac}, host={"method": "indexed", **index})
        own = {"reading": Reading.INDEXED, "check_coverage": True, "window_tokens": 64, **more}
        super().__init__(parts[::-1] if swaps else parts, ringed, **own)
        self.mac, self.index = self.side_of(Mac), self.side_of(Indexed)

    @property
    def hits(self) -> int:
        return sum(counts_of(self.mac).hits)


@pytest.mark.parametrize(("kept_tokens", "swaps"), [(0, False), (96, True)])
def test_where_nothing_matches_a_budget_of_everything_gives_the_exact_profiles_logits(
    kept_tokens: int, swaps: bool
) -> None:
    twins = BothTwins(STRICT, ALL, kept_tokens=kept_tokens, swaps=swaps)
    twins.prefill([PROMPT])
    check_steps(twins, [0], 20)
    counts = counts_of(twins.index)
    assert counts.read_tokens == counts.offloaded_tokens > 0
    assert sum(counts_of(twins.mac).tries) == 20 * NUM_HEADS * (NUM_LAYERS - 1)
    assert twins.hits == 0


def test_hits_and_misses_cover_every_cell_once_while_the_context_grows() -> None:
    """Coverage is checked in each layer of each step; where each head hits, the index is read for none."""
    twins = BothTwins(SOME, FEW, offload_block_tokens=32)
    twins.prefill([PROMPT])
    for _ in range(40):
        assert not twins.step([0]).failures
    mac, own = counts_of(twins.mac), counts_of(twins.index)
    assert 0 < sum(mac.hits) < sum(mac.tries)
    offloaded_layers = [layer for layer, heads in enumerate(own.heads) if heads]
    assert [own.heads[layer] for layer in offloaded_layers] == [
        40 * NUM_HEADS - mac.hits[layer] for layer in offloaded_layers
    ]
    assert twins.sequences[0].run_end > 224, "more than with the prompt"


def test_a_step_in_which_every_head_hits_reads_nothing_of_the_index() -> None:
    twins = BothTwins(LOOSE, FEW)
    twins.prefill([PROMPT])
    for _ in range(6):
        twins.step([0])
    mac, own = counts_of(twins.mac), counts_of(twins.index)
    assert sum(mac.hits) == sum(mac.tries) > 0
    assert own.offloaded_tokens == own.read_tokens == own.fetched_rows == sum(own.heads) == 0


class Watched:
    """What MAC made of each (step, layer, head), against float64 of the rows in pages and of the index's partial."""

    def __init__(self, twins: BothTwins) -> None:
        self.twins, self.num_hits, self.num_misses = twins, 0, 0
        self._after, twins.mac.after = twins.mac.after, self.after  # type: ignore[method-assign]

    def after(self, reads: LayerReads, on_device: DevicePartials, filled: list[Partial]) -> None:
        side, rows = self.twins.mac, reads.rows
        ring = side._rings.get(reads.layer)
        if ring is None:
            return
        before = {name: getattr(ring, name)[0].clone() for name in ("outs", "lses")}
        self._after(reads, on_device, filled)
        matched, cell = reads.kept[side], int(rows.positions[0])
        limits = side._limits[reads.layer]
        begin, end = (int(one) for one in rows.skips[:2, 0]) if reads.skips else (limits.sink, limits.sink)
        for head in range(NUM_HEADS):
            entry, cut = int(matched.entries[0, head]), cell + 1 - limits.band
            if entry >= 0:
                far_begin = int(matched.bounds[1, 0, head])
                rest = wide(before["outs"][head, entry]), float(before["lses"][head, entry])
                self.num_hits += 1
            else:
                far_begin = end if reads.skips else limits.sink
                rest = None
                if reads.skips:
                    rest = wide(reads.fetched[0].out[0, head]), float(reads.fetched[0].lse[0, head])
                    assert begin == limits.sink
                    self.num_misses += 1
            sink, far, near = (
                self.attend(reads, rows, head, *cells)
                for cells in ((0, limits.sink), (far_begin, cut), (cut, cell + 1))
            )
            prefix = far if rest is None else joined(far, rest)
            whole = joined(joined(sink, near), prefix)
            assert reads.attended is not None
            check(reads.attended.out[0, head], reads.attended.lse[0, head], whole)
            place = head, cell % ring.norms.shape[-1]
            check(ring.outs[0][place], ring.lses[0][place], prefix)

    def attend(self, reads: LayerReads, rows: StepRows, head: int, begin: int, end: int) -> tuple[np.ndarray, float]:
        """Return float64 attention of a head to cells of its context that are on the device."""
        pool, cells = self.twins.offloading.pool, torch.arange(begin, end)
        sequence = self.twins.sequences[0]
        pages = torch.tensor(sequence.pages)
        page_ids = pages[cells // 16]
        keys, values = (
            wide(own[reads.layer][page_ids, head // GROUP, cells % 16]) for own in (pool.key_pages, pool.value_pages)
        )
        logits = keys @ wide(reads.query[0, head]) * DIM**-0.5
        lse = np.logaddexp.reduce(logits)
        return np.exp(logits - lse) @ values, float(lse)


def joined(one: tuple[np.ndarray, float], other: tuple[np.ndarray, float]) -> tuple[np.ndarray, float]:
    lse = np.logaddexp(one[1], other[1])
    return np.exp(one[1] - lse) * one[0] + np.exp(other[1] - lse) * other[0], float(lse)


def check(
    out: torch.Tensor, lse: torch.Tensor, wanted: tuple[np.ndarray, float], atol: float = MAC_SUMMARY_ATOL
) -> None:
    assert np.abs(wide(out) - wanted[0]).max() < atol
    assert abs(float(lse) - wanted[1]) < atol


def test_a_hit_and_a_miss_are_macs_formula_in_float64_with_the_indexs_partial() -> None:
    """And the summary that either leaves is that of its prefix."""
    twins = BothTwins(SOME, FEW, check_coverage=False)
    twins.prefill([PROMPT])
    watched = Watched(twins)
    for _ in range(10):
        assert not twins.step([0]).failures
    assert min(watched.num_hits, watched.num_misses) > 50


def test_a_captured_step_is_replayed_without_the_cpu_and_gives_the_bits_of_eager_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts, logits = [PROMPT, document_prompt(280, 3)], []
    for captures in (False, True):
        twins = BothTwins(SOME, FEW, check_coverage=False)
        twins.prefill(prompts)
        steps = twins.offloading.decode_steps
        if captures:
            fake_graphs(monkeypatch)
            with torch.inference_mode():
                steps.capture((2,), lambda fraction: None)
        assert steps.host_reader is not None
        for slots in ([0], [0, 1], [0]):
            Recorded.running, before = None, steps.host_reader.times.requests
            assert not twins.step(slots).failures
            assert (Recorded.running is not None) == captures
            assert (steps.host_reader.times.requests > before) == (1 in slots), "the CPU reads for who holds no ring"
            assert furthest(twins, slots[1:] or [0]) < (HOP_LOGITS_FLOAT32 if slots[1:] else torch.inf)
            logits.append(twins.logits(0)[0])
        assert twins.hits > 0
    for eager, captured in zip(logits[:3], logits[3:], strict=True):
        assert torch.equal(eager, captured)


def test_rows_of_either_method_alone_of_both_and_of_none_share_a_step() -> None:
    """Whatever order their parts have, who holds no ring of MAC and an index of everything is exact."""
    for swaps in (False, True):
        twins = BothTwins(SOME, ALL, ringed=(0,), swaps=swaps)
        twins.prefill([PROMPT, document_prompt(280, 3), document_prompt(290, 5), document_prompt(60, 2)])
        ids = {part.method.name: part.id for part in twins.parts}
        writes = [RingWrite(slot, ids[name], slot, Reading.INDEXED) for slot, name in ((1, "indexed"), (2, "mac"))]
        twins.offloading.launch(StepPlan(ring_writes=writes)).collect()
        for _ in range(4):
            assert not twins.step([0, 1, 2, 3]).failures
            assert furthest(twins, [1, 3]) < HOP_LOGITS_FLOAT32
        assert twins.hits > 0
        assert counts_of(twins.index).read_tokens > 0


@pytest.mark.parametrize("seed", [0, 1])
def test_whatever_becomes_of_two_contexts_every_step_covers_all_of_them(seed: int) -> None:
    """Pages are evicted and reloaded, rings copied, and begun anew as after a preemption."""
    draw = np.random.default_rng(seed)
    twins = BothTwins(SOME, FEW, kept_tokens=1024, window_tokens=64)
    twins.prefill([PROMPT, PROMPT])
    for _ in range(7):
        twins.change(int(draw.choice([0, 1])), draw, twins.sequences[0].num_tokens)
        for _ in range(int(draw.integers(1, 4))):
            assert not twins.step([0, 1]).failures
    assert twins.hits > 0
    assert counts_of(twins.index).offloaded_tokens > 0


def test_heads_that_hit_are_in_no_audit_and_in_no_bound() -> None:
    twins = BothTwins(SOME, FEW | {"errors": {"audit_steps": 1}}, check_coverage=False)
    twins.prefill([PROMPT])
    for _ in range(30):
        assert not twins.step([0]).failures
        twins.index.audits.wait()
    own, figures = counts_of(twins.index), twins.index.figures_of(0)
    offloaded = [layer for layer, heads in enumerate(own.heads) if heads]
    hits = sum(counts_of(twins.mac).hits[layer] for layer in offloaded)
    assert figures["index_heads"] == sum(own.heads) == 30 * NUM_HEADS * len(offloaded) - hits
    assert 0 < sum(own.audited_heads) < 30 * GROUP, "a head of which some layer's step hit is left out"
    assert 0 < sum(own.audit_error) < sum(own.audited_heads) * 1_000_000
    assert twins.index.audits.failure is None
