"""The benchmark of contexts that outgrow the device runs whole on the CPU device, and counts what it says it counts."""

import io
import json
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import cpu.segment_jobs
from bench import long_context
from bench.benchmark_rows import GateError
from bench.cli import app
from bench.engine_patches import one_in_flight
from bench.long_client import MIN_STEPS, Client
from bench.long_context import LongContextBenchmark, Served, run_long_context_benchmark
from bench.long_gate import ROUNDING, check_host_path, check_samples
from bench.rates import measure_host_matmul
from cpu.decode_step import StepAttention
from cpu.pieces import SAMPLED
from cpu.tables import build_tables
from gpu.page_layout import PageLayout
from gpu.profiles import resolve_profiles
from gpu.step import HostRead
from scheduler.engine import engine as stepping
from scheduler.engine.load_engine import load_engine
from scheduler.messages import Delta, HostStats
from scheduler.sequences.capacity import HostCapacity
from server.deployment import Deployment
from server.planning.deployment_plan import resolve_plan
from transfer.exchange import ExchangeSlot
from transfer.host_config import HostConfig
from transfer.machine import probe_machine
from transfer.reading import Reading

SMALL_GIB = 0.0625  # what rates are measured over; the machine's own size takes seconds
DEPLOYMENT = {
    "model": {"random_weights": "tiny", "tokenizer": Path("deploy/models/reference")},
    "gpu": {"device": "cpu", "kv_cache_gib": 0.05, "threads": 1},
    "host": {
        "memory_limit_gib": 0.5,
        "resident_tokens": 128,
        "dense_layers": [0],
        "threads": 1,
        "residency": "fixed",
    },
    "scheduler": {"max_running": 2, "max_context_tokens": 4096},
}


def measure_little(patch: pytest.MonkeyPatch) -> None:
    """Have rates measured over SMALL_GIB."""
    for module in ("cpu.memory_rates", "bench.long_floors"):
        patch.setattr(f"{module}.default_gib", lambda: SMALL_GIB)


@pytest.fixture(scope="module")
def run():
    """What was printed, and the rows after each profile; no time for more than the fewest steps."""
    deployment, printed = Deployment.model_validate(DEPLOYMENT), io.StringIO()
    benchmark = LongContextBenchmark(2304, 2, (1, 2), 8, 0.0, ("sampled", "offloaded"), 2304, True, False)
    with pytest.MonkeyPatch.context() as patch:
        measure_little(patch)
        reported = list(run_long_context_benchmark(benchmark, deployment, Console(file=printed, width=200)))
    return printed.getvalue(), reported


def test_rows_come_after_each_profile_and_the_second_is_the_peer_of_the_first(run):
    first, both = run[1]
    names = [row.name for row in first]
    assert names == ["decode step, sampled"] * 2 + ["prefill, sampled", "second turn, sampled"]
    assert [row.name for row in both[4:]] == ["decode step, offloaded"] * 2 + ["prefill, offloaded"]
    assert all(row.peer_ms is None for row in first[:3])
    assert [row.peer_ms for row in both[:3]] == [row.ms for row in both[4:]]
    assert both[3].peer_ms > 0  # the whole prompt


def test_every_row_has_a_floor_below_what_was_measured(run):
    """Where another program slowed the measuring of the products' rate, it is measured again: the best one counts."""
    for row in run[1][-1]:
        known = fastest = row.rates["host_matmul_tflop_s"]
        for _ in range(5):
            floor_ms = row.floor_ms * known / fastest if "TFLOP/s" in row.floor else row.floor_ms
            if floor_ms < row.ms:
                break
            fastest = max(fastest, measure_host_matmul((torch.float32, torch.bfloat16)))
        assert 0 < floor_ms < row.ms, row.name


def test_a_sample_is_a_small_part_of_what_is_offloaded_and_a_batch_reads_more(run):
    alone, both = run[1][0][:2]
    assert 0 < alone.extras["fraction_read"] < 0.5
    assert both.floor_ms > alone.floor_ms
    assert alone.extras["host_gib"] > 0


