"""The mass of what is left to a sample, over many draws of hash tables: right where what is excluded does not depend on
them, and too low where it was chosen by what a sample read, which is why histories hold exact attention alone.
"""

from typing import Literal

import numpy as np
import pytest
import torch

from gpu.predictor.history import attended_maxima, block_maxima
from tests.cpu.sampling_oracle import chance, simhash
from tests.tolerances import UNBIASED_SIGMAS

TOKENS, DIM, BLOCK, CHOSEN = 512, 32, 16, 12
BITS, TABLES, DRAWS = 4, 12, 200


def masses(history_is_sampled: bool, late: Literal["none", "by time", "by hits"] = "none") -> np.ndarray:
    """Of each draw: the mass that the sample says of all blocks but the chosen ones, over what it is. late: a third of
    these are not there, whichever, or those of which the tables of the step before found most.
    """
    draw = np.random.default_rng(17)
    keys = draw.normal(size=(TOKENS, DIM))
    first = draw.normal(size=DIM)
    second = first + 0.2 * draw.normal(size=DIM)  # the next step's query is near this one's
    logits = [keys @ query / DIM**0.5 for query in (first, second)]
    cosines = [keys @ query / np.linalg.norm(keys, axis=1) / np.linalg.norm(query) for query in (first, second)]
    ratios = []
    for _ in range(DRAWS):
        planes = draw.normal(size=(TABLES, BITS, DIM))
        codes = simhash(keys, planes)
        hits = [(codes == simhash(query[None], planes)).sum(1) >= 2 for query in (first, second)]
        seen = np.where(hits[0], logits[0] - np.log(chance(cosines[0], BITS, TABLES)), -np.inf)
        told = torch.tensor(seen if history_is_sampled else np.where(np.arange(TOKENS) % 3, logits[0], -np.inf))
        noted = attended_maxima(block_maxima(told[None].float(), BLOCK, -torch.inf), told.logsumexp(0).view(1).float())
        blocks = noted[0].topk(CHOSEN).indices.numpy()
        if late != "none":
            found = hits[0].reshape(-1, BLOCK).sum(1)[blocks] if late == "by hits" else draw.random(CHOSEN)
            blocks = blocks[np.argsort(found)[: 2 * CHOSEN // 3]]
        is_left = ~np.isin(np.arange(TOKENS) // BLOCK, blocks)
        estimate = (np.exp(logits[1]) / chance(cosines[1], BITS, TABLES))[is_left & hits[1]].sum()
        ratios.append(estimate / np.exp(logits[1])[is_left].sum())
    return np.array(ratios)


@pytest.mark.parametrize("history_is_sampled", [False, True])
def test_the_mass_of_the_rest_is_unbiased_unless_a_sample_chose_what_is_left_out(history_is_sampled: bool) -> None:
    ratios = masses(history_is_sampled)
    sigmas = (ratios.mean() - 1) / (ratios.std(ddof=1) / DRAWS**0.5)
    if history_is_sampled:
        assert sigmas < -UNBIASED_SIGMAS
        assert ratios.mean() < 0.95
    else:
        assert abs(sigmas) < UNBIASED_SIGMAS
        assert ratios.std() < 0.5


def test_the_mass_is_unbiased_where_blocks_are_late_by_time_alone() -> None:
    ratios = masses(False, "by time")
    assert abs((ratios.mean() - 1) / (ratios.std(ddof=1) / DRAWS**0.5)) < UNBIASED_SIGMAS
    assert ratios.std() < 0.5


def test_the_mass_is_biased_where_tables_say_which_blocks_are_late() -> None:
    ratios = masses(False, "by hits")
    assert (ratios.mean() - 1) / (ratios.std(ddof=1) / DRAWS**0.5) > UNBIASED_SIGMAS
