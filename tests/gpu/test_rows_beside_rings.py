"""Rows without a ring are exact beside rows that hold one, whichever method keeps rings."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.gpu.method_counts import counts_of
from tests.gpu.reference_model import document_prompt
from tests.gpu.ring_twins import RingTwins
from tests.gpu.test_indexed_serving import FEW, PROMPT, IndexedTwins
from tests.gpu.test_mac_serving import LOOSE, STRICT, MacTwins
from tests.gpu.test_predicted_serving import NARROW, PredictedTwins
from tests.gpu.twin_runners import furthest
from tests.tolerances import HOP_LOGITS_FLOAT32

METHODS: dict[str, Callable[..., RingTwins]] = {
    "mac": lambda **more: MacTwins(LOOSE, **more),
    "predicted": lambda **more: PredictedTwins(NARROW, **more),
    "predicted+sampled": lambda **more: PredictedTwins(NARROW, "predicted+sampled", **more),
    "indexed": lambda **more: IndexedTwins(FEW, **more),
}


@pytest.mark.parametrize("name", METHODS)
def test_rows_without_a_ring_share_the_step_and_are_exact(name: str) -> None:
    """A ring of a short context is read by no method but MAC, whose hits are in pages, too."""
    twins = METHODS[name](ringed=(0, 2), check_coverage=True)
    twins.prefill([PROMPT, document_prompt(280, 3), document_prompt(60, 2), document_prompt(40, 4)])
    for _ in range(6):
        assert not twins.step([0, 1, 2, 3]).failures
        assert furthest(twins, [1, 3] if name == "mac" else [1, 2, 3]) < HOP_LOGITS_FLOAT32
    counts = counts_of(twins.side)
    assert (sum(counts.hits) if name == "mac" else counts.read_tokens) > 0


@pytest.mark.parametrize("name", ["mac", "predicted", "predicted+sampled"])
def test_known_tokens_of_a_row_without_a_ring_are_beside_one_that_holds_it(name: str) -> None:
    """Their ids stand where no slot's do."""
    twins = MacTwins(STRICT) if name == "mac" else METHODS[name]()
    twins.prefill([PROMPT, document_prompt(60, 2)])
    plan = twins.plan([0, 1], [])
    plan = replace(plan, decode=[replace(plan.decode[0], runs=[[], [7, 11]])])
    twins.offloading._last_tokens.copy_(twins.exact._last_tokens)
    twins.exact.launch(twins.exact_plan(plan)).collect()
    assert not twins.offloading.launch(plan).collect().failures
    assert twins.offloading._last_tokens[1] == twins.exact._last_tokens[1]
