"""Mixtures of experts: who takes whom, and what they make of it, against float64 oracles; of many tokens and of few."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpu.layers.expert_mlp import MOST_ALONE, ExpertMlp
from gpu.model.spec import Experts
from gpu.operations.arguments import runs_on_triton
from gpu.operations.experts import expert_tiles
from gpu.operations.experts.expert_rows import down_rows, gate_up_rows
from gpu.operations.experts.expert_tiles import FEWEST_PAIRS, LEAST_PAIRS, down_tiles, gate_up_tiles, pair_few, pair_up
from gpu.operations.experts.experts_reference import experts_reference, fold_choice_reference
from gpu.operations.experts.far_experts import FarExperts
from gpu.operations.experts.mixture_matrices import ExpertMatrices
from gpu.operations.experts.routing import choose, fold_choice, router_logits, tile_pairs
from gpu.operations.experts.shared_expert import add_shared
from gpu.operations.linear.packed_matrix import Packed
from tests.gpu import expert_oracle as oracle
from tests.gpu import kernel_oracles
from tests.gpu.expert_oracle import KINDS, Mixture, draw_mixture
from tests.gpu.kernel_oracles import DEVICES, DTYPES, KERNEL_TOLERANCE, NORM_EPS, distance, random, wide
from tests.gpu.packed_oracle import poisoned
from tests.tolerances import KERNEL_CHAIN_BFLOAT16, KERNEL_FLOAT32

CHAIN_TOLERANCE = {torch.float32: 2 * KERNEL_FLOAT32, torch.bfloat16: KERNEL_CHAIN_BFLOAT16}
# experts, and hidden: sizes that no block divides; numbers that are no powers of two; one expert a token, and all
MIXTURES = {
    "many": (Experts(16, 4, 64, True), 128),
    "odd": (Experts(5, 3, 40, False), 72),
    "one": (Experts(6, 1, 32, True), 96),
    "all": (Experts(2, 2, 64, True), 64),
    "biased": (Experts(5, 3, 40, True, has_biases=True), 72),
    "beside": (Experts(7, 3, 64, True, beside_mlp=True), 128),
    "biased words": (Experts(6, 2, 64, True, has_biases=True), 64),
}
SHARED = {"rows": 3, "few": 13, "tiles": 50}  # tokens of one expert
SIZES = [("rows", 1), ("rows", 3), ("few", 1), ("few", 3), ("few", LEAST_PAIRS), ("tiles", 2), ("tiles", 40)]
of_devices = [pytest.mark.parametrize("device", DEVICES), pytest.mark.parametrize("dtype", DTYPES)]


def everywhere(test):
    for mark in of_devices:
        test = mark(test)
    return test


def draw_tokens(tokens: int, hidden: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Hidden states, and a norm's weight, in the midst of NaN."""
    generator = np.random.default_rng(tokens)
    return tuple(
        poisoned(random(generator, shape, dtype, device), float("nan")) for shape in ((tokens, hidden), (hidden,))
    )


def computed(path: str, normed: Tensor, logits: Tensor, mixture: Mixture, residual: Tensor) -> Tensor:
    """By kernels of a kind, whatever the number of tokens; where none run, by the reference."""
    experts, weights = mixture.experts, mixture.weights
    gains = None if weights.beside is None else weights.beside.gains
    matrices = ExpertMatrices(weights.gate_up, weights.down, None, weights.gate_up_bias, weights.down_bias, gains)
    if not runs_on_triton(normed):
        made = experts_reference(normed, *choose(logits, experts), matrices, experts, mixture.activation)
        return made + residual
    if path == "rows":
        product, ids, shares = gate_up_rows(normed, logits, matrices, experts, mixture.activation)
        return down_rows(product, ids, shares, matrices, residual, experts)
    if path == "few":
        pairs = pair_few(logits, experts, isinstance(weights.gate_up, Packed))
    else:
        pairs = pair_up(*choose(logits, experts), experts, isinstance(weights.gate_up, Packed))
    product = gate_up_tiles(normed, pairs, matrices, experts, mixture.activation)
    return down_tiles(product, pairs, matrices, residual, experts)


