"""The kernels that lower and raise inputs of few rows by their own adapters, against float64."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from gpu.operations.linear.adapter_product import (
    MOST_TOKENS,
    AdapterRange,
    AdapterRows,
    Lowered,
    StackedAdapters,
    add_raised,
    lower,
    lower_normed,
    swiglu_raised,
)
from tests.gpu.kernel_oracles import (
    DEVICES,
    DTYPES,
    KERNEL_TOLERANCE,
    NORM_EPS,
    distance,
    interpreted_rms_norm,
    random,
    rms_norm,
    swiglu,
    wide,
)


@dataclass(frozen=True)
class Stand:
    """Adapters of a matrix, drawn, and rows with some of them."""

    adapters: StackedAdapters
    rows: AdapterRows

    def added(self, x: np.ndarray, of_all: bool = False) -> np.ndarray:
        """What the oracle adds to rows of x; of_all: of all adapters together, which is wrong."""
        made, begin = np.zeros((len(x), self.adapters.num_rows)), 0
        owners, ids = self.adapters.owners.cpu().numpy(), self.rows.ids.cpu().numpy()
        for one in self.adapters.ranges:
            own = slice(begin, begin + one.columns)
            lowered = x @ wide(self.adapters.down[own]).T * ((owners[own] == ids) | of_all)
            made[:, one.begin : one.begin + one.rows] += lowered @ wide(self.adapters.up[own, : one.rows])
            begin += one.columns
        return made


def stand(
    generator: np.random.Generator, tokens: int, inner: int, ranges: list[tuple[int, int, list[int]]], num_rows: int,
    dtype: torch.dtype, device: str,
) -> Stand:  # fmt: skip
    """ranges: begin, rows, and the rank that each adapter has there."""
    all_columns = sum(sum(ranks) for _, _, ranks in ranges)
    down = random(generator, (all_columns, inner), dtype, device) * inner**-0.5
    up = random(generator, (all_columns, max(rows for _, rows, ranks in ranges if any(ranks))), dtype, device)
    owners = [n for _, _, ranks in ranges for n, rank in enumerate(ranks, 1) for _ in range(rank)]
    counts = np.array([[0, *ranks] for _, _, ranks in ranges])
    spans = np.stack([counts.cumsum().reshape(counts.shape) - counts, counts], 2).swapaxes(0, 1).astype(np.int32)
    ids = generator.integers(0, len(spans), (tokens, 1))
    ids[0], ids[-1] = 1, len(spans) - 1
    if tokens > 2:
        ids[1] = 0
    adapters = StackedAdapters(
        down, up, torch.tensor(owners, device=device), torch.tensor(spans, device=device),
        tuple(AdapterRange(begin, rows, sum(ranks)) for begin, rows, ranks in ranges), int(counts.max()),
    )  # fmt: skip
    assert adapters.num_rows == num_rows
    return Stand(adapters, AdapterRows(torch.from_numpy(ids).to(device)))


SHAPES = [
    pytest.param(1, 64, [(0, 40, [1])], 40, id="one"),
    pytest.param(5, 600, [(0, 300, [4, 16, 3]), (300, 30, [0, 0, 0]), (330, 10, [1, 0, 2])], 340, id="ranges"),
    pytest.param(7, 4200, [(0, 70, [16] * 8)], 70, id="many"),
    pytest.param(3, 64, [(0, 40, [40, 1])], 40, id="wide"),
    pytest.param(MOST_TOKENS + 1, 64, [(0, 24, [8, 8]), (24, 16, [8, 8])], 40, id="library"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("tokens", "inner", "ranges", "rows"), SHAPES)
def test_each_row_gets_what_its_own_adapter_adds(tokens, inner, ranges, rows, norms, dtype, device):
    generator = np.random.default_rng(inner)
    own = stand(generator, tokens, inner, ranges, rows, dtype, device)
    x, made = random(generator, (tokens, inner), dtype, device), random(generator, (tokens, rows), dtype, device)
    gain, bias = random(generator, (inner,), dtype, device), random(generator, (rows,), dtype, device)
    residual, x_before = random(generator, (tokens, rows), dtype, device), x.clone()
    if norms:
        normed, lowered = lower_normed(x, gain, NORM_EPS, own.adapters, own.rows)
        is_cut = device == "cpu" and dtype == torch.bfloat16 and lowered.is_of_kernels
        taken = (interpreted_rms_norm if is_cut else rms_norm)(wide(x), wide(gain), NORM_EPS)
        assert distance(normed, taken) < KERNEL_TOLERANCE[dtype]
    else:
        taken, lowered = wide(x), lower(x, own.adapters, own.rows)
    for added in (None, bias, residual):
        before = wide(made) + (0 if added is None else wide(added))
        padded = torch.full((tokens, rows + 5), torch.nan, dtype=dtype, device=device)
        padded[:, :rows] = made
        view = padded[:, :rows]
        assert add_raised(view, lowered, added) is view
        assert distance(view, before + own.added(taken)) < 2 * KERNEL_TOLERANCE[dtype]
        if len(own.adapters.spans) > 2:
            assert distance(view, before + own.added(taken, of_all=True)) > 2 * KERNEL_TOLERANCE[dtype]
        assert padded[:, rows:].isnan().all()
        if added is None:
            without = own.rows.ids[:, 0] == 0
            assert torch.equal(view[without], made[without])
    assert torch.equal(x, x_before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, MOST_TOKENS + 1])
def test_gates_are_raised_and_what_they_make_is_lowered(tokens, joined, dtype, device):
    """joined: gate and up are one range. 700 columns are two programs, whose sums the matrix behind them adds."""
    generator, width, hidden = np.random.default_rng(tokens), 700, 64
    ranges = [(0, 2 * width, [5, 3])] if joined else [(0, width, [5, 3]), (width, width, [2, 20])]
    gates = stand(generator, tokens, hidden, ranges, 2 * width, dtype, device)
    down = Stand(stand(generator, tokens, width, [(0, 48, [2, 18])], 48, dtype, device).adapters, gates.rows)
    x, gate_up = (
        random(generator, (tokens, hidden), dtype, device),
        random(generator, (tokens, 2 * width), dtype, device),
    )
    wanted = swiglu(wide(gate_up) + gates.added(wide(x)))
    alone, none = swiglu_raised(gate_up.clone(), lower(x, gates.adapters, gates.rows), "silu")
    assert none is None
    product, lowered = swiglu_raised(gate_up, lower(x, gates.adapters, gates.rows), "silu", down.adapters)
    assert torch.equal(alone, product)
    assert distance(product, wanted) < 3 * KERNEL_TOLERANCE[dtype]
    assert lowered is not None
    assert lowered.is_of_kernels == (tokens <= MOST_TOKENS and lower(x, gates.adapters, gates.rows).is_of_kernels)
    made = random(generator, (tokens, 48), dtype, device)
    before = wide(made)
    assert distance(add_raised(made, lowered), before + down.added(wide(product))) < 2 * KERNEL_TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinite_numbers_stay_with_their_adapter(dtype, device):
    generator = np.random.default_rng(3)
    own = stand(generator, 5, 96, [(0, 20, [3, 4]), (20, 20, [2, 5])], 40, dtype, device)
    own.rows.ids[:] = torch.tensor([1, 0, 1, 0, 1], device=device)[:, None]
    down = own.adapters.down
    down[own.adapters.owners == 2] = torch.inf
    x = random(generator, (5, 96), dtype, device)
    gain, made = torch.ones(96, dtype=dtype, device=device), torch.zeros(5, 40, dtype=dtype, device=device)
    add_raised(made, lower(x, own.adapters, own.rows))
    assert made.isfinite().all()
    add_raised(made, lower_normed(x, gain, NORM_EPS, own.adapters, own.rows)[1])
    assert made.isfinite().all()
    behind = stand(generator, 5, 20, [(0, 8, [1, 2])], 8, dtype, device).adapters
    behind.down[behind.owners == 2] = torch.inf
    product, lowered = swiglu_raised(made, lower(x, own.adapters, own.rows), "silu", behind)
    assert lowered is not None
    assert product.isfinite().all()
    assert add_raised(torch.zeros(5, 8, dtype=dtype, device=device), lowered).isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_other_shapes_are_refused(device):
    own = stand(np.random.default_rng(1), 2, 16, [(0, 8, [2, 2])], 8, torch.float32, device)
    x = torch.zeros(2, 16, device=device)
    lowered = lower(x, own.adapters, own.rows)
    assert isinstance(lowered, Lowered)
    with pytest.raises(ValueError, match="lower: x is"):
        lower(x[:, :8], own.adapters, own.rows)
    with pytest.raises(ValueError, match="lower: ids is"):
        lower(x, own.adapters, AdapterRows(own.rows.ids[:, 0]))
    with pytest.raises(ValueError, match="lower_normed: norm is"):
        lower_normed(x, torch.ones(8, device=device), NORM_EPS, own.adapters, own.rows)
    with pytest.raises(ValueError, match="add_raised: made is"):
        add_raised(torch.zeros(2, 5, device=device), lowered)
    with pytest.raises(ValueError, match="add_raised: added is"):
        add_raised(torch.zeros(2, 8, device=device), lowered, torch.zeros(7, device=device))
    with pytest.raises(ValueError, match="swiglu_raised: down has 1 ranges of rows and takes 16; wanted one, and half"):
        swiglu_raised(torch.zeros(2, 8, device=device), lowered, "silu", own.adapters)
