"""MAC-Attention in the evals: what hits and misses give, and what is counted as read."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from evals.decode import decode_forced, prefill_batch
from evals.forward import load_decoder
from evals.methods.attention_method import DecodeMethod
from evals.methods.full import Full
from evals.tuning.command import app
from evals.tuning.mac import choose_taus
from evals.tuning.mac_method import Mac
from tests.evals.test_methods import GROUP, HEADS, KV_HEADS, LENGTHS, STEPS, Case, run
from tests.gpu.reference_model import FOLDER, document_prompt
from tests.tolerances import METHOD_FLOAT32

SMALL = "capacity=16,max_gap=8,band=4,sink=2,summaries=float32,max_prefix_share=1"
DIM = 8


def method(text: str) -> DecodeMethod:
    return Mac.model_validate(dict(setting.split("=") for setting in text.split(",")))


def ring_rows(dim: int) -> float:
    """Of a KV head: eight queries with norm and origin, a summary read and one written with its query, over a row."""
    each = 8 * (2 * dim + 8) + (4 * dim + 8) + (2 * dim + 4) + (4 * dim + 8)
    return GROUP * each / (4 * dim)


def repeating(gap: int) -> Case:
    """Each step's query is the one of `gap` positions before, in all heads; rotation is the identity here."""
    case = Case(4)
    for row, length in enumerate(LENGTHS):
        for place in range(length, length + STEPS):
            case.q[row, :, place] = case.q[row, :, place - gap]
    case.q = torch.tensor(case.q).to(torch.bfloat16).double().numpy()  # as rings keep them
    return case


def test_where_nothing_matches_everything_is_read_and_the_output_is_exact() -> None:
    case = Case(3)
    for got, wanted in zip(run(case, method(f"tau=0.95,{SMALL}")), run(case, Full()), strict=True):
        torch.testing.assert_close(got.out, wanted.out, atol=METHOD_FLOAT32, rtol=0)
        torch.testing.assert_close(got.lse, wanted.lse, atol=METHOD_FLOAT32, rtol=0)
        assert torch.equal(got.keys_scored, wanted.keys_scored)
        assert got.accepted.tolist() == [0.0] * len(LENGTHS)
        torch.testing.assert_close(got.rows_read, wanted.rows_read + ring_rows(DIM))


@pytest.mark.parametrize("gap", [3, 8])
def test_a_query_that_comes_again_takes_over_its_prefix_and_the_output_is_exact(gap: int) -> None:
    """The prefix is of the same query: so nothing is approximate, and what is read is sink, band and tail."""
    case = repeating(gap)
    for number, (got, wanted) in enumerate(zip(run(case, method(f"tau=0.9,{SMALL}")), run(case, Full()), strict=True)):
        torch.testing.assert_close(got.out, wanted.out, atol=METHOD_FLOAT32, rtol=0)
        assert got.accepted.tolist() == [1.0] * len(LENGTHS)
        assert got.gaps.tolist() == [[gap] * HEADS] * len(LENGTHS)
        assert got.keys_scored.tolist() == [[float(2 + 4 + gap)] * HEADS] * len(LENGTHS)
        torch.testing.assert_close(got.rows_read, torch.full((len(LENGTHS), KV_HEADS), 2 + 4 + gap + ring_rows(DIM)))
        lengths = torch.tensor(LENGTHS) + number + 1
        torch.testing.assert_close(got.skipped, (lengths - 6 - gap) / lengths)


def test_a_band_that_is_left_out_shows() -> None:
    """Power: the summary of a query that is another one's is not exact."""
    case = repeating(3)
    case.q[:, :, -STEPS:] *= 1.2
    far = [
        (got.out - wanted.out).abs().max()
        for got, wanted in zip(run(case, method(f"tau=0.2,{SMALL}")), run(case, Full()), strict=True)
    ]
    assert max(far) > 10 * METHOD_FLOAT32


def test_less_is_read_and_what_was_reused_is_told() -> None:
    decoder = load_decoder(FOLDER, torch.device("cpu"), torch.float32)
    prompt = document_prompt(500, 1).tolist()
    small = "capacity=64,band=32,max_prefix_share=1"
    labels = [f"{small},tau=0.5", f"{small},tau=0.99"]
    batch = prefill_batch(decoder, [prompt[:400], prompt[:330]], 12, [method(label) for label in labels])
    forced = [prompt[400:412], prompt[330:342]]
    loose, strict = (
        [one.to_json() for one in decode_forced(batch, which, forced, None, None).reads] for which in range(2)
    )
    for row in range(2):
        assert 0 < loose[row]["skipped_fraction"] < loose[row]["acceptance"] <= 1
        assert loose[row]["head_fraction"] < 1
        assert strict[row]["acceptance"] < loose[row]["acceptance"]


def test_settings_that_cannot_serve_are_no_method() -> None:
    with pytest.raises(ValueError, match="max_gap is 99"):
        method("capacity=16,max_gap=99")


def test_a_layer_gets_the_least_threshold_from_which_on_the_error_is_small() -> None:
    errors = {0: [0.01, 0.01, 0.0], 1: [0.01, 0.05, 0.0], 2: [0.09, 0.05, 0.03]}
    rows = [
        {"layer": layer, "tau": tau, "error": error}
        for layer, of_layer in errors.items()
        for tau, error in zip((0.3, 0.6, 0.9), of_layer, strict=True)
    ]
    assert choose_taus(rows, 0.02) == {0: 0.3, 1: 0.9, 2: "off"}


def test_tuning_prints_what_layers_do_and_the_lines_to_paste(tmp_path: Path) -> None:
    out = tmp_path / "mac.json"
    small = ["--context", "300", "--steps", "12", "--taus", "0.3,0.99", "--windows", "32:16,64:32", "--error", "0.5"]
    result = CliRunner().invoke(app, ["mac", "--model", "reference", *small, "--device", "cpu", "--json", str(out)])
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert len(document["rows"]) == 2 * 2 * 12
    loose, strict = ([row for row in document["rows"] if row["tau"] == tau] for tau in (0.3, 0.99))
    assert sum(row["acceptance"] for row in loose) > sum(row["acceptance"] for row in strict)
    assert all(row["error"] < 1e-5 for row in strict if row["acceptance"] == 0)
    assert "reuse: {method: mac, capacity: 32, band: 16, layer_tau: {0: 0.3" in result.output
    refused = CliRunner().invoke(app, ["mac", "--model", "reference", "--context", "300", "--steps", "300"])
    assert "--steps: got 300; wanted fewer than --context (300)" in refused.stderr
