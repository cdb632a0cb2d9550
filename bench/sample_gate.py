"""Check that the CPU's answers to sampled steps agree with the paper's formulas over the offloaded rows.

A correct sample may be far from full attention, over random weights as far as a sample of wrong keys. So answers are
not compared with attention but with the expected sample. The gate reads back the rows of each context and layer, and
takes their SimHash codes and those of the query as the device sent it. It counts collisions, weighs keys with two or
more (MagicPIG, arXiv 2410.16179, eq. (10) and (11)), and reports how many of the tier's answers agree, each one that of
a head in one layer and row. An answer from the same keys is off by 1e-6 (rows of int8: 7e-5); one key more or less
makes 1e-3 to 0.5. A product within rounding of a hyperplane moves a key in a few answers of a thousand. So nothing here
depends on the model. Measured at 10 bits and 150 tables over 2,192 random tokens, with random weights and with the
reference model's alike: of correct answers 100 % agree. With one wrong table of 150 it is 28 to 51 %. With all codes
flipped, rows one place off, or a tenth of the tokens in other buckets it is 0 to 0.6 %.

While it watches, the host requests of a step are answered one by one, as on the CPU, instead of in one call. A test
checks that both give the same answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import pi

import torch
from torch import Tensor

from bench.benchmark_rows import require
from cpu.cpu_tier import CpuTier
from gpu.methods.sampled.hyperplanes import PROJECTION_SEED, Projections, draw_projections, encode_reference
from transfer.exchange import ExchangeSlot, wait
from transfer.host_tier import Answered, Attention, ContextRead, LayerRows

ALIKE = 1e-3  # most relative difference of an answer, and most nats of its lse
AGREE = 0.9  # least share of answers that agree
READS = 0.01  # share by which the tier's count of keys may differ: some are within rounding of a hyperplane
_HOST_REQUEST_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A row's query of one layer, and the tier's answer. query, out: `[heads, dim]`. lse: `[heads]`, natural. exact:
    bool `[tokens]`, tokens of the context that are not sampled.
    """

    context_id: int
    layer: int
    query: Tensor
    out: Tensor
    lse: Tensor
    exact: Tensor


@dataclass(frozen=True, slots=True)
class SampleAgreement:
    """How well the host's sampled answers agree: their number, the share that agree, and the keys read, as predicted
    and as counted.
    """

    answers: int
    agree: float
    predicted_reads: int
    counted_reads: int


class WatchedTier:
    """A tier for steps with host reads that remembers each request and its answer."""

    def __init__(self, tier: CpuTier) -> None:
        self.tier = tier
        self.asks: list[Answer] = []

    def attention(self, asks: Sequence[ContextRead]) -> "WatchedAttention":
        return WatchedAttention(self.tier.attention(asks), self, asks)

    def leave_core(self, leaves: bool) -> None:
        self.tier.leave_core(leaves)

    def answer(self, parts: Sequence[tuple[Attention, ExchangeSlot]]) -> Answered:
        """Answer one request after another. The device waits for each answer before it sends the next request."""
        last, before = len(self.tier.shape.layers) - 1, self.tier.stats().attention
        for layer in range(last + 1):
            for attention, slot in parts:
                attention.run(layer, slot)
                if layer < last:
                    slot.advance(slot.rows)
        after = self.tier.stats().attention
        return Answered(after.wait_s - before.wait_s, after.attend_s - before.attend_s)


class WatchedAttention:
    """Attention of a step's rows to their contexts, which remembers each host request."""

    def __init__(self, attention: Attention, watched: WatchedTier, asks: Sequence[ContextRead]) -> None:
        self._attention, self._watched, self._asks = attention, watched, asks

    def run(self, layer: int, slot: ExchangeSlot) -> None:
        wait(slot, layer, _HOST_REQUEST_LIMIT_S)
        queries = slot.queries[: slot.rows].clone()  # the next host request overwrites them after the answer
        self._attention.run(layer, slot)
        for row, ask in enumerate(self._asks):
            if ask.context_id is None:
                continue
            runs = self._watched.tier.runs(ask.context_id)
            pieces = [torch.full((tokens,), not reading.has_tables) for tokens, reading in runs]
            exact = torch.cat(pieces)[: ask.num_tokens]
            answer = Answer(ask.context_id, layer, queries[row], slot.out[row].clone(), slot.lse[row].clone(), exact)
            self._watched.asks.append(answer)

    def give_up(self) -> None:
        self._attention.give_up()


