"""The protocol by which policies that reuse documents are judged: divergences, prompts, rows and tables."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from evals.fusion import (
    Answer,
    Judged,
    PolicyRun,
    attention_map,
    divergence,
    divergences_along,
    fusion_engine,
    fusion_rows,
    judge,
    parse_policies,
)
from evals.fusion_prompts import FusionPrompt, fusion_prompts
from evals.fusion_report import render_fusion, render_policies
from evals.stopping import Stop
from gpu.fusion.plan import UnknownPolicyError
from gpu.prefill.query import PrefillQuery
from scheduler.messages import Logprob
from server.tokenizer import Tokenizer
from tests.server.live_server import REFERENCE
from tests.tolerances import METHOD_FLOAT32

DOCS = Path(__file__).parents[2] / "docs"


def told(logits: np.ndarray, num_top: int) -> Logprob:
    logprobs = logits - np.log(np.exp(logits).sum())
    top = np.argsort(-logprobs)[:num_top]
    return Logprob(float(logprobs[top[0]]), [(int(token), float(logprobs[token])) for token in top])


@pytest.fixture(scope="module")
def prompts() -> list[FusionPrompt]:
    made = fusion_prompts(REFERENCE, ("several_values",), 256, 2, 64, 0)
    return [replace(prompt, max_new_tokens=4) for prompt in made]


def test_a_divergence_over_the_likeliest_tokens_is_nearly_that_over_all() -> None:
    draw = np.random.default_rng(0)
    exact = 3 * draw.normal(size=500)
    other = exact + 0.5 * draw.normal(size=500)
    mine, its = (logits - np.log(np.exp(logits).sum()) for logits in (exact, other))
    whole = float((np.exp(mine) * (mine - its)).sum())
    assert divergence(told(exact, 500), told(other, 500), 500) == pytest.approx(whole, rel=METHOD_FLOAT32)
    assert divergence(told(exact, 256), told(other, 256), 500) == pytest.approx(whole, rel=0.05)
    assert divergence(told(exact, 256), told(exact, 256), 500) == 0.0


def test_divergences_along_an_answer_end_where_another_leaves_it() -> None:
    a, b, c = (told(np.eye(9)[token] * 5, 9) for token in (1, 2, 3))
    found = divergences_along(Answer([a, b, c], [], 0), Answer([a, c, c], [], 0), 9)
    assert len(found) == 2
    assert found[0] == 0.0 < found[1]
    assert len(divergences_along(Answer([a, b], [], 0), Answer([a, b, c], [], 0), 9)) == 2


def test_policies_come_once_where_they_have_no_ratio_behind_vanilla() -> None:
    runs = parse_policies(["a3:select_layer=3,seam_tokens=4", "pie", "vanilla"], [0.1, 0.3])
    assert [run.label for run in runs] == ["vanilla", *["a3:select_layer=3,seam_tokens=4"] * 2, "pie"]
    assert [run.fusion.ratio for run in runs[1:]] == [0.1, 0.3, 0.0]  # type: ignore[union-attr]
    assert (runs[1].fusion.select_layer, runs[1].fusion.seam_tokens) == (3, 4)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="unknown setting 'layer'"):
        parse_policies(["a3:layer=3"], [0.1])
    with pytest.raises(UnknownPolicyError, match="known: a3, cacheblend"):
        parse_policies(["a4"], [0.1])


def test_prompts_are_documents_in_an_order_of_their_own_whose_answers_fit_it(prompts: list[FusionPrompt]) -> None:
    (prompt, again), tokenizer = prompts, Tokenizer(REFERENCE, None)
    assert prompt.token_ids != again.token_ids
    text = tokenizer.decode(prompt.token_ids, False)
    values = prompt.answers[0].split(", ")
    assert len(values) > 1
    assert [text.find(value) for value in values] == sorted(text.find(value) for value in values)
    ends = [0, *(end for _, end in prompt.spans)]
    assert all(end <= begin for end, (begin, _) in zip(ends, prompt.spans, strict=False))
    assert sum(end - begin for begin, end in prompt.spans) > 0.8 * len(prompt.token_ids)


def test_an_attention_map_is_a_softmax_over_what_a_query_sees() -> None:
    draw = np.random.default_rng(0)
    query, keys = draw.normal(size=(3, 4, 8)), draw.normal(size=(2, 9, 8))
    positions = torch.tensor([2, 5, 6])
    asked = PrefillQuery(
        0, torch.from_numpy(query), torch.from_numpy(query), torch.from_numpy(keys), torch.from_numpy(keys), positions,
        None, 9, 0.3, None,
    )  # fmt: skip
    got = attention_map(asked, positions >= 5, 9).numpy()
    assert got.shape == (4, 2, 9)
    for head in range(4):
        for row, (number, position) in enumerate(((1, 5), (2, 6))):
            weights = np.exp(query[number, head] @ keys[head // 2, : position + 1].T * 0.3)
            np.testing.assert_allclose(got[head, row, : position + 1], weights / weights.sum(), atol=METHOD_FLOAT32)
            assert (got[head, row, position + 1 :] == 0).all()


def test_a_run_on_the_engine_that_serves_ends_where_it_is_stopped(prompts: list[FusionPrompt]) -> None:
    runs = parse_policies(["legolink", "full_reuse"], [1.0])
    with fusion_engine(REFERENCE, "cpu", max(len(one.token_ids) for one in prompts) + 48, "float32") as engine:
        judged = judge(engine, REFERENCE, prompts, runs, 1, lambda: None, Stop(None), 2)
        stop = Stop(None)
        stop.ask("TERM")
        assert fusion_rows(judge(engine, REFERENCE, prompts, runs, 0, lambda: None, stop, 2), 256) == []
        assert stop.reason == "signal TERM"
    exact, whole, full_reuse = judged
    assert exact.divergences == [0.0, 0.0]
    assert max(whole.along) < 1e-6 < max(full_reuse.along), "all computed again is vanilla"
    assert whole.scores == exact.scores
    assert [far.shape for far in full_reuse.distances] == [(12,)]
    assert full_reuse.distances[0].max() > 0.01 > whole.distances[0].max()
    rows = [row for row in fusion_rows(judged, 256) if row["task"] == "all"]
    assert [row["prompts"] for row in rows] == [2, 2, 2]
    assert 0.5 < rows[1]["recomputed"] < 1.0
    assert rows[2]["recomputed"] == 0.0


def test_the_page_has_the_lines_that_its_rows_make() -> None:
    judged = [
        Judged(PolicyRun(run.label, run.fusion), [1.0, 0.0], ["a", "b"], [0.0, kl], [0.0, kl / 2])
        for run, kl in zip(parse_policies(["legolink", "pie"], [0.15]), (0.0, 0.02, 0.5), strict=True)
    ]
    for one in judged:
        one.recomputed = [0.1, 0.2]
    lines = render_policies(fusion_rows(judged, 512))
    assert lines[3] == "| `legolink` | 0.15 | 0.0100 ± 0.0196 | 0.0050 ± 0.0098 |  | 50.0 | 100.0 | 0.0 |"
    assert lines[4].startswith("| `pie` |  | 0.2500 ±")
    published = json.loads((DOCS / "results" / "fusion-2k-cpu.json").read_text(encoding="utf-8"))
    page = (DOCS / "RESULTS.md").read_text(encoding="utf-8")
    assert all(line in page for line in render_fusion(published).splitlines())
    assert any(math.isclose(row["ratio"] or 0, 0.15) for row in published["rows"])
