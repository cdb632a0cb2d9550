"""RMSNorm, SwiGLU and RoPE with the KV write against float64 oracles, over poisoned memory and ragged edges."""

import numpy as np
import pytest
import torch

from gpu.operations.head_norm import HeadNorms, head_norm
from gpu.operations.kv.rope_kv_write import rope_kv_write
from gpu.operations.kv.row_places import RowPlaces
from gpu.operations.rms_norm import rms_norm, rms_norm_add
from gpu.operations.swiglu import swiglu
from tests.gpu import kernel_oracles as oracle
from tests.gpu.kernel_oracles import DEVICES, DTYPES, KERNEL_TOLERANCE, NORM_EPS, distance, random, wide

pytestmark = [pytest.mark.parametrize("device", DEVICES), pytest.mark.parametrize("dtype", DTYPES)]
SHAPES = [(1, 256), (3, 100), (5, 4096), (2, 5120)]
FAR_AWAY = 10**12


@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_rms_norm_equals_its_formula(tokens, hidden, dtype, device):
    generator = np.random.default_rng(hidden)
    x, weight = random(generator, (tokens, hidden), dtype, device), random(generator, (hidden,), dtype, device)
    wanted = oracle.rms_norm(wide(x), wide(weight), NORM_EPS)
    before = x.clone()
    assert distance(rms_norm(x, weight, NORM_EPS), wanted) < KERNEL_TOLERANCE[dtype]
    assert torch.equal(x, before)
    lost = int(np.abs(wanted).max(axis=0).argmax())
    one_lost = oracle.rms_norm(np.where(np.arange(hidden) == lost, 0, wide(x)), wide(weight), NORM_EPS)
    assert distance(rms_norm(x, weight, NORM_EPS), one_lost) > KERNEL_TOLERANCE[dtype]


def test_rms_norm_takes_rows_of_a_wider_buffer(dtype, device):
    generator = np.random.default_rng(0)
    buffer = torch.full((3, 300), float("nan"), dtype=dtype, device=device)
    x = buffer[:, 100:228]
    x.copy_(random(generator, (3, 128), dtype, device))
    weight = random(generator, (128,), dtype, device)
    wanted = oracle.rms_norm(wide(x), wide(weight), NORM_EPS)
    assert distance(rms_norm(x, weight, NORM_EPS), wanted) < KERNEL_TOLERANCE[dtype]


@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
@pytest.mark.parametrize("is_wide", [False, True])
def test_a_norm_behind_a_product_is_added_to_what_went_in(tokens, hidden, is_wide, dtype, device):
    """Weights of the rows' dtype or float32, which is multiplied by before anything is rounded."""
    generator = np.random.default_rng(hidden)
    x, residual = (random(generator, (tokens, hidden), dtype, device) for _ in range(2))
    weight = random(generator, (hidden,), torch.float32 if is_wide else dtype, device)
    normed = oracle.rms_norm(wide(x), wide(weight), NORM_EPS)
    before = residual.clone()
    assert distance(rms_norm_add(x, weight, NORM_EPS, residual), wide(residual) + normed) < KERNEL_TOLERANCE[dtype]
    assert torch.equal(residual, before)
    assert distance(rms_norm_add(x, weight, NORM_EPS, residual), normed) > KERNEL_TOLERANCE[dtype]
    assert distance(rms_norm(x, weight, NORM_EPS), normed) < KERNEL_TOLERANCE[dtype]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (3, 1, 96), (2, 2, 256), (16, 1, 128)])
def test_head_norm_norms_queries_and_keys_and_leaves_values(heads, kv_heads, dim, dtype, device):
    generator = np.random.default_rng(dim)
    qkv = random(generator, (5, (heads + 2 * kv_heads) * dim), dtype, device)
    of_query, of_key = (random(generator, (dim,), dtype, device) for _ in range(2))
    rows = wide(qkv).reshape(5, -1, dim)
    wanted = rows.copy()
    wanted[:, :heads] = oracle.rms_norm(rows[:, :heads], wide(of_query), NORM_EPS)
    wanted[:, heads : heads + kv_heads] = oracle.rms_norm(rows[:, heads:][:, :kv_heads], wide(of_key), NORM_EPS)
    swapped = wanted.copy()
    swapped[:, heads : heads + kv_heads] = oracle.rms_norm(rows[:, heads:][:, :kv_heads], wide(of_query), NORM_EPS)
    head_norm(qkv, HeadNorms(of_query, of_key, NORM_EPS), heads, kv_heads)
    got = qkv.view(5, -1, dim)
    assert distance(got, wanted) < KERNEL_TOLERANCE[dtype]
    assert distance(got, swapped) > KERNEL_TOLERANCE[dtype]
    assert np.array_equal(wide(got)[:, heads + kv_heads :], rows[:, heads + kv_heads :])
    head_norm(qkv, HeadNorms(of_query, of_key, NORM_EPS, norms_values=True), heads, kv_heads)
    values = oracle.rms_norm(rows[:, heads + kv_heads :], np.ones(dim), NORM_EPS)
    assert distance(got[:, heads + kv_heads :], values) < KERNEL_TOLERANCE[dtype]


