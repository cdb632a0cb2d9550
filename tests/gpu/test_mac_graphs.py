"""MAC's steps on CUDA: captured as eager, rows of other profiles beside, and what a ring is left with."""

import numpy as np
import pytest
import torch

from tests.gpu.reference_model import document_prompt
from tests.gpu.test_mac_serving import LOOSE, SMALL, STRICT, MacTwins
from tests.gpu.twin_runners import check_steps
from tests.tolerances import BF16_LOGPROB_ATOL
from transfer.reading import Reading

PROMPTS = [document_prompt(300, 1), document_prompt(280, 3), document_prompt(60, 2)]


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(), (1, 3)])
@pytest.mark.parametrize("reading", [Reading.WHOLE, Reading.SAMPLE])
def test_on_cuda_where_nothing_matches_the_logits_are_the_exact_profiles(
    sizes: tuple[int, ...], reading: Reading
) -> None:
    twins = MacTwins(STRICT, ringed=(0, 2), device="cuda", graph_batch_sizes=sizes, reading=reading)
    twins.prefill(PROMPTS)
    check_steps(twins, [0, 1, 2], 20)
    torch.cuda.synchronize()
    assert sum(twins.counts.tries) > 0
    assert sum(twins.counts.hits) == 0


@pytest.mark.gpu
def test_on_cuda_every_cell_is_covered_once() -> None:
    twins = MacTwins(LOOSE, ringed=(0, 2), device="cuda", check_coverage=True)
    twins.prefill(PROMPTS)
    for _ in range(40):
        assert not twins.step([0, 1, 2]).failures
    assert sum(twins.counts.hits) > 0


@pytest.mark.gpu
def test_on_cuda_graphs_give_the_bits_of_eager_steps_and_leave_the_same_rings() -> None:
    logits, stores = [], []
    for sizes in ((), (3,)):
        twins = MacTwins(SMALL | {"tau": 0.6}, ringed=(0, 2), device="cuda", dtype="bfloat16", graph_batch_sizes=sizes)
        twins.offloading.decode_steps.host_reader.halving.always = 1
        twins.prefill(PROMPTS)
        for _ in range(20):
            twins.step([0, 1, 2])
        torch.cuda.synchronize()
        logits.append(np.stack([twins.logits(slot)[0].numpy() for slot in range(3)]))
        stores.append(twins.entries(0))
        assert sum(twins.counts.hits) > 0
        gap = (twins.logits(1)[0].log_softmax(-1) - twins.logits(1)[1].log_softmax(-1)).abs().max()
        assert float(gap) < BF16_LOGPROB_ATOL
    np.testing.assert_array_equal(logits[0], logits[1])
    for name in stores[0]:
        assert torch.equal(stores[0][name], stores[1][name]), name
