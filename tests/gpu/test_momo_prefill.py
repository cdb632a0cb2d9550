"""MOMO among prefill methods: which query blocks are dense, and the same KV however prompts are cut and shared."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from gpu.attention.prefill_attention import prefill_attention_reference
from gpu.attention.prefill_query import PrefillQuery
from gpu.config import Composition, MethodChoice
from gpu.methods.device_side import Site
from gpu.methods.momo import METHOD
from gpu.methods.momo.query_blocks import Momo, make_prefill_side, sparse_attention
from gpu.methods.momo.settings import MomoSettings
from gpu.methods.prefill_side import warm_up_sides
from gpu.model.architecture import ModelError, named_shape
from gpu.prefill.dense import Dense
from gpu.profiles import ProfileError, resolve_profiles
from gpu.step import PageWrite
from tests.gpu.host_prefill import PAGE, Stand, host_prompt
from tests.gpu.kernel_oracles import random
from tests.gpu.reference_model import GREEDY
from tests.gpu.test_prefill_host import units_of
from tests.gpu.test_prefill_methods import SPY, by_spy, draw_tokens
from tests.tolerances import CHUNKING_LOGPROB_ATOL, HOST_LOGIT_BFLOAT16_ATOL, MOMO_FLOAT32

SHAPE = named_shape("tiny")
SETTINGS = MomoSettings(gamma=4, key_block=16, query_block=32, k=2, k_trim=4, dense_until_tokens=72)
DENSE_SETTINGS = SETTINGS.model_copy(update={"dense_until_tokens": 10**6})


@dataclass(frozen=True)
class Prompt:
    """Queries of all of a prompt's tokens, keys and values."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def ask(self, settings: MomoSettings, begin: int, end: int, layer: int = 0) -> torch.Tensor:
        found = Momo(settings, Dense()).attend(replace(self.piece(begin, end), layer=layer))
        assert found.lse is None
        return found.out

    def piece(self, begin: int, end: int) -> PrefillQuery:
        query = self.query[begin:end]
        keys, values = self.keys[:, :end], self.values[:, :end]
        return PrefillQuery(
            0, query, query, keys, values, torch.arange(begin, end), begin, len(self.query), 0.125, None
        )

    def is_dense(self, out: torch.Tensor, begin: int) -> list[bool]:
        """Of each query block of `out`, whether it is what dense attention is."""
        dense = prefill_attention_reference(self.query, self.keys, self.values, 0.125).out
        error = (out - dense[begin : begin + len(out)]).abs().amax((1, 2))
        return [float(block.max()) < MOMO_FLOAT32 for block in error.split(32)]


def make_prompt(tokens: int) -> Prompt:
    generator = np.random.default_rng(tokens)
    shapes = (tokens, 4, 64), (2, tokens, 64), (2, tokens, 64)
    return Prompt(*(random(generator, shape, torch.float32, "cpu") * 2 for shape in shapes))


@pytest.mark.parametrize(
    ("tokens", "dense"),
    [
        (1, [True]),
        (33, [True, True]),
        (96, [True] * 3),
        (128, [True] * 4),
        (129, [True, True, True, False, True]),
        (160, [True, True, True, False, True]),
        (200, [True, True, True, False, False, False, True]),
    ],
)
def test_the_first_and_the_last_query_blocks_are_dense(tokens: int, dense: list[bool]) -> None:
    prompt = make_prompt(tokens)
    assert prompt.is_dense(prompt.ask(SETTINGS, 0, tokens), 0) == dense


@pytest.mark.parametrize("dense_layers", [0, 1, 3])
def test_the_first_layers_are_dense(dense_layers: int) -> None:
    prompt, settings = make_prompt(200), SETTINGS.model_copy(update={"dense_layers": dense_layers})
    is_dense = [all(prompt.is_dense(prompt.ask(settings, 0, 200, layer), 0)) for layer in range(4)]
    assert is_dense == [layer < dense_layers for layer in range(4)]


def test_as_many_dense_layers_as_the_model_has_are_refused() -> None:
    site = Site(SHAPE, None, 0, 1, torch.float32, torch.float32, torch.device("cpu"))
    make_prefill_side(SETTINGS.model_copy(update={"dense_layers": SHAPE.num_layers - 1}), site, Dense())
    few = f"dense_layers is {SHAPE.num_layers}; the model has {SHAPE.num_layers} layers: wanted fewer"
    with pytest.raises(ModelError, match=few):
        make_prefill_side(SETTINGS.model_copy(update={"dense_layers": SHAPE.num_layers}), site, Dense())
    with pytest.raises(ProfileError, match="dense_layers"):
        resolve_profiles({"fast": momo(dense_layers=-1)}, None)


def test_units_and_prefixes_change_nothing() -> None:
    prompt = make_prompt(200)
    whole = prompt.ask(SETTINGS, 0, 200)
    for cuts in ([0, 32, 64, 160, 200], [96, 192, 200], [160, 200]):
        pieces = [prompt.ask(SETTINGS, *cut) for cut in zip(cuts, cuts[1:], strict=False)]  # noqa: RUF007
        torch.testing.assert_close(torch.cat(pieces), whole[cuts[0] :], atol=MOMO_FLOAT32, rtol=0)