def test_geglu_equals_its_formula(dtype, device):
    gate_up = random(np.random.default_rng(3), (3, 200), dtype, device)
    gate, up = np.split(wide(gate_up), 2, axis=1)
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    wanted = 0.5 * gate * (1 + np.tanh(inner)) * up
    assert distance(swiglu(gate_up, "gelu_tanh"), wanted) < KERNEL_TOLERANCE[dtype]
    assert distance(swiglu(gate_up), wanted) > KERNEL_TOLERANCE[dtype]


def test_a_clamped_swiglu_equals_its_formula(dtype, device):
    gate_up = 6 * random(np.random.default_rng(3), (3, 200), dtype, device)
    wanted = oracle.clamped_swiglu(wide(gate_up))
    assert distance(swiglu(gate_up, "clamped_swiglu"), wanted) < KERNEL_TOLERANCE[dtype]
    assert distance(swiglu(gate_up.clamp(-5, 5), "clamped_swiglu"), wanted) > KERNEL_TOLERANCE[dtype]
    assert swiglu(torch.full_like(gate_up, torch.nan), "clamped_swiglu").isnan().all()


def test_a_squared_relu_has_no_gate(dtype, device):
    up = random(np.random.default_rng(3), (3, 1201), dtype, device)
    got = swiglu(up, "relu2")
    assert distance(got, oracle.squared_relu(wide(up))) < KERNEL_TOLERANCE[dtype]
    assert distance(got, wide(up) ** 2) > KERNEL_TOLERANCE[dtype]
    assert swiglu(torch.full_like(up, torch.nan), "relu2").isnan().all()


@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_swiglu_equals_its_formula(tokens, hidden, dtype, device):
    gate_up = random(np.random.default_rng(hidden), (tokens, 2 * hidden), dtype, device)
    wanted = oracle.swiglu(wide(gate_up))
    assert distance(swiglu(gate_up), wanted) < KERNEL_TOLERANCE[dtype]
    halves_swapped = oracle.swiglu(np.roll(wide(gate_up), hidden, axis=1))
    assert distance(swiglu(gate_up), halves_swapped) > KERNEL_TOLERANCE[dtype]


def test_wrong_arguments_are_named_before_anything_runs(dtype, device):
    x = torch.zeros(2, 8, dtype=dtype, device=device)
    with pytest.raises(ValueError, match=r"rms_norm: weight is \(4,\).*wanted \(8,\)"):
        rms_norm(x, x[0, :4], NORM_EPS)
    with pytest.raises(ValueError, match=r"rms_norm_add: residual is \(1, 8\).*wanted \(2, 8\)"):
        rms_norm_add(x, x[0], NORM_EPS, x[:1])
    with pytest.raises(ValueError, match="swiglu: gate_up is"):
        swiglu(x[:, :5])


