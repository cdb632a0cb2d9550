"""Time every operation at a small size: rows beside a floor and a peer, and no number for a wrong result."""

import json
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from bench.benchmark_rows import GateError
from bench.cli import app
from bench.op import attention, frame, indexed, linear
from bench.op.frame import Asked, Case, Work, time_cases
from bench.op.op_command import OPERATIONS
from gpu.layers.projections import Projections
from gpu.model.architecture import named_shape
from gpu.model.matrix_formats import layer_formats
from gpu.weights.matrix import PackedMatrix

CPU, QUIET = torch.device("cpu"), Console(quiet=True)
RATES = {"host_matmul_tflop_s": 0.1}


@pytest.fixture(autouse=True)
def _rates_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "measure_device_rates", lambda device: dict(RATES))
    known = {"host_stream_gb_s": 10.0, "host_random_rows_gb_s": 5.0}
    monkeypatch.setattr(frame, "measure_host_rates", lambda threads, gib: dict(known))
    monkeypatch.setattr(frame, "REPEATS", 2)


def asked(*kinds: str, batches: tuple[int, ...] = (1, 3), tokens: int = 600) -> Asked:
    return Asked("tiny", batches, tokens, kinds, 1, CPU)


def time_all(cases: Iterator[Case], one: Asked) -> list:
    return time_cases(cases, one, QUIET)


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_reports_rows_as_json_last(name: str) -> None:
    done = CliRunner().invoke(
        app, ["op", name, "--shape", "tiny", "--tokens", "600", "--batch", "2", "--device", "cpu"]
    )
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout.strip().splitlines()[-1])
    assert all(row["ms"] > 0 for row in rows)
    assert any(row["peer_ms"] for row in rows)


def test_an_operation_or_a_kind_that_there_is_not_is_refused() -> None:
    assert "wanted one of linear, output" in CliRunner().invoke(app, ["op", "none"]).output
    done = CliRunner().invoke(app, ["op", "attention", "--shape", "tiny", "--kinds", "int2", "--device", "cpu"])
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (
        1,
        "error: --kinds: got int2; wanted some of plain, fp8, int8",
    )
    done = CliRunner().invoke(app, ["op", "linear", "--shape", "qwen3-30b-a3b", "--device", "cpu"])
    assert "got qwen3-30b-a3b, a mixture of experts" in done.stderr
    done = CliRunner().invoke(app, ["op", "linear", "--shape", "tiny", "--device", "cpu", "--kinds", "humming-int4"])
    assert "error: model.products: asked humming, the device is the CPU" in done.stderr


@pytest.mark.parametrize(("rows", "row_bytes"), [("int8", 64), ("int4", 48)])
def test_an_index_is_timed_over_rows_of_few_bits_with_other_bits_and_share(rows: str, row_bytes: int) -> None:
    one = replace(asked("fetch", "attend", batches=(1,)), own={"rows": rows, "bits": "8,4", "share": "0.25"})
    fetch, attend = indexed.indexed_cases(one)
    assert fetch.config == {"stage": "fetch", "batch": 1, "tokens": 600, "budget": 150, "rows": rows, "key_bits": 8,
                            "value_bits": 4}  # fmt: skip
    shape = named_shape("tiny")
    num_rows = 2 * 150 * shape.num_kv_heads  # of keys and of values
    assert fetch.work.num_bytes == num_rows * row_bytes
    assert attend.work.num_bytes == num_rows * 2 * shape.dim, "slots are in two bytes a number"
    assert all(row.ms > 0 for row in time_all(iter([fetch, attend]), one))


def test_options_of_an_index_are_its_own_and_are_checked() -> None:
    done = CliRunner().invoke(app, ["op", "attention", "--rows", "int8"])
    assert (done.exit_code, "is of `indexed`, got attention" in done.output) == (2, True)
    for given, told in ((["--rows", "int2"], "--rows: got int2; wanted one of bfloat16, int8, int4"),
                        (["--bits", "4,3"], "got 4,3 and 0.02"), (["--share", "0"], "got 4,2 and 0;")):  # fmt: skip
        done = CliRunner().invoke(app, ["op", "indexed", "--shape", "tiny", "--device", "cpu", *given])
        assert (done.exit_code, told in done.stderr) == (1, True), done.output


