"""The protocol by which policies that reuse documents are judged: divergences, prompts, rows and tables."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from evals.cells import Cell, PromptSettings
from evals.cli import app
from evals.fusion import (
    Answer,
    Judged,
    attention_map,
    divergence,
    divergences_along,
    fusion_engine,
    fusion_rows,
    judge,
    parse_policies,
)
from evals.fusion_command import SERVED_POLICY
from evals.fusion_prompts import FusionPrompt, PromptPlan, fusion_prompts, prompts_ahead
from evals.report.fusion_figure import draw_fusion
from evals.run import make_prompts
from evals.stopping import RunCut, Stop
from gpu.attention.prefill_query import PrefillQuery
from scheduler.fusion_labels import UnknownLabelError
from scheduler.messages import Fusion, Logprob
from server.text.model_tokenizer import Tokenizer
from tests.command_line import parse
from tests.server.live_server import REFERENCE
from tests.tolerances import METHOD_FLOAT32
from transfer.host_config import DocumentsConfig

DOCS = Path(__file__).parents[2] / "docs"
SETTINGS = PromptSettings(REFERENCE, "reference", 0, ())
PLAN = PromptPlan(SETTINGS, ("several_values",), 2, 64, None)


def told(logits: np.ndarray, num_top: int) -> Logprob:
    logprobs = logits - np.log(np.exp(logits).sum())
    top = np.argsort(-logprobs)[:num_top]
    return Logprob(float(logprobs[top[0]]), [(int(token), float(logprobs[token])) for token in top])


@pytest.fixture(scope="module")
def prompts() -> list[FusionPrompt]:
    return [replace(prompt, max_new_tokens=4) for prompt in fusion_prompts(PLAN, 256)]


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


def test_the_default_policies_have_what_a_deployment_does_that_says_nothing() -> None:
    served = DocumentsConfig()
    (fusion,) = [run.fusion for run in parse_policies([SERVED_POLICY], [served.ratio])[1:]]
    asked = (fusion.policy, fusion.ratio, fusion.select_layer, fusion.seam_tokens)
    assert asked == (served.policy, served.ratio, served.select_layer, served.seam_tokens)


def test_policies_come_once_where_they_have_no_ratio_or_one_of_their_own_behind_vanilla() -> None:
    labels = ["a3:select_layer=3,seam_tokens=4", "pie", "vanilla", "a3:ratio=0.2"]
    runs = parse_policies(labels, [0.1, 0.3])
    assert [run.label for run in runs] == ["vanilla", *[labels[0]] * 2, "pie", labels[3]]
    assert [run.fusion.ratio for run in runs[1:]] == [0.1, 0.3, 0.0, 0.2]
    assert (runs[1].fusion.select_layer, runs[1].fusion.seam_tokens) == (3, 4)


@pytest.mark.parametrize(
    ("label", "wanted"),
    [
        ("a4", "known: a3, random"),
        ("a3:layer=3", "'a3:layer=3': unknown setting 'layer'; have select_layer, seam_tokens, ratio"),
        ("a3:select_layer=x", "select_layer is 'x'; wanted a whole number that is not negative"),
        ("a3:seam_tokens=-1", "seam_tokens is '-1'; wanted a whole number"),
        ("a3:ratio=1.5", "ratio is '1.5'; wanted a number from 0 to 1"),
        ("vanilla:speed=1", "unknown setting 'speed'"),
        ("vanilla:seam_tokens=4", "'vanilla:seam_tokens=4': vanilla does not use seam_tokens; leave it out"),
        ("pie:ratio=0.3", "pie does not use ratio"),
        ("pie:select_layer=5", "pie does not use select_layer"),
        ("pie:seam_tokens=4", "pie does not use seam_tokens"),
    ],
)
def test_a_label_that_says_nothing_that_there_is_is_told_by_name(label: str, wanted: str) -> None:
    with pytest.raises(UnknownLabelError, match=re.escape(wanted)):
        parse_policies([label], [0.1])


def test_a_control_computes_as_many_tokens_again_in_the_same_layers() -> None:
    _, a3, pie, random = parse_policies(["a3:select_layer=5", "pie", "random"], [0.15])
    assert a3.control == Fusion(policy="random", ratio=0.15, select_layer=5)
    assert pie.control is None
    assert random.control == random.fusion


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


CHAT = "{% for m in messages %}<|user|>\n{{ m.content | trim }}<|end|>{% endfor %}<|assistant|>"


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference model's tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    for path in REFERENCE.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": CHAT}))
    return folder


@pytest.mark.parametrize("task", ["niah_multikey_1", "niah_multikey_2", "vt", "cwe", "fwe"])
def test_rulers_prompts_are_the_models_own_turn_with_the_document_in_chunks(task: str, chat_model: Path) -> None:
    settings = PromptSettings(chat_model, "ruler", 0, ())
    (prompt,) = fusion_prompts(PromptPlan(settings, (task,), 1, 64, 9), 1200)
    (made,), tokenizer = make_prompts(Cell(task, 1200, 1, ("full",), 0), settings), Tokenizer(chat_model, None)
    sent, first, last = made.sample.prompt, prompt.spans[0][0], prompt.spans[-1][1]
    before, after = (tokenizer.decode(ids, False) for ids in (prompt.token_ids[:first], prompt.token_ids[last:]))
    question = made.sample.meta["answer_prefix"]
    assert before.removeprefix("<|user|>\n").lstrip("\n") in sent
    assert after.endswith(f"<|end|><|assistant|>{question.lstrip()}")
    assert after.split("<|end|>")[0] in sent
    chunks = sorted(tokenizer.decode(prompt.token_ids[begin:end], False) for begin, end in prompt.spans)
    assert len("".join(chunks)) == len(made.sample.document or ""), "chunks are the document in another order"
    assert prompt.max_new_tokens == 9


def test_a_datasets_document_keeps_its_order_and_fewer_rows_are_fewer_prompts(chat_model: Path, tmp_path: Path) -> None:
    context = " ".join(f"The boat of keeper {number} is painted once a year." for number in range(20))
    row = {"input": "Who?", "context": context, "answers": ["x"], "all_classes": None, "length": 9, "_id": "7"}
    file = tmp_path / "qasper.jsonl"
    file.write_text(json.dumps(row) + "\n")
    name = "longbench/qasper"
    settings = PromptSettings(chat_model, "ruler", 0, (), (), ((name, file),))
    prompts = fusion_prompts(PromptPlan(settings, (name, "niah_single_1"), 4, 64, None), 700)
    assert [prompt.task for prompt in prompts] == [name, "niah_single_1", "niah_single_1"]
    tokenizer, (first, *_) = Tokenizer(chat_model, None), prompts
    text = tokenizer.decode(first.token_ids[first.spans[0][0] : first.spans[-1][1]], False)
    assert text == context
    assert tokenizer.decode(first.token_ids[first.spans[-1][1] :], False).startswith("\n\nQuestion: Who?\nAnswer:")


def test_a_template_that_changes_the_document_is_told(chat_model: Path, tmp_path: Path) -> None:
    for path in chat_model.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text().replace("| trim", "| upper"))
    plan = PromptPlan(PromptSettings(tmp_path, "ruler", 0, ()), ("vt",), 1, 64, None)
    with pytest.raises(ValueError, match="task vt: the chat template changes its document"):
        fusion_prompts(plan, 1200)


def test_the_picture_has_a_panel_a_length_and_a_line_a_policy() -> None:
    judged = judged_of(["a3", "a3:seam_tokens=4", "pie"], [0.15, 0.3], [[0.1, 0.2]] * 5)
    for one in judged:
        one.chunks = [3, 3]
    svg = draw_fusion(fusion_rows(judged, 512) + fusion_rows(judged, 1024))
    assert svg.startswith("<svg")
    for text in ("512 tokens, 3.0 chunks", "1,024 tokens, 3.0 chunks", "a3:seam_tokens=4", "pie", "0.05 nats"):
        assert f"<!-- {text} -->" in svg


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


def test_processes_make_the_prompts_that_are_made_here() -> None:
    plan = replace(PLAN, tasks=("several_values", "facts_one_hop"), num_prompts=3)
    with prompts_ahead(plan, [256, 512], 1) as prompts_of:
        assert [prompts_of(length) for length in (512, 256)] == [fusion_prompts(plan, length) for length in (512, 256)]
    assert [prompt.task for prompt in fusion_prompts(plan, 256)] == [*plan.tasks, "several_values"]


def test_a_run_on_the_engine_that_serves_ends_where_it_is_stopped(prompts: list[FusionPrompt]) -> None:
    runs = parse_policies(["a3:select_layer=1", "pie"], [1.0])
    both = {256: prompts, 200: fusion_prompts(PLAN, 200)[:1]}
    with fusion_engine(REFERENCE, "cpu", max(len(one.token_ids) for one in prompts) + 48, "float32", 64) as engine:
        batches = [{length: len(found[0].scores) for length, found in judged.items()}
                   for judged in judge(engine, REFERENCE, both, runs, 0, lambda: None, Stop(None), 1)]  # fmt: skip
        assert batches == [{256: 1, 200: 0}, {256: 1, 200: 1}, {256: 2, 200: 1}], "lengths take turns"
        (found,) = judge(engine, REFERENCE, {256: prompts}, runs, 1, lambda: None, Stop(None), 2)
        stop = Stop(None)
        stop.ask("TERM")
        assert list(judge(engine, REFERENCE, {256: prompts}, runs, 0, lambda: None, stop, 2)) == []
        assert stop.reason == "signal TERM"
        stop = Stop(None)
        asked = iter(range(99))

        def ask_within_a_batch() -> None:
            if next(asked) == 4:  # three runs a batch
                stop.ask("INT")

        (cut,) = judge(engine, REFERENCE, {256: prompts}, runs, 1, ask_within_a_batch, stop, 1)
        assert [len(one.scores) for one in cut[256]] == [len(one.distances) for one in cut[256]] == [1, 1, 1]
    exact, whole, pie = found[256]
    assert exact.divergences == [0.0, 0.0]
    assert max(whole.along) < 1e-6 < max(pie.along), "all computed again is vanilla"
    assert whole.scores == exact.scores
    assert [far.shape for far in pie.distances] == [(12,)]
    assert pie.distances[0].max() > 0.01 > whole.distances[0].max()
    rows = [row for row in fusion_rows(found[256], 256) if row["task"] == "all"]
    assert [row["prompts"] for row in rows] == [2, 2, 2]
    assert 0.5 < rows[1]["recomputed"] < 1.0
    assert rows[2]["recomputed"] == 0.0


def test_a_batch_that_would_outlast_the_time_is_not_begun(
    prompts: list[FusionPrompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(0, 10_000, 10))  # ten seconds pass between two looks
    monkeypatch.setattr("time.monotonic", lambda: float(next(now)))
    stop = Stop(100)
    with pytest.raises(RunCut, match="--seconds 100"):
        stop.check_room(95)
    stop = Stop(100)
    stop.check_room(85)


def test_the_command_leaves_rows_and_how_to_make_them_again(tmp_path: Path) -> None:
    out = tmp_path / "fusion.json"
    asked = ["--model", str(REFERENCE), "--lengths", "200", "--samples", "1", "--maps", "0", "--policies", "pie"]
    more = ["--tasks", "several_values", "--chunk", "64", "--device", "cpu", "--json", str(out)]
    done = CliRunner().invoke(app, ["fusion", *asked, *more])
    assert done.exit_code == 0, done.output
    document = json.loads(out.read_text())
    assert document["cut"] is None
    assert [row["policy"] for row in document["rows"] if row["task"] == "all"] == ["vanilla", "pie"]
    words = shlex.split(document["command"])
    assert words[:3] == ["tandem", "eval", "fusion"]
    parse(words[1:])


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--ratios", "0.1,1.5"], "--ratios: got '0.1,1.5'; wanted numbers from 0 to 1 with commas between"),
        (["--ratios", "nan"], "--ratios: got 'nan'"),
        (["--ratios", ""], "--ratios: got ''"),
        (["--policies", "a4"], "unknown policy 'a4'"),
        (["--lengths", "20000", "--samples", "1", "--tasks", "needle"], "16384"),
        (
            ["--lengths", "512", "--samples", "1", "--maps", "0", "--policies", "pie", "--chunk", "2049"],
            "--chunk: got 2049; wanted 2048 at most, a unit of prefill here",
        ),
    ],
)
def test_what_cannot_be_compared_is_one_line(options: list[str], wanted: str) -> None:
    done = CliRunner().invoke(app, ["fusion", "--model", str(REFERENCE), "--device", "cpu", *options])
    assert done.exit_code == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert wanted in line


def judged_of(labels: list[str], ratios: list[float], divergences: list[list[float]]) -> list[Judged]:
    """Two prompts of two tasks; vanilla has the first right, others none."""
    judged = []
    for run, apart in zip(parse_policies(labels, ratios), [[0.0, 0.0], *divergences], strict=True):
        scores = [1.0 if run.fusion is None else 0.0, 0.0]
        judged.append(Judged(run, scores, ["a", "b"], apart, [apart[0], apart[1] / 2], [], [0.1, 0.2]))
    return judged


def test_rows_pair_a_policy_with_vanilla_and_with_its_control() -> None:
    rows = fusion_rows(judged_of(["a3", "random"], [0.15], [[0.1, 0.3], [0.5, 0.5]]), 512)
    exact, a3, random = (row for row in rows if row["task"] == "all")
    assert a3["kl_spared"] == pytest.approx(0.3)
    assert a3["spared_error"] == pytest.approx(1.96 * 0.1)
    assert a3["difference"] == pytest.approx(-50.0)
    assert a3["difference_low"] < -50 < a3["difference_high"]
    assert "kl_spared" not in random
    assert "difference" not in exact
    assert [row["task"] for row in rows[:3]] == ["all", "a", "b"]
