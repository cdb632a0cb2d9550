"""The table of a layer's matrices: a row for each kind and batch beside a peer, and no number for a wrong product."""

from types import SimpleNamespace

import pytest
import torch
import typer.testing
from rich.console import Console

import bench.cli
import bench.matrices
from bench.matrices import matrix_rows, prefill_rows
from bench.rows import GateError, Row
from gpu.model.projections import Projections

CPU = torch.device("cpu")


def run(monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...]) -> list[Row]:
    monkeypatch.setattr(bench.matrices, "measure_device_rates", lambda device: {})
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
    monkeypatch.setattr(bench.matrices, "measure_device_rates", lambda device: {})
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


def test_a_product_that_torch_does_not_have_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise RuntimeError("no kernel for this card\nand more")

    monkeypatch.setattr(bench.matrices, "_int4_layer", missing)
    layer = SimpleNamespace(qkv=SimpleNamespace(device=torch.device("cuda")))
    told = bench.matrices._torch_times("int4", SimpleNamespace(layers=[layer]), 1)
    assert told == {"torch_int4": "not here: no kernel for this card"}


def test_a_mixture_of_experts_is_refused_by_name() -> None:
    result = typer.testing.CliRunner().invoke(bench.cli.app, ["kernel", "weights", "--shape", "qwen3-30b-a3b"])
    assert result.exit_code == 2
    assert "got qwen3-30b-a3b" in result.output
