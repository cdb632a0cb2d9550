"""Runs of cells: shared prompts, failures that count, resuming, rows with their noise, and the order of baselines."""

import json
import math
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom
from typer.testing import CliRunner

import evals.run
from evals import clients
from evals.cells import Cell, PromptSettings
from evals.cli import app
from evals.decode import Decoded, decode_greedy, prefill_batch
from evals.forward import load_decoder
from evals.meter import Fractions
from evals.methods.baselines import parse_method
from evals.run import AGREEMENT, Prompt, make_prompts
from evals.samples import Sample
from evals.score_rows import depth_rows, summarize
from evals.served import Server, named_methods
from evals.session import InProcess, run, run_remotely
from evals.store import Record
from evals.tokenizer import load_tokenizer

MODEL = Path("deploy/models/reference")
SETTINGS = PromptSettings(MODEL, "reference", 0, ())


def record(method: str, sample: int, score: float, failure: str | None = None) -> Record:
    cell = {"method": method, "settings": {}, "task": "needle", "length": 512, "metric": "exact_match"}
    measured = {} if failure else {"head_fraction": 0.5}
    return Record(f"{method}{sample}", cell, str(sample), score, "", failure, None, measured)


def test_rows_pair_with_full_attention_and_count_failures() -> None:
    scores = [1.0, 0.0, 1.0, 1.0]
    records = [record("full", sample, score) for sample, score in enumerate(scores)]
    records += [record("topk", sample, score) for sample, score in enumerate([1.0, 0.0, 0.0])]
    records += [record("topk", 3, 0.0, "out of memory")]
    full, topk = summarize(records)
    assert (full["score"], full["difference"], full["failures"]) == (75.0, 0.0, 0)
    assert (topk["samples"], topk["score"], topk["failures"], topk["difference"]) == (4, 25.0, 1, -50.0)
    assert (topk["losses"], topk["gains"], topk["interval"]) == (2, 0, "exact")
    assert binom.cdf(2, 4, -topk["difference_low"] / 100) == pytest.approx(0.0125, rel=1e-6)
    assert topk["head_fraction"] == 0.5


def test_a_run_goes_on_where_it_stopped_and_leaves_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [Cell("needle", 256, 3, ("full", "streaming:budget=0.1"), 0)]
    whole = run(cells, SETTINGS, InProcess("cpu", 2, 0, tmp_path / "whole"), None)
    first = run([Cell("needle", 256, 1, ("full",), 0)], SETTINGS, InProcess("cpu", 2, 0, tmp_path / "parts"), None)
    assert [(one.key, one.score) for one in first] == [(whole[0].key, whole[0].score)]
    resumed = run(cells, SETTINGS, InProcess("cpu", 2, 0, tmp_path / "parts"), None)
    by_key = {one.key: one for one in whole}
    assert {one.key for one in resumed} == set(by_key)
    assert all(one.prediction == by_key[one.key].prediction for one in resumed)
    monkeypatch.setattr(evals.run, "run_batch", lambda *_: pytest.fail("ran a batch that was there"))
    assert len(run(cells, SETTINGS, InProcess("cpu", 2, 0, tmp_path / "parts"), None)) == 6


def test_a_sample_that_does_not_fit_is_a_failure_and_its_neighbours_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    original = evals.run.prefill_batch

    def refuse(decoder, prompts, *rest):
        if len(prompts) > 1 or sum(prompts[0]) % 2 == parity:
            raise torch.OutOfMemoryError("no room")
        return original(decoder, prompts, *rest)

    cell = Cell("needle", 256, 3, ("full",), 0)
    parities = [int(prompt.token_ids.sum()) % 2 for prompt in make_prompts(cell, SETTINGS)]
    parity = parities[0]
    monkeypatch.setattr(evals.run, "prefill_batch", refuse)
    records = run([cell], SETTINGS, InProcess("cpu", 3, 0, None), None)
    assert [one.failure is not None for one in records] == [own == parity for own in parities]
    assert all(one.score == 0 and "no room" in str(one.failure) for one in records if one.failure)


