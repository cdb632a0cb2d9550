"""The table of a layer's matrices: a row for each kind and batch beside a peer, and no number for a wrong product."""

from types import SimpleNamespace

import pytest
import torch
import typer.testing
from rich.console import Console

import bench.cli
import lab.cli
import lab.kernels.matrices
import lab.kernels.output_matrix
from bench.rows import GateError, Row
from gpu.layers.projections import Projections
from gpu.model.architecture import named_shape
from gpu.model.matrix_formats import layer_formats, matrix_shapes
from gpu.weights.humming_matrix import UNPACKED_COLUMNS
from gpu.weights.matrix import PackedMatrix
from lab.kernels.matrices import matrix_rows, prefill_rows
from lab.kernels.output_matrix import output_rows
from tests.gpu.humming_library import stand_in

CPU = torch.device("cpu")


def run(monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...]) -> list[Row]:
    monkeypatch.setattr(lab.kernels.matrices, "measure_device_rates", lambda device: {})
    return matrix_rows("tiny", (1, 3), kinds, CPU, Console(quiet=True))


def test_each_kind_and_batch_has_a_row_beside_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ("bfloat16", "int4", "Q4_K", "Q6_K")
    rows = run(monkeypatch, kinds)
    pairs = [(kind, batch) for kind in kinds for batch in (1, 3)]
    assert [row.shape for row in rows] == [f"tiny {kind}, batch {batch}" for kind, batch in pairs]
    assert all(row.ms > 0 and row.peer_ms for row in rows)
    weights = 256 * (4 + 2 * 2) * 64 + 256 * 256 + 3 * 256 * 512
    assert rows[0].config["bytes"] == 2 * weights


def test_a_prompt_has_a_row_for_each_kind_beside_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.kernels.matrices, "measure_device_rates", lambda device: {})
    seen: list[int] = []
    right = Projections.qkv
    monkeypatch.setattr(Projections, "qkv", lambda self, layer, x: seen.append(len(x)) or right(self, layer, x))
    rows = prefill_rows("tiny", 500, 200, ("bfloat16", "int4"), CPU, Console(quiet=True))
    assert [row.shape for row in rows] == [f"tiny {kind}, prefill of 500 tokens" for kind in ("bfloat16", "int4")]
    assert all(row.ms > 0 and row.peer_ms == rows[0].peer_ms for row in rows)
    assert rows[0].extras["widening_bytes"] == 0
    assert set(seen) == {1, 5, 200, 100}  # the gate's two, and units


def test_a_product_that_is_wrong_has_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Projections.qkv
    monkeypatch.setattr(Projections, "qkv", lambda self, layer, x: right(self, layer, x).roll(1, 1))
    with pytest.raises(GateError, match="a product of 1 tokens is"):
        run(monkeypatch, ("bfloat16",))


def run_output(monkeypatch: pytest.MonkeyPatch, rates: dict[str, float], kinds: tuple[str, ...]) -> list[Row]:
    monkeypatch.setattr(lab.kernels.output_matrix, "measure_device_rates", lambda device: rates)
    return output_rows("tiny", (1, 3), kinds, CPU, Console(quiet=True))


def test_an_output_matrix_has_a_row_for_each_way_in_which_kinds_store_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"device_stream_gb_s": 1.0, "bf16_matmul_tflop_s": 1.0}
    rows = run_output(monkeypatch, rates, ("bfloat16", "fp8", "int4", "Q4_K", "Q6_K"))
    formats = ("bf16", "int8 in groups of 128", "int8 in groups of 16")
    assert [row.shape for row in rows] == [f"tiny {what}, batch {batch}" for what in formats for batch in (1, 3)]
    assert [row.config["kinds"] for row in rows[::2]] == [["bfloat16"], ["fp8", "int4"], ["Q4_K", "Q6_K"]]
    numbers = 1024 * 256
    wanted = [2 * numbers, numbers + 2 * numbers // 128, numbers + 2 * numbers // 16 + 4 * numbers // 256]
    assert [row.config["bytes"] for row in rows[::2]] == wanted
    assert [row.floor_ms for row in rows[::2]] == [pytest.approx(num_bytes / 1e6) for num_bytes in wanted]
    assert all(row.ms > 0 and row.peer_ms for row in rows)


def test_logits_that_are_wrong_have_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PackedMatrix.logits
    monkeypatch.setattr(PackedMatrix, "logits", lambda self, x: right(self, x).roll(1, 1))
    with pytest.raises(GateError, match="logits of 1 tokens are"):
        run_output(monkeypatch, {}, ("Q4_K",))


def test_a_product_that_torch_does_not_have_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise RuntimeError("no kernel for this card\nand more")

    monkeypatch.setattr(lab.kernels.matrices, "_int4_layer", missing)
    layer = SimpleNamespace(qkv=SimpleNamespace(device=torch.device("cuda")))
    told = lab.kernels.matrices._torch_times("int4", SimpleNamespace(layers=[layer]), 1)
    assert told == {"torch_int4": "not here: no kernel for this card"}


def test_a_mixture_of_experts_is_refused_by_name() -> None:
    result = typer.testing.CliRunner().invoke(lab.cli.app, ["kernel", "weights", "--shape", "qwen3-30b-a3b"])
    assert result.exit_code == 2
    assert "got qwen3-30b-a3b" in result.output


def test_kinds_of_the_library_have_its_layout_and_are_refused_where_it_cannot_multiply() -> None:
    formats = layer_formats(lab.kernels.matrices.stored_in(named_shape("llama-3.1-8b"), "humming-fp8"), 0)
    assert all(stored is not None and stored.humming and stored.kind == "fp8" for stored in formats.values())
    asked = ["kernel", "weights", "--shape", "tiny", "--device", "cpu", "--kinds", "int4,humming-int4"]
    result = typer.testing.CliRunner().invoke(lab.cli.app, asked)
    assert result.exit_code == 1
    assert "error: model.products: asked humming, the device is the CPU" in result.output
    asked = ["engine", "--random-weights", "tiny", "--device", "cpu", "--products", "humming", "--weights", "int4"]
    result = typer.testing.CliRunner().invoke(bench.cli.app, asked)
    assert result.exit_code == 1
    assert "error: model.products: asked humming, the device is the CPU" in result.output


def test_rows_of_the_library_are_of_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    library = stand_in(monkeypatch)
    monkeypatch.setattr(lab.kernels.matrices, "measure_device_rates", lambda device: {})
    row = matrix_rows("tiny", (3,), ("humming-int4",), CPU, Console(quiet=True))[0]
    shape = lab.kernels.matrices.stored_in(named_shape("tiny"), "humming-int4")
    wanted = [matrix_shapes(shape, shape.layers[0])[name] for name in layer_formats(shape, 0)]
    stored = layer_formats(shape, 0)["qkv"]
    assert stored is not None
    assert row.config["bytes"] == sum(stored.num_bytes(*one) for one in wanted)
    assert row.shape == "tiny humming-int4, batch 3"
    prompt = prefill_rows("tiny", 20, 16, ("humming-int4",), CPU, Console(quiet=True))
    assert {tokens for _, tokens in library.launched} == {1, 3, 4, 5, 16, UNPACKED_COLUMNS}  # these for the gate
    assert prompt[0].extras["widening_bytes"] == 0
