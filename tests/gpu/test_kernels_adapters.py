"""The kernels that add what adapters make of few rows, against float64."""

import numpy as np
import pytest
import torch

from gpu.operations.linear.adapter_product import MOST_TOKENS, StackedAdapters, add_adapters
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
    up = random(generator, (sum(ranks), rows), dtype, device)
    begins = torch.from_numpy(np.cumsum([0, 0, *ranks])).to(device, torch.int32)
    owners = torch.tensor([n for n, rank in enumerate(ranks, 1) for _ in range(rank)], device=device)
    ids = torch.from_numpy(generator.integers(0, len(ranks) + 1, (tokens, 1))).to(device)
    ids[0] = 1

    def summed(kept: np.ndarray) -> np.ndarray:
        return wide(made) + (wide(x) @ wide(down).T * kept) @ wide(up)

    kept = owners.cpu().numpy()[None] == ids.cpu().numpy()
    wanted, before = summed(kept), made.clone()
    of_all = summed(np.ones_like(kept))
    padded = torch.full((tokens, rows + 5), torch.nan, dtype=dtype, device=device)
    padded[:, :rows] = made
    x_before, view = x.clone(), padded[:, :rows]
    assert add_adapters(view, x, StackedAdapters(down, up, owners, begins, max(ranks)), ids) is view
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
    owners, begins = (torch.ones(4, dtype=kind, device=device) for kind in (torch.int64, torch.int32))

    def add(ids: torch.Tensor, rows: int = 8) -> None:
        add_adapters(made, x, StackedAdapters(down, torch.zeros(4, rows, device=device), owners, begins, 4), ids)

    with pytest.raises(ValueError, match="add_adapters: up is"):
        add(owners[:2, None], rows=5)
    with pytest.raises(ValueError, match="add_adapters: ids is"):
        add(owners[:2])