class Rope:
    """Arguments of one RoPE and KV write: 37 tokens of two slots in random order, one padding token between them."""

    def __init__(self, dtype: torch.dtype, device: str, heads: int, kv_heads: int, dim: int, page_tokens: int) -> None:
        generator = np.random.default_rng(dim + heads)
        self.heads, self.kv_heads, self.dim, self.page_tokens = heads, kv_heads, dim, page_tokens
        places = generator.permutation([(0, position) for position in range(20)] + [(2, 31 + i) for i in range(17)])
        slots, positions = np.insert(places[:, 0], 5, -1), np.insert(places[:, 1], 5, FAR_AWAY)
        self.frequencies = 10_000.0 ** (-np.arange(dim // 2) / (dim // 2))
        angles = np.arange(64)[:, None] * self.frequencies
        self.qkv = random(generator, (len(slots), (heads + 2 * kv_heads) * dim), dtype, device)
        self.cos, self.sin = (torch.from_numpy(table).float().to(device) for table in (np.cos(angles), np.sin(angles)))
        self.positions, self.slots = torch.from_numpy(positions).to(device), torch.from_numpy(slots).int().to(device)
        self.cells = 63 - self.positions
        num_pages = 3 * 64 // page_tokens
        self.page_table = torch.from_numpy(generator.permutation(num_pages)).int().view(3, -1).to(device)
        shape = (num_pages, kv_heads, page_tokens, dim)
        self.key_pages = torch.full(shape, float("nan"), dtype=dtype, device=device)
        self.value_pages = self.key_pages.clone()

    def run(self, norms: HeadNorms | None = None) -> torch.Tensor:
        return rope_kv_write(
            self.qkv, RowPlaces(self.cos, self.sin, self.positions, self.cells, self.slots), self.page_table,
            self.key_pages, self.value_pages, self.heads, norms,
        )  # fmt: skip


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page_tokens"), [(4, 2, 64, 16), (6, 1, 128, 32), (3, 3, 64, 64)])
def test_rope_rotates_queries_and_writes_keys_and_values_to_their_pages(
    heads, kv_heads, dim, page_tokens, dtype, device
):
    rope = Rope(dtype, device, heads, kv_heads, dim, page_tokens)
    before = rope.qkv.clone()
    query = rope.run()
    assert torch.equal(rope.qkv, before)
    tokens = [row for row, slot in enumerate(rope.slots.tolist()) if slot >= 0]
    split = wide(rope.qkv).reshape(len(rope.slots), -1, dim)
    angles = wide(rope.positions)[tokens][:, None] * rope.frequencies
    rotated = oracle.rotate(split[tokens, : heads + kv_heads], angles)
    assert distance(query[tokens], rotated[:, :heads]) < KERNEL_TOLERANCE[dtype]
    keys, values = np.full(rope.key_pages.shape, np.nan), np.full(rope.key_pages.shape, np.nan)
    for index, row in enumerate(tokens):
        slot, cell = int(rope.slots[row]), int(rope.cells[row])
        page = int(rope.page_table[slot, cell // page_tokens])
        keys[page, :, cell % page_tokens] = rotated[index, heads:]
        values[page, :, cell % page_tokens] = split[row, heads + kv_heads :]
    for pages, wanted in ((rope.key_pages, keys), (rope.value_pages, values)):
        written = ~np.isnan(wanted)
        assert np.array_equal(~np.isnan(wide(pages)), written)
        assert distance(pages.cpu()[torch.from_numpy(written)], wanted[written]) < KERNEL_TOLERANCE[dtype]
    shifted = oracle.rotate(split[tokens, :heads], angles + rope.frequencies)
    assert distance(query[tokens], shifted) > KERNEL_TOLERANCE[dtype]


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page_tokens"), [(4, 2, 64, 16), (3, 1, 96, 32)])
def test_heads_are_normed_in_place_before_they_are_rotated(heads, kv_heads, dim, page_tokens, is_wide, dtype, device):
    rope, plain = (Rope(dtype, device, heads, kv_heads, dim, page_tokens) for _ in range(2))
    generator = np.random.default_rng(dim)
    kind = torch.float32 if is_wide else dtype
    norms = HeadNorms(*(random(generator, (dim,), kind, device) for _ in range(2)), NORM_EPS)
    rows = wide(rope.qkv).reshape(len(rope.slots), -1, dim)
    head_norm(plain.qkv, norms, heads, kv_heads)
    query, wanted = rope.run(norms), plain.run()
    normed = oracle.rms_norm(rows[:, :heads], wide(norms.query), NORM_EPS)
    got = rope.qkv.view(len(rope.slots), -1, dim)
    assert distance(got[:, :heads], normed) < KERNEL_TOLERANCE[dtype]
    assert np.array_equal(wide(got)[:, heads + kv_heads :], rows[:, heads + kv_heads :])
    used = rope.slots >= 0
    pairs = ((query[used], wanted[used]), (rope.key_pages, plain.key_pages), (rope.qkv, plain.qkv))
    for one, other in pairs:  # both rounded where they are normed, and again where they are rotated
        assert distance(one.nan_to_num(), wide(other.nan_to_num())) < 2 * KERNEL_TOLERANCE[dtype]
    assert torch.equal(rope.value_pages.nan_to_num(), plain.value_pages.nan_to_num())
    rope.run(HeadNorms(norms.query, norms.key, NORM_EPS, norms_values=True))
    written = wide(plain.value_pages.nan_to_num())
    seen = np.abs(written).sum(-1, keepdims=True) > 0
    wanted_values = np.where(seen, oracle.rms_norm(written, np.ones(dim), NORM_EPS), 0.0)
    assert distance(rope.value_pages.nan_to_num(), wanted_values) < KERNEL_TOLERANCE[dtype]
    with pytest.raises(ValueError, match=r"rope_kv_write: key_norm is .*wanted \(\d+,\)"):
        rope.run(HeadNorms(norms.query, norms.key[:-1], NORM_EPS))


def test_rope_refuses_a_qkv_of_another_width(dtype, device):
    rope = Rope(dtype, device, 4, 2, 64, 16)
    rope.heads = 5
    with pytest.raises(ValueError, match="rope_kv_write: qkv is 512 wide"):
        rope.run()