def test_answers_of_methods_are_scored_by_their_tasks_metric() -> None:
    class Texts:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return "".join(map(chr, ids))

    samples = [Sample("needle", answer, "prompt", [answer], "string_match_all", 2, 4, None) for answer in ("12", "34")]
    prompts = [Prompt(sample, np.zeros(1, np.int32)) for sample in samples]
    read = Fractions(0.1, 0.2, 0.3, 0.4)
    decoded = Decoded([[ord("1"), ord("2"), ord("9")], [ord("3"), ord("5")]], [read, read], [])
    keys = evals.run._Keys(Cell("needle", 256, 2, ("full",), 0), SETTINGS, "model")
    records = list(evals.run._score(Texts(), keys, "full", prompts, decoded, None, None))
    assert [(one.prediction, one.score) for one in records] == [("12", 1.0), ("35", 0.0)]
    assert records[0].measured == read.to_json() | {"applied": 1.0}


def test_forced_cells_score_agreement_with_full_attention() -> None:
    methods = ("full", "streaming:budget=8", "topk:budget=1.0")
    records = run([Cell("list", 1024, 1, methods, 6)], SETTINGS, InProcess("cpu", 1, 0, None), None)
    assert [one.cell["metric"] for one in records] == [AGREEMENT] * 3
    full, streaming, whole = records
    assert full.score == whole.score == 1.0
    assert streaming.score < 1.0
    assert whole.measured["head_fraction"] == 1.0


def test_baselines_rank_on_needles_as_their_papers_say() -> None:
    """At equal reads: exact top-k keeps all that full attention has, Quest no more than it, StreamingLLM far less.

    Quest reads its first two layers in full, as in its paper.
    """
    names = ("full", "topk:budget=0.08", "quest:budget=0.08,dense_layers=0-1", "streaming:budget=0.08",
             "oracle:budget=0.2")  # fmt: skip
    cell = Cell("many_needles", 1024, 6, names, 0)
    decoder, tokenizer = load_decoder(MODEL, torch.device("cpu"), torch.float32), load_tokenizer(MODEL)
    prompts = make_prompts(cell, SETTINGS)
    ids = [prompt.token_ids.tolist() for prompt in prompts]
    batch = prefill_batch(decoder, ids, 8, [parse_method(name) for name in names])
    right = {}
    for which, name in enumerate(names):
        decoded = decode_greedy(batch, which, 8, frozenset(decoder.architecture.eos_token_ids), None)
        texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in decoded.tokens]
        pairs = zip(texts, prompts, strict=True)
        right[name.partition(":")[0]] = sum(text.strip() == prompt.sample.answers[0] for text, prompt in pairs)
    assert right["topk"] >= right["full"] > len(prompts) / 2
    assert right["topk"] >= right["quest"] > right["streaming"]
    assert right["oracle"] > right["streaming"]


def test_a_text_that_is_cut_after_it_is_tokenised_is_not_warned_of(capfd: pytest.CaptureFixture[str]) -> None:
    assert len(load_tokenizer(MODEL)("a house " * 20_000).input_ids) > 16_384
    assert "longer than" not in capfd.readouterr().err


class ProfileServer(BaseHTTPRequestHandler):
    """Answers completions with the prompt's last number; under the profile `short` only those without one, and under
    `unknown` or below another path than /v1 none."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        profile, numbers = body.get("attention_profile"), re.findall(r"is (\d{7})\.", body["prompt"])
        broken = profile == "unknown" or (profile == "short" and bool(numbers)) or not self.path.startswith("/v1/")
        payload = {"error": {"message": f"no {profile}"}} if broken else {"choices": [{"text": " ".join(numbers[-1:])}]}
        data = json.dumps(payload).encode()
        self.send_response(400 if broken else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Keeps the test's output clean."""


