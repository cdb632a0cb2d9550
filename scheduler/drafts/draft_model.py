"""Drafts by a small model of the same vocabulary, which runs on the same device with pages of its own.

It follows a request's tokens: a prompt one chunk a step, so that no stream waits for all of it, and later a few tokens
at once. Then it draws on from there, with the request's options, seed and draw numbers, so its draft differs from the
model's own tokens only where the two models do. Its rows behind the last accepted token are overwritten by the next
tokens. Penalties are left out, since its draws are not part of the answer.
"""

import time
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

import numpy as np
from msgspec import structs

from gpu.profiles import FULL_ATTENTION
from gpu.sampling.sampler import count_equal
from gpu.sampling_params import SamplingParams
from gpu.step import DecodeGroup, PageWrite, PrefillJob, PrefillPrompt, PrefillUnit, StepPlan, StepResult
from scheduler.cache.page_pool import Memory, PagePool
from scheduler.sequences.sequence import Sequence, State

MOST_BEHIND = 16  # tokens that a step takes in before it draws; more are a prompt's


class Launched(Protocol):
    """A step under way."""

    def collect(self) -> StepResult: ...


class DraftRunner(Protocol):
    """What a draft model asks of its runner; see `gpu.runner.Runner`."""

    @property
    def page_memory(self) -> Memory | None: ...

    def launch(self, plan: StepPlan) -> Launched: ...

    def feed(self, slots: Many[int], token_ids: Many[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class DraftModelSizes:
    """What a draft model's runner was made with: layers, slots, pages of so many tokens, tokens of its longest context,
    and of a unit of prefill. vocab_size: of the model that verifies.
    """

    num_layers: int
    num_slots: int
    num_pages: int
    page_tokens: int
    context_tokens: int
    chunk_tokens: int
    vocab_size: int


@dataclass(slots=True)
class _Held:
    """What a sequence has. num_cached: tokens in front whose rows are right; tail: drafted ones, whose rows follow."""

    slot: int
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0
    tail: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Row:
    """A sequence that is drafted for. token_ids: that it has; drafted: so far, of `number`."""

    sequence: Sequence
    held: _Held
    token_ids: list[int]
    first: int  # of these, which is in no row yet
    number: int
    drafted: list[int] = field(default_factory=list)
    is_over: bool = False  # what it drew last is no token of the other model


class DraftModel:
    """Drafts for all sequences. seconds: that it took, in all."""

    def __init__(self, runner: DraftRunner, sizes: DraftModelSizes) -> None:
        self.seconds = 0.0
        self._runner = runner
        self._sizes = sizes
        self._pages = PagePool(0, sizes.num_pages, prefix_cache=False, memory=runner.page_memory)
        self._slots = list(range(sizes.num_slots))
        self._held: dict[Sequence, _Held] = {}
        self._released: list[int] = []
        self._writes: list[PageWrite] = []
        self._num_jobs = 0

    @property
    def num_pages_held(self) -> int:
        return self._pages.num_held

    def most_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens may be drafted behind what a sequence has: none beyond the longest context."""
        return max(0, self._sizes.context_tokens - sequence.num_tokens)

    def draft(self, asked: Many[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        """Return at most so many tokens that may follow each sequence, of which no draw is in flight: none where there
        is no room, and where its prompt is not all taken in.
        """
        began = time.perf_counter()
        rows = {sequence: row for sequence, number in asked if (row := self._begin(sequence, number)) is not None}
        for row in list(rows.values()):
            if len(row.token_ids) - row.first > MOST_BEHIND and not self._take_in(row):
                del rows[row.sequence]
        for step in range(max((row.number for row in rows.values()), default=0)):
            going_on = [row for row in rows.values() if len(row.drafted) == step < row.number and not row.is_over]
            if going_on:
                self._step(going_on, step)
        for row in rows.values():
            row.held.num_cached, row.held.tail = len(row.token_ids), row.drafted[:-1]
        self.seconds += time.perf_counter() - began
        return [tuple(rows[sequence].drafted) if sequence in rows else () for sequence, _ in asked]

    def forget(self, sequence: Sequence) -> None:
        """Give back what a sequence holds, if anything."""
        held = self._held.pop(sequence, None)
        if held is not None:
            self._pages.release(held.pages)
            self._slots.append(held.slot)
            self._released.append(held.slot)

    def _begin(self, sequence: Sequence, number: int) -> _Row | None:
        """Return a row with pages for its tokens and its draft; None: there is no room."""
        assert not sequence.num_in_flight, "drafts: a model drafts behind tokens that are known"
        number = min(number, self.most_tokens(sequence))
        held = self._hold(sequence, -(-(sequence.num_tokens + number) // self._sizes.page_tokens)) if number else None
        if held is None:
            return None
        new = sequence.tokens_from(held.num_cached).tolist()
        held.num_cached += min(count_equal(new, held.tail), len(new) - 1)
        held.tail = []
        return _Row(sequence, held, sequence.tokens_from(0).tolist(), held.num_cached, number)

    def _hold(self, sequence: Sequence, num_pages: int) -> _Held | None:
        """Return what a sequence holds, with so many pages; those that do not run are evicted for it."""
        held = self._held.get(sequence)
        more = num_pages - (0 if held is None else len(held.pages))
        self._pages.reach(more)
        resting = (one for one in list(self._held) if one.state is not State.RUNNING and one is not sequence)
        while (held is None and not self._slots) or self._pages.num_available < more:
            one = next(resting, None)
            if one is None:
                return None
            self.forget(one)
        if held is None:
            held = self._held[sequence] = _Held(self._slots.pop())
        if more > 0:
            pages = self._pages.allocate(more)
            self._writes.append(PageWrite(held.slot, len(held.pages), tuple(pages)))
            held.pages += pages
        return held

    def _take_in(self, row: _Row) -> bool:
        """Take in a chunk of what is missing; tell whether that was all, so that a token is drawn behind it."""
        begin, end = row.first, min(len(row.token_ids), row.first + self._sizes.chunk_tokens)
        num_prompt = min(end, row.sequence.num_prompt_tokens)
        prompt = PrefillPrompt(
            row.held.slot, np.array(row.token_ids[:end], np.int32), begin, num_prompt,
            _options(row.sequence.request.sampling), FULL_ATTENTION,
        )  # fmt: skip
        self._num_jobs += 1
        units = [PrefillUnit(self._num_jobs, layer, 0, end - begin) for layer in range(self._sizes.num_layers)]
        result = self._launch(new_jobs=(PrefillJob(self._num_jobs, (prompt,)),), units=tuple(units))
        if end < len(row.token_ids):
            row.held.num_cached = end
            return False
        self._read(result, [row])
        return True

    def _step(self, rows: list[_Row], step: int) -> None:
        """Draw the token number `step` of each row: behind the one before it, or behind what was missing."""
        behind = [[] if step else row.token_ids[row.first :] for row in rows]
        if not step:
            self._runner.feed([row.held.slot for row in rows], [tokens[0] for tokens in behind])
        group = DecodeGroup(
            slots=tuple(row.held.slot for row in rows),
            positions=tuple(len(row.token_ids) - 1 + step if step else row.first for row in rows),
            samples=tuple(len(row.sequence.output) + step for row in rows),
            runs=None if step else tuple(tuple(tokens[1:]) for tokens in behind),
        )
        self._read(self._launch(decode=(group,)), rows)

    def _read(self, result: StepResult, rows: list[_Row]) -> None:
        drawn = {token.slot: token.token_id for token in result.tokens}  # a slot's last one: the others were known
        for row in rows:
            token_id = drawn.get(row.held.slot, -1)
            row.is_over = not 0 <= token_id < self._sizes.vocab_size
            row.drafted += [] if row.is_over else [token_id]

    def _launch(self, **work: object) -> StepResult:
        """Carry out a step, behind what has changed in slots and pages."""
        plan = StepPlan(released_slots=tuple(self._released), page_writes=tuple(self._writes), **work)  # type: ignore[arg-type]
        self._released, self._writes = [], []
        return self._runner.launch(plan).collect()


def cut_at(token_ids: Many[int], ends: Many[int]) -> tuple[int, ...]:
    """Return the tokens in front of the first that ends a text."""
    return tuple(takewhile(lambda token_id: token_id not in ends, token_ids))


def _options(sampling: SamplingParams) -> SamplingParams:
    """Return how it draws: as the request, without penalties, whose counts are of what is told, and logprobs."""
    return structs.replace(
        sampling, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, num_logprobs=None,
        num_prompt_logprobs=None,
    )  # fmt: skip
