"""Run `python -m lab mac`: a setting is a method and a profile, parts keep what they made, and what is said is
counted.
"""

import json
import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from evals.cells import PromptSettings
from evals.forward import load_decoder
from evals.meter import layer_shares
from evals.methods.method import DecodeMethod
from evals.store import Record, Store
from evals.tuning.mac_method import Mac
from gpu.methods.counters import subtract_counts
from gpu.methods.mac import METHOD as MAC
from gpu.profiles import resolve_profiles
from lab.cli import app
from lab.mac.figures import errors_figure, layers_figure
from lab.mac.forced import share_alike
from lab.mac.grid import BESIDE, OVERS, Setting, by_label, spread
from lab.mac.parts import Asked, Done, parts_of
from lab.mac.report import render_errors, render_layers
from lab.mac.reuse_errors import measure_errors
from lab.mac.run import complete, pool_layers
from lab.methods import parse_method
from lab.quality.results import render_table
from tests.evals.test_run import SETTINGS
from tests.evals.test_serving import MODEL
from tests.gpu.reference_model import FOLDER, document_prompt
from transfer.host_config import HostConfig

TINY = ["mac", "--model", str(MODEL), "--device", "cpu", "--report", "--alone", "--lengths", "256", "--taus", "0.3",
        "--share", "1", "--windows", "32:16", "--over", "exact", "--tasks", "needle", "--long", "word_needle",
        "--tokens", "2", "--samples", "1", "--forced-samples", "1", "--served-samples", "1",
        "--error-steps", "2", "--error-texts", "1"]  # fmt: skip
METHOD, SERVED = "mac:tau=0.3,max_prefix_share=1,capacity=32,band=16", "profile:mac-32-16-0.3-1-exact"
SETTING = Setting(0.3, 1, 32, 16, "exact")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mac")


@pytest.fixture(scope="module")
def first(folder: Path) -> tuple[Result, dict[str, Any]]:
    """Return the command once, and its document."""
    result = CliRunner().invoke(app, [*TINY, "--out", str(folder)])
    assert result.exit_code == 0, result.output
    return result, json.loads((folder / "mac.json").read_text())


def test_a_run_scores_methods_and_profiles_freely_and_on_right_answers(first: tuple[Result, dict[str, Any]]) -> None:
    _, run = first
    assert (run["set"], run["cut"], run["failed"]) == ("mac", None, {})
    places = {(row["method"], row["task"], row["metric"]) for row in run["rows"]}
    free = {(label, "needle", "exact_match") for label in ("full", METHOD, SERVED, "profile:exact")}
    long = {(label, "word_needle", "exact_match") for label in (SERVED, "profile:exact")}
    fed = {(label, "word_needle", name) for label in ("full", METHOD) for name in ("token_accuracy", "agreement")}
    assert places == free | long | fed
    ours = [row for row in run["rows"] if row["method"] in (METHOD, SERVED)]
    assert all(0 < row["skipped_fraction"] < row["acceptance"] <= 1 for row in ours)
    assert {row["family"] for row in ours} == {"mac 32:16", "mac 32:16, served"}
    full = [row for row in run["rows"] if row["method"] == "full"]
    assert {(row["metric"], row["score"]) for row in full} >= {("agreement", 100.0)}
    assert [row["method"] for row in run["rows"]].index("full") == 0, "then by what they read"


def test_layers_of_a_profile_are_the_engines_counts(first: tuple[Result, dict[str, Any]]) -> None:
    _, run = first
    layers = [row for row in run["layers"] if row["layer"] is not None]
    assert [row["layer"] for row in layers] == list(range(12))
    assert {row["method"] for row in run["layers"]} == {SERVED}
    (all_layers,) = (row for row in run["layers"] if row["layer"] is None)
    served = [row for row in run["rows"] if row["method"] == SERVED]
    mean = sum(row["acceptance"] for row in served) / len(served)
    assert all_layers["acceptance"] == pytest.approx(mean)
    assert all(row["gap"] >= 1 for row in layers if row["acceptance"])