def test_the_floor_is_the_larger_of_bytes_and_products() -> None:
    rates = {"device_stream_gb_s": 100.0, "bf16_matmul_tflop_s": 10.0}
    assert Work(2e9, "device_stream_gb_s", 1e9).floor(rates) == ("2000.0 MB at 100 GB/s", pytest.approx(20.0))
    assert Work(2e9, "device_stream_gb_s", 1e12).floor(rates)[1] == pytest.approx(100.0)
    assert Work(2e9, "host_stream_gb_s").floor(rates) == ("none: host_stream_gb_s is not measured here", None)


def test_times_are_of_one_of_the_calls_in_a_row() -> None:
    taken: list[int] = []
    case = Case("x", "y", Work(0, "host_stream_gb_s"), check=lambda: None, run=lambda: taken.append(1), times=1e9)
    (row,) = time_all(iter([case]), asked())
    assert row.ms < 1e-6
    assert row.peer_ms is None
    assert len(taken) == frame.WARMUPS + 2


def test_matrices_of_each_kind_and_batch_have_the_bytes_that_are_stored() -> None:
    one = asked("bfloat16", "int4", "Q6_K")
    rows = time_all(linear.linear_cases(one), one)
    pairs = [(kind, batch) for kind in one.kinds for batch in (1, 3)]
    assert [row.shape for row in rows] == [f"tiny {kind}, batch {batch}" for kind, batch in pairs]
    weights = 256 * (4 + 2 * 2) * 64 + 256 * 256 + 3 * 256 * 512
    assert rows[0].config["bytes"] == 2 * weights
    formats = layer_formats(linear.stored_in(named_shape("llama-3.1-8b"), "humming-fp8"), 0)
    assert all(stored is not None and stored.humming and stored.kind == "fp8" for stored in formats.values())


def test_an_output_matrix_has_a_row_for_each_way_in_which_kinds_store_it() -> None:
    one = asked("bfloat16", "fp8", "int4", "Q4_K", "Q6_K")
    rows = time_all(linear.output_cases(one), one)
    assert [row.config["kinds"] for row in rows[::2]] == [["bfloat16"], ["fp8", "int4"], ["Q4_K", "Q6_K"]]
    numbers = 1024 * 256
    wanted = [2 * numbers, numbers + 2 * numbers // 128, numbers + 2 * numbers // 16 + 4 * numbers // 256]
    assert [row.config["bytes"] for row in rows[::2]] == wanted


def wrong_product(patch: pytest.MonkeyPatch) -> None:
    right = Projections.qkv
    patch.setattr(Projections, "qkv", lambda self, layer, x: right(self, layer, x).roll(1, 1))


def wrong_logits(patch: pytest.MonkeyPatch) -> None:
    right = PackedMatrix.logits
    patch.setattr(PackedMatrix, "logits", lambda self, x: right(self, x).roll(1, 1))


def wrong_attention(patch: pytest.MonkeyPatch) -> None:
    right = attention.paged_decode_attention
    patch.setattr(
        attention, "paged_decode_attention",
        lambda *given: SimpleNamespace(near=SimpleNamespace(out=right(*given).near.out.roll(1, 1))),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("cases", "kinds", "break_it", "told"),
    [
        (linear.linear_cases, ("bfloat16",), wrong_product, "a product of 1 tokens is"),
        (linear.output_cases, ("Q4_K",), wrong_logits, "logits of 1 tokens are"),
        (attention.decode_cases, ("int8",), wrong_attention, "decode attention, int8: head 0 is"),
    ],
    ids=["linear", "output", "attention"],
)
def test_a_wrong_result_gives_no_number(cases, kinds, break_it, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch)
    one = asked(*kinds)
    with pytest.raises(GateError, match=told):
        time_all(cases(one), one)
