"""Draw tokens from logits, for a batch of sequences with options of their own, without waiting for the device.

Order of the options: logit bias and penalties on the raw logits; masks; temperature; top-k, top-p, min-p. A sequence's
draw is a function of its logits, its seed, its mask and the number of the draw, whatever else is in the batch and
across preemption. If logits differ by rounding, another token is drawn about as often as the probability mass that the
rounding moves. A row costs what its options need: a plain greedy row an argmax (one read of its logits), a drawn row
its distances and the race (about 30 bytes for each vocabulary entry), a filtered row the passes of `gpu.sampling.draw`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice, takewhile
from types import MappingProxyType

import numpy as np
import torch

from gpu.operations.race import race
from gpu.sampling.draw import distances, keep_top_k, keep_top_p, weigh
from gpu.sampling.logprobs import Logprobs, gather_logprobs, to_pinned
from gpu.sampling.penalties import PenaltyTable
from gpu.sampling_params import SamplingParams
from gpu.step import NOT_FINITE, NOTHING_LEFT, SampledToken, TokenLogprob
from gpu.upload import upload

Masks = Mapping[int, np.ndarray]
"""By slot, the tokens that may be drawn: uint32 `[ceil(vocab / 32)]`, bit `i % 32` of word `i // 32` for token i. A
slot with a draft has a mask for each of its rows: `[1 + drafted, ceil(vocab / 32)]`.
"""

NO_MASKS: Masks = MappingProxyType({})

_KEYS_KEPT = 64  # a multiple of 4, since Philox makes four numbers at once
_NO_TOKEN = -3  # an id that no draw and no draft has
_FLOAT32_TINY = float(np.finfo(np.float32).tiny)


class KeyStream:
    """The keys of one seed's draws. Key n is the n-th number, 64 random bits, of numpy's Philox with the seed
    as key.
    """

    def __init__(self, seed: int) -> None:
        self._key = seed % 2**64
        self._chunk = -1
        self._numbers: list[int] = []

    def __getitem__(self, number: int) -> int:
        """Return key number `index` as int64, in `[-2**63, 2**63)`."""
        chunk, offset = divmod(number, _KEYS_KEPT)
        if chunk != self._chunk:
            philox = np.random.Philox(key=self._key, counter=chunk * _KEYS_KEPT // 4)
            self._numbers = philox.random_raw(_KEYS_KEPT).view(np.int64).tolist()
            self._chunk = chunk
        return self._numbers[offset]


@dataclass(slots=True)
class _Slot:
    params: SamplingParams
    keys: KeyStream
    penalty_row: int | None
    bias: tuple[torch.Tensor, torch.Tensor] | None  # ids int64 and values float32, on the device

    @property
    def is_edited(self) -> bool:
        """Return whether scores differ from the logits even without a mask."""
        return self.penalty_row is not None or self.bias is not None


@dataclass(slots=True)
class Sampled:
    """The tokens that a batch drew. tokens: int64 `[slots]` on the device, the next input ids; 0 where nothing could be
    drawn.

    Call `copy_to_host` on the stream that sampled, sync that stream, then `to_host`.
    """

    tokens: torch.Tensor
    reported: torch.Tensor  # int64 [rows]: tokens, or NOT_FINITE or NOTHING_LEFT
    slots: list[int]
    num_logprobs: list[int | None]  # by row
    logprobs: Logprobs | None  # of the rows that asked, in order
    drafts: list[tuple[int, ...]] | None = None  # by slot; each token adds a row. None: one row for each slot
    drafted: torch.Tensor | None = None  # int64, the tokens of all drafts if the device drafted some; else None
    accepted: torch.Tensor | None = None  # int64 [slots], with drafts: how many tokens of each were accepted
    _host: tuple[torch.Tensor, Logprobs | None] | None = field(default=None, init=False)

    def copy_to_host(self) -> None:
        """Start the copies into pinned memory (on CUDA)."""
        self._host = to_pinned(self.reported), self.logprobs.copy_to_host() if self.logprobs else None
        self.drafted = None if self.drafted is None else to_pinned(self.drafted)

    def to_host(self) -> list[SampledToken]:
        """Return the tokens of all slots, in order, as in `by_slot`."""
        return list(chain.from_iterable(self.by_slot()))

    def by_slot(self) -> list[list[SampledToken]]:
        """Return the tokens of each slot, in order, up to the first that differs from the draft."""
        assert self._host is not None, "Sampled.to_host before copy_to_host"
        reported, logprobs = self._host
        if self.drafts is None:
            return [[token] for token in _list_tokens(self.slots, reported.tolist(), self.num_logprobs, logprobs)]
        owners = [slot for slot, draft in zip(self.slots, self.drafts, strict=True) for _ in range(1 + len(draft))]
        rows = iter(_list_tokens(owners, reported.tolist(), self.num_logprobs, logprobs))
        told = []
        known = iter(chain.from_iterable(self.drafts) if self.drafted is None else self.drafted.tolist())
        for draft in ([*islice(known, len(draft))] for draft in self.drafts):
            own = list(islice(rows, 1 + len(draft)))
            told.append(own[: 1 + count_equal([token.token_id for token in own], draft)])
        return told


@dataclass(slots=True)
class Given:
    """Tokens of runs, in order, which are not drawn, with the other fields that `Sampled` has."""

    token_ids: list[int]
    slots: list[int]
    num_logprobs: list[int | None]
    logprobs: Logprobs | None


@dataclass(slots=True)
class Drawing:
    """Rows of logits that are drawn from at once, or later when their masks are known.

    logits, slots, samples: as `Sampler.sample` takes them; logits are freed once drawn. runs, drafts: as in
    `DecodeGroup`; such a slot has one more row for each token. Only the last row of a run is drawn from, but all rows
    of a draft. drafted: as in `Sampler.verify`. positions: of input tokens.
    """

    logits: torch.Tensor | None
    slots: list[int]
    samples: list[int]
    runs: list[list[int]] | None = None
    drafts: list[tuple[int, ...]] | None = None
    drafted: torch.Tensor | None = None
    positions: list[int] | None = None
    _sampled: Sampled | None = field(default=None, init=False)
    _given: Given | None = field(default=None, init=False)

    def draw(self, sampler: "Sampler", masks: Masks = NO_MASKS) -> Sampled:
        assert self.logits is not None, "sampler: drawn twice"
        logits, self.logits = self.logits, None
        drafts = self.drafts or [()] * len(self.slots)
        if self.runs is not None:
            lengths = [1 + len(run) + len(draft) for run, draft in zip(self.runs, drafts, strict=True)]
            firsts = [end - length for end, length in zip(accumulate(lengths), lengths, strict=True)]
            self._given = sampler.take(logits, self.slots, self.runs, firsts)
            drawn = [
                first + len(run) + step
                for first, run, draft in zip(firsts, self.runs, drafts, strict=True)
                for step in range(1 + len(draft))
            ]
            logits = logits.index_select(0, upload(np.array(drawn, np.int64), logits.device))
        if self.drafts is None:
            self._sampled = sampler.sample(logits, self.slots, self.samples, *([masks] if masks else []))
        else:
            self._sampled = sampler.verify(logits, self.slots, self.samples, self.drafts, masks, self.drafted)
        return self._sampled

    @property
    def sampled(self) -> Sampled:
        assert self._sampled is not None, "sampler: nothing is drawn yet"
        return self._sampled

    def copy_to_host(self) -> None:
        """Start copies as `Sampled.copy_to_host`."""
        self.sampled.copy_to_host()
        if self._given is not None and self._given.logprobs is not None:
            self._given.logprobs = self._given.logprobs.copy_to_host()

    def to_host(self) -> list[SampledToken]:
        """Return each slot's tokens, in order: its run, and then the drawn tokens."""
        if self.runs is None or self._given is None:
            return self.sampled.to_host()
        drawn, given = self.sampled.by_slot(), self._given
        taken = iter(_list_tokens(given.slots, given.token_ids, given.num_logprobs, given.logprobs))
        return [token for run, own in zip(self.runs, drawn, strict=True) for token in [*islice(taken, len(run)), *own]]