@pytest.fixture
def profile_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), ProfileServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_server_is_scored_by_its_profiles_and_its_refusals_are_failures(tmp_path: Path, profile_server: str) -> None:
    cells = [Cell("needle", 256, 3, named_methods(["exact", "profile:exact", "short"]), 0)]
    asked = Server(f"{profile_server}/v1", "reference", None, 2, 0, 60.0)
    records = run_remotely(cells, SETTINGS, asked, tmp_path, None, None)
    again = run_remotely(cells, SETTINGS, asked, tmp_path, None, None)
    full, short = summarize(records)
    assert (full["method"], full["score"], full["failures"], full["head_fraction"]) == ("profile:exact", 100.0, 0, None)
    assert (short["method"], short["score"], short["failures"], short["samples"]) == ("profile:short", 0.0, 3, 3)
    assert short["reasons"] == {'status 400: {"error": {"message": "no short"}}': 3}
    assert {one.key for one in again} == {one.key for one in records}


def ask_by_command(url: str, out: Path, method: str) -> Any:
    command = ["tasks", "--model", str(MODEL), "--url", url, "--method", method, "--lengths", "256", "--samples", "2"]
    return CliRunner().invoke(app, [*command, "--json", str(out)])


def test_failures_of_a_command_are_in_its_table_its_json_and_its_status(tmp_path: Path, profile_server: str) -> None:
    out = tmp_path / "out.json"
    result = ask_by_command(f"{profile_server}/v1", out, "short")
    assert result.exit_code == 1
    assert "failed: needle 256 profile:short: 2 of 2: status 400" in result.stdout.replace("\n", " ")
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["failures"], row["samples"], list(row["reasons"].values())) == (2, 2, [2])
    for url in (f"{profile_server}/v1", profile_server, profile_server.removeprefix("http://")):
        assert ask_by_command(url, out, "exact").exit_code == 0


@pytest.mark.parametrize(("path", "method", "told"), [
    ("/v1", "unknown", "no unknown"), ("/v2", "exact", "status 400"), (None, "exact", "ConnectError"),
])  # fmt: skip
def test_a_server_that_cannot_answer_is_found_before_a_sample_is_sent(
    path: str | None, method: str, told: str, tmp_path: Path, profile_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "FIRST_WAIT_S", 0.001)
    url = "http://127.0.0.1:1/v1" if path is None else profile_server + path
    result = ask_by_command(url, tmp_path / "out.json", method)
    assert result.exit_code == 1
    base = url.removesuffix("/v1") + "/v1"
    assert f"error: --url {base}: POST /completions for one token of model 'reference'" in result.stderr
    assert told in result.stderr
    assert "wanted status 200 and an answer" in result.stderr
    fidelity = CliRunner().invoke(app, ["fidelity", "--model", str(MODEL), "--url", url, "--method", method])
    assert (fidelity.exit_code, told in fidelity.stderr) == (1, True)


def test_what_is_no_address_of_a_server_is_told_before_anything_is_asked(tmp_path: Path) -> None:
    result = ask_by_command("ftp://somewhere", tmp_path / "out.json", "exact")
    assert result.exit_code == 1
    assert "--url: got 'ftp://somewhere'; wanted HOST:PORT" in result.stderr


def test_a_method_that_breaks_fails_alone_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("evals.methods.quest.Quest.begin", broken)
    cell = Cell("needle", 256, 2, ("full", "quest:budget=0.2", "topk:budget=0.2"), 0)
    full, quest, topk = summarize(run([cell], SETTINGS, InProcess("cpu", 2, 0, None), None))
    assert (full["failures"], topk["failures"]) == (0, 0)
    assert (quest["samples"], quest["failures"], quest["score"]) == (2, 2, 0.0)


def test_a_stopped_run_leaves_the_cells_that_it_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evals.session.LEAVE_EVERY_S", math.inf)
    cells = [Cell(task, 256, 2, ("full",), 0) for task in ("needle", "word_needle")]
    left: list[tuple[int, int]] = []
    run(cells, SETTINGS, InProcess("cpu", 2, 0, None), lambda records, done: left.append((len(records), done)))
    assert left == [(2, 1), (4, 2)]


def test_depths_are_means_of_tenths_and_failures_count() -> None:
    records = [replace(record("full", number, 1.0), depth=depth) for number, depth in enumerate((0.0, 0.05, 1.0))]
    records[1] = replace(records[1], score=0.0, failure="late")
    rows = depth_rows(records)
    assert [(row["depth"], row["samples"], row["score"]) for row in rows] == [(0.05, 2, 50.0), (0.95, 1, 100.0)]