def test_an_exact_peer_reads_each_row_once_for_a_group(run):
    exact = run[1][-1][4]
    assert exact.extras["fraction_read"] == pytest.approx(1 / 2)  # of two query heads


def test_a_batch_that_has_no_time_is_stepped_the_fewest_times(run):
    assert {row.extras["steps"] for row in run[1][-1] if row.name.startswith("decode")} == {MIN_STEPS}


def test_floors_are_printed_before_the_first_profile_and_the_fraction_read_beside_each_time(run):
    before, after = run[0].split("profile sampled\n")
    assert before.count("at best") == 7
    assert after.count("ms a step (") == after.count("of offloaded keys read by each head") == 4


def test_tokens_a_second_are_of_all_steps():
    """Where rows step in two lanes, or one is late, the median may be of steps with fewer rows."""
    ours = long_context.Batch([40.0, 40.0, 80.0], 0.0, 0.0, 0.0, 0.0, 0, 0.0, None, {})
    extras = long_context._extras(Served([], {}, {}, 0.0, 0.0, 0.0, None), ours, 4, 9.0)
    assert extras["mean_ms"] == pytest.approx(160 / 3)
    assert extras["tokens_per_s"] == pytest.approx(75)


def test_requests_of_the_peer_share_one_prompt(run):
    ours, peer = run[0].split("profile offloaded\n")
    assert (ours.count("  prefill "), ours.count("  again ")) == (2, 0)
    assert (peer.count("  prefill "), peer.count("  again ")) == (1, 1)


def test_steps_stand_beside_those_with_one_in_flight_and_the_peers(run):
    for row in run[1][-1]:
        if row.name.startswith("decode"):
            assert row.extras["one_in_flight_ms"] > 0
            assert row.extras["two_in_flight_again_ms"] > 0
    ours, peer = run[1][-1][1], run[1][-1][5]
    assert run[0].count("one step in flight: ") == 4
    assert f"batch 2: sampled {ours.ms:.2f} ms, {ours.ms / peer.ms:.3f} of offloaded's {peer.ms:.2f}" in run[0]


@pytest.mark.parametrize("own_prompts", [False, True])
def test_requests_of_a_peer_have_prompts_of_their_own_where_that_is_asked(monkeypatch, own_prompts):
    taken: dict[str, int] = {}
    engine, ready = SimpleNamespace(shutdown=lambda: None), SimpleNamespace(vocab_size=9, profiles={})
    floors = SimpleNamespace(plan=SimpleNamespace(device="cpu", kv="float32"), capacity=None)

    def serve(client, prompts, benchmark, profile, *others):
        taken[profile.name] = len({tuple(prompt) for prompt in prompts})
        return Served([], {}, {}, 0.0, 0.0, 0.0, None)

    for name, instead in {
        "measure_floors": lambda deployment: floors,
        "_announce": lambda *given: None,
        "load_engine": lambda *given: (engine, ready),
        "check_host_path": lambda *given: {},
        "_serve": serve,
        "_rows": lambda *given: [],
    }.items():
        monkeypatch.setattr(long_context, name, instead)
    monkeypatch.setattr(Client, "fixed_residence", lambda self: nullcontext())
    profiles = ("sampled", "exact")
    benchmark = LongContextBenchmark(20, 4, (4,), 8, 0.0, profiles, 0, False, own_prompts)
    list(run_long_context_benchmark(benchmark, Deployment.model_validate(DEPLOYMENT), Console(quiet=True)))
    assert taken == {"sampled": 4, "exact": 4 if own_prompts else 1}


def test_a_batch_that_cannot_run_is_refused_before_anything_is_measured(tmp_path):
    config = tmp_path / "two.yaml"
    config.write_text(json.dumps(DEPLOYMENT, default=str))  # which is YAML
    refused = CliRunner().invoke(app, ["long", str(config), "--batch", "1,4"])
    assert refused.exit_code == 2
    assert "max_running 2" in " ".join(refused.output.replace("│", " ").split())