@everywhere
def test_a_sum_may_be_written_over_the_residual(dtype, device):
    mixture = draw_mixture(*MIXTURES["many"], "plain", dtype, device)
    normed, _ = draw_tokens(40, mixture.router.shape[1], dtype, device)
    if not runs_on_triton(normed):
        pytest.skip("kernels alone write over anything")
    experts, weights = mixture.experts, mixture.weights
    matrices = ExpertMatrices(weights.gate_up, weights.down, None, weights.gate_up_bias, weights.down_bias, None)
    logits = random(np.random.default_rng(7), (40, experts.num_experts), torch.float32, device)
    pairs = pair_up(*choose(logits, experts), experts, False)
    product = gate_up_tiles(normed, pairs, matrices, experts, mixture.activation)
    residual = normed.clone()
    wanted = down_tiles(product, pairs, matrices, residual, experts)
    assert torch.equal(residual, normed)
    over = down_tiles(product, pairs, matrices, residual, experts, overwrites=True)
    assert over.data_ptr() == residual.data_ptr()
    assert torch.equal(over, wanted)


def assert_is_mixture(path: str, tokens: int, mixture: Mixture, dtype: torch.dtype, device: str) -> None:
    hidden = mixture.router.shape[1]
    normed, _ = draw_tokens(tokens, hidden, dtype, device)
    generator = np.random.default_rng(7)
    residual = random(generator, (tokens, hidden), dtype, device)
    logits = random(generator, (tokens, mixture.experts.num_experts), torch.float32, device) * 2
    got = computed(path, normed, logits, mixture, residual)
    made = oracle.mix(wide(normed), *oracle.choose(wide(logits), mixture.experts), mixture)
    assert distance(got, wide(residual) + made) < CHAIN_TOLERANCE[dtype]
    assert got.dtype == dtype


@pytest.mark.parametrize(("path", "tokens"), SIZES)
@pytest.mark.parametrize("name", [name for name in MIXTURES if name != "biased words"])
@everywhere
def test_experts_are_weighed_and_added(dtype, device, name, path, tokens):
    assert_is_mixture(path, tokens, draw_mixture(*MIXTURES[name], "plain", dtype, device), dtype, device)


@pytest.mark.parametrize(("path", "tokens"), [("rows", 3), ("few", 3), ("tiles", 40)])
@pytest.mark.parametrize(("name", "kind"), [("many", "plain"), ("biased", "plain"), ("many", "int4"), ("many", "fp8")])
@everywhere
def test_experts_without_gates_are_a_squared_relu(dtype, device, name, kind, path, tokens):
    if (path, kind) not in {("rows", "int4"), ("rows", "fp8")}:  # which are not multiplied so
        assert_is_mixture(path, tokens, draw_mixture(*MIXTURES[name], kind, dtype, device, False), dtype, device)


@pytest.mark.parametrize(("path", "tokens"), [size for size in SIZES if size[0] != "rows"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "plain"])
@everywhere
def test_experts_of_few_bits_are_those_of_their_numbers(dtype, device, kind, path, tokens):
    assert_is_mixture(path, tokens, draw_mixture(*MIXTURES["many"], kind, dtype, device), dtype, device)


@pytest.mark.parametrize("tokens", [1, FEWEST_PAIRS, FEWEST_PAIRS + 1])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "plain"])
@everywhere
def test_warps_share_the_columns_of_few_tokens(dtype, device, kind, tokens):
    """Of rows whose units are several turns of a loop, the last of them not whole."""
    assert_is_mixture("few", tokens, draw_mixture(Experts(2, 1, 640, True), 640, kind, dtype, device), dtype, device)


