"""What a benchmark of predicted blocks forces or replays: no block is wanted twice; tables say what was measured."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from bench.predicted_decode import REPLAYED, Measured, compare_ways, tabulate
from bench.predicted_ways import Replayed, force, read_selections
from gpu.methods.predicted.blocks import Blocks, new_blocks
from gpu.methods.predicted.settings import PredictedSettings
from gpu.model.architecture import named_shape
from tests.gpu.test_predicted_serving import WEIGHTS

CPU = torch.device("cpu")
SETTINGS = PredictedSettings(weights=WEIGHTS, budget_tokens=1024)


def layer_of(rings: int) -> Blocks:
    return new_blocks(SETTINGS, named_shape("tiny"), 1, rings, torch.float32, CPU).layer(0)


@pytest.mark.parametrize("turnover", [0.0, 0.05, 0.5])
def test_a_share_of_the_blocks_that_are_there_is_exchanged_for_others(turnover: float) -> None:
    torch.manual_seed(3)
    layer = layer_of(20)
    slots, blocks = SETTINGS.num_slots, layer.interior.shape[1]
    assert blocks > 2 * slots
    wanted = force(layer, turnover).topk(slots, 1).indices
    layer.ids.copy_(wanted)
    after = force(layer, turnover).topk(slots, 1).indices
    stays = (after[:, :, None] == wanted[:, None]).any(2).float().mean()
    assert float(stays) == pytest.approx(1 - turnover, abs=0.03)


def test_what_was_recorded_comes_again_to_and_fro_for_each_layer_and_head() -> None:
    draw, slots, kv_heads = np.random.default_rng(2), SETTINGS.num_slots, named_shape("tiny").num_kv_heads
    layer = layer_of(2)
    blocks = layer.interior.shape[1]
    recorded = np.stack([draw.permutation(blocks)[:slots] for _ in range(3 * 2 * kv_heads)])
    recorded = recorded.reshape(3, 2, kv_heads, slots).astype(np.int32)
    recorded[1, 1, 0, 5:] = -1  # fewer than there is room for
    replayed = Replayed(recorded, 3, kv_heads, slots, blocks, CPU)
    for number, step in enumerate([1, 2, 1, 0, 1]):
        for place in range(3):
            scores = replayed(layer, place)
            for head in range(kv_heads):
                wanted = set(recorded[step, place % 2, head].tolist()) - {-1}
                assert set(scores[head].nonzero().flatten().tolist()) == wanted, (number, place, head)
    assert not torch.equal(scores[:kv_heads], scores[kv_heads:]), "another context is at another step"
    with pytest.raises(ValueError, match="3 steps of 64 blocks; wanted 2 or more of 32"):
        Replayed(recorded, 3, kv_heads, 32, blocks, CPU)
    with pytest.raises(ValueError, match="the run has 10; use a longer --context"):
        Replayed(recorded, 3, kv_heads, slots, 10, CPU)


def test_a_file_without_selections_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "selections.npz"
    np.savez(path, blocks=np.zeros((2, 1, 1, 4), np.int32))
    assert read_selections(path).shape == (2, 1, 1, 4)
    np.savez(path, others=np.zeros(3))
    with pytest.raises(ValueError, match="holds none; make it with `tandem eval selections`"):
        read_selections(path)


def test_a_table_has_floors_of_compute_and_link_prediction_apart_and_what_is_gained() -> None:
    def one(way, turnover, ms, link, alone=None, hidden=None):
        return Measured(way, turnover, ms, link, 2_000_000, 0.2, alone, hidden)

    found = [one("read", 0.2, 10.0, 0), one("predict", 0.2, 10.5, 0), one("across", 0.2, 11.0, 400_000, 4.0, 0.875),
             one("across", REPLAYED, 10.6, 100_000, 1.0, 0.9), one("refetch", 0.2, 22.0, 30_000_000, 30.0),
             one("refetch", REPLAYED, 21.2, 30_000_000, 30.0)]  # fmt: skip
    printed = io.StringIO()
    Console(file=printed, width=200).print(tabulate(found, 1e9, "budget"))
    text = printed.getvalue()
    across, refetch = (next(line for line in text.splitlines() if line.strip("│ ").startswith(way)) for way in
                       ("across", "refetch"))  # fmt: skip
    assert [cell.strip() for cell in across.split("│")[1:-1]] == [
        "across", "20%", "20.0%", "11.00", "10.00", "1.10", "0.4", "20%", "4.00", "88%",
    ]  # fmt: skip
    assert [cell.strip() for cell in refetch.split("│")[1:-1]][4:6] == ["30.00", "0.73"], "the link's, not compute's"
    assert compare_ways(found) == [
        "prediction: 0.50 ms", "across at 0.2: 1.10 of reading alone; 2.00 of refetch over it",
        "across at replayed: 1.06 of reading alone; 2.00 of refetch over it",
    ]  # fmt: skip
