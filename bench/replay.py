"""Replay recorded texts, to apply a real model's acceptance of drafts to random weights.

A stream's answer without drafts is recorded. Then the draft source runs at its full cost, and its tokens are replaced
by the record's, each wrong at a rate that depends on its position in the draft. The rates of a real model follow from
how many tokens its steps drew (docs/methods/drafts.md). Every stream draws the record. If rounding puts another
candidate first, the record's token is drawn nevertheless, and the difference of both is counted, in steps of bf16.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.benchmark_rows import require
from gpu.runner import Runner
from gpu.sampling.sampler import Sampled
from gpu.upload import upload
from scheduler.drafts.draft_source import DraftSource, Proposal

LEVEL_STEPS = 2.0  # steps of bf16: candidates this close count as level
MOST_STEPS = 16.0  # candidates further apart come from another computation, not from rounding
MATCHED = 8  # matched tokens of a proposal: the same for all, so that chances depend on what was drawn
_BF16_BITS = 8  # bits of a significand
_TIE = 1e-6  # steps that count for another token with an equal logit
_WIDTHS = (2, 4, 8)  # rows of steps for which there are figures of real models

# Tokens a step of 2, 4 and 8 rows that SmolLM2-135M-Instruct drew with n-grams (docs/methods/drafts.md).
NGRAM_LENGTHS = {"questions": (1.84, 3.18, 4.96), "summaries": (1.79, 2.93, 4.31), "edits": (1.74, 2.76, 3.88)}
# Of 8 rows, drafted by `indexed`: the least of any kind, that of five edits.
INDEXED_LENGTH = 7.22


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How often drafted tokens are right. rates: by position in the draft, if all tokens before are right; the last
    rate is for all later positions.
    """

    name: str
    rates: tuple[float, ...]

    def spoil(self, token_ids: Sequence[int], first: int, vocab_size: int, draw: Random) -> list[int]:
        """Return these tokens of a draft, which begin at position `first`, some of them replaced by wrong ones."""
        last = len(self.rates) - 1
        return [
            token_id if draw.random() < self.rates[min(first + step, last)] else (token_id + 1) % vocab_size
            for step, token_id in enumerate(token_ids)
        ]


def rates_of(lengths: Mapping[int, float]) -> tuple[float, ...]:
    """Return rates by position with which steps draw as many tokens as measured. lengths: tokens drawn, by rows.

    Positions between two measured widths have the same rate.
    """
    rates: list[float] = []
    for width in sorted(lengths):
        low, high = 0.0, 1.0
        while high - low > 1e-6:
            middle = (low + high) / 2
            tried = [*rates, *[middle] * (width - 1 - len(rates))]
            low, high = (middle, high) if _length_of(tried) < lengths[width] else (low, middle)
        rates += [round(high, 4)] * (width - 1 - len(rates))
    return tuple(rates)


def _length_of(rates: Sequence[float]) -> float:
    """Return the tokens that a step draws on average, including the one after the accepted draft."""
    return 1.0 + float(np.cumprod(rates).sum())


RIGHT = Acceptance("all right", (1.0,))
REAL = {name: Acceptance(name, rates_of(dict(zip(_WIDTHS, drawn, strict=True))))
        for name, drawn in NGRAM_LENGTHS.items()} | {
    "indexed": Acceptance("indexed", rates_of({_WIDTHS[-1]: INDEXED_LENGTH}))
}  # fmt: skip


def parse_acceptance(text: str) -> tuple[Acceptance, ...]:
    """Parse a comma-separated list of rates and of kinds of a real model's texts. Raises ValueError."""
    found = []
    for part in text.split(","):
        try:
            found.append(REAL[part] if part in REAL else Acceptance(f"{float(part):g} a token", (float(part),)))
        except ValueError:
            raise ValueError(f"got {part!r}; wanted rates from 0 to 1, or {', '.join(REAL)}, with commas") from None
        if not 0.0 <= found[-1].rates[0] <= 1.0:
            raise ValueError(f"got {part!r}; wanted a rate from 0 to 1")
    return tuple(found)


