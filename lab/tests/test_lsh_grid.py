"""`tandem tune lsh` measures what the plain method itself reads and errs."""

import pytest
import torch

from evals.methods.attention_method import PromptLayer, Step
from evals.methods.full import Full
from evals.tuning import grid as grids
from evals.tuning.grid import LayerSamples
from lab.methods import parse_method
from tests.evals.test_tuning import GRID, RESIDENT, prompt_of
from tests.tolerances import METHOD_FLOAT32


def step_at(prompt: PromptLayer, position: int) -> Step:
    query, length = prompt.queries[:, :, position], position + 1
    keys, values = prompt.keys[:, :, :length], prompt.values[:, :, :length]
    return Step(0, query, query, keys, values, torch.tensor([length]), length)


@pytest.mark.parametrize("at_once", [1 << 28, 1])
def test_a_grid_measures_what_the_method_itself_reads_and_errs(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside `sampled`, position by position, offloaded at the first one; whatever goes together."""
    monkeypatch.setattr(grids, "MAX_COMPARED", at_once)
    prompt, positions = prompt_of(80, 1), torch.tensor([60, 66, 79])
    tallies = LayerSamples(prompt, positions, RESIDENT).measure(GRID, seed=3)
    for setting, tally in tallies.items():
        method = parse_method(
            f"sampled:bits_per_table={setting.bits_per_table},num_tables={setting.num_tables},seed=3,sink=2,window=6"
        )
        first = int(positions[0])
        state = method.begin(PromptLayer(0, prompt.queries[:, :, :first], prompt.queries[:, :, :first], prompt.keys,
                                         prompt.values, torch.tensor([first]), first))  # fmt: skip
        read = error = 0.0
        for position in range(first, 80):
            step = step_at(prompt, position)
            result, exact = method.step(step, state), Full().step(step, None)
            if position in positions:
                read += ((result.keys_scored - 8) / (position + 1 - 8)).sum().item()
                error += ((result.out - exact.out).norm(dim=-1) / exact.out.norm(dim=-1)).sum().item()
        assert tally.terms == 12
        assert tally.read == pytest.approx(read, rel=METHOD_FLOAT32)
        assert tally.error == pytest.approx(error, rel=METHOD_FLOAT32)
