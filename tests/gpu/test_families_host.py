"""Contexts of other families that outgrow the device: what is offloaded is read as if it were not; windows go nowhere.

The runner that offloads keeps windows alone in layers that have one; its oracle has all of every context in pages.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from cpu.cpu_tier import open_tier
from gpu.config import GpuConfig
from gpu.memory.demand import PlanError
from gpu.memory.host_shares import resolve_host
from gpu.methods.kept import keep_as_set
from gpu.model.architecture import named_shape, read_architecture
from tests.gpu import twin_runners
from tests.gpu.family_checkpoints import checkpoint, draw_prompt
from tests.gpu.test_families import off
from tests.gpu.test_indexed_serving import ALL as ALL_TOKENS
from tests.gpu.test_indexed_serving import FEW, IndexedTwins
from tests.gpu.test_mac_serving import STRICT, MacTwins
from tests.gpu.test_predicted_serving import WIDE, PredictedTwins
from tests.gpu.twin_runners import Twins, tier_shape
from tests.reference_tier import ReferenceTier
from tests.tolerances import FAMILY_LOGITS, FAMILY_OFFLOADED
from transfer.host_config import HostConfig
from transfer.host_tier import HostTier
from transfer.reading import Reading

# heads of 128, 64, 256, 8, 64, 64, 64, 32 and 96; 8, 16, 2, 7, 4, 4, 2, 2 and 2 to a KV head
LAYERS = {"qwen3": 3, "glm4": 3, "gemma3": 6, "qwen2": 3, "qwen3_moe": 3,
          "gpt_oss": 4, "gemma4": 6, "gemma4 with inputs": 8, "qwen3_5": 4, "qwen3_next": 4,
          "phi3": 3}  # fmt: skip
# whose logits alone are compared: what they do in attention others do as well, or they do beside it
OTHERS = {"ministral3": 3, "smollm3": 5, "granite": 3, "olmo3": 5, "muse_glimmer": 5,
          "gemma4_unified": 6}  # fmt: skip
# Where all layers have the same heads, so that the oracle may have all of them in pages.
ALIKE = {"gemma4": {"head_dim": 64, "global_head_dim": 64, "num_key_value_heads": 1},
         "gemma4 with inputs": {"head_dim": 64, "global_head_dim": 64}}  # fmt: skip
ALIKE["gemma4_unified"] = ALIKE["gemma4"] | {"model_type": "gemma4_unified_text", "enable_moe_block": False}
SOME = [("qwen3", "bfloat16"), ("glm4", "int8")]  # in the ordinary suite
INDEXED_SOME = 0.04  # of the largest logit: 20 tokens of 300 are read, the rest is estimated; seen are 0.007 to 0.023
INDEXED_OTHERS = 0.1  # as that; seen are 0.001 to 0.05, and 0.08 where gemma4's router takes other experts by a hair
ALL = (1, 64)  # bits and tables with which nearly every key is sampled
MIB = 2**20


@contextmanager
def twins_of(name: str, monkeypatch: pytest.MonkeyPatch, tables: tuple[int, int] | None = None,
             reading: Reading | None = None, rows: Literal["bfloat16", "int8"] = "bfloat16",
             make: Callable[..., Twins] = Twins, **more: Any) -> Iterator[Twins]:  # fmt: skip
    """tables: of the tier that serves, or None: the plain one, with such rows; make, more: of the twins."""
    family = "gemma4" if name == "gemma4_unified" else name
    known = checkpoint(family, num_hidden_layers=(LAYERS | OTHERS)[name], **ALIKE.get(name, {}))
    shape = read_architecture(known.folder)
    replaced = {
        "NUM_LAYERS": shape.num_layers,
        "NUM_HEADS": shape.num_heads,
        "DIM": shape.dim,
        "NUM_KV_HEADS": shape.num_kv_heads,
        "WINDOW_LAYERS": shape.layers_apart,
        "shallow_model": lambda _: SimpleNamespace(name=str(known.folder)),
    }
    for key, value in replaced.items():
        monkeypatch.setattr(twin_runners, key, value)
    dense = keep_as_set(HostConfig(), shape).dense_layers
    tier: HostTier = ReferenceTier(replace(tier_shape(dense), rows=rows), 100_000, 256, 200)
    if tables is not None:
        tier = open_tier(tier_shape(dense, *tables), torch.float32, 128 * MIB, num_threads=1, is_pinned=False)
    try:
        yield make(dense_layers=dense, tier=tier, **({} if reading is None else {"reading": reading}), **more)
    finally:
        if tables is not None:
            tier.shutdown()


def decode(twins: Twins, steps: int) -> float:
    """How far logits are off the exact profile's, at most."""
    twins.prefill([draw_prompt(300), draw_prompt(150)])
    most = 0.0
    for _ in range(steps):
        assert not twins.step([0, 1]).failures
        most = max([most, *(off(*twins.logits(slot)) for slot in (0, 1))])
    return most


