"""Fidelity: what is no change costs nothing, what is a change shows, and pooling is a weighted mean."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from evals.cli import app
from evals.fidelity import compare, pool_rows, spread_grid
from evals.fidelity_run import FidelityRun, run_comparisons
from evals.forward import load_decoder
from evals.methods.attention_method import MethodError
from evals.served import server_of
from evals.stopping import Stop
from gpu.model.architecture import read_architecture
from tests.tolerances import METHOD_FLOAT32

MODEL = Path("deploy/models/reference")


def test_whole_budget_changes_nothing_and_a_small_one_does() -> None:
    decoder = load_decoder(MODEL, torch.device("cpu"), torch.float32)
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(10, 8000, (length,), generator=draw).tolist() for length in (60, 48)]
    labels = ["topk:budget=1.0", "streaming:budget=0.2,dense_layers=0-1"]
    rows, layers = compare(decoder, prompts, labels, 4)
    full, whole, small = rows
    assert whole["agreement"] == 1.0
    assert whole["kl"] < METHOD_FLOAT32
    assert whole["perplexity"] == pytest.approx(full["perplexity"], rel=1e-3)
    assert small["kl"] > METHOD_FLOAT32
    mine = {label: [row for row in layers if row["method"] == label] for label in labels}
    num_layers = read_architecture(MODEL).num_layers
    assert [row["layer"] for row in mine[labels[0]]] == list(range(num_layers))
    assert [row["layer"] for row in mine[labels[1]]] == list(range(2, num_layers))
    assert all(row["error"] < METHOD_FLOAT32 and abs(row["mass_kept"] - 1) < METHOD_FLOAT32 for row in mine[labels[0]])
    assert all(row["error"] > METHOD_FLOAT32 and 0 < row["mass_kept"] < 1 for row in mine[labels[1]])


def test_a_short_prompt_is_refused() -> None:
    decoder = load_decoder(MODEL, torch.device("cpu"), torch.float32)
    with pytest.raises(MethodError, match="5 tokens"):
        compare(decoder, [[5] * 5], ["full"], 4)


def test_batches_pool_by_their_prompts() -> None:
    row = {"method": "full", "prompts": 3, "tokens": 8, "kl": 1.0, "nll": 0.0, "perplexity": 1.0}
    pooled = pool_rows([[row], [{**row, "prompts": 1, "kl": 5.0}]], ("method",), "prompts")
    assert pooled[0]["kl"] == 2.0
    assert pooled[0]["prompts"] == 4
    assert pooled[0]["tokens"] == 8


def test_a_grid_spreads_into_all_its_methods() -> None:
    assert spread_grid("full") == ["full"]
    assert spread_grid("quest:budget=0.02|0.05,page=16|32") == [
        "quest:budget=0.02,page=16",
        "quest:budget=0.02,page=32",
        "quest:budget=0.05,page=16",
        "quest:budget=0.05,page=32",
    ]


def test_a_run_that_is_cut_keeps_the_cells_that_are_finished() -> None:
    class SecondCheck(Stop):
        checks = 0

        def check(self) -> None:
            self.checks += 1
            if self.checks == 2:
                self.cut("time is over")

    stop = SecondCheck(None)
    run = FidelityRun(MODEL, ["streaming:budget=0.5"], [64, 96], 1, 4, (), 0, "cpu", 1, None)
    found = run_comparisons(run, stop)
    assert [(row["length"], row["method"]) for row in found["rows"]] == [(64, "full"), (64, "streaming:budget=0.5")]
    assert stop.reason == "time is over"


def test_a_run_that_is_cut_says_so_in_its_file_and_its_status(tmp_path: Path) -> None:
    path = tmp_path / "cut.json"
    command = ["fidelity", "--model", str(MODEL), "--device", "cpu", "--lengths", "64", "--seconds", "0"]
    ended = CliRunner().invoke(app, [*command, "--method", "streaming:budget=0.5", "--json", str(path)])
    assert ended.exit_code == 3, ended.output
    document = json.loads(path.read_text())
    assert document["rows"] == []
    assert document["cut"] == "--seconds 0 are over"


def test_a_run_whose_time_ends_with_its_last_row_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Stop(None)

    def compare_and_stop(*_: object) -> dict[str, object]:
        stop.ask("TERM")
        return {"method": "profile:exact"}

    server = server_of("127.0.0.1:1", None, MODEL, None, 1)
    monkeypatch.setattr("evals.end_to_end.compare_profile", compare_and_stop)
    run = FidelityRun(MODEL, ["profile:exact"], [64], 1, 4, (), 0, "cpu", 1, server)
    assert [row["method"] for row in run_comparisons(run, stop)["rows"]] == ["full", "profile:exact"]
    assert stop.reason is None


def test_a_signal_during_the_methods_ends_a_run_before_an_engine_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Stop(None)

    def compare_and_stop(*_: object) -> tuple[list[dict[str, object]], list[object]]:
        stop.ask("TERM")
        return [{"method": "full"}], []

    monkeypatch.setattr("evals.fidelity_run.run_fidelity", compare_and_stop)
    monkeypatch.setattr("evals.fidelity_run.load_serving_engine", None)
    found = run_comparisons(FidelityRun(MODEL, ["profile:exact"], [64], 1, 4, (), 0, "cpu", 1, None), stop)
    assert ([row["method"] for row in found["rows"]], stop.reason) == (["full"], "signal TERM")


def test_a_run_that_is_cut_before_its_first_row_writes_no_page(tmp_path: Path) -> None:
    path = tmp_path / "cut.html"
    command = ["fidelity", "--model", str(MODEL), "--device", "cpu", "--lengths", "64", "--seconds", "0"]
    ended = CliRunner().invoke(app, [*command, "--method", "streaming:budget=0.5", "--html", str(path)])
    assert (ended.exit_code, path.exists()) == (3, False), ended.output
