"""Run `python -m lab kernel mac`: hits as they were drawn, floors counted cell by cell, and no number of a wrong
result.
"""

import json

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from bench.benchmark_rows import GateError
from lab.cli import app
from lab.kernels import mac_attention
from lab.kernels.mac_attention import Path, Shape, cells_read, draw_gaps, mac_rows, make_fixed, make_layer, make_pages

CPU, QUIET = torch.device("cpu"), Console(quiet=True)
SHAPE = Shape(8, 2, 32, 16, torch.float32)


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_as_many_heads_hit_as_were_to_and_no_others(rate: float, is_shared: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    pages = make_pages(SHAPE, 2, 200, CPU)
    layer = make_layer(SHAPE, pages, rate, is_shared, generator)
    matched = Path(SHAPE, pages, make_fixed(pages)).match(layer)
    assert torch.equal(matched.entries.long(), layer.wanted)
    assert int((matched.entries >= 0).sum()) == rate * 16
    if is_shared:
        groups = matched.bounds.view(3, 2, 2, 4)
        assert torch.equal(groups, groups[..., :1].expand_as(groups))


def test_gaps_are_drawn_from_the_whole_ring_but_its_end() -> None:
    gaps = draw_gaps(SHAPE, 500, 1.0, False, torch.Generator().manual_seed(1))
    assert set(gaps.flatten().tolist()) == set(range(1, 32))


def test_cells_that_are_read_are_those_that_a_head_of_the_group_reads() -> None:
    pages = make_pages(SHAPE, 2, 200, CPU)
    layer = make_layer(SHAPE, pages, 0.7, False, torch.Generator().manual_seed(1))
    bounds = (matched := Path(SHAPE, pages, make_fixed(pages)).match(layer)).bounds
    total = 0
    for row in range(2):
        for kv_head in range(2):
            cells: set[int] = set()
            for head in range(4 * kv_head, 4 * kv_head + 4):
                begin, end, _ = bounds[:, row, head].tolist()
                cells |= set(range(200)) - set(range(begin, end))
            total += len(cells)
    assert cells_read(SHAPE, 200, matched) == total


def test_a_wrong_result_gives_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    right = mac_attention.complete

    def off_by_a_little(*arguments: object) -> object:
        whole = right(*arguments)  # type: ignore[arg-type]
        whole.out.mul_(1.05)
        return whole

    monkeypatch.setattr(mac_attention, "complete", off_by_a_little)
    with pytest.raises(GateError, match=r"off eq. \(7\)"):
        mac_rows(SHAPE, [256], [1], [0.5], [False], CPU, QUIET)


def test_a_match_that_was_not_meant_gives_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mac_attention, "NOISE", 8.0)
    with pytest.raises(GateError):
        mac_rows(SHAPE, [256], [1], [1.0], [False], CPU, QUIET)


def test_the_command_reports_lengths_batches_rates_and_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["kernel", "mac", "--lengths", "256", "--batch", "1,2", "--rates", "0,1", "--heads", "4", "--kv-heads", "2",
             "--capacity", "32", "--band", "16", "--device", "cpu"]  # fmt: skip
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout.strip().splitlines()[-1])
    assert [row["shape"] for row in rows] == [
        f"{batch} x 256, 4/2, hits {rate} {ways}"
        for batch in (1, 2) for ways in ("a head", "a group") for rate in ("0%", "100%")
    ]  # fmt: skip
    assert all(row["ms"] > 0 and row["floor_ms"] > 0 and row["peer_ms"] > 0 for row in rows)
