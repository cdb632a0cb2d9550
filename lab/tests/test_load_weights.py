"""The load benchmark writes a checkpoint that transformers' readers know, loads it, and says beside what."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from gpu.model.architecture import named_shape, read_architecture
from gpu.model.shapes import named_config
from gpu.weights.checkpoint import load_weights
from lab.cli import app
from lab.speed.load_weights import write_checkpoint


@pytest.mark.parametrize("name", ["tiny", "tiny-phi3"])
def test_a_written_checkpoint_is_one_that_loads(name: str, tmp_path: Path) -> None:
    shape = named_shape(name)
    files = write_checkpoint(tmp_path, shape, named_config(name), 3)
    weights = load_weights(tmp_path, read_architecture(tmp_path), torch.bfloat16, torch.device("cpu"), lambda _: None)
    stored = {}
    for file in files:
        with safe_open(file, framework="pt") as shard:
            stored |= {key: shard.get_tensor(key) for key in shard.keys()}  # noqa: SIM118
    assert torch.equal(weights.embedding, stored["model.embed_tokens.weight"])
    assert torch.equal(weights.layers[1].down, stored["model.layers.1.mlp.down_proj.weight"])
    assert weights.embedding.float().std() == pytest.approx(0.02, rel=0.05)


def test_a_load_is_measured_beside_the_page_cache_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["load-weights", str(tmp_path), "--random-weights", "tiny", "--rounds", "1", "--device", "cpu"]
    )
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout.splitlines()[-1])
    assert 0 < row["floor_ms"] < row["ms"]
    stored_gib = row["config"]["bytes"] / 2**30
    assert row["extras"]["gib_s"] == pytest.approx(stored_gib / row["ms"] * 1e3)
    assert stored_gib < row["extras"]["peak_rss_gib"] < 8
    assert not list(tmp_path.iterdir())
    unknown = CliRunner().invoke(app, ["load-weights", str(tmp_path), "--random-weights", "none"])
    assert unknown.exit_code == 1
    assert "unknown shape 'none'" in unknown.stderr
