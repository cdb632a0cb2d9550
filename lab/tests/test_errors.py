"""Estimated errors of sampled answers are judged by what is true, over heads with and without a heavy key."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from cpu.audits import HEAVY_WEIGHT
from evals.forward import load_decoder
from lab.cli import app
from lab.quality.sample_errors import HEADS, Answers, Draws, measure_errors, pool_errors
from tests.gpu.reference_model import FOLDER

SETTINGS = Draws(bits_per_table=4, num_tables=24, steps=6, sink=16, window=16, exclude=0, draws=3, threads=1)
PROMPTS = [list(range(100, 500))]


def test_shares_within_two_estimates_are_counted_apart_for_heavy_heads() -> None:
    estimated = np.full((4, 2), 0.1)
    wrong = np.array([[0.1, 0.1], [0.19, 0.3], [0.3, 0.1], [0.1, 0.1]])
    others = np.array([[0.1, 0.3], [0.1, 0.1], [0.3, 0.3], [0.1, 0.1]])
    largest = np.array([0.01, 0.05, HEAVY_WEIGHT, 0.4])
    rows = {row["heads"]: row for row in pool_errors([Answers(wrong, estimated, others, largest)])}
    assert [rows[heads]["answers"] for heads in HEADS] == [4, 3, 1]
    whole, light = rows[HEADS[0]], rows[HEADS[1]]
    assert (whole["log_mass_within"], whole["output_within"]) == (0.75, 0.75)
    assert light["other_directions_within"] == pytest.approx(3 / 6)
    assert light["log_mass_error"] == pytest.approx(np.sqrt((0.01 + 0.0361 + 0.09) / 3))
    assert pool_errors([Answers(wrong[:3], estimated[:3], others[:3], largest[:3])])[2] == {
        "heads": HEADS[2], "answers": 0,
    }  # fmt: skip


def test_answers_are_off_by_what_is_estimated_and_exact_where_all_is_found() -> None:
    decoder = load_decoder(FOLDER, torch.device("cpu"), torch.float32)
    num_layers = decoder.architecture.num_layers
    calls: list[int] = []
    found = measure_errors(decoder, PROMPTS, SETTINGS, [num_layers - 1], lambda: calls.append(1))
    assert len(found) == 1
    assert len(calls) == num_layers
    (whole, *_) = pool_errors(found)
    answers = SETTINGS.draws * SETTINGS.steps * decoder.architecture.num_heads
    assert 0.9 * answers <= whole["answers"] <= answers
    assert whole["log_mass_error"] > 1e-3
    assert 0.5 < whole["log_mass_estimate"] / whole["log_mass_error"] < 2
    few = replace(SETTINGS, bits_per_table=1, num_tables=200, draws=1)
    (all_found, *_) = pool_errors(measure_errors(decoder, PROMPTS, few, [num_layers - 1], lambda: None))
    assert all_found["log_mass_error"] < 1e-4 * whole["log_mass_error"] + 1e-4
    left = measure_errors(decoder, PROMPTS, replace(SETTINGS, exclude=256), [num_layers - 1], lambda: None)
    assert pool_errors(left)[0]["log_mass_error"] != whole["log_mass_error"]
    with pytest.raises(ValueError, match="a prompt of 50 tokens has nothing between sink and window"):
        measure_errors(decoder, [list(range(50))], SETTINGS, [0], lambda: None)


def test_the_command_prints_a_table_and_writes_rows(tmp_path) -> None:
    out = tmp_path / "errors.json"
    command = ["errors", "--model", str(FOLDER), "--lengths", "260", "--steps", "2", "--draws", "1", "--bits", "4",
               "--tables", "20", "--exclude", "0,32", "--device", "cpu", "--json", str(out)]  # fmt: skip
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())["rows"]
    assert [(row["excluded"], row["heads"]) for row in rows] == [
        (tokens, heads) for tokens in (0, 32) for heads in HEADS
    ]
