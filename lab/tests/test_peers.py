"""Both sides of a peer's rows: the same prompts, rows that are written as they are done, and a table of both."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
from typer.testing import CliRunner

from lab.cli import app
from lab.speed.llama_rows import BenchError, command_of, read_line, time_row
from lab.speed.peer_rows import ROWS, choose_rows, join_rows, rate_of, read_rows, summarise_row, write_row
from lab.speed.random_gguf import SIZES, write_random_gguf
from lab.speed.token_turns import TokenLoad, Turn, draw_tokens
from lab.speed.vllm_rows import NOT_INSTALLED, Stepper, main, model_config, run_rows


class Engine:
    """Draws the prompt's length at every step, for `most` requests at a time; `told` has all prompts."""

    def __init__(self, most: int = 64) -> None:
        self._open: dict[str, list[int]] = {}
        self._drawn: dict[str, list[int]] = {}
        self._most = most
        self.told: list[list[int]] = []
        self.steps = 0

    def add_request(self, name: str, prompt: dict[str, list[int]], asked: tuple[int, bool]) -> None:
        tokens, self._tells_each = asked
        self.told.append(prompt["prompt_token_ids"])
        self._open[name] = [tokens, len(prompt["prompt_token_ids"])]
        self._drawn[name] = []

    def step(self) -> list[Any]:
        self.steps += 1
        outputs = []
        for name in list(self._open)[: self._most]:
            left, length = self._open[name]
            self._open[name][0] -= 1
            if left == 1:
                del self._open[name]
            self._drawn[name].append(length)
            if self._tells_each or left == 1:
                drawn = SimpleNamespace(token_ids=[length] if self._tells_each else self._drawn[name])
                outputs.append(SimpleNamespace(request_id=name, outputs=[drawn], finished=left == 1))
        return outputs


def step_all(load: TokenLoad, engine: Engine) -> list[Turn]:
    return Stepper(engine, lambda tokens, tells_each: (tokens, tells_each)).run(load)


def test_a_stepped_engine_gets_the_prompts_that_a_server_gets_and_every_token_is_counted() -> None:
    load, engine = TokenLoad(5, 7, 4), Engine()
    turns = step_all(load, engine)
    assert engine.told == [draw_tokens(load, request, 0) for request in range(5)]
    assert [len(turn.token_ids) for turn in turns] == [4] * 5
    assert all(turn.times_s == sorted(turn.times_s) and len(turn.times_s) == 4 for turn in turns)


def test_a_step_is_timed_by_the_engines_steps_where_tokens_are_told_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count(step=0.5)
    stepper, load = Stepper(Engine(), lambda tokens, tells_each: (tokens, tells_each)), TokenLoad(3, 4, 40)
    turns = stepper.run(load, tells_each=False)
    assert [(len(turn.token_ids), len(turn.times_s)) for turn in turns] == [(40, 1)] * 3
    monkeypatch.setattr("lab.speed.vllm_rows.time", SimpleNamespace(perf_counter=lambda: next(now)))
    stepper.run(load, tells_each=False)
    assert stepper.step_s(40) == pytest.approx(0.5)


def test_a_next_turn_has_the_one_before_it_and_its_answer() -> None:
    load, engine = TokenLoad(2, 3, 2, turns=3), Engine()
    assert len(step_all(load, engine)) == 6
    first = [prompt for prompt in engine.told if prompt[:3] == draw_tokens(load, 0, 0)]
    assert [len(prompt) for prompt in first] == [3, 8, 13]
    assert first[1] == [*first[0], 3, 3, *draw_tokens(load, 0, 1)]


def test_requests_come_when_they_are_due_and_no_more_are_open_than_are_to_be() -> None:
    load = TokenLoad(6, 3, 2, rate=200.0)
    turns = step_all(load, Engine())
    arrivals = load.arrivals()
    assert arrivals is not None
    assert max(turn.due_s for turn in turns) - min(turn.due_s for turn in turns) == pytest.approx(
        arrivals[-1] - arrivals[0]
    )
    assert all(turn.sent_s >= turn.due_s for turn in turns)
    assert step_all(TokenLoad(6, 3, 2, concurrency=1), narrow := Engine())
    assert narrow.steps == 12


def test_rows_are_written_as_they_are_done_and_not_run_again(tmp_path: Path) -> None:
    file = tmp_path / "vllm-bf16.jsonl"
    stepper = Stepper(Engine(), lambda tokens, tells_each: (tokens, tells_each))
    run_rows(stepper, "bf16", choose_rows("step-1,prompt-512,arrivals", True, None), file, [file])
    assert list(read_rows(file)) == ["step-1", "prompt-512"], "arrivals want a rate"
    given = tmp_path / "given.jsonl"
    (row,) = choose_rows("arrivals", True, 500.0)
    run_rows(stepper, "bf16", [row], given, [given])
    assert list(read_rows(given)) == ["arrivals"]
    assert row.with_repeat(0).arrivals() == replace(row.load, seed=row.with_repeat(0).seed, rate=500.0).arrivals()
    with file.open("a") as out:
        out.write('{"row": "load-1", "summ')
    assert list(read_rows(file)) == ["step-1", "prompt-512"], "the last one was cut"