class Sampler:
    """Draws tokens. It keeps the options, counters and seeds of up to `num_slots` sequences, by slot."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._slots: list[_Slot | None] = [None] * num_slots
        self._penalties = PenaltyTable(num_slots, vocab_size, self.device)
        self._bits = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=self.device)

    def assign(self, slot: int, params: SamplingParams, prompt_ids: np.ndarray, output_ids: np.ndarray) -> None:
        """Give `slot` to a sequence. prompt_ids, output_ids: int32 `[tokens]`; output_ids were drawn before a
        preemption.

        Raises ValueError for a bias on a token that the vocabulary does not have.
        """
        self.release(slot)
        bias = None
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias.keys(), np.int64)
            if ids.min() < 0 or ids.max() >= self.vocab_size:
                raise ValueError(f"logit_bias: token ids {ids.min()} to {ids.max()}; wanted 0 to {self.vocab_size - 1}")
            values = np.fromiter(params.logit_bias.values(), np.float32)
            bias = upload(ids, self.device), upload(values, self.device)
        row = self._penalties.add(prompt_ids, output_ids) if params.has_penalties else None
        self._slots[slot] = _Slot(params, KeyStream(params.seed), row, bias)

    def release(self, slot: int) -> list[torch.Tensor]:
        """Forget the sequence in `slot`, if there is one. Return its tensors on the device, which may still be read."""
        state, self._slots[slot] = self._slots[slot], None
        if state is None:
            return []
        if state.penalty_row is not None:
            self._penalties.remove(state.penalty_row)
        return [*(state.bias or ())]

    def sample(self, logits: torch.Tensor, slots: list[int], samples: list[int], masks: Masks = NO_MASKS) -> Sampled:
        """Draw a token for each row of `logits` (bf16 or float32 `[rows, vocab]`, on the device, left as it is).

        Row i belongs to `slots[i]`, which must be assigned, and is its draw number `samples[i]`. Slots that have a mask
        draw from its tokens alone.
        """
        states = [self._slots[slot] for slot in slots]
        assert all(state is not None for state in states), f"sample: unassigned slot among {slots}"
        given = {row: masks[slot] for row, slot in enumerate(slots) if slot in masks}
        reported = self._choose(logits, states, samples, given)  # type: ignore[arg-type]
        tokens = reported.clamp(min=0)
        asked = [state.params.num_logprobs for state in states]  # type: ignore[union-attr]
        return Sampled(tokens, reported, list(slots), asked, self._logprobs(logits, tokens, asked))

    def verify(
        self, logits: torch.Tensor, slots: list[int], samples: list[int], drafts: list[tuple[int, ...]],
        masks: Masks = NO_MASKS, drafted: torch.Tensor | None = None,
    ) -> Sampled:  # fmt: skip
        """Draw a token after the input token of each slot, and after each token of its draft as if that had been drawn.

        `slots[i]` has `1 + len(drafts[i])` rows of `logits` (as in `sample`), for the draws from number `samples[i]`
        on. Its tokens are the draws up to the first that differs from the draft; later rows do not count. Each draw is
        a function of its logits, seed, mask and number, so steps of one token would draw the same tokens. drafted:
        int64, the tokens of all drafts in order, if `drafts` have only their lengths; None: `drafts` have the tokens.
        """
        lengths = [1 + len(draft) for draft in drafts]
        owners = [place for place, length in enumerate(lengths) for _ in range(length)]
        steps = [step for length in lengths for step in range(length)]
        states = [state for place in owners if (state := self._slots[slots[place]]) is not None]
        assert len(states) == len(owners), f"verify: a slot of {slots} is not assigned"
        numbers = [samples[place] + step for place, step in zip(owners, steps, strict=True)]
        given = {row: np.atleast_2d(masks[slots[place]])[step] for row, (place, step) in enumerate(zip(owners, steps,
                 strict=True)) if slots[place] in masks}  # fmt: skip
        expected = [token_id for draft in drafts for token_id in (*draft, _NO_TOKEN)]
        firsts = [end - length for end, length in zip(accumulate(lengths), lengths, strict=True)]
        there = upload(np.array([owners, expected, [firsts[place] for place in owners]], np.int64), self.device)
        if drafted is not None:
            rows_of_drafts = np.array([row for row, token_id in enumerate(expected) if token_id != _NO_TOKEN], np.int64)
            there[1].index_copy_(0, upload(rows_of_drafts, self.device), drafted)
        # With penalties a draw depends on the draws before it, so such rows are drawn one after another.
        waits = [step if state.penalty_row is not None else 0 for step, state in zip(steps, states, strict=True)]
        stands = torch.ones(len(slots), dtype=torch.int64, device=self.device)
        reported = torch.empty(len(owners), dtype=torch.int64, device=self.device)
        for turn in range(max(waits) + 1):
            rows = [row for row, wait in enumerate(waits) if wait == turn]
            index = upload(np.array(rows, np.int64), self.device)
            own_states = [states[row] for row in rows]
            own_masks = {place: given[row] for place, row in enumerate(rows) if row in given}
            own_numbers, own_owners = [numbers[row] for row in rows], there[0, index]
            own = logits if len(rows) == len(owners) else logits.index_select(0, index)
            chosen = self._choose(own, own_states, own_numbers, own_masks, stands[own_owners])
            reported[index] = chosen
            penalised = [place for place, state in enumerate(own_states) if state.penalty_row is not None]
            if penalised and max(waits) > turn:
                places = upload(np.array(penalised, np.int64), self.device)
                stands[own_owners[places]] *= chosen[places] == there[1, index[places]]
        behind = (reported != there[1]).cumsum(0)  # misses up to and with a row; each slot's last row is a miss
        missed = torch.cat([behind.new_zeros(1), behind])[there[2]]  # misses before the row's slot
        is_last = (behind - missed == 1) & (reported != there[1])
        accepted = torch.zeros_like(stands).index_add_(0, there[0], (behind == missed).long())
        tokens = torch.zeros_like(stands).index_add_(0, there[0], torch.where(is_last, reported.clamp(min=0), 0))
        asked = [state.params.num_logprobs for state in states]
        logprobs = self._logprobs(logits, reported.clamp(min=0), asked)
        told = [tuple(draft) for draft in drafts]
        return Sampled(tokens, reported, list(slots), asked, logprobs, told, drafted, accepted)

    def guess(self, logits: torch.Tensor, slots: list[int], samples: list[int]) -> torch.Tensor:
        """Return the tokens, int64 `[rows]`, that `sample` would draw without masks; 0 where it would draw none. They
        are drafts that a later step verifies, so penalties do not count them.
        """
        states = [state for slot in slots if (state := self._slots[slot]) is not None]
        assert len(states) == len(slots), f"guess: a slot of {slots} is not assigned"
        stands = torch.zeros(len(slots), dtype=torch.int64, device=self.device)
        return self._choose(logits, states, samples, {}, stands).clamp(min=0)

    def take(self, logits: torch.Tensor, slots: list[int], runs: list[list[int]], firsts: list[int]) -> Given:
        """Count the tokens of runs as if they had been drawn. `runs[i]` follows the input token of `slots[i]`, whose
        rows of logits (as in `sample`) begin at `firsts[i]`.
        """
        states = [state for slot in slots if (state := self._slots[slot]) is not None]
        assert len(states) == len(slots), f"take: a slot of {slots} is not assigned"
        owners = [place for place, run in enumerate(runs) for _ in run]
        token_ids = [token_id for run in runs for token_id in run]
        num_logprobs = [states[place].params.num_logprobs for place in owners]
        given = Given(token_ids, [slots[place] for place in owners], num_logprobs, None)
        listed = any(num_top is not None for num_top in num_logprobs)
        if listed or any(states[place].penalty_row is not None for place in owners):
            tokens = upload(np.array(token_ids, np.int64), self.device)
            self._count([states[place] for place in owners], tokens)
            if listed:
                rows = [first + step for first, run in zip(firsts, runs, strict=True) for step in range(len(run))]
                own = logits.index_select(0, upload(np.array(rows, np.int64), logits.device))
                given.logprobs = self._logprobs(own, tokens, num_logprobs)
        return given

    def _choose(
        self, logits: torch.Tensor, states: list[_Slot], samples: list[int], masks: Mapping[int, np.ndarray],
        stands: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return tokens int64 `[rows]`: NOT_FINITE if the logits' maximum is not finite (which reveals NaN, infinity
        and rows of `-inf`), NOTHING_LEFT if only the edited scores' maximum is not finite. stands: as in `_count`.
        """
        drawn = [row for row, state in enumerate(states) if not state.params.is_greedy]
        edited = [row for row, state in enumerate(states) if row in masks or state.is_edited]
        others = drawn + [row for row in edited if states[row].params.is_greedy]
        if not others:
            return _report(*logits.max(1))
        index = upload(np.array(others, np.int64), self.device)
        scores = logits.index_select(0, index).float()
        raw_best = scores.amax(1) if edited else None
        self._edit(scores, [states[row] for row in others])
        self._mask(scores, {place: masks[row] for place, row in enumerate(others) if row in masks})
        best, chosen = scores.max(1)
        if drawn:
            chosen[: len(drawn)] = self._draw(
                scores[: len(drawn)],
                best[: len(drawn)],
                [states[row].params for row in drawn],
                [states[row].keys[samples[row]] for row in drawn],
            )
        if raw_best is not None:
            chosen = _report(raw_best, torch.where(best.isfinite(), chosen, NOTHING_LEFT))
        else:
            chosen = _report(best, chosen)
        everywhere = _report(*logits.max(1)) if len(others) < len(states) else torch.empty_like(chosen)
        reported = everywhere.index_copy_(0, index, chosen)
        self._count(states, reported.clamp(min=0), stands)
        return reported

    def _edit(self, scores: torch.Tensor, states: list[_Slot]) -> None:
        """Apply bias, then penalties, in place and only on rows that ask for them."""
        for row, state in enumerate(states):
            if state.bias is not None:
                scores[row].index_add_(0, *state.bias)
        penalised = [row for row, state in enumerate(states) if state.penalty_row is not None]
        if not penalised:
            return
        params = [states[row].params for row in penalised]
        settings = [[p.repetition_penalty, p.presence_penalty, p.frequency_penalty] for p in params]
        rows = upload(np.array([penalised, [states[row].penalty_row for row in penalised]], np.int64), self.device)
        settings_there = upload(np.array(settings, np.float32).T.copy(), self.device)
        edited = self._penalties.apply(scores.index_select(0, rows[0]), rows[1], settings_there)
        scores.index_copy_(0, rows[0], edited)

    def _mask(self, scores: torch.Tensor, masks: Mapping[int, np.ndarray]) -> None:
        """Set scores of tokens outside of their row's mask to -inf, in place."""
        if not masks:
            return
        packed = upload(np.stack(list(masks.values())).view(np.uint8), self.device)  # on little-endian hosts
        is_out = (packed[:, :, None] & self._bits).eq(0).flatten(1)[:, : self.vocab_size]
        if len(masks) == len(scores):
            scores.masked_fill_(is_out, -math.inf)
            return
        rows = upload(np.fromiter(masks, np.int64), self.device)
        scores.index_copy_(0, rows, scores.index_select(0, rows).masked_fill_(is_out, -math.inf))

    def _draw(
        self, scores: torch.Tensor, best: torch.Tensor, params: list[SamplingParams], keys: list[int]
    ) -> torch.Tensor:
        vocab = scores.shape[1]
        table = np.array(
            [
                [max(p.temperature, _FLOAT32_TINY) for p in params],
                [min(p.top_k, vocab) if p.top_k > 0 else vocab for p in params],
                [p.top_p for p in params],
                [-math.log(p.min_p) if p.min_p > 0 else math.inf for p in params],
            ]
        )  # float64 [4, rows]
        uploaded = upload(np.concatenate([table.view(np.int64), np.array([keys], np.int64)]), self.device)
        temperature, top_k, top_p, min_p_distance = uploaded[:4].view(torch.float64)
        distance = distances(scores, best, temperature.float())
        if any(0 < p.top_k < vocab for p in params):
            distance.masked_fill_(~keep_top_k(distance, top_k.long()), math.inf)
        if any(p.top_p < 1 for p in params):
            distance.masked_fill_(~keep_top_p(distance, weigh(distance), top_p), math.inf)
        if any(p.min_p > 0 for p in params):
            distance.masked_fill_(distance > min_p_distance.float()[:, None], math.inf)
        return race(distance, uploaded[4])

    def _count(self, states: list[_Slot], tokens: torch.Tensor, stands: torch.Tensor | None = None) -> None:
        """Count tokens int64 `[rows]` for penalties. stands: 0 for a token that is void after all; None: all count."""
        penalised = [(row, state.penalty_row) for row, state in enumerate(states) if state.penalty_row is not None]
        if penalised:
            rows = upload(np.array(penalised, np.int64).T.copy(), self.device)  # [2, penalised]
            own_stands = None if stands is None else stands.index_select(0, rows[0])
            self._penalties.count(rows[1], tokens.index_select(0, rows[0]), own_stands)

    def _logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, asked: list[int | None]) -> Logprobs | None:
        rows = [row for row, num_top in enumerate(asked) if num_top is not None]
        if not rows:
            return None
        if len(rows) < len(asked):
            index = upload(np.array(rows, np.int64), self.device)
            logits, tokens = logits.index_select(0, index), tokens.index_select(0, index)
        return gather_logprobs(logits, tokens, max(num_top or 0 for num_top in asked))


def count_equal(tokens: Sequence[int], draft: Sequence[int]) -> int:
    """Return how many first tokens of a draft equal the drawn tokens."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, draft, strict=False)))


def _list_tokens(
    slots: list[int], token_ids: list[int], num_logprobs: list[int | None], logprobs: Logprobs | None
) -> list[SampledToken]:
    """Return tokens with their logprobs. logprobs: of the rows that asked for them, in order, on the host."""
    listed = iter(logprobs.to_list() if logprobs else [])
    tokens = []
    for slot, token_id, num_top in zip(slots, token_ids, num_logprobs, strict=True):
        logprob = None
        if num_top is not None:
            entry = next(listed)
            logprob = TokenLogprob(entry.logprob, entry.top[:num_top]) if token_id >= 0 else None
        tokens.append(SampledToken(slot, token_id, logprob))
    return tokens


def _report(best: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return `tokens`, with NOT_FINITE where the row's maximum `best` is not finite."""
    return torch.where(best.isfinite(), tokens, NOT_FINITE)
