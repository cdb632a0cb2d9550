"""What a benchmark of predicted blocks forces: a share of them changes, no block is wanted twice."""

import pytest
import torch

from bench.predicted_decode import force
from gpu.methods.predicted.blocks import new_blocks
from gpu.methods.predicted.settings import PredictedSettings
from gpu.model.architecture import named_shape
from tests.gpu.test_predicted_serving import WEIGHTS


@pytest.mark.parametrize("turnover", [0.0, 0.05, 0.5])
def test_a_share_of_the_blocks_that_are_there_is_exchanged_for_others(turnover: float) -> None:
    torch.manual_seed(3)
    settings = PredictedSettings(weights=WEIGHTS, budget_tokens=1024)
    layer = new_blocks(settings, named_shape("tiny"), 1, 20, torch.float32, torch.device("cpu")).layer(0)
    slots, blocks = settings.num_slots, layer.interior.shape[1]
    assert blocks > 2 * slots
    wanted = force(layer, turnover).topk(slots, 1).indices
    layer.ids.copy_(wanted)
    after = force(layer, turnover).topk(slots, 1).indices
    stays = (after[:, :, None] == wanted[:, None]).any(2).float().mean()
    assert float(stays) == pytest.approx(1 - turnover, abs=0.03)