class Replayed:
    """Proposes a record's tokens, wrong at given rates. source: runs at its full cost; None: nothing runs."""

    def __init__(
        self, source: DraftSource | None, num_prompt_tokens: int, record: Sequence[int], acceptance: Acceptance,
        vocab_size: int, draw: Random,
    ) -> None:  # fmt: skip
        self.num_observed = 0
        self._source = source
        self._num_prompt_tokens = num_prompt_tokens
        self._record = record
        self._acceptance = acceptance
        self._vocab_size = vocab_size
        self._draw = draw

    def observe(self, token_ids: np.ndarray) -> None:
        """Pass further tokens to the source."""
        self.num_observed += len(token_ids)
        if self._source is not None:
            self._source.observe(token_ids)

    def propose(self, most_tokens: int) -> Proposal:
        """Let the source propose, and return the record's tokens instead of its own."""
        if self._source is not None:
            self._source.propose(most_tokens)
        begin = self.num_observed - self._num_prompt_tokens
        token_ids = self._record[begin : begin + most_tokens]
        return Proposal(self._acceptance.spoil(token_ids, 0, self._vocab_size, self._draw), MATCHED)

    def forget(self) -> None:
        """Let the source free its state."""
        if self._source is not None:
            self._source.forget()


@dataclass(frozen=True, slots=True)
class Partings:
    """How draws differed from the record. level: another candidate was first, by LEVEL_STEPS at most. beyond: by more
    than that. most_steps: the largest difference, in steps of bf16.
    """

    draws: int = 0
    level: int = 0
    beyond: int = 0
    most_steps: float = 0.0

    def __str__(self) -> str:
        return (
            f"of {self.draws:,} draws {self.level} had another candidate first by at most {LEVEL_STEPS:g} bf16 steps, "
            f"{self.beyond} by more (at most {self.most_steps:.1f})"
        )

    def check(self, is_exact: bool, what: str) -> None:
        """Raise GateError if draws differed too much. is_exact: not even level candidates may differ."""
        require(self.most_steps <= MOST_STEPS, f"{what}: the text is the record's ({self})")
        require(not is_exact or self.level + self.beyond == 0, f"{what}: in float32 the text is the record's ({self})")


@dataclass(frozen=True, slots=True)
class _Told:
    """The draws of one step's rows.

    scores: logits of the token that would have been drawn, and of `wanted`, `[rows, 2]`. places: each row's slot in the
    step, and its distance behind its input token. accepted: of drafts, by slot; None: there are none.
    """

    scores: Tensor
    is_other: Tensor
    wanted: list[int]
    places: list[tuple[int, int]]
    accepted: Tensor | None

    def gaps(self) -> Tensor:
        """Return the distances of the two in steps of bf16, of rows that count; 0 if they are the same token."""
        best, own = self.scores.float().cpu().unbind(1)
        step = torch.ldexp(torch.ones_like(best), torch.frexp(best).exponent - _BF16_BITS)
        gaps = torch.where(self.is_other.cpu(), ((best - own) / step).clamp(min=_TIE), 0.0)
        counts = torch.tensor(self.wanted) >= 0
        if self.accepted is not None:  # rows behind the first wrong token do not count
            slots, steps = torch.tensor(self.places).unbind(1)
            counts &= steps <= self.accepted.cpu()[slots]
        return gaps[counts]