@pytest.mark.parametrize("name", ["biased words", "beside"])
@pytest.mark.parametrize(("path", "tokens"), [("few", 3), ("tiles", 40)])
@everywhere
def test_experts_of_few_bits_have_their_biases_and_factors(dtype, device, path, tokens, name):
    assert_is_mixture(path, tokens, draw_mixture(*MIXTURES[name], "int4", dtype, device), dtype, device)


@pytest.mark.parametrize("at_once", [1, 3, 16])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "plain"])
@everywhere
def test_experts_widened_in_parts_are_those_of_their_numbers(dtype, device, kind, at_once, monkeypatch):
    monkeypatch.setattr(expert_tiles, "LEAST_WIDENED_PAIRS", 1)
    monkeypatch.setattr(expert_tiles, "experts_at_once", lambda rows, inner, dtype_bytes: at_once)
    monkeypatch.setattr(expert_tiles, "MOST_PACKED_PAIRS", 8)  # so that tiles of 16 pairs are of widened experts
    assert_is_mixture("tiles", 40, draw_mixture(*MIXTURES["many"], kind, dtype, device), dtype, device)


@pytest.mark.parametrize("tokens", [1, MOST_ALONE, MOST_ALONE + 1, LEAST_PAIRS, LEAST_PAIRS + 1, 33, 65])
@pytest.mark.parametrize("name", ["many", "odd", "biased", "beside"])
@everywhere
def test_a_layer_is_its_norm_its_routing_and_its_experts(dtype, device, name, tokens):
    """In bfloat16 a token whose experts are taken by a hair may take another: few do, so most tokens agree."""
    mixture = draw_mixture(*MIXTURES[name], "plain", dtype, device)
    x, norm = draw_tokens(tokens, mixture.router.shape[1], dtype, device)
    got = ExpertMlp(mixture.weights, mixture.experts, mixture.activation)(x, norm, NORM_EPS)
    wanted = oracle.layer(wide(x), wide(norm), NORM_EPS, mixture)
    off = np.linalg.norm(wide(got) - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    assert np.mean(off < 2 * CHAIN_TOLERANCE[dtype]) >= (1.0 if dtype == torch.float32 else 0.9)


@pytest.mark.parametrize("tokens", [1, MOST_ALONE, 20, 65])
@pytest.mark.parametrize("packed", ["gate_up", "down"])
@everywhere
def test_one_of_two_matrices_may_have_few_bits(dtype, device, packed, tokens):
    """As files have them; of 65 tokens that take both experts tiles would be of 128 pairs, which are for plain ones."""
    mixture, other = (draw_mixture(*MIXTURES["all"], kind, dtype, device) for kind in ("plain", "int4"))
    weights = replace(mixture.weights, **{packed: getattr(other.weights, packed)})
    mixture = replace(mixture, weights=weights, **{packed: getattr(other, packed)})
    x, norm = draw_tokens(tokens, mixture.router.shape[1], dtype, device)
    got = ExpertMlp(weights, mixture.experts, "silu")(x, norm, NORM_EPS)
    assert distance(got, oracle.layer(wide(x), wide(norm), NORM_EPS, mixture)) < 2 * CHAIN_TOLERANCE[dtype]


@pytest.mark.long
@pytest.mark.parametrize("tokens", [1024, 4096])
@pytest.mark.parametrize("kind", ["plain", "int4"])
@everywhere
def test_thousands_of_tokens_are_tiles_of_any_size(dtype, device, kind, tokens):
    assert_is_mixture("tiles", tokens, draw_mixture(*MIXTURES["many"], kind, dtype, device), dtype, device)


@pytest.mark.parametrize("tokens", [1, 3, 64, 65])
@pytest.mark.parametrize("experts", [16, 7])
@everywhere
def test_logits_of_the_router_are_those_behind_the_norm_and_never_rounded(dtype, device, experts, tokens):
    hidden, generator = 136, np.random.default_rng(experts)
    x, norm = draw_tokens(tokens, hidden, dtype, device)
    router = poisoned(random(generator, (experts, hidden), dtype, device), float("nan"))
    normed, logits = router_logits(x, norm, NORM_EPS, router)
    assert distance(normed, kernel_oracles.rms_norm(wide(x), wide(norm), NORM_EPS)) < KERNEL_TOLERANCE[dtype]
    assert logits.dtype == torch.float32
    if device == "cuda" or dtype == torch.float32:  # the CPU's products of bfloat16 are
        assert distance(logits, wide(normed) @ wide(router).T) < KERNEL_FLOAT32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_normalised", [True, False])
def test_of_equal_logits_the_lower_expert_is_taken(device, is_normalised):
    experts = Experts(6, 3, 8, is_normalised)
    logits = torch.tensor(
        [[1, 1, 1, 1, 1, 1], [0, 2, 1, 2, 1, 1], [-0.0, 0, -1, 0, -0.0, -1], [9, -9, 9, -9, 9, 9],
         [-3, -2, -1, -1, -2, -3]], dtype=torch.float32, device=device,
    )  # fmt: skip
    ids, weights = choose(logits, experts)
    assert ids.tolist() == [[0, 1, 2], [1, 3, 2], [0, 1, 3], [0, 2, 4], [2, 3, 1]]
    assert distance(weights, oracle.choose(wide(logits), experts)[1]) < KERNEL_FLOAT32


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_who_takes_whom_and_pairs_by_expert_are_as_sorting_says(data):
    num_experts = data.draw(st.integers(1, 20))
    experts = Experts(num_experts, data.draw(st.integers(1, num_experts)), 8, data.draw(st.booleans()))
    tokens = data.draw(st.integers(1, 12))
    row = st.lists(
        st.sampled_from([-1e30, -2.5, -0.0, 0.0, 1.0, 1.5, 30.0]), min_size=num_experts, max_size=num_experts
    )
    logits = torch.tensor(data.draw(st.lists(row, min_size=tokens, max_size=tokens)), dtype=torch.float32)
    ids, weights = choose(logits, experts)
    wanted, shares = oracle.choose(wide(logits), experts)
    assert np.array_equal(ids.numpy(), wanted)
    assert np.allclose(weights.numpy(), shares, atol=1e-6)
    assert_has_all_pairs_by_expert(ids, num_experts, data.draw(st.sampled_from([1, 4, 16])))


def assert_has_all_pairs_by_expert(ids: Tensor, num_experts: int, per_tile: int) -> None:
    """Every pair once, in tiles of its expert alone, filled from the first on and in order; others have none."""
    tile_experts, takers = (part.cpu().numpy() for part in tile_pairs(ids, num_experts, per_tile))
    flat = ids.cpu().numpy().reshape(-1)
    assert len(tile_experts) == len(takers) == len(flat) // per_tile + num_experts
    for expert in range(num_experts):
        own = takers[tile_experts == expert].reshape(-1)
        wanted = np.flatnonzero(flat == expert)
        assert own[: len(wanted)].tolist() == wanted.tolist()
        assert (own[len(wanted) :] == -1).all()
        assert len(own) - len(wanted) < per_tile
    assert set(tile_experts.tolist()) <= {-1, *flat.tolist()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("per_tile", [16, 128])
@pytest.mark.parametrize("tokens", [1, 700, pytest.param(4096, marks=pytest.mark.long)])
def test_pairs_of_many_tokens_are_sorted_block_after_block(device, tokens, per_tile):
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, 9, (tokens, 8))).to(device, torch.int32)
    assert_has_all_pairs_by_expert(ids, 10, per_tile)  # the last one is taken by nobody


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_normalised", [True, False])
@pytest.mark.parametrize(("group_best", "is_sigmoid"), [(1, False), (2, False), (2, True)])
def test_experts_of_the_best_groups_are_taken_with_weights_as_they_are_or_of_sum_one(
    device, is_normalised, group_best, is_sigmoid
):
    experts = Experts(12, 3, 8, is_normalised, is_sigmoid=is_sigmoid, groups=4, groups_taken=2, group_best=group_best)
    generator = np.random.default_rng(3)
    logits, correction = (random(generator, shape, torch.float32, device) for shape in ((9, 12), (12,)))
    ids, weights = choose(fold_choice(logits, experts, correction if is_sigmoid else None), experts)
    scores = np.exp(wide(logits))
    scores = scores / (1 + scores) if is_sigmoid else scores / scores.sum(1, keepdims=True)
    for row, score in enumerate(scores):
        wanted = score + is_sigmoid * wide(correction)
        groups = np.sort(wanted.reshape(4, 3), 1)[:, -group_best:].sum(1)
        allowed = np.repeat(np.isin(np.arange(4), np.argsort(-groups)[:2]), 3)
        taken = np.argsort(-np.where(allowed, wanted, -np.inf))[:3]
        assert sorted(ids[row].tolist()) == sorted(taken.tolist())
        own = score[ids[row].tolist()]
        assert distance(weights[row], own / own.sum() if is_normalised else own) < KERNEL_FLOAT32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_experts", "groups"), [(7, 1), (64, 1), (160, 8), (12, 3)])
