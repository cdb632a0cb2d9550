"""MAC's steps on CUDA: captured as eager, beside rows of other profiles, over an index, and what rings have."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.method_counts import counts_of
from tests.gpu.reference_model import document_prompt
from tests.gpu.test_indexed_serving import ALL, FEW
from tests.gpu.test_mac_indexed import SOME, BothTwins
from tests.gpu.test_mac_serving import LOOSE, SMALL, STRICT, MacTwins
from tests.gpu.twin_runners import NUM_HEADS, NUM_LAYERS, check_steps
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
@pytest.mark.usefixtures("products_by_library")
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


@pytest.mark.gpu
@pytest.mark.parametrize("index", [ALL, FEW], ids=["everything", "few"])
def test_on_cuda_hits_and_misses_over_an_index_cover_every_cell_once(index: dict[str, Any]) -> None:
    twins = BothTwins(SOME, index, ringed=(0, 2), device="cuda")
    twins.prefill(PROMPTS)
    for _ in range(40):
        assert not twins.step([0, 1, 2]).failures
    torch.cuda.synchronize()
    assert 0 < sum(counts_of(twins.mac).hits) < sum(counts_of(twins.mac).tries)
    assert counts_of(twins.index).read_tokens > 0


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(), (1, 3)])
def test_on_cuda_over_an_index_of_everything_where_nothing_matches_the_logits_are_the_exact_profiles(
    sizes: tuple[int, ...],
) -> None:
    twins = BothTwins(STRICT, ALL, ringed=(0, 2), device="cuda", graph_batch_sizes=sizes, check_coverage=False)
    twins.prefill(PROMPTS)
    check_steps(twins, [0, 1, 2], 20)
    assert sum(counts_of(twins.mac).hits) == 0
    assert counts_of(twins.index).read_tokens > 0


@pytest.mark.gpu
def test_on_cuda_graphs_over_an_index_give_what_eager_steps_give() -> None:
    """Row 0 alone, so that no step asks the CPU; what is chosen is added up in no fixed order."""
    logits, hits = [], []
    for sizes in ((), (1,)):
        more = {"dtype": "bfloat16", "graph_batch_sizes": sizes, "check_coverage": False}
        twins = BothTwins(SOME, FEW, device="cuda", **more)
        twins.prefill(PROMPTS[:1])
        asked = twins.offloading.decode_steps.host_reader.times.requests
        for _ in range(8):
            assert not twins.step([0]).failures
        torch.cuda.synchronize()
        assert twins.offloading.decode_steps.host_reader.times.requests == asked
        logits.append(twins.logits(0)[0].log_softmax(-1))
        hits.append(twins.hits)
    assert 0 < hits[0] < 8 * NUM_HEADS * NUM_LAYERS
    assert float((logits[0] - logits[1]).abs().max()) < BF16_LOGPROB_ATOL