def test_what_comes_behind_a_prompts_last_block_changes_nothing_before_it() -> None:
    prompt = make_prompt(200)
    shorter = Prompt(prompt.query[:140], prompt.keys[:, :140], prompt.values[:, :140])
    got, wanted = shorter.ask(SETTINGS, 0, 140), prompt.ask(SETTINGS, 0, 200)
    torch.testing.assert_close(got[:128], wanted[:128], atol=MOMO_FLOAT32, rtol=0)
    assert (got[128:] - wanted[128:140]).abs().max() > MOMO_FLOAT32


def test_warming_up_goes_through_sparse_query_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    begins = []

    def record(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, begin: int, *more) -> torch.Tensor:
        begins.append((begin, len(query), keys.shape[1]))
        return sparse_attention(query, keys, values, begin, *more)

    monkeypatch.setattr("gpu.methods.momo.query_blocks.sparse_attention", record)
    room = torch.full((2, 2, 200, 64), torch.nan)
    sides = [Momo(SETTINGS.model_copy(update={"dense_layers": 1}), Dense()), Momo(DENSE_SETTINGS, Dense())]
    warm_up_sides(sides, *room.unbind(), 4, 64, 1)
    assert begins == [(96, 32, 160)]


def test_what_it_cannot_do_is_refused() -> None:
    prompt = make_prompt(100)
    with pytest.raises(AssertionError, match="a unit begins at 16; wanted a multiple of 32"):
        prompt.ask(SETTINGS, 16, 100)
    with pytest.raises(AssertionError, match="a unit ends at 50 of a prompt"):
        prompt.ask(SETTINGS, 32, 50)
    piece = prompt.piece(0, 100)
    scattered = PrefillQuery(*(getattr(piece, name) if name != "begin" else None for name in piece.__slots__))
    with pytest.raises(ValueError, match="positions are not consecutive; wanted consecutive ones"):
        Momo(SETTINGS, Dense()).attend(scattered)
    with pytest.raises(AssertionError, match="has no lse covers the whole past"):
        Momo(SETTINGS, Dense()).attend(piece).partial()


def logits_of(settings: MomoSettings, chunk_tokens: int, num_shared: int) -> torch.Tensor:
    """Of a prompt of 210 tokens; `num_shared` of them stand in pages, computed as a prompt before."""
    ids = draw_tokens(210, 1)
    stand = Stand(has_tier=False)
    stand.prefill.attention.sides = {SPY: Momo(settings, Dense())}
    pages: list[int] = []
    if num_shared:
        pages = list(stand.give_pages(0, len(ids), None))
        first = stand.job(1, 0, ids[: num_shared + 32], sampling=GREEDY)
        stand.prefill.add(first)
        stand.run(by_spy(units_of(first, 64)))
    own = [*pages[: num_shared // PAGE], *stand.give_pages(1, len(ids) - num_shared, None)]
    stand.pool.write_pages([PageWrite(1, 0, own)])
    job = stand.job(2, 1, ids, begin=num_shared)
    stand.prefill.add(job)
    stand.run(by_spy(units_of(job, chunk_tokens)))
    return stand.sampler.logits[-1]


def test_through_all_layers_neither_units_nor_a_shared_prefix_change_a_token() -> None:
    wanted = logits_of(SETTINGS, 64, 0)
    for chunk_tokens, num_shared in ((256, 0), (32, 0), (64, 96), (32, 160)):
        got = logits_of(SETTINGS, chunk_tokens, num_shared)
        torch.testing.assert_close(got, wanted, atol=CHUNKING_LOGPROB_ATOL, rtol=0)
    assert (logits_of(DENSE_SETTINGS, 64, 0) - wanted).abs().max() > CHUNKING_LOGPROB_ATOL


def test_a_prompt_that_is_offloaded_is_prefilled_so_too() -> None:
    ids, told = draw_tokens(24 * PAGE + 5, 1), []
    for has_tier in (False, True):
        stand = Stand(has_tier=has_tier)
        stand.prefill.attention.sides = {SPY: Momo(SETTINGS, Dense())}
        host = host_prompt(len(ids), 7) if has_tier else None
        stand.give_pages(0, len(ids), host)
        job = stand.job(1, 0, ids, host) if has_tier else stand.job(1, 0, ids)
        stand.prefill.add(job)
        stand.run(by_spy(units_of(job, 64)))
        told.append(stand.sampler.logits[-1])
    torch.testing.assert_close(told[1], told[0], atol=HOST_LOGIT_BFLOAT16_ATOL, rtol=0)


def momo(**settings: object) -> Composition:
    return Composition(prefill=MethodChoice(method="momo", **settings))


def test_profiles_of_it_share_kv_only_where_all_that_shapes_it_is_the_same() -> None:
    named = {"fast": momo(), "same": momo(gamma=16), "wider": momo(k_trim=128), "later": momo(dense_until_tokens=32768),
             "lower": momo(dense_layers=2)}  # fmt: skip
    profiles = resolve_profiles(named, None)
    keys = {name: profile.kv_key for name, profile in profiles.items()}
    assert keys["fast"] == keys["same"]
    assert len({keys[name] for name in ("exact", "fast", "wider", "later", "lower")}) == 5
    assert profiles["fast"].align_tokens == MomoSettings().query_block
    assert set(METHOD.kv_settings.values()) == set(MomoSettings.model_fields)
    with pytest.raises(ProfileError, match="k_trim is 2; wanted more than a query block's own 2"):
        resolve_profiles({"fast": momo(k_trim=2)}, None)
