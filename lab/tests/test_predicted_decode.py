"""What a benchmark of predicted blocks forces or replays: no block is wanted twice; tables say what was measured."""

import io
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from rich.console import Console

from gpu.methods.predicted import device
from gpu.methods.predicted.choosing import pack_bits
from gpu.methods.predicted.held_blocks import Blocks, new_blocks
from gpu.methods.predicted.settings import PredictedSettings
from gpu.model.architecture import named_shape
from gpu.weights.drawing import random_weights
from lab.kernels import predicted_ways
from lab.kernels.predicted_decode import REPLAYED, Cell, Contexts, Measured, measure, parse_cells
from lab.kernels.predicted_run import Asked, run_cells
from lab.kernels.predicted_tables import tabulate, tabulate_aims
from lab.kernels.predicted_ways import WAYS, Forced, Replayed, SelectionsError, force, read_selections
from tests.gpu.kernel_oracles import DEVICES
from tests.gpu.test_predicted_serving import WEIGHTS
from transfer.tier_shape import BLOCK_TOKENS

CPU = torch.device("cpu")
SETTINGS = PredictedSettings(weights=WEIGHTS, budget_tokens=1024)


def layer_of(rings: int, device: str = "cpu") -> Blocks:
    return new_blocks(SETTINGS, named_shape("tiny"), 1, rings, torch.float32, torch.device(device)).layer(0)


def hold(layer: Blocks, chosen: torch.Tensor) -> None:
    """chosen: int64 `[places, slots]`."""
    layer.ids.copy_(chosen)
    words = layer.bits.shape[1]
    layer.bits.copy_(torch.stack([pack_bits(own, words) for own in chosen]))


@pytest.mark.parametrize("turnover", [0.0, 0.05, 0.5])
def test_a_share_of_the_blocks_that_are_there_is_exchanged_for_others(turnover: float) -> None:
    torch.manual_seed(3)
    layer = layer_of(20)
    slots, blocks = SETTINGS.num_slots, layer.scores.shape[1]
    assert blocks > 2 * slots
    wanted = force(layer, turnover).topk(slots, 1).indices
    hold(layer, wanted)
    after = force(layer, turnover).topk(slots, 1).indices
    stays = (after[:, :, None] == wanted[:, None]).any(2).float().mean()
    assert float(stays) == pytest.approx(1 - turnover, abs=0.03)


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_recorded_comes_again_to_and_fro_for_each_layer_and_head(device: str) -> None:
    draw, slots, kv_heads = np.random.default_rng(2), SETTINGS.num_slots, named_shape("tiny").num_kv_heads
    layer = layer_of(2, device)
    blocks = layer.scores.shape[1]
    recorded = np.stack([draw.permutation(blocks)[:slots] for _ in range(3 * 2 * kv_heads)])
    recorded = recorded.reshape(3, 2, kv_heads, slots).astype(np.int32)
    recorded[1, 1, 0, 5:] = -1  # fewer than there is room for
    more = np.concatenate([recorded, np.full_like(recorded, blocks - 1)], 3)  # worse ones, of a larger budget
    replayed = Replayed(more, 3, kv_heads, slots, blocks, torch.device(device))
    for number, step in enumerate([1, 2, 1, 0, 1]):
        for place in range(3):
            scores = replayed(layer, place)
            for head in range(kv_heads):
                wanted = set(recorded[step, place % 2, head].tolist()) - {-1}
                assert set(scores[head].nonzero().flatten().tolist()) == wanted, (number, place, head)
    assert not torch.equal(scores[:kv_heads], scores[kv_heads:]), "another context is at another step"
    with pytest.raises(SelectionsError, match="3 steps of 64 blocks; wanted 2 or more of 128"):
        Replayed(recorded, 3, kv_heads, 128, blocks, CPU)
    with pytest.raises(SelectionsError, match="the run has 10; name longer contexts in --cells"):
        Replayed(recorded, 3, kv_heads, slots, 10, CPU)


def test_a_file_without_selections_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "selections.npz"
    np.savez(path, blocks=np.zeros((2, 1, 1, 4), np.int32))
    assert read_selections(path).shape == (2, 1, 1, 4)
    np.savez(path, others=np.zeros(3))
    with pytest.raises(SelectionsError, match="holds none; make it with `python -m lab selections`"):
        read_selections(path)


def test_a_table_has_floors_of_compute_and_link_prediction_apart_and_what_is_gained() -> None:
    def one(way, turnover, ms, link, alone=None, hidden=None):
        return Measured(way, turnover, ms, link, 2_000_000, 0.2, alone, hidden)

    found = [one("read", 0.2, 10.0, 0), one("predict", 0.2, 10.5, 0), one("predict", REPLAYED, 10.4, 0),
             one("across", 0.2, 11.0, 400_000, 4.0, 0.875), one("across", REPLAYED, 10.6, 100_000, 1.0, 0.9),
             one("refetch", 0.2, 22.0, 30_000_000, 30.0), one("refetch", REPLAYED, 21.2, 30_000_000, 30.0)]  # fmt: skip
    printed = io.StringIO()
    Console(file=printed, width=200).print(tabulate(found, 1e9, "budget"))
    text = printed.getvalue()
    across, refetch = (next(line for line in text.splitlines() if line.strip("│ ").startswith(way)) for way in
                       ("across", "refetch"))  # fmt: skip
    assert [cell.strip() for cell in across.split("│")[1:-1]] == [
        "across", "20%", "20.0%", "11.00", "10.00", "1.10", "0.4", "20%", "4.00", "88%",
    ]  # fmt: skip
    assert [cell.strip() for cell in refetch.split("│")[1:-1]][4:6] == ["30.00", "0.73"], "the link's, not compute's"
    printed = io.StringIO()
    Console(file=printed, width=200).print(tabulate_aims({Cell(32768, 4096, 4): found}, 1e9))
    assert [line.split() for line in printed.getvalue().splitlines()[1:]] == [
        ["32768:4096x4", "20%", "11.00", "10.00", "compute", "0.50", "1.10", "2.00", "88%", "0.4", "20.0%"],
        ["32768:4096x4", "replayed", "10.60", "10.00", "compute", "0.40", "1.06", "2.00", "90%", "0.1", "5.0%"],
    ]