def test_arrivals_come_at_a_share_of_the_slower_sides_best_rate(tmp_path: Path) -> None:
    files = [tmp_path / "ours", tmp_path / "theirs"]
    assert rate_of(files) is None
    for file, seconds in zip(files, (10.0, 8.0), strict=True):
        summary = {"seconds": seconds, "tokens_per_s": 1.0}
        write_row(file, "side", "bf16", ROWS["load-128"], [summary])
    assert rate_of(files) == pytest.approx(0.7 * 12.8)
    assert rate_of(files[1:]) == pytest.approx(0.7 * 16)


def test_both_sides_are_joined_with_their_ratio(tmp_path: Path) -> None:
    for side, seconds in (("tandem", 3.0), ("vllm", 4.0)):
        told = summarise_row(ROWS["load-8"], [Turn(0.0, 0.0, [1.0, seconds], [1, 2])])
        write_row(tmp_path / f"{side}-bf16.jsonl", side, "bf16", ROWS["load-8"], [told, told | {"seconds": 9.0}])
    write_row(tmp_path / "tandem-bf16.jsonl", "tandem", "bf16", ROWS["prompt-512"], [{"first_s_p50": 0.02}])
    joined = join_rows(tmp_path / "tandem-bf16.jsonl", tmp_path / "vllm-bf16.jsonl")
    assert [(line["row"], line["ratio"]) for line in joined] == [("prompt-512", None), ("load-8", 0.75)]
    done = CliRunner().invoke(app, ["peers-table", str(tmp_path), "--json", str(tmp_path / "both.json")])
    assert done.exit_code == 0, done.output
    assert "0.75" in done.output
    assert len(json.loads((tmp_path / "both.json").read_text())["rows"]) == 2


def test_no_row_and_no_repeat_finds_a_prefix_of_another() -> None:
    loads = [row.with_repeat(number) for row in ROWS.values() for number in range(row.repeats)]
    beginnings = [tuple(draw_tokens(load, request, 0)[:16]) for load in loads for request in range(load.requests)]
    assert len(set(beginnings)) == len(beginnings)


def test_llama_cpps_benchmark_is_asked_for_a_step_behind_a_context_or_for_a_prompt() -> None:
    for name, words in (
        ("step-1", "-p 0 -n 136 -d 0"),
        ("step-1-16384", "-p 0 -n 72 -d 16384"),
        ("prompt-512", "-p 512 -n 0"),
    ):
        command = command_of(Path("bench"), Path("m.gguf"), ROWS[name], "q8_0", 99)
        assert words in " ".join(command)
        assert "-ctk q8_0 -ctv q8_0" in " ".join(command)
    line = json.dumps({"avg_ns": 72_000_000, "avg_ts": 1000.0, "n_gen": 72})
    assert read_line(ROWS["step-1-16384"], line)["step_s"] == pytest.approx(0.001)
    assert read_line(ROWS["prompt-512"], line)["first_s_p50"] == pytest.approx(0.072)
    with pytest.raises(BenchError, match="prompt-512 with f16: status 1"):
        time_row(Path("/bin/false"), Path("m.gguf"), ROWS["prompt-512"], "f16", 0)


def test_a_random_file_has_the_kinds_of_q4_k_m_and_numbers_around_zero(tmp_path: Path) -> None:
    sizes = replace(SIZES["small"], layers=8, vocab=300)
    write_random_gguf(tmp_path / "r.gguf", sizes)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "r.gguf").tensors}
    kinds = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    assert kinds["output.weight"] == "Q6_K"
    assert [kinds[f"blk.{layer}.ffn_down.weight"] for layer in range(8)] == [
        "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q6_K",
    ]  # fmt: skip
    for name in ("blk.1.ffn_down.weight", "blk.0.ffn_down.weight"):
        numbers = gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)
        assert abs(float(numbers.mean())) < 0.1 * float(numbers.std())
        assert float(numbers.std()) == pytest.approx(sizes.inner**-0.5, rel=0.4)


def test_rows_have_names_and_unknown_ones_are_refused() -> None:
    assert "step-1-98304" not in [row.name for row in choose_rows("short", False, None)]
    assert max(row.max_context_tokens for row in choose_rows("short", False, None)) < 17_408
    with pytest.raises(ValueError, match="rows: load-9 is none; wanted some of short, all, step-1"):
        choose_rows("load-9", False, None)


def test_without_vllm_its_side_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bf16", str(tmp_path / "rows"), "--rows", "step-1"]) == NOT_INSTALLED
    assert "its side is left out" in capsys.readouterr().err


def test_both_sides_have_the_same_shape() -> None:
    from gpu.model.named_shapes import named_shape

    for kind, name in (("int4", "llama-3.1-8b"), ("moe", "qwen3-30b-a3b")):
        config, shape = model_config(kind), named_shape(name)
        assert config["num_hidden_layers"] == shape.num_layers
        assert (config["hidden_size"], config["vocab_size"]) == (shape.hidden, shape.vocab_size)
        assert (config["num_attention_heads"], config["num_key_value_heads"]) == (shape.num_heads, shape.num_kv_heads)
    assert model_config("int4")["quantization_config"]["format"] == "pack-quantized"
    assert "quantization_config" not in model_config("bf16")
