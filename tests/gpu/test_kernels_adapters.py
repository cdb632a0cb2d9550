"""The kernels that add what adapters make of few rows, against float64."""

import numpy as np
import pytest
import torch

from gpu.operations.linear.adapter_product import MOST_TOKENS, add_adapters
from tests.gpu.kernel_oracles import DEVICES, DTYPES, KERNEL_TOLERANCE, distance, random, wide


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "inner", "rows", "ranks"),
    [(1, 64, 40, [4]), (5, 600, 130, [4, 16, 3]), (16, 2100, 70, [16] * 8), (MOST_TOKENS + 1, 64, 40, [8, 8])],
)
def test_each_row_gets_what_its_own_adapter_adds(tokens, inner, rows, ranks, dtype, device):
    generator = np.random.default_rng(inner)
    made, x = random(generator, (tokens, rows), dtype, device), random(generator, (tokens, inner), dtype, device)
    down = random(generator, (sum(ranks), inner), dtype, device) * inner**-0.5
    up = random(generator, (rows, sum(ranks)), dtype, device)
    owners = torch.tensor([n for n, rank in enumerate(ranks, 1) for _ in range(rank)], device=device)
    ids = torch.from_numpy(generator.integers(0, len(ranks) + 1, (tokens, 1))).to(device)
    ids[0] = 1

    def summed(kept: np.ndarray) -> np.ndarray:
        return wide(made) + (wide(x) @ wide(down).T * kept) @ wide(up).T

    kept = owners.cpu().numpy()[None] == ids.cpu().numpy()
    wanted, before = summed(kept), made.clone()
    of_all = summed(np.ones_like(kept))
    padded = torch.full((tokens, rows + 5), torch.nan, dtype=dtype, device=device)
    padded[:, :rows] = made
    x_before, view = x.clone(), padded[:, :rows]
    assert add_adapters(view, x, down, up, owners, ids) is view
    assert distance(view, wanted) < 2 * KERNEL_TOLERANCE[dtype]
    if len(ranks) > 1:
        assert distance(view, of_all) > 2 * KERNEL_TOLERANCE[dtype]
    assert padded[:, rows:].isnan().all()
    assert torch.equal(x, x_before)
    without = before[ids[:, 0] == 0]
    assert torch.equal(view[ids[:, 0] == 0], without)


@pytest.mark.parametrize("device", DEVICES)
def test_other_shapes_are_refused(device):
    made, x, down = (torch.zeros(*shape, device=device) for shape in ((2, 8), (2, 16), (4, 16)))
    owners = torch.ones(4, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="add_adapters: up is"):
        add_adapters(made, x, down, torch.zeros(8, 5, device=device), owners, torch.ones_like(owners)[:2, None])
    with pytest.raises(ValueError, match="add_adapters: ids is"):
        add_adapters(made, x, down, torch.zeros(8, 4, device=device), owners, owners[:2])