def test_what_was_cut_before_its_aims_is_no_line_of_them() -> None:
    found = [Measured("read", 0.2, 10.0, 0, 2_000_000, 0.0, None, None)]
    assert tabulate_aims({Cell(8192, 512, 1): found}, 1e9).row_count == 0


def test_cells_are_parsed_in_their_order() -> None:
    assert parse_cells("32768:4096x4,8192:512x1") == [Cell(32768, 4096, 4), Cell(8192, 512, 1)]
    for wrong in ("32768", "32768:4096", "32768:x4", "a:1x1", "4096:4096x1", "8192:512x0"):
        with pytest.raises(ValueError, match=f"cells: '{wrong}'; wanted"):
            parse_cells(f"8192:512x1,{wrong}")


@pytest.mark.parametrize("device", DEVICES)
def test_one_share_serves_steps_that_are_captured_once_and_each_draws_anew(device: str) -> None:
    torch.manual_seed(3)
    layer, slots = layer_of(2, device), SETTINGS.num_slots
    wanted = Forced(3, torch.device(device))
    hold(layer, torch.rand(layer.scores.shape, device=device).topk(slots, 1).indices)
    drawn = set[int]()
    for share in (0.0, 0.3, 0.3, 1.0):
        wanted.share.fill_(share)
        after = wanted(layer, 2).topk(slots, 1).indices
        stays = (after[:, :, None] == layer.ids[:, None]).any(2).float().mean()
        assert float(stays) == pytest.approx(1 - share, abs=0.1 if 0 < share < 1 else 0)
        drawn.add(int(after[0].sum()))
    assert len(drawn) == 4, "others at each call"


def test_what_hidden_is_compared_with_chooses_in_the_same_way_and_fetches_nothing(monkeypatch) -> None:
    shape, slots = named_shape("tiny"), 8
    draw, called = np.random.default_rng(3), Counter[str]()

    def count(module: ModuleType, name: str) -> None:
        serving = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given: called.update([name]) or serving(*given))

    count(predicted_ways, "choose_blocks")
    count(predicted_ways, "fetch_blocks")
    count(device, "fetch_blocks")
    chosen = [draw.permutation(100)[:slots] for _ in range(3 * shape.num_kv_heads)]
    selections = np.stack(chosen).reshape(3, 1, shape.num_kv_heads, slots).astype(np.int32)
    contexts = Contexts(shape, 2048, 1, random_weights(shape, 0, torch.float32, CPU, lambda fraction: None))
    cell, found = Cell(2048, slots * BLOCK_TOKENS, 1), []
    steps = measure(contexts, WEIGHTS, cell, [0.5, 0.9], 4, selections, None)
    for one in steps:
        found.append((one.way, one.turnover, one.changed, bool(called["choose_blocks"]), bool(called["fetch_blocks"])))
        called.clear()
        if one.way == "across":
            break
    steps.close()
    contexts.shutdown()
    assert found[1:3] == [("predict", 0.5, 0.0, True, False), ("predict", REPLAYED, 0.0, True, False)]
    assert found[3][:2] == ("across", 0.5)
    assert found[3][4], "by what serves"


def test_steps_run_in_every_way_and_rows_are_left_one_by_one(tmp_path: Path, capsys) -> None:
    out, printed = tmp_path / "steps.json", io.StringIO()
    asked = Asked("tiny", parse_cells("2048:256x2,2048:128x1"), WEIGHTS, [0.5], 8, None, None, None)
    run_cells(asked, "cpu", out, Console(file=printed, width=140))
    rows = json.loads(out.read_text())["rows"]
    assert [(row["budget"], row["way"]) for row in rows] == [(budget, way) for budget in (256, 128) for way in WAYS]
    changed = {row["way"]: row["changed"] for row in rows if row["budget"] == 256}
    assert changed["read"] == changed["predict"] == 0
    kept = (1 - 0.5**SETTINGS.predict_every) / SETTINGS.predict_every  # a layer changes in one step of so many
    assert changed["across"] == pytest.approx(kept, abs=0.1)
    assert changed["demand"] == pytest.approx(kept, abs=0.1)
    assert changed["layer"] == pytest.approx(0.25, abs=0.1), "of two layers the first is nobody's next"
    of_256 = {row["way"]: row for row in rows if row["budget"] == 256}
    blocks = {way: round(row["changed"] * row["plain_bytes"]) for way, row in of_256.items()}
    assert of_256["predict"]["link_bytes"] > 0, "blocks are looked at"
    assert of_256["across"]["link_bytes"] > blocks["across"]
    assert abs(of_256["layer"]["link_bytes"] - blocks["layer"]) <= 1, "a layer ahead has no history to look for"
    assert of_256["refetch"]["link_bytes"] == of_256["refetch"]["plain_bytes"] // 2, "nor has one that fetches anew"
    assert "2048:256x2" in printed.getvalue()
    assert not capsys.readouterr().out
    run_cells(replace(asked, seconds=1e-9), "cpu", out, Console(file=printed, width=140))
    assert json.loads(out.read_text())["rows"] == []
    assert "time is over before 2048:256x2" in printed.getvalue()