class Recorded:
    """Makes a runner draw recorded texts, by their prompts. A prompt that `records` lacks is answered freely."""

    def __init__(self, runner: Runner) -> None:
        self.records: dict[bytes, list[int]] = {}
        self._sampler: Any = runner._sampler
        self._slots: dict[int, list[int]] = {}  # the record of each slot
        self._at: dict[int, int] = {}  # by slot, tokens drafted since its last draw
        self._told: list[_Told] = []
        self._originals = {name: getattr(self._sampler, name) for name in ("assign", "sample", "verify", "_choose")}
        for name in ("assign", "sample", "verify"):
            setattr(self._sampler, name, getattr(self, f"_{name}"))

    def take_partings(self) -> Partings:
        """Return how draws since the last call differed from the record. Waits for the device."""
        gap = torch.cat([torch.zeros(0), *(one.gaps() for one in self._told)])
        self._told.clear()
        level, beyond = (gap > 0) & (gap <= LEVEL_STEPS), gap > LEVEL_STEPS
        return Partings(gap.numel(), int(level.sum()), int(beyond.sum()), float(gap.max()) if gap.numel() else 0.0)

    def replace_guesses(self, acceptance: Acceptance | None, draw: Random) -> None:
        """Replace the tokens that the device drafts, at their full cost, by the record's, right at these rates.

        acceptance None: undo it.
        """
        vars(self._sampler).pop("guess", None)
        if acceptance is None:
            return
        guess, vocab_size = self._sampler.guess, self._sampler.vocab_size

        def replaced(logits: Tensor, slots: list[int], samples: list[int]) -> Tensor:
            tokens, wanted = guess(logits, slots, samples), []
            for slot, number in zip(slots, samples, strict=True):
                place = self._at.get(slot, 0)
                self._at[slot] = place + 1
                token_id = self._token_of(slot, number)
                wanted += acceptance.spoil([max(token_id, 0)], place, vocab_size, draw)
            return upload(np.array(wanted, np.int64), tokens.device)

        self._sampler.guess = replaced

    def _assign(self, slot: int, params: Any, prompt_ids: np.ndarray, output_ids: np.ndarray) -> None:
        self._slots[slot] = self.records.get(np.asarray(prompt_ids, np.int32).tobytes(), [])
        self._originals["assign"](slot, params, prompt_ids, output_ids)

    def _sample(self, logits: Tensor, slots: list[int], samples: list[int], *masks: Any) -> Sampled:
        wanted = [self._token_of(slot, number) for slot, number in zip(slots, samples, strict=True)]
        return self._drawn("sample", (logits, slots, samples, *masks), wanted, [])

    def _verify(
        self, logits: Tensor, slots: list[int], samples: list[int], drafts: list[tuple[int, ...]], *rest: Any
    ) -> Sampled:
        places = [(place, step) for place, draft in enumerate(drafts) for step in range(1 + len(draft))]
        wanted = [self._token_of(slots[place], samples[place] + step) for place, step in places]
        return self._drawn("verify", (logits, slots, samples, drafts, *rest), wanted, places)

    def _token_of(self, slot: int, number: int) -> int:
        """Return the record's token for draw `number`, or -1 if it has none."""
        record = self._slots.get(slot, ())
        return record[number] if number < len(record) else -1

    def _drawn(self, name: str, given: tuple[Any, ...], wanted: list[int], places: list[tuple[int, int]]) -> Sampled:
        """Draw `wanted` where it is known, and keep what would have been drawn instead."""
        for slot in given[1]:
            self._at.pop(slot, None)
        if max(wanted, default=-1) < 0:
            drawn: Sampled = self._originals[name](*given)
            return drawn
        told: list[tuple[Tensor, Tensor]] = []

        def choose(logits: Tensor, *rest: Any) -> Tensor:
            chosen = self._originals["_choose"](logits, *rest)
            own = upload(np.array(wanted, np.int64), chosen.device)
            pairs = torch.stack([chosen, own], 1).clamp(min=0)
            told.append((logits.gather(1, pairs), (own >= 0) & (chosen != own)))
            return torch.where(own >= 0, own, chosen)

        self._sampler._choose = choose
        try:
            sampled: Sampled = self._originals[name](*given)
        finally:
            del vars(self._sampler)["_choose"]
        ((scores, is_other),) = told
        self._told.append(_Told(scores, is_other, wanted, places, sampled.accepted))
        return sampled
