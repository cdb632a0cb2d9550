"""`python -m lab kernel index-variants` on a tiny shape: each way has a row with its floor, a wrong one has none."""

from typing import Any

import pytest
import torch
from rich.console import Console

from bench.benchmark_rows import GateError
from bench.op.frame import Asked
from bench.op.indexed import Stand
from gpu.methods.indexed import estimating, scoring
from gpu.methods.indexed.choosing import choose_tokens
from gpu.methods.indexed.ring import EMPTY, Index
from lab.kernels import index_variants
from lab.kernels.index_variants import tabulate, variant_rows, variants

TINY = Asked("tiny", (1, 2), 1100, (), 1, torch.device("cpu"))


@pytest.fixture(autouse=True)
def known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_variants, "measure_device_rates", lambda _: {"device_stream_gb_s": 1000.0})


def test_each_way_has_a_row_by_batch_and_leaves_constants_as_they_were() -> None:
    before = (scoring.BY_WORDS, scoring.WORD_TILE, estimating.BY_WORDS, estimating.PREFETCHED)
    rows = variant_rows(TINY, Console(quiet=True))
    assert before == (scoring.BY_WORDS, scoring.WORD_TILE, estimating.BY_WORDS, estimating.PREFETCHED)
    assert len(rows) == 2 * (len(variants()) + 2)
    one, two = (next(row for row in rows if row.name == "estimate, as it is" and row.config["batch"] == batch)
                for batch in (1, 2))  # fmt: skip
    kv_heads, heads, dim = TINY.shape.num_kv_heads, TINY.shape.num_heads, TINY.shape.dim
    own_bytes = 1100 * (kv_heads * (dim // 4 + 4) + 2 * heads)
    assert one.floor_ms == pytest.approx(own_bytes / 1e9)
    assert two.floor_ms == pytest.approx(2 * own_bytes / 1e9)
    assert tabulate(rows).row_count == len(variants()) + 2


@pytest.mark.parametrize("part", ["score", "choose", "estimate"])
def test_a_wrong_result_has_no_number(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    right = getattr(Stand, part)

    def wrong(self: Stand, layer: Index) -> None:
        right(self, layer)
        (self.work.logits if part == "score" else self.work.rest_out)[0, :100] *= 1.5

    def choose_others(layer: Index, *rest: Any) -> None:
        choose_tokens(layer, *rest)
        layer.ids[:, ::2] = EMPTY

    if part == "choose":
        monkeypatch.setattr(index_variants, "choose_tokens", choose_others)
    else:
        monkeypatch.setattr(Stand, part, wrong)
    with pytest.raises(GateError, match="no number without a right result"):
        variant_rows(TINY, Console(quiet=True))
