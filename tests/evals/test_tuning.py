"""`tandem tune lsh`: what it measures is what the method reads and errs, and what it chooses is within the budget."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from evals.forward import load_decoder
from evals.methods.attention_method import PromptLayer
from evals.tuning.command import app, deployment_of, warnings_of
from evals.tuning.grid import LayerSamples, Resident, Setting, table_memory_bytes
from evals.tuning.lsh import Budget, choose_setting, measure_grid, summarize_grid
from evals.tuning.momo import choose_dense_until
from server.deployment import load_deployment

MODEL = Path("deploy/models/reference")
GRID = [Setting(bits, tables) for bits in (3, 5) for tables in (8, 20)]
RESIDENT = Resident(2, 6)


def prompt_of(count: int, seed: int) -> PromptLayer:
    draw = torch.Generator().manual_seed(seed)
    queries, keys, values = (torch.randn(1, heads, count, 16, generator=draw) for heads in (4, 2, 2))
    return PromptLayer(0, queries, queries, keys + 0.5, values, torch.tensor([count]), count)


def test_more_tables_read_more_and_err_less() -> None:
    settings = [Setting(4, tables) for tables in (10, 40, 160)]
    tallies = LayerSamples(prompt_of(400, 2), torch.arange(300, 400, 5), RESIDENT).measure(settings, seed=0)
    shares = [tallies[one].read / tallies[one].terms for one in settings]
    errors = [tallies[one].error / tallies[one].terms for one in settings]
    assert shares == sorted(shares)
    assert errors == sorted(errors, reverse=True)


def test_table_memory_is_entries_and_offsets_of_every_window() -> None:
    assert table_memory_bytes(Setting(10, 150), 98_304, 1, 1) == 150 * (2 * 98_304 + 3 * 4 * 1024)
    assert table_memory_bytes(Setting(10, 150), 98_305, 30, 8) == 240 * 150 * (2 * 98_305 + 4 * 4 * 1024)


def row(bits: int, tables: int, read: float, error: float, memory: int) -> dict:
    return {"bits_per_table": bits, "num_tables": tables, "read": read, "error": error, "memory_bytes": memory}


def test_the_choice_is_the_least_error_within_reads_and_memory() -> None:
    rows = [row(8, 75, 0.05, 0.1, 10), row(10, 150, 0.02, 0.2, 20), row(11, 300, 0.02, 0.15, 40)]
    assert choose_setting(rows, Budget(0.05, None))["bits_per_table"] == 8
    assert choose_setting(rows, Budget(0.02, None))["bits_per_table"] == 11
    assert choose_setting(rows, Budget(0.02, 30))["bits_per_table"] == 10
    with pytest.raises(ValueError, match=r"1\.00%.*reads 2\.00% \(K 10"):
        choose_setting(rows, Budget(0.01, None))
    with pytest.raises(ValueError, match="--memory-gib"):
        choose_setting(rows, Budget(0.05, 5))


def test_one_pass_measures_every_layer_that_is_not_dense() -> None:
    decoder = load_decoder(MODEL, torch.device("cpu"), torch.float32)
    tokens = torch.randint(10, 8000, (200,), generator=torch.Generator().manual_seed(4)).tolist()
    passed: list[int] = []
    found = measure_grid(decoder, tokens, GRID, 4, Resident(4, 64), "0+half", 0, lambda: passed.append(1))
    layers = decoder.architecture.num_layers
    assert len(passed) == layers
    assert sorted(found) == sorted(set(range(layers)) - {0, layers // 2})
    rows = summarize_grid(found, 2, 200)
    assert [(one["bits_per_table"], one["num_tables"]) for one in rows] == [(3, 8), (3, 20), (5, 8), (5, 20)]
    assert rows[0]["error"] == pytest.approx(sum(one["error"] for one in rows[0]["layers"]) / len(found))
    with pytest.raises(ValueError, match="--context"):
        measure_grid(decoder, tokens[:80], GRID, 4, Resident(4, 64), "", 0, lambda: None)


def test_the_command_prints_the_table_and_the_lines_to_paste(tmp_path: Path) -> None:
    out = tmp_path / "tune.json"
    small = ["--context", "512", "--queries", "8", "--bits", "6,8", "--tables", "20,40", "--budget", "0.2"]
    result = CliRunner().invoke(app, ["lsh", "--model", "reference", *small, "--device", "cpu", "--json", str(out)])
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 4
    chosen = min((one for one in rows if one["read"] <= 0.2), key=lambda one: one["error"])
    pair = f"bits_per_table: {chosen['bits_per_table']}, num_tables: {chosen['num_tables']}"
    assert f"host:\n  sampled: {{{pair}}}" in result.output
    assert "by equation 21" in result.output


def test_what_is_written_is_a_deployment_that_samples_so(tmp_path: Path) -> None:
    out = tmp_path / "deployment.yaml"
    small = ["--context", "512", "--queries", "8", "--bits", "6", "--tables", "20", "--budget", "0.5"]
    asked = ["lsh", "--model", "reference", *small, "--dense-layers", "0+3", "--device", "cpu", "--write", str(out)]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    config = load_deployment(out)
    assert config.model.path == MODEL.resolve()
    assert (config.host.dense_layers, config.scheduler.default_profile) == ((0, 3), "sampled")
    assert (config.host.sampled.bits_per_table, config.host.sampled.num_tables) == (6, 20)
    refused = CliRunner().invoke(app, asked)
    assert refused.exit_code == 1
    assert f"--write: {out} is there already" in refused.stderr
    row = {"bits_per_table": 6, "num_tables": 20, "read": 0.9, "read_even_buckets": 0.1, "error": 0.1,
           "worst_error": 0.1, "worst_layer": 1}  # fmt: skip
    text = "# sampling is expensive for this model: it reads 90.00% of the keys"
    assert deployment_of(MODEL, row, {0}).startswith(text)


def test_dense_prefill_goes_on_to_where_momo_is_faster_from_then_on() -> None:
    def rows(**faster: bool) -> list[dict]:
        return [{"depth": int(depth[1:]), "dense_ms": 2.0, "momo_ms": 1.0 if is_faster else 2.0}
                for depth, is_faster in faster.items()]  # fmt: skip

    assert choose_dense_until(rows(d4=False, d8=True, d16=True)) == 8
    assert choose_dense_until(rows(d16=True, d4=True, d8=False)) == 16
    assert choose_dense_until(rows(d4=True, d8=True)) == 4
    assert choose_dense_until(rows(d4=True, d8=False)) is None


def test_prefill_is_timed_at_every_depth(tmp_path: Path) -> None:
    out = tmp_path / "prefill.json"
    small = ["--depths", "256,512", "--unit-tokens", "128", "--set", "k_trim=4", "--device", "cpu", "--json", str(out)]
    result = CliRunner().invoke(app, ["prefill", "--model", "tiny", *small])
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert [row["depth"] for row in document["rows"]] == [256, 512]
    assert all(row["dense_ms"] > 0 and row["momo_ms"] > 0 for row in document["rows"])
    until = document["dense_until_tokens"]
    wanted = "momo: slower than dense" if until is None else f"k_trim: 4, dense_until_tokens: {until}}}"
    assert wanted in result.output
    refused = CliRunner().invoke(app, ["prefill", "--model", "tiny", "--depths", "100"])
    assert refused.exit_code == 1
    assert "--depths: got 100; wanted multiples of query_block (128)" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--bits", "17"], "wanted 1 to 16 bits"),
        (["--tables", "a"], "--tables: got 'a'"),
        (["--context", "20000"], "--context"),
        (["--model", "nowhere"], "nowhere"),
    ],
)
def test_errors_are_one_line(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["lsh", "--model", "reference", "--device", "cpu", *arguments])
    assert result.exit_code == 1
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert words in errors[0]


def test_a_model_whose_keys_make_sampling_dear_or_wrong_is_told_so_with_the_figures() -> None:
    fine = {"read": 0.02, "read_even_buckets": 0.015, "error": 0.05, "worst_error": 0.1, "worst_layer": 3}
    assert warnings_of(fine) == []
    (dear,) = warnings_of(fine | {"read": 0.04})
    assert "expensive for this model: it reads 4.00% of the keys, even buckets would take 1.50%" in dear
    (wrong,) = warnings_of(fine | {"error": 0.4, "worst_error": 0.7})
    assert "inaccurate for this model: attention is off by 40.0%, and by 70.0% in layer 3" in wrong
    assert len(warnings_of(fine | {"read": 0.04, "worst_error": 0.7})) == 2