class _Rows:
    """Rows of one context and layer, read back: their values in float64, and their codes."""

    def __init__(self, parts: Sequence[LayerRows], projections: Projections) -> None:
        """Store keys minus their centre. Codes are of keys as they are stored, since scale does not change them."""
        stored = [part.keys.float() for part in parts]
        keys = [
            rows.double() if part.key_scale is None else rows.double() * part.key_scale.double()[:, None, None]
            for rows, part in zip(stored, parts, strict=True)
        ]
        values = [
            part.values.double()
            if part.value_scale is None
            else part.values.double() * part.value_scale.double()[:, None]
            for part in parts
        ]
        centres = [part.centre.double()[:, None].expand_as(rows) for rows, part in zip(keys, parts, strict=True)]
        self._keys, self._values, self._centres = (torch.cat(each, 1) for each in (keys, values, centres))
        self._codes = encode_reference(torch.cat(stored, 1), projections).int()  # [kv_heads, tokens, tables]

    def attend(self, ask: Answer, projections: Projections) -> tuple[Tensor, Tensor, int]:
        """Return out float64 `[heads, dim]`, lse `[heads]`, and the number of keys that are read for it."""
        kv_heads, _, dim = self._keys.shape
        query = ask.query.double().view(kv_heads, -1, dim)  # [kv_heads, group, dim]
        codes = encode_reference(ask.query.float(), projections).int().view(kv_heads, -1, 1, projections.num_tables)
        drawn = (self._codes[:, None] == codes).sum(-1) >= 2  # [kv_heads, group, tokens]
        products = query @ self._keys.transpose(1, 2)
        norms = query.norm(dim=-1)[..., None] * self._keys.norm(dim=-1)[:, None]
        log_u = _chance(products / norms, projections).log()
        logits = (products + query @ self._centres.transpose(1, 2)) * dim**-0.5
        logits = torch.where(ask.exact, logits, torch.where(drawn, logits - log_u, -torch.inf))
        lse = logits.logsumexp(-1)
        out = (logits - lse[..., None]).exp().nan_to_num(0.0) @ self._values
        read = int((drawn & ~ask.exact).sum()) + kv_heads * int(ask.exact.sum())  # a group reads exact ones together
        return out.view(-1, dim), lse.flatten(), read


def _chance(cosine: Tensor, projections: Projections) -> Tensor:
    """Return u of eq. (10); paper: K = bits_per_table, L = num_tables."""
    tables = projections.num_tables
    one = (1 - cosine.clamp(-1, 1).acos() / pi) ** projections.bits_per_table  # that a table agrees
    return 1 - (1 - one) ** tables - tables * one * (1 - one) ** (tables - 1)


def measure_samples(tier: CpuTier, asks: Sequence[Answer], counted_reads: int) -> SampleAgreement:
    """Compare answers with the right sample. Their contexts must be open; they may have grown."""
    shape = tier.shape
    projections = draw_projections(
        shape.dim, shape.bits_per_table, shape.num_tables, PROJECTION_SEED, asks[0].query.dtype, torch.device("cpu")
    )
    answers, agree, reads = 0, 0, 0
    for (context_id, layer, tokens), group in groupby(sorted(asks, key=_place_of), _place_of):
        rows = _Rows(tier.rows(context_id, layer, tokens), projections)
        for ask in group:
            out, lse, read = rows.attend(ask, projections)
            is_alike = (ask.out - out).norm(dim=-1) <= ALIKE * out.norm(dim=-1)  # False for NaN
            is_alike &= (ask.lse == lse) | ((ask.lse - lse).abs() <= ALIKE)
            answers, agree, reads = answers + len(lse), agree + int(is_alike.sum()), reads + read
    return SampleAgreement(answers, agree / answers, reads, counted_reads)


def require_samples(name: str, found: SampleAgreement) -> None:
    """Raise GateError unless the answers agree with the expected sample."""
    require(
        found.agree >= AGREE,
        f"{name}: {found.agree:.1%} of {found.answers:,} answers are of the keys that collide; wanted {AGREE:.0%}",
    )
    require(
        abs(found.counted_reads - found.predicted_reads) <= READS * found.predicted_reads,
        f"{name}: the CPU counted {found.counted_reads:,} keys read; {found.predicted_reads:,} collide or are read "
        f"exactly",
    )


def _place_of(ask: Answer) -> tuple[int, int, int]:
    return ask.context_id, ask.layer, len(ask.exact)
