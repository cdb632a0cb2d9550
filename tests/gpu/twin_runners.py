"""Two runners of the reference model's first layers: one keeps every context on the device, one sends them down.

The first is the oracle of the second. Both are fed the first one's tokens. What the host rounds (rows in bf16) is
written back into the oracle's pages, so that the two differ by the order of float32 sums alone. Pages are NaN until
written and again when they are evicted, so any read of what is not there shows.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from gpu.config import GpuConfig, ModelConfig
from gpu.load import load_runner
from gpu.methods.method import ProfilePart
from gpu.operations.kv.kv_rows import make_codes, read_codes
from gpu.page_layout import PageLayout
from gpu.profiles import resolve_profiles, served_parts
from gpu.runner import Runner
from gpu.runner_settings import LoadSettings
from gpu.step import (
    DecodeGroup,
    FinishedReload,
    HostPrompt,
    HostRead,
    Offload,
    PageEviction,
    PageWrite,
    PrefillJob,
    PrefillPrompt,
    Reload,
    StepPlan,
    StepResult,
    TablePlace,
    WindowWrite,
)
from tests.gpu.poison import poison_pool
from tests.gpu.reference_model import GREEDY, layer_units, prefill_prompts, shallow_model
from tests.reference_tier import ReferenceTier, stored_rows
from tests.tolerances import HOP_LOGITS_FLOAT32
from transfer.host_config import HostConfig, SampledConfig
from transfer.host_tier import HostTier
from transfer.reading import Reading
from transfer.tier_shape import TierShape

NUM_LAYERS = 4  # two of them dense by default
WINDOW_LAYERS: tuple[int, ...] = ()  # whose windows the runner that offloads keeps by themselves
WINDOW_PAGES = 3
NUM_HEADS, NUM_KV_HEADS, DIM = 8, 2, 64
DEFAULT_DENSE = (0, NUM_LAYERS // 2)
MAX_CONTEXT = 1024
NUM_PAGES = 512
BITS, NUM_TABLES = 6, 5
Kv = Literal["auto", "bfloat16", "fp8", "int8"]
PROFILES = {
    Reading.WHOLE: "offloaded",
    Reading.BLOCKS: "offloaded",
    Reading.INDEXED: "offloaded",
    Reading.SAMPLE: "sampled",
}


def tier_shape(dense_layers: tuple[int, ...], bits: int = BITS, num_tables: int = NUM_TABLES) -> TierShape:
    layers = tuple(layer for layer in range(NUM_LAYERS) if layer not in dense_layers)
    return TierShape(layers, NUM_HEADS, NUM_KV_HEADS, DIM, "bfloat16", bits, num_tables)


def layout_of(num_dense: int, num_pages: int) -> PageLayout:
    """Of `num_pages` resident pages, and as many of the dense layers."""
    layers = NUM_LAYERS - len(WINDOW_LAYERS), num_dense - len(WINDOW_LAYERS)
    num_blocks = PageLayout(*layers, num_pages).blocks_for(num_pages)
    return PageLayout(*layers, num_pages + num_blocks)


def parts_for(shape: TierShape) -> tuple[ProfilePart, ...]:
    """Of the built-in profiles, with the tables that the tier has."""
    sampled = SampledConfig(bits_per_table=shape.bits_per_table, num_tables=shape.num_tables)
    return served_parts(resolve_profiles({}, HostConfig(sampled=sampled)).values())


def load(
    tier: HostTier | None, page_tokens: int, max_running: int, device: str, dtype: str,
    graph_batch_sizes: tuple[int, ...], max_context: int = MAX_CONTEXT, num_pages: int = NUM_PAGES,
    check_coverage: bool = False, more_parts: Many[ProfilePart] = (), kv: Kv = "auto", link_share: float = 0.0,
    num_rings: int = 3,
) -> Runner:  # fmt: skip
    num_resident = num_pages if tier is None else layout_of(NUM_LAYERS - len(tier.shape.layers), num_pages).num_pages
    runner = load_runner(
        ModelConfig(path=Path(shallow_model(NUM_LAYERS).name)),
        GpuConfig(
            device=device,
            dtype=dtype,
            page_tokens=page_tokens,
            graph_batch_sizes=graph_batch_sizes,
            check_coverage=check_coverage,
            kv=kv,
        ),
        LoadSettings(
            max_running=max_running,
            max_context_tokens=max_context,
            chunk_tokens=512,
            max_hidden_tokens=4096,
            num_pages=num_resident,
            tier=tier,
            parts=(*(() if tier is None else parts_for(tier.shape)), *more_parts),
            num_rings={part.id: num_rings for part in more_parts if part.method.has_rings},
            sink_tokens=page_tokens if tier is not None else 0,
            window_tokens=64,
            num_windows=0 if tier is None or not WINDOW_LAYERS else max_running,
            window_pages=WINDOW_PAGES,
            link_share=link_share,
        ),
        on_progress=lambda stage, fraction: None,
    )
    runner.pool.windows.write([WindowWrite(slot, None, slot) for slot in range(runner.pool.windows.shape.count)])
    runner.dense.choice = None  # which kernel attends to prompts follows from times, and bits from the kernel
    poison_pool(runner.pool)
    return runner


def lose_pages(pages: torch.Tensor, page_ids: list[int]) -> None:
    """They are NaN from now on."""
    pages[list(page_ids)] = torch.nan if pages.dtype.is_floating_point else torch.tensor(-1).to(pages.dtype)


def round_what_is_written(runner: Runner, stored: torch.dtype) -> None:
    """Every row that the runner writes to its pages becomes what codes of it mean, from now on."""
    decoder, write = runner._prefill.decoder, runner._prefill.decoder._write
    runner.decode_steps._compiled = None  # which writes rows by itself

    def write_rounded(index, qkv, positions, cells, slots, pages, *heads):
        query = write(index, qkv, positions, cells, slots, pages, *heads)
        pool, token = runner.pool, slots >= 0
        page_ids = pool.table_of(index)[slots[token].long(), cells[token] // pool.page_tokens].long()
        for held in (pool.key_pages[index], pool.value_pages[index]):
            at = (page_ids, slice(None), cells[token] % pool.page_tokens)
            held[at] = read_codes(*make_codes(held[at], stored), held.dtype)
        return query

    decoder._write = write_rounded


@dataclass
class Sequence:
    """A slot of the runner that offloads; the run that the host has is `[sink, run_end)`, empty until the context goes
    down, and of it `[sink, released)` is not on the device any more.
    """

    slot: int
    context_id: int
    num_tokens: int
    run_end: int = 0
    released: int = 0
    pages: list[int] = field(default_factory=list)


class Twins:
    """`exact` keeps all; `offloading` writes what is older than the window to the host, in offload blocks, and evicts
    the pages of all but its last `kept_tokens`.
    """

    def __init__(self, *, dense_layers: tuple[int, ...] = DEFAULT_DENSE, page_tokens: int = 16, window_tokens: int = 64,
                 offload_block_tokens: int = 64, reading: Reading = Reading.WHOLE, capacity_tokens: int = 100_000,
                 max_running: int = 5, device: str = "cpu", dtype: str = "float32",
                 graph_batch_sizes: tuple[int, ...] = (),
                 tier: HostTier | None = None, max_context: int = MAX_CONTEXT, num_pages: int = NUM_PAGES,
                 check_coverage: bool = False, more_parts: Many[ProfilePart] = (),
                 kept_tokens: int = 0, kv: Kv = "auto", link_share: float = 0.0,
                 num_rings: int = 3) -> None:  # fmt: skip
        """tier: in place of a ReferenceTier of `capacity_tokens`, and of its shape. more_parts: of what is served, in
        the runner that offloads, beside what the built-in profiles are made of. kv: of the runner that offloads; of
        codes the oracle has what they mean in its pages. link_share: of what the host has, read by the device.
        num_rings: of each part that has rings.
        """
        self.tier = tier or ReferenceTier(tier_shape(dense_layers), capacity_tokens, 256, 200)
        self.page_tokens, self.window_tokens, self.offload_block_tokens = (
            page_tokens,
            window_tokens,
            offload_block_tokens,
        )
        self.reading, self.kept_tokens = reading, kept_tokens
        self.num_pages, sizes = num_pages, (max_context, num_pages)
        self.exact = load(None, page_tokens, max_running, device, dtype, (), *sizes)
        self.offloading = load(
            self.tier, page_tokens, max_running, device, dtype, graph_batch_sizes, *sizes, check_coverage, more_parts,
            kv, link_share, num_rings,
        )  # fmt: skip
        if self.offloading.pool.has_codes:
            round_what_is_written(self.exact, self.offloading.pool.key_pages[0].dtype)
        self.sequences: dict[int, Sequence] = {}
        self._free = list(range(num_pages))
        layout = layout_of(NUM_LAYERS - len(self.tier.shape.layers), num_pages)
        self._dense = layout.dense_pages(range(num_pages, layout.num_pages), 0, num_pages)
        self._logits: dict[Runner, dict[int, torch.Tensor]] = {}
        for runner in (self.exact, self.offloading):
            self._record_logits(runner)

    def prefill(self, prompts: list[np.ndarray]) -> None:
        """Each in its own slot, whole on both devices."""
        for prompt in prefill_prompts(prompts):
            sequence = Sequence(prompt.slot, 100 + prompt.slot, len(prompt.token_ids))
            self.sequences[prompt.slot] = sequence
            own_pages = [self._free.pop() for _ in range(-(-sequence.num_tokens // self.page_tokens))]
            sequence.pages = list(own_pages)
            job = PrefillJob(prompt.slot, [prompt])
            units = layer_units(job, 512, NUM_LAYERS)
            writes = [PageWrite(prompt.slot, 0, list(range(*self._exact_pages(prompt.slot, 0, sequence.num_tokens))))]
            self.exact.launch(StepPlan(page_writes=writes, new_jobs=[job], units=units)).collect()
            writes = [PageWrite(prompt.slot, 0, own_pages)]
            self.offloading.launch(StepPlan(page_writes=writes, new_jobs=[job], units=units)).collect()

    def prefill_down(self, slot: int, token_ids: np.ndarray) -> None:
        """The prompt's middle goes to the host as it is computed; the oracle gets the host's rows afterwards."""
        sink, num_tokens = self.page_tokens, len(token_ids)
        end = (num_tokens - self.window_tokens) // self.page_tokens * self.page_tokens
        released = max(sink, end - self.kept_tokens)
        sequence = Sequence(slot, 100 + slot, num_tokens, end, released)
        self.sequences[slot] = sequence
        dense = range(sink // self.page_tokens, released // self.page_tokens)
        sequence.pages = [
            (self._dense if page in dense else self._free).pop() for page in range(-(-num_tokens // self.page_tokens))
        ]
        host = HostPrompt(sequence.context_id, None, sink, released, end, self.reading)
        prompt = PrefillPrompt(slot, token_ids, 0, num_tokens, GREEDY, PROFILES[self.reading], host)
        job = PrefillJob(slot, [prompt])
        units = layer_units(job, 512, NUM_LAYERS)
        writes = [PageWrite(slot, 0, sequence.pages)]
        self.offloading.launch(StepPlan(page_writes=writes, new_jobs=[job], units=units)).collect()
        writes = [PageWrite(slot, 0, list(range(*self._exact_pages(slot, 0, num_tokens))))]
        job = PrefillJob(slot, [replace(prompt, host=None, profile="exact")])
        self.exact.launch(StepPlan(page_writes=writes, new_jobs=[job], units=units)).collect()
        self._round(sequence)

    def step(self, slots: list[int]) -> StepResult:
        """One token for each of these slots; offloads that are due go first. Both runners get the oracle's tokens."""
        due = [offload for slot in slots for offload in self._due(self.sequences[slot])]
        plan = self.plan(slots, due)
        releases = plan.evictions
        exact_plan = self.exact_plan(plan)
        self.offloading._last_tokens.copy_(self.exact._last_tokens)
        result = self.offloading.launch(plan).collect()
        for offload in due:
            if offload.slot not in result.failures:
                self.sequences[offload.slot].run_end = offload.end
        for release in releases:
            if release.places[0].slot not in result.failures:
                self._settle(release)
        self.exact.launch(exact_plan).collect()
        for slot in slots:
            self.sequences[slot].num_tokens += 1
        return result

    def plan(self, slots: list[int], offloads: list[Offload]) -> StepPlan:
        """Of the runner that offloads: rows with host reads, and rows that do not, in one group."""
        writes = []
        for slot in slots:
            sequence = self.sequences[slot]
            if sequence.num_tokens == len(sequence.pages) * self.page_tokens:
                sequence.pages.append(self._free.pop())
                writes.append(PageWrite(slot, len(sequence.pages) - 1, sequence.pages[-1:]))
        releases = [release for slot in slots if (release := self._release(self.sequences[slot], offloads)) is not None]
        group = self.group(slots, releases)
        return StepPlan(page_writes=writes, offloads=offloads, evictions=releases, decode=[group])

    def exact_plan(self, plan: StepPlan) -> StepPlan:
        """The oracle's, for the same rows."""
        writes = []
        for write in plan.page_writes:
            begin = write.first_page * self.page_tokens
            pages = range(*self._exact_pages(write.slot, begin, begin + self.page_tokens))
            writes.append(PageWrite(write.slot, write.first_page, list(pages)))
        return StepPlan(page_writes=writes, decode=[replace(plan.decode[0], host_reads=None)])

    def logits(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The last step's, float32 `[vocab]`: of the runner that offloads, and of the oracle."""
        return self._logits[self.offloading][slot], self._logits[self.exact][slot]

    def fork(self, source: int, slot: int) -> None:
        """`slot`, of the same tokens, has its pages evicted for a fork of `source`'s context."""
        sequence, run_end = self.sequences[slot], self.sequences[source].run_end
        num_tokens = run_end - self.page_tokens
        self.tier.fork(self.sequences[source].context_id, sequence.context_id, num_tokens, Reading.WHOLE)
        sequence.run_end = run_end
        self.evict(sequence, self.sequences[source].released)

    def evict(self, sequence: Sequence, end: int) -> None:
        """Evict what the host has of a sequence up to `end`, between two steps."""
        release = self._release_to(sequence, end)
        self.offloading.launch(StepPlan(evictions=[release])).collect()
        self._settle(release)

    def fetch(self, sequence: Sequence, begin: int) -> FinishedReload:
        """Start to bring back what is released behind `begin`; what is to follow."""
        first, last = begin // self.page_tokens, sequence.released // self.page_tokens
        page_ids = [self._free.pop() for _ in range(first, last)]
        run_begin = begin - self.page_tokens
        fetch = Reload(sequence.context_id, run_begin, sequence.released - self.page_tokens, page_ids)
        self.offloading.launch(StepPlan(reloads=[fetch])).collect()
        return FinishedReload(page_ids, sequence.pages[first:last], [TablePlace(sequence.slot, first)])

    def restore(self, restore: FinishedReload) -> StepResult:
        """What was fetched takes its place; the dense pages are free (and NaN again)."""
        (place,) = restore.places
        sequence, pool = self.sequences[place.slot], self.offloading.pool
        last = place.first_page + len(restore.page_ids)
        sequence.pages[place.first_page : last] = restore.page_ids
        sequence.released = place.first_page * self.page_tokens
        result = self.offloading.launch(StepPlan(finished_reloads=[restore])).collect()
        for layer in pool.dense_layers:
            for pages in (pool.key_pages[layer], pool.value_pages[layer]):
                lose_pages(pages, restore.dense_page_ids)
        self._dense = list(restore.dense_page_ids) + self._dense
        return result

    def group(self, slots: list[int], releases: Many[PageEviction] = ()) -> DecodeGroup:
        """What these slots read, after `releases`."""
        ends = {
            release.places[0].slot: (release.places[0].first_page + len(release.page_ids)) * self.page_tokens
            for release in releases
        }
        asks: list[HostRead | None] = []
        for slot in slots:
            end = ends.get(slot, self.sequences[slot].released)
            is_asked = end > self.page_tokens
            reads_all = self.reading is Reading.WHOLE
            own = HostRead(self.sequences[slot].context_id, self.page_tokens, end, reads_all)
            asks.append(own if is_asked else None)
        positions = [self.sequences[slot].num_tokens for slot in slots]
        return DecodeGroup(slots, positions, [1] * len(slots), asks)

    def _due(self, sequence: Sequence) -> list[Offload]:
        sink = self.page_tokens
        begin = sequence.run_end or sink
        end = (sequence.num_tokens - self.window_tokens) // self.page_tokens * self.page_tokens
        if end - begin < self.offload_block_tokens:
            return []
        if sequence.run_end:
            end = begin + self.offload_block_tokens
        pages = slice(begin // self.page_tokens, end // self.page_tokens)
        return [
            Offload(sequence.slot, sequence.context_id, begin, end, sequence.pages[pages],
                    is_new_context=not sequence.run_end, reading=self.reading)
        ]  # fmt: skip

    def _release(self, sequence: Sequence, offloads: list[Offload]) -> PageEviction | None:
        """What a slot's offload of this step leaves to evict, if that is anything."""
        end = next((offload.end for offload in offloads if offload.slot == sequence.slot), 0) - self.kept_tokens
        return self._release_to(sequence, end) if end > (sequence.released or self.page_tokens) else None

    def _release_to(self, sequence: Sequence, end: int) -> PageEviction:
        first = (sequence.released or self.page_tokens) // self.page_tokens
        page_ids = sequence.pages[first : end // self.page_tokens]
        return PageEviction(page_ids, [self._dense.pop() for _ in page_ids], [TablePlace(sequence.slot, first)])

    def _settle(self, release: PageEviction) -> None:
        """Pages are free (and NaN again); the oracle gets the rows as the host has them."""
        first, last = release.places[0].first_page, release.places[0].first_page + len(release.page_ids)
        sequence, pool = self.sequences[release.places[0].slot], self.offloading.pool
        sequence.pages[first:last] = release.dense_page_ids
        sequence.released = last * self.page_tokens
        self._free = list(release.page_ids) + self._free
        in_pages = [layer for layer in range(NUM_LAYERS) if layer not in WINDOW_LAYERS]
        for pages in (all_pages[layer] for all_pages in (pool.key_pages, pool.value_pages) for layer in in_pages):
            lose_pages(pages, release.page_ids)
        self._round(sequence)

    def _round(self, sequence: Sequence) -> None:
        """The oracle's rows of what is released become those that the host has."""
        oracle, shape = self.exact.pool, (NUM_KV_HEADS, -1, self.page_tokens, DIM)
        ids = list(range(*self._exact_pages(sequence.slot, self.page_tokens, sequence.released)))
        num_tokens = sequence.released - self.page_tokens
        for place, layer in enumerate(self.tier.shape.layers):
            stored = stored_rows(self.tier, sequence.context_id, place, num_tokens)
            for pages, rows in zip((oracle.key_pages[layer], oracle.value_pages[layer]), stored, strict=True):
                pages[ids] = rows.reshape(shape).transpose(0, 1).to(pages.device, pages.dtype)

    def _exact_pages(self, slot: int, begin: int, end: int) -> tuple[int, int]:
        """The oracle's page ids of tokens `[begin, end)`: a slot has a run of its own."""
        first = slot * (self.num_pages // 5)
        return first + begin // self.page_tokens, first + -(-end // self.page_tokens)

    def _record_logits(self, runner: Runner) -> None:
        sample, kept = runner._sampler.sample, self._logits.setdefault(runner, {})

        def recording(logits: torch.Tensor, slots: list[int], samples: list[int]):
            kept.update(zip(slots, logits.cpu().clone(), strict=True))
            return sample(logits, slots, samples)

        runner._sampler.sample = recording


def furthest(twins: Twins, slots: list[int]) -> float:
    """Largest difference of a logit in the last step."""
    pairs = [twins.logits(slot) for slot in slots]
    return max(float((got - wanted).abs().max()) for got, wanted in pairs)


def check_steps(twins: Twins, slots: list[int], num_steps: int, limit: float = HOP_LOGITS_FLOAT32) -> None:
    for _ in range(num_steps):
        assert not twins.step(slots).failures
        assert furthest(twins, slots) < limit
