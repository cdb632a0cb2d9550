"""A runner without a model, for tests of the scheduler: it keeps token ids in pages where a real one keeps keys.

The next token is a hash of the context as read back *from the pages*, so a page shared, freed or overwritten wrongly
changes the text; a host context keeps token ids as well, and must have what the dense pages of its slot have. It checks
the contract of `gpu.step` as it goes: units in order, prefixes there, runs without gaps.
"""

import pickle
from collections.abc import Collection
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from gpu.page_layout import PageLayout
from gpu.sampling_params import SamplingParams
from gpu.step import (
    NOT_FINITE,
    NOTHING_LEFT,
    FinishedReload,
    HostRead,
    LogitsUnit,
    Offload,
    PageEviction,
    PartId,
    PrefillJob,
    PrefillPrompt,
    Reload,
    RingCopy,
    RingWrite,
    SampledToken,
    StepPlan,
    StepResult,
    TokenLogprob,
    Unit,
)
from tests.scheduler.window_model import TokenWindows
from transfer.reading import Reading

VOCAB = 50


def next_token(context: list[int], profile: str) -> int:
    digest = blake2b(profile.encode() + np.array(context, "<u4").tobytes(), digest_size=8)
    return int.from_bytes(digest.digest(), "little") % VOCAB


def draw_token(context: list[int], profile: str, banned: list[int]) -> int:
    """The next token, or the first after it that is not banned."""
    token = next_token(context, profile)
    while token in banned:
        token = (token + 1) % VOCAB
    return token


