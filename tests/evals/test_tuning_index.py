"""`tandem tune indexed`: what it measures is what the method's formulas say, and what it chooses is within the KL."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from evals.cells import Cell, PromptSettings
from evals.methods.attention_method import PromptLayer, Step
from evals.methods.full import Full
from evals.run import Prompt
from evals.stopping import Stop
from evals.store import Record
from evals.tuning.command import app
from evals.tuning.index import choose_index, make_grid
from evals.tuning.index_method import Index, index_bytes
from evals.tuning.index_tasks import add_scores, describe_gate, run_tasks
from tests.tolerances import METHOD_FLOAT32

HEADS, KV_HEADS, DIM = 4, 2, 16
LENGTHS, SINK, WINDOW = (300, 171), 4, 16


def make_case(seed: int, steps: int) -> tuple[PromptLayer, list[Step]]:
    """A prompt of two rows and steps behind it; what stands behind a length is NaN."""
    draw = torch.Generator().manual_seed(seed)
    longest = max(LENGTHS)
    q, k, v = (torch.randn(2, heads, longest + steps, DIM, generator=draw) for heads in (HEADS, KV_HEADS, KV_HEADS))
    keys, values = k + 0.7, v.clone()
    queries = 1.5 * q

    def until(lengths: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        behind = (torch.arange(keys.shape[2]) >= lengths[:, None])[:, None, :, None]
        return tuple(one.masked_fill(behind, math.nan)[:, :, :count] for one in (keys, values))

    start = torch.tensor(LENGTHS)
    own = until(start, longest + steps)
    prompt = PromptLayer(0, queries[:, :, :longest], queries[:, :, :longest], *own, start, longest)
    made = []
    for number in range(steps):
        lengths = start + number + 1
        query = queries[:, :, number]
        made.append(Step(0, query, query, *until(lengths, longest + number + 1), lengths, longest + number + 1))
    return prompt, made


def method(**settings) -> Index:
    return Index(sink=SINK, window=WINDOW, **settings)


def test_a_budget_of_everything_is_full_attention() -> None:
    prompt, steps = make_case(1, 40)
    own = method(budget_share=1.0)
    state = own.begin(prompt)
    for step in steps:
        got, wanted = own.step(step, state), Full().step(step, None)
        assert (got.out - wanted.out).abs().max() < METHOD_FLOAT32
        assert (got.lse - wanted.lse).abs().max() < METHOD_FLOAT32
        assert torch.equal(got.keys_scored, wanted.keys_scored)


@pytest.mark.parametrize(("key_bits", "value_bits"), [(4, 2), (2, 4), (8, 2)])
def test_what_is_not_chosen_is_estimated_from_rounded_keys_and_values(key_bits: int, value_bits: int) -> None:
    """In float64, a head at a time; the group chooses together."""
    prompt, steps = make_case(2, 40)
    own = method(budget_share=0.001, key_bits=key_bits, value_bits=value_bits)
    state = own.begin(prompt)
    for step in steps:
        got = own.step(step, state)
        for row in range(2):
            length, end = int(step.lengths[row]), state.ends[row]
            assert length - WINDOW - 32 < end <= length - WINDOW, "whole blocks that have left the window"
            budget = 16
            for kv_head in range(KV_HEADS):
                heads = range(kv_head * 2, kv_head * 2 + 2)
                keys, values, near, close = (
                    one[row, kv_head, :length].double().numpy()
                    for one in (step.keys, step.values, state.keys, state.values)
                )
                query = step.query[row, list(heads)].double().numpy() / math.sqrt(DIM)
                exact, rough = query @ keys.T, query @ near.T
                mixed = exact.copy()
                mixed[:, SINK:end] = rough[:, SINK:end]
                shares = np.exp(mixed - np.logaddexp.reduce(mixed, -1)[:, None]).sum(0)[SINK:end]
                chosen = SINK + np.argsort(-shares, kind="stable")[:budget]
                mixed[:, chosen] = exact[:, chosen]
                is_rest = np.zeros(length, bool)
                is_rest[SINK:end] = True
                is_rest[chosen] = False
                lse = np.logaddexp.reduce(mixed, -1)
                out = np.exp(mixed - lse[:, None]) @ np.where(is_rest[:, None], close, values)
                assert np.abs(got.out[row, list(heads)].numpy() - out).max() < METHOD_FLOAT32
                assert np.abs(got.lse[row, list(heads)].numpy() - lse).max() < METHOD_FLOAT32
            read = length - (end - SINK) + budget
            assert got.keys_scored[row].tolist() == [read] * HEADS
            in_rows = (end - SINK) * (DIM * (key_bits + value_bits) / 8 + 4 + 2 * DIM / 32) / (4 * DIM)
            assert got.rows_read[row, 0].item() == pytest.approx(read + in_rows)


def test_more_bits_err_less_and_a_wrong_value_is_seen() -> None:
    prompt, (step, *_) = make_case(3, 1)
    errors = []
    for bits in ((2, 2), (4, 2), (8, 4)):
        own = method(budget_share=0.001, key_bits=bits[0], value_bits=bits[1])
        state = own.begin(prompt)
        exact = Full().step(step, None).out
        errors.append(float((own.step(step, state).out - exact).norm() / exact.norm()))
    assert errors == sorted(errors, reverse=True)
    state.values[:, :, SINK:100] = state.values[:, :, SINK:100].flip(2)
    assert float((own.step(step, state).out - exact).norm() / exact.norm()) > 3 * errors[-1]


def test_an_index_takes_the_bytes_that_the_page_says() -> None:
    assert index_bytes(Index().served(), 128) == 108


def row(share: float, read: float, kl: float) -> dict:
    return {"key_bits": 4, "value_bits": 2, "budget_share": share, "bytes": read, "kl": kl}


def test_the_choice_has_the_fewest_bytes_within_the_kl() -> None:
    rows = [row(0.002, 0.2, 0.01), row(0.005, 0.21, 0.003), row(0.02, 0.25, 0.001)]
    assert choose_index(rows, 0.003)["budget_share"] == 0.005
    assert choose_index(rows, 0.002)["budget_share"] == 0.02
    assert choose_index([row(0.002, 0.2, 0.001), row(0.005, 0.2, 0.001)], 0.002)["budget_share"] == 0.005
    with pytest.raises(ValueError, match=r"least of these is 0\.0010 \(key_bits 4, value_bits 2, budget_share 0\.02\)"):
        choose_index(rows, 0.0001)


def record(method: str, task: str, number: int, score: float) -> Record:
    cell = {"method": method, "task": task, "length": 400, "metric": "m", "text": "t", "seed": 0}
    return Record(f"{method} {task} {number}", cell, f"{task}-{number}", score, "", None, None, {})


def records_of(losses: int, num: int, method: str) -> list[Record]:
    """A task that full attention can do, on which a method loses so many of `num` prompts, and one that it cannot."""
    pairs = [(number, 1.0, float(number >= losses)) for number in range(num)]
    strong = [record(name, "a", number, (exact, own)[name != "full"]) for number, exact, own in pairs
              for name in ("full", method)]  # fmt: skip
    return strong + [record(name, "weak", number, 0.0) for number in range(num) for name in ("full", method)]


def test_a_setting_that_loses_tasks_for_certain_is_not_chosen_and_the_gate_is_told() -> None:
    small, large = row(0.002, 0.2, 0.001), row(0.02, 0.25, 0.001)
    labels = [Index(budget_share=one["budget_share"]).label for one in (small, large)]
    lost = [*records_of(12, 20, labels[0]), *records_of(0, 20, labels[1])[1::2]]
    scored = add_scores([small, large], lost)
    assert [one["task_prompts"] for one in scored] == [20, 20], "of the task that full attention can do"
    assert [one["task_exact"] for one in scored] == [100.0, 100.0]
    assert [one["task_score"] for one in scored] == pytest.approx([40.0, 100.0])
    assert scored[0]["task_low"] < scored[0]["task_difference"] < scored[0]["task_high"] < -1
    chosen = choose_index(scored, 0.003)
    assert chosen["budget_share"] == 0.02
    told = describe_gate(chosen, 0.003, ["a", "weak"])
    assert told.startswith(
        "a KL of 0.003 at most, and by 20 prompts no loss of tasks above 1 point for certain; so few"
    )
    with pytest.raises(ValueError, match="all settings within it lose too many points"):
        choose_index(scored[:1], 0.003)


def test_one_lost_prompt_of_few_is_no_certain_loss_and_without_tasks_the_kl_is_the_gate() -> None:
    label = Index(budget_share=0.002).label
    (one,) = add_scores([row(0.002, 0.2, 0.001)], records_of(1, 8, label))
    assert choose_index([one], 0.003) is one
    (weak,) = add_scores([row(0.002, 0.2, 0.001)], [each for each in records_of(1, 8, label) if "weak" in each.key])
    assert weak["task_difference"] is None
    assert describe_gate(weak, 0.003, ["weak"]).endswith("full attention scores under 20 points on weak")
    (none,) = add_scores([row(0.002, 0.2, 0.001)], [])
    assert describe_gate(none, 0.003, []) == "a KL of 0.003 at most, alone: no tasks were asked for"


def test_tasks_take_turns_and_end_with_the_time_but_not_before_there_are_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def answer(decoder: object, prompts: Sequence[Prompt], grid: Sequence[Index]) -> dict[str, list[list[int]]]:
        seen.append([prompt.sample.task for prompt in prompts])
        return {method: [[5] for _ in prompts] for method in ("full", *(one.label for one in grid))}

    monkeypatch.setattr("evals.tuning.index_tasks._answer", answer)
    settings = PromptSettings(Path("deploy/models/reference"), "reference", 0, ())
    for tasks, rounds in ((["niah_single_2", "niah_multikey_1"], 1), (["niah_single_2"], 2)):
        seen.clear()
        cells = [Cell(name, 300, 3, (), 0) for name in tasks]
        told = run_tasks(None, cells, settings, [Index()], Stop(0.0), lambda: None)  # type: ignore[arg-type]
        assert seen == [tasks] * rounds
        assert {one.cell["method"] for one in told} == {"full", "indexed"}
        assert len(told) == 2 * rounds * len(tasks)


def test_a_grid_has_bits_that_are_served() -> None:
    assert [(one.key_bits, one.value_bits) for one in make_grid([4, 8], [2], [0.01])] == [(4, 2), (8, 2)]
    with pytest.raises(ValueError, match="key_bits"):
        make_grid([5], [2], [0.01])


def test_the_command_prints_the_curve_and_the_lines_to_paste(tmp_path: Path) -> None:
    out = tmp_path / "tune.json"
    small = ["--context", "400", "--steps", "8", "--samples", "1", "--key-bits", "4", "--value-bits", "2,4"]
    small += ["--tasks", "niah_single_2", "--prompts", "2"]
    asked = ["indexed", "--model", "reference", *small, "--shares", "0.01", "--kl", "9", "--device", "cpu"]
    result = CliRunner().invoke(app, [*asked, "--json", str(out)])
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    assert [one["value_bits"] for one in rows] == [2, 4]
    assert rows[0]["bytes"] < rows[1]["bytes"]
    assert rows[0]["error"] > rows[1]["error"] > 0
    assert [one["task_prompts"] for one in rows] == [2, 2]
    assert all(one["task_low"] <= one["task_difference"] <= one["task_high"] for one in rows)
    assert rows[0]["task_score"] == pytest.approx(rows[0]["task_exact"] + rows[0]["task_difference"])
    assert "gate: a KL of 9 at most, and by 2 prompts" in result.output
    assert "host: {method: indexed, key_bits: 4, value_bits: 2, budget_share: 0.01}" in result.output
    refused = CliRunner().invoke(app, [*asked[:-3], "0", "--device", "cpu", "--tasks", ""])
    assert refused.exit_code == 1
    assert "raise --kl" in refused.stderr