@pytest.fixture(scope="module")
def client():
    """Of an engine that gates are tried on."""
    deployment = Deployment.model_validate(DEPLOYMENT)
    plan = resolve_plan(deployment, probe_machine()).memory
    engine, ready = load_engine(deployment, plan, lambda *_: None)
    yield Client(engine, ready.vocab_size, ready.profiles)
    engine.shutdown()


@pytest.fixture
def check(client):
    """The gate of a profile, over one request; `offloaded` is looked at in any case, and first."""
    host = Deployment.model_validate(DEPLOYMENT).host
    known = resolve_profiles({}, host)
    capacity = client.engine.scheduler.residence._capacity.host
    return lambda name: check_host_path(client, capacity, "bfloat16", "bfloat16", [known[name]], 1, Console(quiet=True))


def test_the_gate_is_passed_before_anything_is_timed_and_stands_in_every_row(run):
    before, after = run[0].split("profile sampled\n")
    assert before.count("gate, offloaded: 2 x 2,192 tokens") == before.count("gate, sampled: 2 x 2,192 tokens") == 1
    assert "gate" not in after
    for row in run[1][-1]:
        found = row.config["gate"]["offloaded"]
        assert found["tokens"] > 64
        assert 0 < found["apart"] < ROUNDING["bfloat16"]
        assert found["same"] > 0.9
        samples = row.config["gate"]["sampled"]["samples"]
        assert samples["agree"] == 1.0
        assert samples["predicted_reads"] > samples["answers"] > 40


def samples(attention: StepAttention) -> bool:
    return bool((attention.table["mode"] == SAMPLED).any())


def broken(monkeypatch: pytest.MonkeyPatch, reading: Reading, spoil) -> None:
    """`spoil(layer, slot)` has the CPU's answers of one kind of steps after they are given."""
    run = StepAttention.run

    def run_and_spoil(attention: StepAttention, layer: int, slot: ExchangeSlot) -> None:
        run(attention, layer, slot)
        if samples(attention) == reading.has_tables:
            spoil(layer, slot)

    monkeypatch.setattr(StepAttention, "run", run_and_spoil)


def test_a_kv_head_that_one_layer_loses_gives_no_number(check, monkeypatch):
    broken(monkeypatch, Reading.WHOLE, lambda layer, slot: slot.out[:, :2].mul_(0.0 if layer == 1 else 1.0))
    with pytest.raises(GateError, match="offloaded: log-probabilities are"):
        check("offloaded")


def test_answers_that_are_those_of_another_head_give_no_number_in_sampled_steps_either(check, monkeypatch):
    broken(monkeypatch, Reading.SAMPLE, lambda layer, slot: slot.out.copy_(slot.out.roll(2, 1)))
    with pytest.raises(GateError, match="sampled: log-probabilities are"):
        check("sampled")


def test_a_sample_of_nothing_gives_no_number(check, monkeypatch):
    def count_nothing(attention: StepAttention, layer: int, slot: ExchangeSlot) -> None:
        counts = attention._attend.counts
        before = counts.rows_read
        run(attention, layer, slot)
        if samples(attention):
            counts.rows_read = before

    run = StepAttention.run
    monkeypatch.setattr(StepAttention, "run", count_nothing)
    with pytest.raises(GateError, match="sampled: the CPU read nothing of 2,192 tokens"):
        check("sampled")


def sample(client):
    """The gate of samples alone, over two requests."""
    return check_samples(client, "sampled", 2192, 2, Console(quiet=True))


def flip_all(entries):
    entries ^= np.uint16(0x3FF)


def flip_one_table(entries):
    entries[0] ^= np.uint16(1)


def shift_rows(entries):
    entries[:] = np.roll(entries, 1, axis=1)