@pytest.mark.parametrize("name", [*list(LAYERS)[:-1], *OTHERS, pytest.param("phi3", marks=pytest.mark.long)])
def test_offloaded_logits_are_those_of_the_exact_profile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with twins_of(name, monkeypatch) as twins:
        assert decode(twins, 6) < FAMILY_LOGITS
        assert twins.sequences[0].released > 200


def test_that_comparison_sees_one_token_of_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    with twins_of("gemma3", monkeypatch) as twins:
        twins.prefill([draw_prompt(300)])
        twins.step([0])
        assert off(*twins.logits(0)) < FAMILY_LOGITS
        page = twins._exact_pages(0, 96, 112)[0]
        twins.exact.pool.value_pages[2][page, :, 4] *= -3  # what is offloaded still has it as it was
        twins.step([0])
        assert off(*twins.logits(0)) > FAMILY_LOGITS


@pytest.mark.long  # each head dimension and group is compiled, half a minute
@pytest.mark.parametrize("reading", [Reading.WHOLE, Reading.SAMPLE])
@pytest.mark.parametrize("name", ["qwen3", "glm4", "gemma3", "phi3", "qwen3_moe", "gpt_oss", "gemma4"])
def test_the_tier_that_serves_reads_them_all_likewise(
    name: str, reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    with twins_of(name, monkeypatch, ALL, reading) as twins:
        bound = (
            FAMILY_LOGITS if reading is Reading.WHOLE else 100 * FAMILY_LOGITS
        )  # a few keys opposite to the query are left out
        assert decode(twins, 6) < bound


SINKS = {
    "predicted, all": (partial(PredictedTwins, WIDE), FAMILY_LOGITS),
    "indexed, all": (partial(IndexedTwins, ALL_TOKENS), FAMILY_LOGITS),
    "indexed, some": (partial(IndexedTwins, FEW), INDEXED_SOME),
    "mac": (partial(MacTwins, STRICT), FAMILY_LOGITS),
}


@pytest.mark.parametrize("name", SINKS)
def test_methods_of_the_card_merge_sinks_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a gpt-oss: what an index reads and estimates, and queries of which none is like an earlier one."""
    make, bound = SINKS[name]
    with twins_of("gpt_oss", monkeypatch, make=make) as twins:
        twins.prefill_down(0, draw_prompt(300))
        for _ in range(5):
            assert not twins.step([0]).failures
            assert off(*twins.logits(0)) < bound
        for layer in twins.offloading.weights.layers:
            layer.sinks.add_(6.0)
        assert not twins.step([0]).failures
        assert off(*twins.logits(0)) > bound, "power: other sinks are seen"


@pytest.mark.parametrize("name", ["gemma4", "gemma4 with inputs", *OTHERS])
def test_an_index_reads_all_tokens_exactly_and_estimates_what_it_does_not_read(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each family, whatever scales its queries, rotates its keys or gates what attention gives. What is only
    estimated is seen, so the first bound has power.
    """
    for settings, least, most in ((ALL_TOKENS, 0.0, FAMILY_LOGITS), (FEW, FAMILY_LOGITS, INDEXED_OTHERS)):
        with twins_of(name, monkeypatch, make=partial(IndexedTwins, settings)) as twins:
            twins.prefill_down(0, draw_prompt(300))
            seen = []
            for _ in range(3):
                assert not twins.step([0]).failures
                seen.append(off(*twins.logits(0)))
            assert least < max(seen) < most


def apart(
    name: str, rows: Literal["bfloat16", "int8"], monkeypatch: pytest.MonkeyPatch, is_lost: bool = False
) -> float:
    """Root mean square of the differences of log-probabilities, in nats, from the exact profile, whose rows are not
    rounded. is_lost: a KV head's answers are wrong in one layer.
    """
    monkeypatch.setattr(Twins, "_round", lambda self, sequence: None)
    with twins_of(name, monkeypatch, rows=rows) as twins:
        twins.prefill([draw_prompt(300)])
        squares = []
        for step in range(8):
            if is_lost and step == 1:
                with torch.inference_mode():
                    twins.tier.contexts[100][0].chunk.layers[0].values[0] *= -1
            assert not twins.step([0]).failures
            got, wanted = (logits.log_softmax(-1) for logits in twins.logits(0))
            squares.append(float((got - wanted).square().mean()))
        return float(np.sqrt(np.mean(squares)))


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        pytest.param(name, rows, marks=[] if (name, rows) in SOME else pytest.mark.long)
        for name in LAYERS
        for rows in ("bfloat16", "int8")
        if (name, rows) != ("gpt_oss", "int8")  # off by 0.018: this draw's experts are taken by a hair
    ],
)
def test_offloaded_answers_are_as_far_off_as_their_rows_are_rounded(
    name: str, rows: Literal["bfloat16", "int8"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bounds that `tandem bench long` holds it to."""
    bound = FAMILY_OFFLOADED[rows]
    off_by, lost = (apart(name, rows, monkeypatch, is_lost) for is_lost in (False, True))
    print("APART", name, rows, off_by, lost)
    assert off_by < bound < lost


def test_contexts_of_a_gemma4_with_heads_of_512_are_not_sent_down() -> None:
    shape = named_shape("gemma-4-26b-a4b")
    with pytest.raises(PlanError, match=r"^host: gemma-4-26b-a4b has heads of 512, 8 to a KV head; the host reads"):
        resolve_host(HostConfig(), keep_as_set(HostConfig(), shape), shape, 16, 2, 8)


def test_layers_with_a_window_stay_and_a_model_of_nothing_else_has_nothing_to_send() -> None:
    gemma, mistral = named_shape("gemma-3-4b"), named_shape("mistral-7b-v0.1")
    kept = keep_as_set(HostConfig(), gemma)
    assert set(range(34)) - set(kept.dense_layers) == {5, 11, 23, 29}  # 17 is half the depth
    assert keep_as_set(HostConfig(dense_layers=()), gemma).dense_layers == gemma.window_layers
    page_tokens = GpuConfig().page_tokens
    assert resolve_host(HostConfig(), kept, gemma, page_tokens, 2, 8).tier_shape.layers == (5, 11, 23, 29)
    hybrid = named_shape("qwen3.5-9b")
    kept = keep_as_set(HostConfig(), hybrid)
    assert resolve_host(HostConfig(), kept, hybrid, page_tokens, 2, 8).tier_shape.layers == tuple(range(3, 32, 4))
    with pytest.raises(PlanError, match="all 32 layers stay on the device, 32 since they have a window, so nothing"):
        resolve_host(HostConfig(), keep_as_set(HostConfig(), mistral), mistral, page_tokens, 2, 8)