def expected_output(prompt: list[int], max_tokens: int, stop: list[int], profile: str, min_tokens: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        is_early = len(tokens) - len(prompt) < min_tokens
        tokens.append(draw_token(tokens, profile, stop if is_early else []))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


@dataclass
class _Job:
    """`done`: of each prompt that is not cut out, its rows computed in each layer, and scored behind the last."""

    job: PrefillJob
    done: list[tuple[PrefillPrompt, list[int]]]


class PageRunner:
    """`broken` holds slots whose logits are not finite, `exhausted` those with nothing left to draw; `refuses_memory`:
    nothing more is offloaded.

    `layout`: where pages of both kinds lie; None: there are no dense ones. A page of one kind takes the bytes of those
    of the other that its block held. `clock` adds up simulated seconds: `unit_seconds` a token-layer (10,000 tokens on,
    twice that), `logits_seconds` a scored token. `windows`: of layers that keep no more, or None.
    """

    def __init__(
        self,
        num_layers: int,
        page_tokens: int,
        unit_seconds: float = 0.0,
        decode_seconds: float = 0.0,
        layout: PageLayout | None = None,
    ) -> None:
        self.num_layers = num_layers
        self.page_tokens = page_tokens
        self.unit_seconds = unit_seconds
        self.decode_seconds = decode_seconds
        self.host_seconds, self.num_parts = 0.0, 1  # of a step with a host read
        self.logits_seconds = unit_seconds
        self.layout = layout
        self.clock = 0.0
        self.pages: dict[int, list[int | None]] = {}
        self.tables: dict[int, list[int]] = {}
        self.dense: dict[int, range] = {}  # by slot, pages of its table that are dense
        self.is_dense: dict[int, bool] = {}  # by block
        self.context_of: dict[int, int] = {}  # by slot
        self.profiles: dict[int, str] = {}
        self.readings: dict[int, Reading] = {}  # by context
        self.sampling: dict[int, SamplingParams] = {}
        self.last: dict[int, int] = {}
        self.jobs: dict[int, _Job] = {}
        self.plans: list[StepPlan] = []
        self.broken: set[int] = set()
        self.exhausted: set[int] = set()
        self.contexts: dict[int, list[int]] = {}
        self.num_late = 0  # how often what is asked is not ready
        self.late_steps: dict[tuple[int, int], int] = {}  # likewise, by context and end
        self.fetched: dict[int, list[int]] = {}  # by page, until it is restored
        self.refuses_memory = False
        self.failures: dict[int, str] = {}
        self.failed: set[int] = set()
        self.prompt_logprobs: dict[int, list[TokenLogprob]] = {}
        self.ring_holders: dict[tuple[PartId, int], int] = {}  # slots
        self.copies: list[RingCopy] = []
        self.num_cells: dict[int, int] = {}  # by slot, that are written
        self.masks: dict[int, np.ndarray] = {}
        self.undrawn: Done | None = None
        self.as_launched: list[tuple[StepPlan, bytes]] = []  # the last plans
        self.windows: TokenWindows | None = None

    def method_counts(self) -> dict[str, dict[str, list[int]]]:
        return {}

    def request_figures(self, slots: Collection[int]) -> dict[int, dict[str, int]]:
        return {}

    def expert_counts(self) -> None:
        """All lie on the device."""

    def is_ready(self, ask: HostRead) -> bool:
        """As `num_late` or `late_steps` says; a context is asked for behind the plan that writes it."""
        has = len(self.contexts.get(ask.context_id, ()))
        late = self.late_steps.get((ask.context_id, ask.end), self.num_late)
        self.late_steps[ask.context_id, ask.end] = late - 1
        return ask.end - ask.begin <= has and late <= 0

    def launch(self, plan: StepPlan) -> "Done":
        """All of a plan with masked slots waits for its masks, which come before the next plan."""
        assert self.undrawn is None, "a step was launched behind one that is not drawn"
        self._note(plan)
        done = Done(None if plan.masked_slots else self._carry_out(plan, {}), plan)
        self.undrawn = done if plan.masked_slots else None
        return done

    def _note(self, plan: StepPlan) -> None:
        """A plan stays as it was launched, for three launches: a device that works behind may read it later."""
        self.as_launched.append((plan, pickle.dumps(plan)))
        if len(self.as_launched) > 3:
            other, pickled = self.as_launched.pop(0)
            assert pickle.dumps(other) == pickled, "a plan was changed behind its launch"

    def draw(self, step: "Done", masks: dict[int, np.ndarray]) -> None:
        assert step is self.undrawn
        step.result, self.undrawn = self._carry_out(step.plan, masks), None

    def drafted(self, step: "Done") -> dict[int, list[int]]:
        """Nothing drafts on this device."""
        return {}

    def _carry_out(self, plan: StepPlan, masks: dict[int, np.ndarray]) -> StepResult:
        self.plans.append(plan)
        self.masks = masks
        assert set(masks) <= set(plan.masked_slots)
        self.prompt_logprobs = {}
        self.failures = {}
        for slot in plan.released_slots:
            self.ring_holders = {ring: own for ring, own in self.ring_holders.items() if own != slot}
            self._cut(slot)
            self._vacate(slot)
        for context_id in plan.closed_contexts:
            self._close(context_id)
        for offload in plan.offloads:
            self._offload(offload)
        for restore in plan.finished_reloads:
            self._restore(restore)
        for release in plan.evictions:
            self._release(release)
        for fetch in plan.reloads:
            self._fetch(fetch)
        for write in plan.page_writes:
            if write.first_page == 0:
                self._enter(write.slot)
            table = self.tables.setdefault(write.slot, [])
            assert len(table) == write.first_page, "pages are appended without gaps"
            table += write.page_ids
            assert len(set(table)) == len(table) or self._keeps_nothing
        if self.windows is not None:
            self.windows.write(plan.window_writes)
        for ring_write in plan.ring_writes:
            self._assign(ring_write, plan)
        for job in plan.new_jobs:
            self._start(job)
        tokens = [token for unit in plan.units for token in self._advance(unit)]
        before = self.clock
        self.clock += sum(self._seconds(unit) for unit in plan.units)
        unit_seconds = self.clock - before
        for group in plan.decode:
            asks = group.host_reads or [None] * len(group.slots)
            runs = group.runs or [[] for _ in group.slots]
            drafts = group.drafts or [() for _ in group.slots]
            for slot, position, sample, ask, run, draft in zip(
                group.slots, group.positions, group.samples, asks, runs, drafts, strict=True
            ):
                if slot not in self.failed:
                    self._check_context(slot, ask)
                self._check_window(slot, position)
                assert not (run and slot in self.ring_holders.values()), "who holds a ring looks at it with each token"
                assert not (draft and run), "what must follow is no draft"
                assert slot not in masks or not draft or len(masks[slot]) == 1 + len(draft), "a mask for each row"
                for place, token_id in enumerate([self.last[slot], *run, *draft], position):
                    self._write(slot, place, token_id)
                for place in range(position, position + 1 + len(run) + len(draft)):  # rows read behind all writes
                    self._check_window(slot, place + 1, is_row=True)
                if slot not in self.failed:
                    tokens += [SampledToken(slot, token_id, None) for token_id in run]
                last = position + len(run)
                self.num_cells[slot] = last + 1
                tokens.append(self._draw(slot, last + 1))
                for step, drafted in enumerate(draft, 1):
                    if tokens[-1].token_id != drafted:
                        break
                    last += 1
                    tokens.append(self._draw(slot, last + 1, step))
                    self.num_cells[slot] = last + 1
                if draft and self.windows is not None:
                    self.windows.settle(slot, last + 1)
                assert sample >= 1 + len(run)
        decode_seconds = self.decode_seconds if plan.decode else 0.0
        self.clock += decode_seconds
        asks = any(group.host_reads is not None for group in plan.decode)
        told = StepResult(tuple(tokens), self.prompt_logprobs, unit_seconds, decode_seconds, self.failures)
        return replace(told, host_seconds=self.host_seconds, num_parts=self.num_parts) if asks else told

    def _assign(self, write: RingWrite, plan: StepPlan) -> None:
        """A ring is one slot's; what is copied to it is of the tokens that the new prompt has in front."""
        assert (write.part, write.ring) not in self.ring_holders, "the ring is another slot's"
        prompts = [one for job in plan.new_jobs for one in job.prompts if one.slot == write.slot]
        if not prompts:
            assert write.slot in self.context_of, "a ring that comes late is of a slot with tokens in host memory"
            if write.source is not None:
                other = self.ring_holders[write.part, write.source.ring]
                assert self._read(other, 0, write.source.begin) == self._read(write.slot, 0, write.source.begin)
            self.ring_holders[write.part, write.ring] = write.slot
            return
        (prompt,) = prompts
        if write.source is not None:
            source, begin = write.source, write.source.begin
            other = self.ring_holders[write.part, source.ring]
            tokens = self._read(other, 0, begin)
            assert tokens == prompt.token_ids[:begin].tolist()
            assert begin == prompt.begin
            last = max(self.num_cells[other], len(prompt.token_ids))
            assert source.end >= last, "nothing stands for what the other wrote, or for the prompt's own"
            self.copies.append(source)
        self.ring_holders[write.part, write.ring] = write.slot

    def _check_window(self, slot: int, num_tokens: int, is_row: bool = False) -> None:
        """What is written there is what pages have of the last of so many tokens."""
        if self.windows is not None and slot not in self.failed:
            first = max(0, num_tokens - self.windows.window_tokens)
            tokens = self._read(slot, first, num_tokens)
            check = self.windows.check_row if is_row else self.windows.check
            check(slot, [None] * first + tokens)

    def _vacate(self, slot: int) -> None:
        self.tables.pop(slot)
        if self.windows is not None:
            self.windows.of_slot.pop(slot, None)
        self.dense.pop(slot, None)
        self.profiles.pop(slot, None)
        if self.windows is not None:
            self.windows.of_slot.pop(slot, None)
        self.failed.discard(slot)

    def _enter(self, slot: int) -> None:
        """Its first pages come to a slot."""

    def _held_pages(self) -> set[int]:
        return {page for table in self.tables.values() for page in table}

    def _close(self, context_id: int) -> None:
        del self.contexts[context_id]

    def _start(self, job: PrefillJob) -> None:
        self.jobs[job.job_id] = _Job(job, [(prompt, [0] * (self.num_layers + 1)) for prompt in job.prompts])
        for prompt in job.prompts:
            assert 0 <= prompt.begin < len(prompt.token_ids)
            if prompt.host is not None:
                assert len(job.prompts) == 1, "a prompt that is offloaded is alone in its job"
                self._open(prompt)
            cached = self._read(prompt.slot, 0, prompt.begin)
            assert cached == prompt.token_ids[: prompt.begin].tolist(), "the cached prefix is what the pages hold"
            assert len(self.tables[prompt.slot]) * self.page_tokens >= len(prompt.token_ids)
            self.profiles[prompt.slot] = prompt.profile
            self.sampling[prompt.slot] = prompt.sampling
            for position in range(prompt.begin, len(prompt.token_ids)):
                self._write(prompt.slot, position, None)

    def _cut(self, slot: int) -> None:
        """Its prompt is in no job any more."""
        for entry in self.jobs.values():
            entry.done = [one for one in entry.done if one[0].slot != slot]
        self.jobs = {job_id: entry for job_id, entry in self.jobs.items() if entry.done}

    def _open(self, prompt: PrefillPrompt) -> None:
        host = prompt.host
        others = [entry for entry in self.jobs.values() if entry.job.prompts[0].host is not None]
        assert len(others) == 1, "one prompt is offloaded at a time"
        assert host.sink < host.end < len(prompt.token_ids)
        assert prompt.begin == 0 or host.sink < prompt.begin <= host.end
        assert host.sink <= host.evicted <= host.end
        self.dense[prompt.slot] = range(host.sink // self.page_tokens, host.evicted // self.page_tokens)
        self.context_of[prompt.slot] = host.context_id
        assert host.context_id not in self.contexts
        shared = [] if host.source_id is None else self.contexts[host.source_id][: max(0, prompt.begin - host.sink)]
        assert shared == prompt.token_ids[host.sink : prompt.begin].tolist(), "the source has what is shared"
        self.contexts[host.context_id] = shared
        self.readings[host.context_id] = host.reading
        if self.refuses_memory:
            self._fail(prompt.slot)

    def _offload(self, offload: Offload) -> None:
        if offload.is_new_context:
            self.context_of[offload.slot] = offload.context_id
            self.contexts[offload.context_id] = []
            self.readings[offload.context_id] = offload.reading
        table, context = self.tables[offload.slot], self.contexts[offload.context_id]
        first, last = offload.begin // self.page_tokens, offload.end // self.page_tokens
        assert offload.end <= len(table) * self.page_tokens
        if offload.slot in self.failed or self.refuses_memory:
            self._fail(offload.slot)
            return
        assert table[first:last] == [*offload.page_ids]
        tokens = self._read(offload.slot, offload.begin, offload.end)
        assert None not in tokens, "what is offloaded is written"
        context += tokens

    def _release(self, release: PageEviction) -> None:
        """Rows are read, then written: dense pages may lie in the pages that are evicted."""
        read = [list(self.pages[page]) for page in release.page_ids]
        for place in release.places:
            if place.slot not in self.tables:
                continue  # it was preempted in this plan
            table, last = self.tables[place.slot], place.first_page + len(release.page_ids)
            assert table[place.first_page : last] == [*release.page_ids]
            table[place.first_page : last] = release.dense_page_ids
            dense = self.dense.get(place.slot)
            assert not dense or dense.stop == place.first_page, "what is released is in front"
            self.dense[place.slot] = range(dense.start if dense else place.first_page, last)
        for page, rows in zip(release.dense_page_ids, read, strict=True):
            if self._keeps_nothing:
                break
            self._claim(page, is_dense=True)
            self.pages[page] = rows

    def _fetch(self, fetch: Reload) -> None:
        """The other layers' rows: nobody reads the pages before a restore, which finds them as they were left."""
        tokens = self.contexts[fetch.context_id][: fetch.end]
        assert len(tokens) == fetch.end, "what is fetched is offloaded"
        assert self._held_pages().isdisjoint(fetch.page_ids), "the pages are nobody's"
        for index, page in enumerate(fetch.page_ids):
            begin = fetch.begin + index * self.page_tokens
            self._claim(page, is_dense=False)
            self.pages[page] = list(tokens[begin : begin + self.page_tokens])
            self.fetched[page] = list(self.pages[page])

    def _restore(self, restore: FinishedReload) -> None:
        """The fetched rows are still there, and the dense layers' are the same tokens."""
        for page, dense_page in zip(restore.page_ids, restore.dense_page_ids, strict=True):
            rows = self.fetched.pop(page)
            assert self.pages[page] == rows, "a page was written between its fetch and its restore"
            assert self._keeps_nothing or self.pages[dense_page] == rows
        for place in restore.places:
            if place.slot not in self.tables:
                continue  # it was preempted in this plan
            table, last = self.tables[place.slot], place.first_page + len(restore.page_ids)
            assert table[place.first_page : last] == [*restore.dense_page_ids]
            table[place.first_page : last] = restore.page_ids
            dense = self.dense[place.slot]
            assert dense.stop == last, "what comes back is the last that is released"
            self.dense[place.slot] = range(dense.start, place.first_page)

    def _claim(self, page: int, is_dense: bool) -> None:
        """A page is written: what its block held of the other kind is gone."""
        if self.layout is None:
            return
        block = page % self.layout.num_pages
        if self.is_dense.setdefault(block, is_dense) != is_dense:
            self.is_dense[block] = is_dense
            for other in range(block, self.layout.num_ids, self.layout.num_pages):
                self.pages.pop(other, None)

    def _fail(self, slot: int) -> None:
        self.failed.add(slot)
        self.failures[slot] = "host memory: asked 9, have 8; raise host.memory_limit_gib"

    def _check_context(self, slot: int, ask: HostRead | None) -> None:
        """What the device does not have, the host is asked for, and has."""
        dense = self.dense.get(slot)
        if ask is None:
            assert not dense
            return
        assert dense == range(ask.begin // self.page_tokens, ask.end // self.page_tokens)
        asked = self.contexts[ask.context_id][: ask.end - ask.begin]
        assert asked == self._read(slot, ask.begin, ask.end)

    def _advance(self, unit: Unit) -> list[SampledToken]:
        """Rows of the job's prompts, one prompt after another, each the next of its prompt in that layer."""
        entry = self.jobs[unit.job_id]
        layer = self.num_layers if isinstance(unit, LogitsUnit) else unit.layer
        first, is_over = 0, True
        for prompt, done in entry.done:
            most = [prompt.num_computed_tokens] * self.num_layers + [prompt.num_scored_tokens]
            assert done[:layer] == most[:layer], "units come layer by layer"
            begin, end = max(unit.begin, first), min(unit.end, first + most[layer])
            if begin < end:
                assert begin - first == done[layer], "a row is computed once, in order"
                done[layer] = end - first
            first += most[layer]
            is_over &= done == most
        assert unit.begin < unit.end <= first or (is_over and unit.begin == unit.end == first)
        return self._finish(unit.job_id) if is_over else []

    def _finish(self, job_id: int) -> list[SampledToken]:
        tokens = []
        for prompt, _ in self.jobs.pop(job_id).done:
            self._check_window(prompt.slot, prompt.begin)
            for position in range(prompt.begin, len(prompt.token_ids)):
                self._write(prompt.slot, position, int(prompt.token_ids[position]))
            if prompt.host is not None and prompt.slot not in self.failed:
                begin = max(prompt.begin, prompt.host.sink)
                self.contexts[prompt.host.context_id] += prompt.token_ids[begin : prompt.host.end].tolist()
            for branch in prompt.branches if prompt.slot not in self.failed else ():
                assert self.windows is not None, "a branch is of windows"
                self.windows.leave(branch, prompt.begin, prompt.token_ids)
            self.num_cells[prompt.slot] = len(prompt.token_ids)
            tokens.append(self._draw(prompt.slot, len(prompt.token_ids)))
            if prompt.sampling.num_prompt_logprobs is not None and prompt.samples == 0:
                assert prompt.begin == 0, "prompt logprobs need every prompt token computed"
                scored = prompt.token_ids[1 : prompt.num_prompt_tokens].tolist()
                self.prompt_logprobs[prompt.slot] = tuple(TokenLogprob(-float(token), ()) for token in scored)
        return tokens

    def _seconds(self, unit: Unit) -> float:
        if isinstance(unit, LogitsUnit):
            return self.logits_seconds * (unit.end - unit.begin)
        return self.unit_seconds * (unit.end - unit.begin) * (1.0 + unit.end / 10_000)

    def _draw(self, slot: int, context: int, step: int = 0) -> SampledToken:
        if slot in self.broken | self.failed:
            return SampledToken(slot, NOT_FINITE, None)
        if slot in self.exhausted:
            return SampledToken(slot, NOTHING_LEFT, None)
        tokens = self._read(slot, 0, context)
        assert None not in tokens, "a context is read before it is written"
        banned = []
        if slot in self.masks:
            words = np.atleast_2d(self.masks[slot])[step]
            bits = np.unpackbits(words.view(np.uint8)[: VOCAB // 8 + 1], bitorder="little")
            banned = [token for token in range(VOCAB) if not bits[token]]
        if len(banned) == VOCAB:
            return SampledToken(slot, NOTHING_LEFT, None)
        self.last[slot] = draw_token(tokens, self.profiles[slot], banned)
        return SampledToken(slot, self.last[slot], None)

    @property
    def _keeps_nothing(self) -> bool:
        """Of what is released: there are no dense layers."""
        return self.layout is not None and not self.layout.num_dense_layers

    def _write(self, slot: int, position: int, token: int | None) -> None:
        page, offset = divmod(position, self.page_tokens)
        is_dense = page in self.dense.get(slot, ())
        if self.windows is not None and token is not None and slot not in self.failed:
            self.windows.put(slot, position, token)
        if is_dense and self._keeps_nothing:
            return
        self._claim(self.tables[slot][page], is_dense)
        self.pages.setdefault(self.tables[slot][page], [None] * self.page_tokens)[offset] = token

    def _read(self, slot: int, begin: int, end: int) -> list[int | None]:
        """Tokens of `[begin, end)`, page by page; None where nothing was written."""
        dense, keeps_nothing, found = self.dense.get(slot, range(0)), self._keeps_nothing, []
        at = begin
        while at < end:
            page, offset = divmod(at, self.page_tokens)
            count = min(end - at, self.page_tokens - offset)
            if page in dense and keeps_nothing:
                first = at - dense.start * self.page_tokens
                found += self.contexts[self.context_of[slot]][first : first + count]
            else:
                found += self.pages.get(self.tables[slot][page], [None] * self.page_tokens)[offset : offset + count]
            at += count
        assert len(found) == end - begin, "a context has what is read"
        return found


@dataclass
class Done:
    result: StepResult | None
    plan: StepPlan

    def collect(self) -> StepResult:
        assert self.result is not None, "a step is collected that was not drawn"
        return self.result