@pytest.mark.parametrize("spoil", [flip_all, flip_one_table, shift_rows])
def test_tables_of_wrong_codes_give_no_number(client, monkeypatch, spoil):
    def build_spoilt(entries, offsets, bits, begin, end, threads):
        if begin == 0:  # a head's tables come in several calls
            spoil(entries)
        build_tables(entries, offsets, bits, begin, end, threads)

    monkeypatch.setattr(cpu.segment_jobs, "build_tables", build_spoilt)
    with pytest.raises(GateError, match=r"sampled: \d+\.\d% of \d+ answers are of the keys that collide; wanted 90%"):
        sample(client)


def test_weights_that_are_off_by_a_five_hundredth_give_no_number(client, monkeypatch):
    assert sample(client).agree == 1.0
    broken(monkeypatch, Reading.SAMPLE, lambda layer, slot: slot.lse.add_(0.002))
    with pytest.raises(GateError, match=r"sampled: 0\.0% of"):
        sample(client)


def test_a_count_of_two_reads_in_a_hundred_too_many_gives_no_number(client, monkeypatch):
    def count_more(attention: StepAttention, layer: int, slot: ExchangeSlot) -> None:
        counts = attention._attend.counts
        before = counts.rows_read
        run(attention, layer, slot)
        counts.rows_read += (counts.rows_read - before) // 50

    run = StepAttention.run
    monkeypatch.setattr(StepAttention, "run", count_more)
    with pytest.raises(GateError, match=r"sampled: the CPU counted [\d,]+ keys read; [\d,]+ collide"):
        sample(client)


def test_a_deployment_whose_device_holds_no_prompt_that_is_offloaded_gives_no_number():
    capacity = HostCapacity(16, PageLayout(4, 1, 8), True, 1 << 30, 16, 64, 128, 4096, lambda *_: 0)
    client = SimpleNamespace(longest_tokens={"exact": 4096, "offloaded": 8192})
    offloaded = resolve_profiles({}, HostConfig())["offloaded"]
    with pytest.raises(
        GateError, match="is offloaded from 4,097 tokens on, and exact and offloaded have room for 4,064"
    ):
        check_host_path(client, capacity, "bfloat16", "bfloat16", [offloaded], 1, Console(quiet=True))
    exact = resolve_profiles({}, None)["exact"]
    assert check_host_path(client, capacity, "bfloat16", "bfloat16", [exact], 1, Console(quiet=True)) == {}


def test_codes_on_the_device_are_not_what_rows_in_host_memory_are_compared_with():
    coded = Deployment.model_validate(DEPLOYMENT | {"gpu": DEPLOYMENT["gpu"] | {"kv": "fp8"}})
    engine, ready = load_engine(coded, resolve_plan(coded, probe_machine()).memory, lambda *_: None)
    try:
        client, capacity = Client(engine, ready.vocab_size, ready.profiles), engine.scheduler.residence._capacity.host
        offloaded = resolve_profiles({}, coded.host)["offloaded"]
        with pytest.raises(GateError, match="offloaded: log-probabilities are"):
            check_host_path(client, capacity, "bfloat16", "bfloat16", [offloaded], 1, Console(quiet=True))
        check_host_path(client, capacity, "fp8", "bfloat16", [offloaded], 1, Console(quiet=True))
    finally:
        engine.shutdown()


class LateRow:
    """An engine of two requests, of which one is left out of steps until its tables stand, behind the fifth."""

    def __init__(self) -> None:
        self.host_read_times = self._runner = self
        self.decode_steps = SimpleNamespace(drain=lambda: None)
        residence = SimpleNamespace(page_tokens=16, host_read=lambda sequence: HostRead(sequence.number, 16, 160))
        running = [SimpleNamespace(number=number, open_context=None) for number in range(2)]
        self.scheduler = SimpleNamespace(roster=SimpleNamespace(running=running), residence=residence)
        self.depths: list[int] = []

    def is_ready(self, ask: HostRead) -> bool:
        return ask.context_id == 0 or len(self.depths) >= 5

    def step(self) -> list[Delta]:
        self.depths.append(stepping.MOST_IN_FLIGHT)
        time.sleep(0.01)
        return [Delta(request_id="one", token_ids=[7])] * (1 + self.is_ready(HostRead(1, 16, 160)))

    def stats(self):
        zeros = dict.fromkeys(HostStats.__struct_fields__, 0)
        return SimpleNamespace(host=HostStats(**zeros | {"method_counts": {}}), methods={})


