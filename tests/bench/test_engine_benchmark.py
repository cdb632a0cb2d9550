"""The engine benchmark on a small shape: what it measures is right, and a wrong result yields no number."""

from pathlib import Path

import numpy as np
import pytest
import torch
import typer
import yaml
from rich.console import Console
from typer.testing import CliRunner

import bench.engine_steps
from bench.agreement import Agreement
from bench.benchmark_rows import GateError, Row
from bench.cli import app
from bench.decode_loop import build_runner, decode, served_graph_sizes
from bench.engine_steps import EngineBenchmark, draw_prompts, run_engine_benchmark
from bench.hugging_face import load_hugging_face
from bench.machine_commands import parse_batches
from bench.over_http import Floor, HttpBenchmark, draw_round, run_http_benchmark
from bench.plain_decode import PlainDecode
from bench.split_engine import run_split_benchmark
from gpu.config import ModelConfig
from gpu.model.architecture import named_shape
from gpu.model.matrix_formats import step_weight_bytes
from gpu.model.split import split_over
from gpu.rehearsal import Rehearsal
from gpu.runner import Runner
from gpu.step import StepPlan
from gpu.weights.drawing import random_weights
from scheduler.engine_config import EngineConfig
from scheduler.planning.step_bytes import prompt_flops
from server.deployment import Deployment, load_deployment
from server.planning.deployment_plan import resolve_plan
from transfer.machine import probe_machine

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
REFERENCE = Path(__file__).parents[2] / "deploy" / "models" / "reference"
TINY = named_shape("tiny")
CONTEXT = 40


@pytest.fixture(autouse=True)
def _quick_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.engine_steps, "measure_host_rates", lambda threads: {"host_stream_gb_s": 1.0})
    monkeypatch.setattr(bench.engine_steps, "measure_device_rates", lambda device: {"device_stream_gb_s": 1.0})


