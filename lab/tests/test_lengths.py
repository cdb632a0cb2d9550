"""A model is timed at several lengths, with and without host memory, and every time stands beside a floor below it."""

import json

import pytest
import typer

from lab.speed.lengths import lengths
from tests.bench.test_long_context import SMALL_GIB

CONFIG = {
    "model": {"random_weights": "tiny", "tokenizer": "deploy/models/reference"},
    "gpu": {"device": "cpu", "kv_cache_gib": 0.05, "threads": 1},
    "scheduler": {"max_running": 2, "max_context_tokens": 2048},
}
HOST = {"memory_limit_gib": 0.5, "resident_tokens": 128, "dense_layers": [], "threads": 1, "residency": "fixed"}


@pytest.mark.parametrize(("host", "profile"), [(None, "exact"), (HOST, "offloaded")])
def test_each_length_has_a_prompt_steps_by_batch_and_a_next_turn(tmp_path, monkeypatch, host, profile):
    for module in ("cpu.memory_rates", "bench.long_floors"):
        monkeypatch.setattr(f"{module}.default_gib", lambda: SMALL_GIB)
    config, told = tmp_path / "tiny.yaml", tmp_path / "rows.json"
    config.write_text(json.dumps(CONFIG | ({"host": host} if host else {})))  # which is YAML
    lengths(config, "300,600", "1,2", profile, 40, 8, 0.1, told)
    rows = json.loads(told.read_text())
    of_each = ["prompt", "decode step", "decode step", "next turn of 40"]
    assert [row["name"] for row in rows] == [f"{name}, {profile}" for name in of_each * 2]
    assert [row["shape"] for row in rows[:3]] == ["tiny, 300 tokens", *(f"tiny, 300 tokens, batch {n}" for n in (1, 2))]
    assert all(row["floor_ms"] < row["ms"] for row in rows)
    assert rows[5]["floor_ms"] > rows[1]["floor_ms"]  # longer contexts read more


def test_a_length_without_room_for_its_answers_is_refused_before_anything_is_timed(tmp_path, monkeypatch, capsys):
    for module in ("cpu.memory_rates", "bench.long_floors"):
        monkeypatch.setattr(f"{module}.default_gib", lambda: SMALL_GIB)
    config = tmp_path / "tiny.yaml"
    config.write_text(json.dumps(CONFIG))
    with pytest.raises(typer.Exit):
        lengths(config, "300,2048", "1", "exact", 40, 8, 0.1, None)
    assert "--contexts: 2,216 tokens with answers fit exact" in capsys.readouterr().err