def test_nothing_is_timed_before_the_tables_of_all_rows_stand():
    client = Client(LateRow(), 10, {})
    timed = client.steps(2, 8, 0.0)
    assert timed.ready_ms >= 50
    assert max(timed.step_ms) < 2 * min(timed.step_ms), "a step is one of both rows"
    assert client.steps(2, 8, 0.0).ready_ms < 10


def test_tables_that_never_stand_give_no_number(monkeypatch):
    monkeypatch.setattr("bench.long_client.READY_S", 0.02)
    engine = LateRow()
    engine.is_ready = lambda ask: False
    with pytest.raises(GateError, match="tables stand within 0 s"):
        Client(engine, 10, {}).steps(2, 8, 0.0)


def test_a_batch_of_which_a_request_has_ended_gives_no_number():
    with pytest.raises(GateError, match="2 of 3 requests are left"):
        Client(LateRow(), 10, {}).steps(3, 8, 0.0)


def test_with_one_step_in_flight_the_engine_is_left_as_it_was():
    engine = LateRow()
    client = Client(engine, 10, {})
    with one_in_flight():
        client.until_ready()
    client.advance()
    assert engine.depths == [1] * 5 + [2]


@pytest.mark.long
def test_of_a_profile_that_reuses_it_is_told_how_many_heads_do_and_a_peer_that_samples_has_prompts_of_its_own():
    """A threshold of nothing matches every query; the window of a match stays on the device."""
    reuse = {
        "method": "mac", "tau": 0.0, "max_prefix_share": 1.0, "capacity": 32, "band": 16, "min_context_tokens": 2304,
        "rings": 2,
    }  # fmt: skip
    profiles = {"again": {"reuse": reuse | {"stops_matching": False}, "host": "sampled"}}
    deployment, printed = Deployment.model_validate(DEPLOYMENT | {"profiles": profiles}), io.StringIO()
    benchmark = LongContextBenchmark(2400, 2, (2,), 4, 0.0, ("again", "sampled"), 0, None, False, False)
    with pytest.MonkeyPatch.context() as patch:
        measure_little(patch)
        *_, rows = run_long_context_benchmark(benchmark, deployment, Console(file=printed, width=200))
    ours, _, peer, _ = rows
    assert (ours.name, peer.name) == ("decode step, again", "decode step, sampled")
    assert ours.extras["hits"] > 0.5
    assert peer.extras["hits"] is None
    assert ours.extras["rows_read"] < peer.extras["rows_read"] / 2, "a head that hits asks for nothing"
    assert printed.getvalue().count("of heads reuse attention") == 1
    assert printed.getvalue().split("profile sampled\n")[1].count("  prefill ") == 2


def test_a_default_profile_is_known_by_its_name_and_has_the_layers_that_it_is_served_with(monkeypatch):
    def plan(deployment):
        assert deployment.host.dense_layers == ()
        raise GateError("planned")

    host = {name: value for name, value in DEPLOYMENT["host"].items() if name != "dense_layers"}
    scheduler = DEPLOYMENT["scheduler"] | {"default_profile": "indexed"}
    deployment = Deployment.model_validate(DEPLOYMENT | {"host": host, "scheduler": scheduler})
    benchmark = LongContextBenchmark(2304, 1, (1,), 8, 0.0, ("indexed",), 0, False, False)
    monkeypatch.setattr(long_context, "measure_floors", plan)
    with pytest.raises(GateError, match="planned"):
        next(run_long_context_benchmark(benchmark, deployment, Console(quiet=True)))
