"""Products of experts whose matrices lie in two places, in any order, have the bits of those that lie in one."""

import pytest
import torch

from gpu.model.spec import Experts
from gpu.operations.arguments import runs_on_triton
from gpu.operations.experts.expert_rows import down_rows, gate_up_rows
from gpu.operations.experts.expert_tiles import down_tiles, gate_up_tiles, pair_few, pair_up
from gpu.operations.experts.experts_reference import experts_reference
from gpu.operations.experts.far_experts import FarExperts
from gpu.operations.experts.mixture_matrices import ExpertMatrices
from gpu.operations.experts.routing import choose
from gpu.operations.linear.packed_matrix import Packed, Stored
from gpu.weights.host_experts import tensors_of, with_tensors
from gpu.weights.weights import ExpertWeights
from tests.gpu.expert_oracle import KINDS, draw_mixture
from tests.gpu.kernel_oracles import DEVICES
from tests.tolerances import FAR_SUM_BFLOAT16, FAR_SUM_FLOAT32

EXPERTS, HIDDEN = Experts(6, 3, 64, True), 64
SLOTS = (4, 1, 5)  # whose experts lie far, by slot
CASES = [("rows", 2, "plain"), *((path, tokens, kind) for path, tokens in (("few", 2), ("tiles", 9)) for kind in KINDS)]


def taken(stored: Stored, experts: tuple[int, ...]) -> Stored:
    """Those experts' rows, in this order, in memory of their own."""
    parts = (torch.cat([tensor.chunk(6)[one] for one in experts]) for tensor in tensors_of(stored))
    return with_tensors(stored, parts)


def split(weights: ExpertWeights, device: str) -> tuple[ExpertWeights, FarExperts]:
    near = tuple(one for one in range(6) if one not in SLOTS)
    places = [~SLOTS.index(one) if one in SLOTS else near.index(one) for one in range(6)]
    own = ExpertWeights(weights.router, taken(weights.gate_up, near), taken(weights.down, near))
    there = torch.tensor(places, dtype=torch.int32, device=device)
    return own, FarExperts(taken(weights.gate_up, SLOTS), taken(weights.down, SLOTS), there)


def computed(path: str, x: torch.Tensor, logits: torch.Tensor, weights: ExpertWeights, far: FarExperts | None):
    ids, shares = choose(logits, EXPERTS)
    matrices = ExpertMatrices(weights.gate_up, weights.down, far)
    if not runs_on_triton(x):
        return experts_reference(x, ids, shares, matrices, EXPERTS, "silu")
    if path == "rows":
        product, ids, shares = gate_up_rows(x, logits, matrices, EXPERTS, "silu")
        return down_rows(product, ids, shares, matrices, x, EXPERTS)
    has_packed = isinstance(weights.gate_up, Packed)
    pairs = pair_few(logits, EXPERTS, has_packed) if path == "few" else pair_up(ids, shares, EXPERTS, has_packed)
    product = gate_up_tiles(x, pairs, matrices, EXPERTS, "silu")
    return down_tiles(product, pairs, matrices, x, EXPERTS)


@pytest.mark.parametrize(("path", "tokens", "kind"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("device", DEVICES)
def test_where_experts_lie_changes_no_bit(device: str, dtype: torch.dtype, path: str, tokens: int, kind: str) -> None:
    weights = draw_mixture(EXPERTS, HIDDEN, kind, dtype, device).weights
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(device, dtype)
    logits = torch.randn(tokens, 6, generator=generator).to(device)
    own, far = split(weights, device)
    wanted = computed(path, x, logits, weights, None)
    assert torch.equal(computed(path, x, logits, own, far), wanted)
    other = FarExperts(far.gate_up, far.down, far.places.roll(1))
    assert not torch.equal(computed(path, x, logits, own, other), wanted), "power: others' places"


@pytest.mark.parametrize("device", DEVICES)
def test_all_may_lie_far(device: str) -> None:
    weights = draw_mixture(EXPERTS, HIDDEN, "plain", torch.float32, device).weights
    x, logits = torch.ones(2, HIDDEN, device=device), torch.arange(12.0, device=device).view(2, 6)
    places = ~torch.arange(6, dtype=torch.int32, device=device)
    none = ExpertWeights(weights.router, weights.gate_up[:0], weights.down[:0])
    far = FarExperts(weights.gate_up, weights.down, places)
    for path in ("rows", "tiles"):
        assert torch.equal(computed(path, x, logits, none, far), computed(path, x, logits, weights, None))


LEFT_OUT = [
    ("rows", 3, "plain"), *(("few", tokens, "plain") for tokens in (1, 9)),
    *((path, tokens, kind) for path, tokens in (("few", 2), ("tiles", 9)) for kind in KINDS),
]  # fmt: skip


@pytest.mark.parametrize(("path", "tokens", "kind"), LEFT_OUT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("device", DEVICES)
def test_what_is_left_out_and_what_is_not_are_the_whole(
    device: str, dtype: torch.dtype, path: str, tokens: int, kind: str
) -> None:
    """Both in float32, and each without what the other has; a token of which all are left out keeps its residual."""
    weights = draw_mixture(EXPERTS, HIDDEN, kind, dtype, device).weights
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(device, dtype)
    logits = torch.randn(tokens, 6, generator=generator).to(device)
    logits[0, list(SLOTS)] += 100
    own, far = split(weights, device)
    other = ExpertWeights(weights.router, taken(weights.gate_up, SLOTS), taken(weights.down, SLOTS))
    near = computed(path, x, logits, own, FarExperts(None, None, far.places))
    rest = computed(path, x, logits, other, FarExperts(None, None, ~far.places))
    whole = computed(path, x, logits, weights, None).float()
    residual = x.float() if runs_on_triton(x) else torch.zeros_like(x, dtype=torch.float32)
    assert near.dtype == rest.dtype == torch.float32
    assert torch.equal(near[0], residual[0])
    off = (near + rest - residual - whole).abs().max() / whole.abs().max()
    assert off < (FAR_SUM_FLOAT32 if dtype == torch.float32 else FAR_SUM_BFLOAT16)
    power = (near - whole).abs().max() / whole.abs().max()
    assert power > FAR_SUM_BFLOAT16, "power: without the others"


@pytest.mark.skipif(not runs_on_triton(torch.empty(0)), reason="of launchers, which the reference has none of")
def test_a_far_matrix_of_other_columns_is_named() -> None:
    weights = draw_mixture(EXPERTS, HIDDEN, "plain", torch.float32, "cpu").weights
    own, far = split(weights, "cpu")
    wrong = FarExperts(far.gate_up[:, :-1], far.down, far.places)
    with pytest.raises(ValueError, match="far gate_up is"):
        computed("rows", torch.ones(2, HIDDEN), torch.ones(2, 6), own, wrong)