def test_the_page_and_the_tables_show_the_run(first: tuple[Result, dict[str, Any]], folder: Path) -> None:
    result, run = first
    page, tables = (folder / "report.html").read_text(), (folder / "report.md").read_text()
    for title in ("Quality against KV bytes read", "What layers reuse", "What reuse errs"):
        assert f"<h2>{title}</h2>" in page
    figures = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(figures) == 4
    ids = [element.attrib["id"] for each in figures for element in ElementTree.fromstring(each).iter()
           if "id" in element.attrib]  # fmt: skip
    assert len(ids) == len(set(ids))
    assert all(line in tables for line in render_table(run["rows"]))
    assert all(line in tables and line in result.output for line in render_layers(run["layers"]))


def test_the_same_command_makes_nothing_again(
    first: tuple[Result, dict[str, Any]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.read_text() for path in folder.rglob("*.jsonl")}
    assert before

    def fail(*_: object) -> None:
        raise AssertionError("it is there")

    monkeypatch.setattr("evals.run.run_batch", fail)
    monkeypatch.setattr("lab.mac.forced._run_batch", fail)
    monkeypatch.setattr("lab.mac.parts.measure_errors", fail)
    monkeypatch.setattr("evals.serving.ServingEngine.answer", lambda *_: iter(()))
    result = CliRunner().invoke(app, [*TINY, "--out", str(folder)])
    assert result.exit_code == 0, result.output
    again = json.loads((folder / "mac.json").read_text())
    assert [again[name] for name in ("rows", "layers", "errors")] == [
        first[1][name] for name in ("rows", "layers", "errors")
    ]
    assert {path: path.read_text() for path in folder.rglob("*.jsonl")} == before


def test_a_part_with_a_fault_is_told_and_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: tuple[Result, dict[str, Any]]
) -> None:
    def fail(*_: object) -> None:
        raise KeyError(1)

    monkeypatch.setattr("lab.mac.forced._run_batch", fail)
    result = CliRunner().invoke(app, [*TINY, "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "failed: decoder-0: KeyError: 1" in result.stderr
    run = json.loads((tmp_path / "mac.json").read_text())
    assert run["failed"] == {"decoder-0": "KeyError: 1"}
    metrics = {(row["method"], row["metric"]) for row in run["rows"]}
    assert metrics == {(row["method"], "exact_match") for row in first[1]["rows"]}, "what it had made before is kept"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--taus", "1.5"], "--taus: got '1.5'"),
        (["--over", "predicted"], "--over: got 'predicted'; wanted exact or sampled"),
        (["--windows", "1024"], "wanted CAPACITY:BAND"),
        (["--long", "haystacks"], "unknown 'haystacks'"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*TINY, "--out", str(tmp_path), *arguments])
    assert result.exit_code == 1
    assert words in result.stderr


def test_a_settings_method_and_profile_agree_in_all_that_decides_an_answer() -> None:
    for setting in spread((0.45, 0.9), 0.2, ((256, 64), (1024, 256)), OVERS):
        method = parse_method(setting.method)
        assert isinstance(method, Mac)
        named = {setting.profile: setting.composition(rings=3)}
        part = resolve_profiles(named, HostConfig())[setting.profile].ring_part
        assert part is not None
        assert part.settings.model_dump() | {"rings": None} == method.served.model_dump()
    assert len(by_label(spread((0.3, 0.6), 1.0, ((256, 64),), OVERS))) == 6
    assert all(isinstance(parse_method(label), DecodeMethod) for label in BESIDE)


def asked(**changes: Any) -> Asked:
    settings = tuple(spread((0.3, 0.45), 1.0, ((256, 64), (512, 128)), OVERS))
    same = {
        "prompts": PromptSettings(MODEL, "reference", 0, ()), "device": "cpu", "settings": settings, "beside": BESIDE,
        "lengths": (4096, 16_384), "tasks": ("needle",), "long": ("long_list",), "most": 64, "samples": 3,
        "forced_samples": 2, "served_samples": 1, "error_texts": 1, "error_steps": 8,
        "batch": 1,
    }  # fmt: skip
    return Asked(**(same | changes))


def test_every_setting_is_in_one_part_of_each_way_and_long_contexts_come_first() -> None:
    parts = parts_of(asked())
    free = [label for part in parts for label in (part.cells[0].methods if part.cells else ())]
    counts = {label: free.count(label) for label in free if label != "full"}
    wanted = [one.served for one in asked().settings] + ["profile:exact", "profile:sampled", *BESIDE]
    wanted += [one.method for one in asked().settings if one.over == "exact"]
    assert counts == dict.fromkeys(wanted, 1)
    fed = [label for part in parts for cell in part.forced[:1] for label in cell.methods]
    assert sorted(fed) == sorted(["full", *(label for label in wanted if not label.startswith("profile:"))])
    assert all([cell.length_tokens for cell in part.cells] == sorted(
        (cell.length_tokens for cell in part.cells), reverse=True) for part in parts)  # fmt: skip
    assert [part.kind for part in parts].count("errors") == 1
    fewer = parts_of(asked(served_samples=0, error_steps=0, forced_samples=0))
    assert {part.kind for part in fewer} == {"decoder"}
    assert not any(part.forced for part in fewer)


def test_of_a_part_that_was_cut_what_earlier_calls_left_counts_and_nothing_of_other_settings(tmp_path: Path) -> None:
    part = parts_of(asked())[0]
    known, other = (Record(key, {"method": method}, "0", 1.0, "", None, None)
                    for key, method in (("a", part.cells[0].methods[0]), ("b", "topk")))  # fmt: skip
    with Store(tmp_path / part.name / "records.jsonl") as store:
        store.add(known)
        store.add(other)
    assert [one.key for one in complete(part, None, tmp_path).records] == ["a"]
    assert [one.key for one in complete(part, Done(part.name, reason="late"), tmp_path).records] == ["a"]
    assert complete(part, Done(part.name), tmp_path).records == []


def counts(**numbers: list[int]) -> dict[str, list[int]]:
    return {key: [0, 0] for key in MAC.counters} | {f"reuse_{name}": own for name, own in numbers.items()}


def test_layers_say_shares_of_what_came_between() -> None:
    """Eight heads of two groups of four: layer 0 looked 16 times, layer 1 never."""
    before = counts(tries=[8, 0], hits=[8, 0], context_cells=[800, 0], gaps=[80, 0])
    after = counts(
        tries=[24, 0], hits=[12, 0], context_cells=[2400, 0], skipped_cells=[320, 0], gaps=[100, 0], ages=[40, 0],
        kv_cells=[300, 0], whole_groups=[1, 0], refused=[2, 0],
    )  # fmt: skip
    found = layer_shares(MAC, subtract_counts(after, before), group=4)
    assert {name: values[0] for name, values in found.items()} == {
        "acceptance": 0.25, "skipped_fraction": 0.2, "gap": 5.0, "age": 10.0, "whole_groups": 0.25, "kv_read": 0.75,
        "refused": 0.125,
    }  # fmt: skip
    assert all(math.isnan(values[1]) for values in found.values())
    assert layer_shares(MAC, subtract_counts(after, after), group=4) == {}


def test_layers_are_pooled_over_tasks_each_once_and_unknown_ones_are_left_out() -> None:
    def record(key: str, task: str, acceptance: list[float]) -> Record:
        cell = {"method": SERVED, "length": 256, "task": task}
        return Record(key, cell, key, 1.0, "", None, None, layers={"acceptance": acceptance})

    one, other = [1.0, math.nan], [0.5, math.nan]
    rows = pool_layers([record("a", "x", one), record("b", "x", one), record("c", "y", other)], by_label([SETTING]))
    assert [(row["layer"], row["acceptance"], row["tasks"]) for row in rows] == [
        (0, 0.75, 2), (1, None, 2), (None, 0.75, 2)
    ]  # fmt: skip
    assert rows[0]["family"] == "mac 32:16, served"


def test_errors_fall_as_the_band_grows_and_every_hit_is_in_one_octave() -> None:
    decoder = load_decoder(MODEL, torch.device("cpu"), torch.float32)
    text = torch.randint(8, 8000, (140,), generator=torch.Generator().manual_seed(3)).tolist()
    methods = [Mac(tau=0.1, capacity=32, band=band, summaries="float32", max_prefix_share=1.0) for band in (1, 96)]
    rows = measure_errors(decoder, [text], 3, methods, lambda: None)
    shape = decoder.architecture
    for band in (1, 96):
        own = [row for row in rows if row["band"] == band]
        assert sum(row["hits"] for row in own) <= 3 * shape.num_layers * shape.num_heads
        assert all(1 <= row["gap_begin"] <= 32 and row["gap_end"] == 2 * row["gap_begin"] for row in own)
    sums = [
        sum(row["error"] * row["hits"] for row in rows if row["band"] == band)
        / sum(row["hits"] for row in rows if row["band"] == band)
        for band in (1, 96)
    ]
    assert 0 < sums[1] < sums[0] / 2
    assert render_errors([{"length": 140, **row} for row in rows])[2].startswith("| r | 1 to 1 | 2 to 3 |")


def test_figures_are_of_their_length_and_placement() -> None:
    rows = [
        {"length": 256, "layer": layer, **SETTING.told(True), "acceptance": 0.5, "skipped_fraction": None}
        for layer in range(8)
    ]
    errors = [{"length": 256, "layer": layer, "band": 8, "gap_begin": 4, "error": 0.1 * (layer + 1)}
              for layer in range(8)]  # fmt: skip
    assert layers_figure(rows, 256, "sampled") is None
    assert layers_figure(rows, 512, "exact") is None
    assert errors_figure(errors, 512) is None
    for drawn in (layers_figure(rows, 256, "exact"), errors_figure(errors, 256)):
        assert drawn is not None
        ElementTree.fromstring(drawn)


def test_tokens_are_alike_at_their_places() -> None:
    assert share_alike([1, 2, 3, 4], [1, 2, 4, 3]) == 0.5
    with pytest.raises(ValueError, match="zip"):
        share_alike([1], [1, 2])


def test_full_attention_runs_once_beside_any_number_of_groups_of_methods() -> None:
    asked = Asked(SETTINGS, "cpu", tuple(spread([0.3, 0.45, 0.6], 1.0, [(64, 16), (32, 16)], ["exact", "sampled"])),
                  ("topk:budget=0.1", *(f"quest:budget={budget}" for budget in range(64, 84))), (256, 512),
                  ("needle", "word_needle"), ("list",), 16, 2, 2, 2, 0, 0, 1)  # fmt: skip
    parts = [part for part in parts_of(asked) if part.kind == "decoder"]
    assert len(parts) > 2
    for cells in ([cell for part in parts for cell in part.cells], [cell for part in parts for cell in part.forced]):
        places = [(cell.task, cell.length_tokens) for cell in cells if "full" in cell.methods]
        assert len(places) == len(set(places)) == len({(cell.task, cell.length_tokens) for cell in cells})


def test_errors_are_of_heads_that_hit() -> None:
    decoder = load_decoder(FOLDER, torch.device("cpu"), torch.float32)
    text = document_prompt(120, 1).tolist()
    some, same = (Mac(tau=tau, max_prefix_share=1.0, capacity=32, band=16, summaries="float32") for tau in (0.5, 0.99))
    rows = measure_errors(decoder, [text], 4, [some], lambda: None)
    heads = 4 * decoder.architecture.num_layers * decoder.architecture.num_heads
    assert 0 < sum(row["hits"] for row in rows) < heads
    assert all(row["error"] > 0 for row in rows)
    strict = measure_errors(decoder, [text], 4, [same], lambda: None)
    assert {row["layer"] for row in strict} <= {0}, "a token that comes again has the same query there"
