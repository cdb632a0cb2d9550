"""`python -m lab kernel layer-experts` on tiny experts: rows beside their floors, and wrong products give no number."""

import pytest
from rich.console import Console

from bench.benchmark_rows import GateError
from cpu.experts import HostExperts
from lab.kernels import layer_experts
from lab.kernels.layer_experts import Kind, LayerBenchmark, layer_rows
from transfer.host_tier import Answered

TINY = tuple(Kind(name, "tiny", 256, 256, 8, 2) for name in ("MXFP4", "Q4_K", "int4"))
BYTES_OF = {"MXFP4": 17 / 32, "Q4_K": 37 / 64, "int4": 1 / 2 + 3 / 128}


@pytest.fixture(autouse=True)
def known_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_experts, "measure_host_rates", lambda threads: {"host_stream_gb_s": 10.0 * threads})


def test_both_paths_of_each_kind_stand_beside_the_bytes_that_they_read() -> None:
    rows = layer_rows(LayerBenchmark((1, 3), 2), Console(quiet=True), TINY)
    names = [(row.name, row.shape) for row in rows]
    assert names == [
        (f"{kind.name} in {path}", f"tiny, {number}")
        for kind in TINY for number in (1, 3) for path in ("floats", "integers")
    ]  # fmt: skip
    for row in rows:
        assert row.floor_ms is not None
        assert row.extras["share"] == pytest.approx(row.extras["gb_s"] / 20)
        if row.shape == "tiny, 1":
            expert_bytes = 3 * 256 * 256 * BYTES_OF[str(row.config["kind"])]
            assert row.floor_ms == pytest.approx(2 * expert_bytes / 20e6)
        assert 0 < row.extras["integers_off"] < layer_experts.MOST_OFF


def test_products_that_are_wrong_give_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = HostExperts.answer

    def twist(self: HostExperts, parts: list) -> Answered:
        answered = answer(self, parts)
        if self._layers[0].in_integers:
            parts[0][1].out[0, 0] += 1.0
        return answered

    monkeypatch.setattr(HostExperts, "answer", twist)
    with pytest.raises(GateError, match=r"MXFP4: integers are .* off floats"):
        layer_rows(LayerBenchmark((1,), 1), Console(quiet=True), TINY)
