"""Every family's tiny checkpoint goes through the command line: plan, the engine's benchmark, an eval, `tune lsh`."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from bench.cli import app as bench
from evals.cli import app as evals
from evals.tuning.command import app as tune
from server.commands.tandem import app as tandem
from tests.bench.test_long_context import SMALL_GIB
from tests.gpu.family_checkpoints import CONFIGS, checkpoint
from tests.gpu.reference_model import FOLDER

FAMILIES = [name if name == "gemma3" else pytest.param(name, marks=pytest.mark.long) for name in CONFIGS]
SHAPES = ("mistral", "qwen2", "qwen3", "phi3", "glm4", "gemma3", "gemma4-shared", "qwen3-moe", "mixtral")
WINDOWS_ALONE = ("mistral",)


def folder_of(name: str) -> Path:
    """Of a model whose words are the reference model's, with its tokenizer."""
    folder = checkpoint(name, vocab_size=8192).folder
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((FOLDER / file).read_bytes())
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_checkpoint_is_planned_measured_and_tuned(name: str, tmp_path: Path) -> None:
    folder, run = folder_of(name), CliRunner().invoke
    deployment = tmp_path / "deployment.yaml"
    deployment.write_text(
        yaml.safe_dump({"model": {"path": str(folder)}, "gpu": {"device": "cpu", "memory_limit_gib": 2}})
    )
    planned = run(tandem, ["plan", str(deployment), "--json"])
    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.stdout)

    small = ["--tasks", "needle", "--lengths", "256", "--samples", "1", "--device", "cpu"]
    measured = run(evals, ["tasks", "--model", str(folder), "--method", "full", *small])
    assert measured.exit_code == 0, measured.output

    tuned = run(tune, ["lsh", "--model", str(folder), "--context", "300", "--queries", "4", "--bits", "4", "--tables",
                       "8", "--budget", "1", "--dense-layers", "0", "--device", "cpu"])  # fmt: skip
    if name in WINDOWS_ALONE:
        assert tuned.exit_code == 1
        assert "windows" in tuned.stderr
    else:
        assert tuned.exit_code == 0, tuned.output
        assert "sampled: {bits_per_table: 4, num_tables: 8}" in tuned.output


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
def test_random_weights_of_a_family_are_timed_beside_their_floor(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpu.memory_rates.default_gib", lambda: SMALL_GIB)
    timed = CliRunner().invoke(
        bench, ["engine", "--random-weights", f"tiny-{shape}", "--batch", "1,2", "--prompt-tokens", "8", "--steps", "8",
                "--rounds", "1", "--device", "cpu", "--dtype", "float32"]
    )  # fmt: skip
    assert timed.exit_code == 0, timed.output
    rows = json.loads(timed.stdout.splitlines()[-1])
    assert all(row["ms"] > 0 and row["floor_ms"] > 0 for row in rows)
