"""Draft with a small model of the same vocabulary, which runs on the same device with pages of its own.

It takes in a request's tokens: a prompt one chunk a step, so that no stream waits for all of it, and later a few tokens
at once. Then it draws the next tokens with the request's options, seed and draw numbers, so its draft differs from the
model's tokens only where the two models disagree. The rows of rejected tokens are overwritten by the next tokens.
Penalties are left out, since drafted tokens are not part of the answer.
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

MOST_BEHIND = 16  # most tokens that a decode step takes in before it draws; more are prefilled


class Launched(Protocol):
    """A launched step."""

    def collect(self) -> StepResult: ...


class DraftRunner(Protocol):
    """The part of a runner that a draft model uses; see `gpu.runner.Runner`."""

    @property
    def page_memory(self) -> Memory | None: ...

    def launch(self, plan: StepPlan) -> Launched: ...

    def feed(self, slots: Many[int], token_ids: Many[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class DraftModelSizes:
    """The sizes with which a draft model's runner was made. context_tokens: of its longest context. chunk_tokens: of a
    prefill unit. vocab_size: of the model that verifies.
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
    """What a sequence holds. num_cached: its first tokens, whose rows are final. tail: drafted tokens with rows after
    these.
    """

    slot: int
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0
    tail: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Row:
    """A sequence that is drafted for. token_ids: its tokens. first: the first of these without a row. drafted: so far,
    of `number`. is_over: the last draw was no token of the verifying model.
    """

    sequence: Sequence
    held: _Held
    token_ids: list[int]
    first: int
    number: int
    drafted: list[int] = field(default_factory=list)
    is_over: bool = False


class DraftModel:
    """Drafts for all sequences. seconds: the time that it took since the start."""

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
        """Return how many tokens may be drafted for a sequence before the longest context is full."""
        return max(0, self._sizes.context_tokens - sequence.num_tokens)

    def draft(self, asked: Many[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        """Return the drafted tokens of each sequence, at most the number asked for.

        No draw of these sequences may be in flight. A sequence gets none if there is no room for it, or while its
        prompt is being taken in.
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
        """Free what a sequence holds, if anything."""
        held = self._held.pop(sequence, None)
        if held is not None:
            self._pages.release(held.pages)
            self._slots.append(held.slot)
            self._released.append(held.slot)

    def _begin(self, sequence: Sequence, number: int) -> _Row | None:
        """Return a row with pages for its tokens and its draft; None: there is no room."""
        assert not sequence.num_in_flight, "drafts: a model drafts only after tokens that are known"
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
        """Prefill a chunk of the missing tokens; return whether that was all of them, so that a token was drawn."""
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
        """Draw the drafted token number `step` of each row. The first step also takes in the missing tokens."""
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
        """Carry out a step, with the changes of slots and pages since the last one."""
        plan = StepPlan(released_slots=tuple(self._released), page_writes=tuple(self._writes), **work)  # type: ignore[arg-type]
        self._released, self._writes = [], []
        return self._runner.launch(plan).collect()


def cut_at(token_ids: Many[int], ends: Many[int]) -> tuple[int, ...]:
    """Return the tokens before the first stop token."""
    return tuple(takewhile(lambda token_id: token_id not in ends, token_ids))


def _options(sampling: SamplingParams) -> SamplingParams:
    """Return the request's sampling without logprobs and penalties, which count only tokens of the answer."""
    return structs.replace(
        sampling, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, num_logprobs=None,
        num_prompt_logprobs=None,
    )  # fmt: skip