def make_benchmark(device: str, model: Path | None, dtype: str) -> EngineBenchmark:
    shape = None if model else "tiny"
    return EngineBenchmark(model, shape, (1, 3), 12, 10, 2, torch.get_num_threads(), device, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_carry_floor_and_peer_and_the_ceiling_comes_first(
    device: str, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run_engine_benchmark(make_benchmark(device, None, dtype), Console())
    assert capsys.readouterr().out.startswith(f"decode step, tiny {dtype}, batch 1: at best")
    steps = [row for row in rows if row.name == "decode step"]
    assert [row.config["batch"] for row in steps] == [1, 3]
    assert len(rows) - len(steps) == (2 if device == "cuda" else 0)
    for row in steps:
        assert row.peer_ms is not None
        assert row.floor_ms is not None
        assert row.floor_ms > 0
        assert row.p10 <= row.ms <= row.p90


def test_prompts_stand_beside_their_products_and_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a mixture: a token's products are of the experts that it takes, and a prompt reads all of them."""
    monkeypatch.setattr(bench.engine_steps, "measure_host_matmul", lambda dtypes: 2.0)
    asked = EngineBenchmark(None, "tiny-qwen3-moe", (1,), 12, 10, 2, torch.get_num_threads(), "cpu", "float32", None,
                            (40, 100), 32)  # fmt: skip
    step, *prompts = run_engine_benchmark(asked, Console(quiet=True))
    assert step.name == "decode step"
    shape = named_shape("tiny-qwen3-moe")
    for row, length in zip(prompts, (40, 100), strict=True):
        assert (row.name, row.shape) == ("prefill", f"tiny-qwen3-moe float32, {length} tokens")
        products_ms = prompt_flops(shape, 0, length) / 2e9
        assert row.extras["products_ms"] == pytest.approx(products_ms)
        assert row.floor_ms == pytest.approx(
            max(products_ms, step_weight_bytes(shape, 4, False, length) / row_rate(row))
        )
        assert row.p10 <= row.ms <= row.p90


def test_prompts_are_timed_by_an_engine_that_is_loaded_as_a_server_loads_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With its units, its warm-up and its own word of how long a prefill took."""
    asked = EngineBenchmark(None, "tiny", (1,), 12, 10, 1, torch.get_num_threads(), "cpu", "float32", None, (70,), 32)
    loaded, warmed, units = [], [], []
    real_load, real_warm, real_plan = bench.engine_steps.load_engine, Rehearsal.warm_up, Runner._launch

    def load(config: EngineConfig, *rest: object) -> object:
        loaded.append(config)
        return real_load(config, *rest)

    def launch(runner: Runner, plan: StepPlan) -> object:
        units.append([unit.end - unit.begin for unit in plan.units])
        return real_plan(runner, plan)

    monkeypatch.setattr(bench.engine_steps, "load_engine", load)
    monkeypatch.setattr(
        Rehearsal, "warm_up", lambda own, tokens, *rest: (warmed.append(tokens), real_warm(own, tokens, *rest))[1]
    )
    monkeypatch.setattr(Runner, "_launch", launch)
    told: list[float] = []
    monkeypatch.setattr(bench.engine_steps, "_MOST_PROMPTS", 4)
    real_ms = bench.engine_steps._prefill_ms
    monkeypatch.setattr(bench.engine_steps, "_prefill_ms", lambda *given: (told.append(real_ms(*given)), told[-1])[1])
    _, row = run_engine_benchmark(asked, Console(quiet=True))
    (config,) = loaded
    assert config.scheduler.prefill.chunk_tokens == 32
    assert warmed[-1] == 32
    assert max(size for sizes in units for size in sizes) == 32
    assert row.ms == pytest.approx(float(np.median(told[1:])))


def test_steps_run_in_the_graphs_that_a_server_captures() -> None:
    assert served_graph_sizes([1, 3, 5, 8, 64, 65]) == (1, 4, 8, 64)
    assert served_graph_sizes([200]) == ()


def row_rate(row: Row) -> float:
    """At which the device reads weights, in bytes a millisecond."""
    return 1e6 * max(row.rates["host_stream_gb_s"], row.rates["host_weights_gb_s"])


def test_the_peer_with_a_checkpoint_is_transformers_and_its_tokens_are_ours() -> None:
    rows = run_engine_benchmark(make_benchmark("cpu", REFERENCE, "float32"), Console(quiet=True))
    assert {row.peer for row in rows} == {"transformers generate"}
    assert all(row.extras["agreement"] == 1.0 for row in rows)


def test_a_wrong_step_yields_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Power of the gate: one matrix of ours has its sign flipped, the peer's has not."""
    real = bench.engine_steps.random_weights

    def damaged(*arguments: object) -> object:
        weights = real(*arguments)
        bench.engine_steps.PlainDecode = lambda a, w, b, c, d: PlainDecode(a, undamaged, b, c, d)
        undamaged = real(*arguments)
        weights.layers[0].qkv.neg_()
        return weights

    monkeypatch.setattr(bench.engine_steps, "PlainDecode", PlainDecode)
    monkeypatch.setattr(bench.engine_steps, "random_weights", damaged)
    with pytest.raises(GateError, match="the peer chooses"):
        run_engine_benchmark(make_benchmark("cpu", None, "float32"), Console(quiet=True))


@pytest.mark.parametrize("device", DEVICES)
def test_decoding_twice_gives_the_same_tokens_and_the_plain_peer_chooses_them_too(device: str) -> None:
    there = torch.device(device)
    weights = random_weights(TINY, 3, torch.float32, there, lambda fraction: None)
    runner = build_runner(TINY, weights, 3, CONTEXT, torch.float32, there)
    runner.capture((3,), lambda fraction: None)
    prompts = draw_prompts(3, 12, TINY.vocab_size)
    first, second = decode(runner, prompts, 20), decode(runner, prompts, 20)
    assert first.tokens.shape == (3, 21)
    assert len(first.step_ms) == 19
    assert np.array_equal(first.tokens, second.tokens)
    peer = PlainDecode(TINY, weights, 3, CONTEXT, there)
    assert peer.follow(prompts, first.tokens).share == 1.0
    assert peer.follow(prompts, (first.tokens + 1) % TINY.vocab_size).share == 0.0


def test_transformers_steps_are_timed_one_by_one() -> None:
    peer = load_hugging_face(REFERENCE, torch.float32, torch.device("cpu"))
    tokens, step_ms = peer.generate(draw_prompts(2, 8, 8192), 6)
    assert tokens.shape == (2, 7)
    assert len(step_ms) == 6
    assert peer.follow(draw_prompts(2, 8, 8192), tokens) == Agreement(1.0, 0.0)


def test_every_round_over_http_has_prompts_of_its_own() -> None:
    benchmark = HttpBenchmark(Path("unused"), 4, 8, 4, 1, 1000, 60)
    assert draw_round(benchmark, 0) == draw_round(benchmark, 0)
    assert draw_round(benchmark, 0) != draw_round(benchmark, 1)


def test_streams_over_http_are_whole_and_compared_with_the_engine_alone(tmp_path: Path) -> None:
    path = tmp_path / "deployment.yaml"
    gpu = {"device": "cpu", "dtype": "float32", "kv_cache_gib": 0.125, "threads": 1}
    scheduler = {"max_running": 4, "max_context_tokens": 256}
    path.write_text(yaml.safe_dump({"model": {"path": str(REFERENCE)}, "gpu": gpu, "scheduler": scheduler}))
    plan = resolve_plan(load_deployment(path), probe_machine())
    benchmark = HttpBenchmark(path, 3, 8, 5, 1, plan.architecture.vocab_size, 120)
    floor = Floor("1 GB over 1 GB/s", 1000.0, {"host_stream_gb_s": 1.0})
    (row,) = run_http_benchmark(benchmark, plan, floor, Console(quiet=True))
    assert row.peer == "the engine alone"
    assert row.extras["share_of_engine"] > 0


def test_a_server_that_cannot_start_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "deployment.yaml"
    plan = resolve_plan(Deployment(model=ModelConfig(random_weights="tiny")), probe_machine())
    path.write_text("model: {path: nowhere}\n")
    benchmark = HttpBenchmark(path, 1, 8, 4, 1, 1000, 120)
    floor = Floor("", 1.0, {})
    with pytest.raises(GateError, match=r"exited with status 1 while loading: .*nowhere"):
        run_http_benchmark(benchmark, plan, floor, Console(quiet=True))


@pytest.mark.parametrize("text", ["", "1,", "a", "0", "-1,2"])
def test_batches_that_are_no_positive_numbers_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="wanted positive numbers"):
        parse_batches(text)


def test_batches_are_a_list() -> None:
    assert parse_batches("1,8, 16") == (1, 8, 16)


@pytest.mark.long
def test_a_split_model_is_timed_beside_the_floor_of_a_device_s_own_weights() -> None:
    asked = EngineBenchmark(None, "tiny", (1, 3), 12, 10, 2, 1, "cpu", "float32", None, (40,), 32)
    one, three, prompt = run_split_benchmark(asked, 2, Console(quiet=True))
    assert one.shape == "tiny float32 over 2 devices, batch 1, context 23"
    share = split_over(TINY, 2)
    assert one.floor_ms == pytest.approx(step_weight_bytes(share, 4, False, 1) / row_rate(one))
    assert (three.peer, three.extras["tokens_per_s"]) == (None, pytest.approx(3e3 / three.ms))
    assert (prompt.name, prompt.config["devices"]) == ("prefill", 2)


@pytest.mark.parametrize("beside", [["--http", "a.yaml"], ["--weights", "Q4_K"]])
def test_what_stands_beside_several_devices_is_told(beside: list[str]) -> None:
    told = CliRunner().invoke(app, ["engine", "--random-weights", "tiny", "--devices", "2", *beside])
    assert told.exit_code == 2
    assert "--devices" in told.output