@pytest.mark.parametrize("is_sigmoid", [True, False])
def test_the_kernel_folds_a_choice_as_the_reference_does(device, num_experts, groups, is_sigmoid):
    """With weights that a correction outweighs, and large ones of either sign."""
    experts = Experts(num_experts, 4, 8, True, is_sigmoid=is_sigmoid, groups=groups, groups_taken=-(-groups // 2))
    generator = np.random.default_rng(num_experts)
    logits = random(generator, (9, num_experts), torch.float32, device) * 20
    correction = random(generator, (num_experts,), torch.float32, device) if is_sigmoid else None
    got, wanted = (fold(logits, experts, correction) for fold in (fold_choice, fold_choice_reference))
    assert (torch.isfinite(got).sum(1) == 4).all()
    assert torch.equal(torch.isfinite(got), torch.isfinite(wanted))
    taken = torch.isfinite(wanted)
    assert torch.allclose(got[taken], wanted[taken], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_of_equal_weights_the_first_expert_and_group_are_taken(device):
    if not runs_on_triton(torch.empty(0, device=device)):
        pytest.skip("of the reference any may be")
    experts = Experts(12, 3, 8, True, is_sigmoid=True, groups=4, groups_taken=2)
    folded = fold_choice(torch.zeros(2, 12, device=device), experts, None)
    assert torch.isfinite(folded).nonzero().tolist() == [[row, one] for row in range(2) for one in range(3)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_normalised", [True, False])
@pytest.mark.parametrize(("num_experts", "tokens", "groups"), [(16, 3, 1), (16, 12, 4), (5, 16, 1), (200, 16, 1)])
def test_what_tiles_of_few_tokens_find_themselves_is_what_is_chosen(device, num_experts, tokens, groups, is_normalised):
    """By pairs, where those are fewer than experts, and by experts; with ties, and of groups."""
    if not runs_on_triton(torch.empty(0, device=device)):
        pytest.skip("kernels alone find it")
    experts = Experts(num_experts, 4, 16, is_normalised, groups=groups, groups_taken=-(-groups // 2))
    generator = np.random.default_rng(tokens)
    logits = random(generator, (tokens, num_experts), torch.float32, device).mul_(2).round_()
    if groups > 1:
        logits = fold_choice(logits, experts, None)
    tiles = pair_few(logits, experts)
    for buffer in (tiles.experts, tiles.takers):
        buffer.fill_(-7)
    gate_up = random(generator, (num_experts * 32, 32), torch.float32, device)
    matrices = ExpertMatrices(gate_up, gate_up)  # down is not read
    gate_up_tiles(random(generator, (tokens, 32), torch.float32, device), tiles, matrices, experts, "silu")
    ids, shares = choose(logits, experts)
    found = {}
    for expert, pairs in zip(tiles.experts.tolist(), tiles.takers.tolist(), strict=True):
        found |= {pair: expert for pair in pairs if pair >= 0 and expert >= 0}
    assert [found[pair] for pair in range(tokens * 4)] == ids.flatten().tolist()
    assert sum(expert >= 0 for expert in tiles.experts.tolist()) == len(ids.unique())
    total = tiles.shares.sum(1, keepdim=True) if is_normalised else 1.0
    assert distance(tiles.shares / total, wide(shares)) < KERNEL_FLOAT32


@pytest.mark.parametrize("path", ["rows", "few", "tiles"])
@everywhere
def test_experts_that_nobody_takes_are_not_read(dtype, device, path):
    mixture = draw_mixture(*MIXTURES["many"], "plain", dtype, device)
    experts, hidden = mixture.experts, mixture.router.shape[1]
    logits = random(np.random.default_rng(3), (5, 16), torch.float32, device)
    logits[:, 6:] -= 100
    for matrix, rows in ((mixture.weights.gate_up, 2 * experts.intermediate), (mixture.weights.down, hidden)):
        matrix[6 * rows :] = float("nan")
    normed, _ = draw_tokens(5, hidden, dtype, device)
    got = computed(path, normed, logits, mixture, torch.zeros_like(normed))
    wanted = oracle.mix(wide(normed), *oracle.choose(wide(logits), experts), mixture)
    assert distance(got, wanted) < CHAIN_TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("kind", "path"), [("plain", "rows"), *((kind, path) for kind in ("plain", "int4") for path in ("few", "tiles"))]
)
@everywhere
def test_all_tokens_may_take_one_expert(dtype, device, kind, path):
    experts, hidden = MIXTURES["many"]
    mixture, tokens = draw_mixture(replace(experts, per_token=1), hidden, kind, dtype, device), SHARED[path]
    logits = torch.zeros(tokens, 16, device=device)
    logits[:, 11] = 1.0
    normed, _ = draw_tokens(tokens, hidden, dtype, device)
    got = computed(path, normed, logits, mixture, torch.zeros_like(normed))
    wanted = oracle.mix(wide(normed), np.full((tokens, 1), 11), np.ones((tokens, 1)), mixture)
    assert distance(got, wanted) < CHAIN_TOLERANCE[dtype]


@pytest.mark.parametrize(("path", "tokens"), [("rows", 4), ("few", 4), ("few", 11), ("tiles", 24)])
@everywhere
def test_a_tokens_result_hangs_on_no_other_token(dtype, device, path, tokens):
    """To the last bit, wherever it stands among as many; but on a CPU products of matrices are a library's."""
    mixture = draw_mixture(*MIXTURES["many"], "plain", dtype, device)
    normed, _ = draw_tokens(tokens, mixture.router.shape[1], dtype, device)
    logits = random(np.random.default_rng(3), (tokens, 16), torch.float32, device)
    moved = torch.arange(tokens, device=device).roll(3)
    first = computed(path, normed, logits, mixture, normed)[moved]
    again = computed(path, normed[moved], logits[moved], mixture, normed[moved])
    is_library = device == "cpu" and path != "rows"
    assert torch.equal(first, again) or (is_library and distance(first, wide(again)) < 1e-6)


def test_what_is_not_finite_takes_experts_that_there_are():
    logits = torch.full((2, 6), float("nan"))
    logits[1] = float("-inf")
    ids, _ = choose(logits, Experts(6, 3, 8, True))
    assert bool(((ids >= 0) & (ids < 6)).all())


def _arguments():
    """A mixture, and two tokens with their logits and pairs."""
    mixture = draw_mixture(*MIXTURES["many"], "plain", torch.float32, "cpu")
    normed, logits = torch.zeros(2, 128), torch.zeros(2, 16)
    return mixture, normed, logits, pair_up(*choose(logits, mixture.experts), mixture.experts, False)


def test_matrices_of_another_shape_are_refused():
    mixture, normed, logits, pairs = _arguments()
    experts, weights, product = mixture.experts, mixture.weights, torch.zeros(8, 64)
    whole = ExpertMatrices(weights.gate_up, weights.down)
    short, wide_down = replace(whole, gate_up=weights.gate_up[:-1]), replace(whole, down=weights.down.double())
    with pytest.raises(ValueError, match=r"gate_up_rows: gate_up is .*wanted \(2048, 128\)"):
        gate_up_rows(normed, logits, short, experts, "silu")
    with pytest.raises(ValueError, match=r"gate_up_tiles: gate_up is .*wanted \(2048, 128\)"):
        gate_up_tiles(normed, pairs, short, experts, "silu")
    with pytest.raises(ValueError, match=r"gate_up_tiles: normed is \(1, 128\).*wanted \(2, 128\)"):
        gate_up_tiles(normed[:1], pairs, whole, experts, "silu")
    with pytest.raises(ValueError, match=r"pair_few: logits are of 17 tokens; wanted 1 to 16"):
        pair_few(torch.zeros(17, 16), experts)
    with pytest.raises(ValueError, match=r"down_rows: down is .*float64.*wanted \(2048, 64\)"):
        down_rows(product, pairs.takers, pairs.shares, wide_down, normed, experts)
    with pytest.raises(ValueError, match=r"down_tiles: down is .*float64.*wanted \(2048, 64\)"):
        down_tiles(product, pairs, wide_down, normed, experts)


def test_packed_experts_with_columns_out_of_order_are_refused():
    mixture, normed, _, pairs = _arguments()
    packed = draw_mixture(*MIXTURES["many"], "int4", torch.float32, "cpu").weights.gate_up
    assert isinstance(packed, Packed)
    moved = replace(packed, order=torch.arange(128))
    with pytest.raises(ValueError, match=r"columns in another order; wanted .* columns in order"):
        gate_up_tiles(normed, pairs, ExpertMatrices(moved, mixture.weights.down), mixture.experts, "silu")


def test_packed_experts_are_refused_by_rows():
    """Wherever they lie."""
    mixture, normed, logits, pairs = _arguments()
    experts, plain = mixture.experts, mixture.weights
    packed = draw_mixture(*MIXTURES["many"], "int4", torch.float32, "cpu").weights
    far = FarExperts(packed.gate_up, packed.down, torch.zeros(16, dtype=torch.int32))
    near, apart = ExpertMatrices(packed.gate_up, packed.down), ExpertMatrices(plain.gate_up, plain.down, far)
    product = torch.zeros(2, 4, 64)
    with pytest.raises(ValueError, match=r"gate_up_rows: gate_up is packed; wanted a tensor: .* in tiles"):
        gate_up_rows(normed, logits, near, experts, "silu")
    with pytest.raises(ValueError, match=r"gate_up_rows: far gate_up is packed; wanted a tensor"):
        gate_up_rows(normed, logits, apart, experts, "silu")
    with pytest.raises(ValueError, match=r"down_rows: down is packed; wanted a tensor"):
        down_rows(product, pairs.takers, pairs.shares, near, normed, experts)
    with pytest.raises(ValueError, match=r"down_rows: far down is packed; wanted a tensor"):
        down_rows(product, pairs.takers, pairs.shares, apart, normed, experts)


@pytest.mark.parametrize("tokens", [1, 3, 70])
@pytest.mark.parametrize("hidden", [64, 200])
@everywhere
def test_what_every_token_has_beside_experts_is_added_by_its_own_share(dtype, device, hidden, tokens):
    drawn = np.random.default_rng(tokens + hidden)
    rows = [torch.from_numpy(drawn.standard_normal((count, hidden))) for count in (tokens, tokens, tokens, 1)]
    mixed, made, normed, share = (one.to(device, dtype) for one in rows)
    base, own, x, weight = (one.double() for one in (mixed, made, normed, share))
    wanted = base + own * (x @ weight.T).sigmoid()
    got = add_shared(mixed, made, normed, share)
    assert got is mixed
    assert ((got.double() - wanted).abs() / (1 + wanted.abs())).max() < (1e-5 if dtype == torch.float32 else 2e-2)
