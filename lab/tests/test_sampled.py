"""LSH sampling against equations 10, 11 and 21 and table 8 of its paper, in float64 and over many projections."""

import math

import numpy as np
import pytest
import torch
from scipy.special import betainc

from evals.methods.attention_method import PromptLayer, Step, StepResult
from evals.methods.full import Full
from evals.tuning.collisions import count_collisions, even_bucket_fraction, log_inclusion
from gpu.methods.sampled.hyperplanes import draw_projections, encode_reference
from lab.methods import parse_method, sampled
from lab.methods.sampled import Sampled
from tests.evals.test_methods import DIM, GROUP, HEADS, KV_HEADS, LENGTHS, Case, run
from tests.tolerances import (
    INCLUSION_RTOL,
    METHOD_FLOAT32,
    SAMPLED_MEAN_SIGMAS,
    TABLE_8_RTOL,
)

CPU = torch.device("cpu")


def table_probability(degrees: float, bits: int) -> float:
    return (1 - degrees / 180) ** bits


def inclusion(rate: np.ndarray | float, tables: int) -> np.ndarray:
    """Return p[two or more of `tables` independent events of this rate]: the regularised incomplete beta function."""
    return betainc(2, tables - 1, rate)


def pairs_at(degrees: float, count: int, dim: int, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return unit vectors `[count, dim]`, float64, each pair at this angle."""
    first, other = torch.randn(2, count, dim, generator=draw, dtype=torch.float64)
    first = first / first.norm(dim=-1, keepdim=True)
    other = other - (other * first).sum(-1, keepdim=True) * first
    other = other / other.norm(dim=-1, keepdim=True)
    angle = math.radians(degrees)
    return first, math.cos(angle) * first + math.sin(angle) * other


def sampled_share(degrees: float, bits: int, columns: int, seed: int) -> tuple[int, np.ndarray]:
    """Return tables to a draw, chosen so that about a quarter is sampled, and the share of 32 pairs sampled in each
    draw.
    """
    tables = max(2, round(1 / table_probability(degrees, bits)))
    draws = columns // (tables * bits)
    query, key = pairs_at(degrees, 32, 16, torch.Generator().manual_seed(seed))
    projections = draw_projections(16, bits, tables * draws, seed, torch.float32, CPU)
    equal = encode_reference(query.float(), projections) == encode_reference(key.float(), projections)
    return tables, (equal.view(32, draws, tables).sum(-1) >= 2).double().mean(0).numpy()


ANGLES = [(bits, degrees) for bits in range(7, 12) for degrees in (20, 60, 90, 100)] + [
    (bits, degrees) for bits in range(1, 5) for degrees in (110, 125, 140)
]
FEW_ANGLES = [(7, 20), (10, 60), (11, 90), (8, 100), (1, 140), (4, 110)]


@pytest.mark.parametrize(
    ("bits", "degrees"),
    [*FEW_ANGLES, *(pytest.param(*it, marks=pytest.mark.long) for it in ANGLES if it not in FEW_ANGLES)],
)
def test_keys_are_sampled_as_often_as_equation_10_says(bits: int, degrees: int) -> None:
    tables, share = sampled_share(degrees, bits, 1_000_000, bits * 1000 + degrees)
    wanted = inclusion(table_probability(degrees, bits), tables)
    error = share.std(ddof=1) / math.sqrt(len(share))
    assert abs(share.mean() - wanted) < SAMPLED_MEAN_SIGMAS * error
    if degrees > 100:
        assert 2 * error < 0.05 * wanted  # a 95 % interval of 5 %
    elsewhere = inclusion(table_probability(degrees, bits + 1), tables)  # one bit more would be noticed
    assert abs(share.mean() - elsewhere) > SAMPLED_MEAN_SIGMAS * error


@pytest.mark.parametrize(("bits", "tables"), [(1, 2), (7, 75), (10, 150), (11, 300), (16, 300)])
def test_log_inclusion_keeps_its_digits_at_every_cosine(bits: int, tables: int) -> None:
    cosine = torch.cat([torch.linspace(-0.9999, 0.9999, 4001, dtype=torch.float64), torch.tensor([1.0, 1.5])])
    rate = (1 - np.arccos(np.clip(cosine.numpy(), -1, 1)) / np.pi) ** bits
    wanted = np.log(inclusion(rate, tables))
    np.testing.assert_allclose(
        log_inclusion(cosine, bits, tables).numpy(), wanted, rtol=INCLUSION_RTOL, atol=INCLUSION_RTOL
    )
    assert log_inclusion(torch.tensor([-1.0, math.nan]), bits, tables)[0] > -math.inf


def test_collisions_are_counted_for_each_head_whatever_goes_together(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(5)
    query = torch.randint(0, 3, (3, 4, 300), generator=draw, dtype=torch.int16)
    keys = torch.randint(0, 3, (3, 2, 300, 17), generator=draw, dtype=torch.int16)
    keys[0, 0] = query[0, 0, :, None]  # 300 tables agree, more than a byte holds
    wanted = np.zeros((3, 4, 17), dtype=int)
    for request, head in np.ndindex(3, 4):
        wanted[request, head] = (keys[request, head // 2].numpy() == query[request, head].numpy()[:, None]).sum(0)
    np.testing.assert_array_equal(count_collisions(query, keys).numpy(), wanted)
    assert wanted[0, 0, 0] == 300
    monkeypatch.setattr("evals.tuning.collisions.MAX_COMPARED", 4 * 64 * 17)
    np.testing.assert_array_equal(count_collisions(query, keys).numpy(), wanted)


@pytest.mark.parametrize(
    "text", ["sink=2,window=3", "sink=0,window=0", "sink=1,window=30", "sink=2,window=3,centred=false"]
)
def test_a_step_is_equation_11_over_the_sample_and_exact_on_sink_and_window(text: str) -> None:
    bits, tables, case = 3, 8, Case(20)
    method = parse_method(f"sampled:bits_per_table={bits},num_tables={tables},seed=1,{text}")
    assert isinstance(method, Sampled)
    matrix = draw_projections(DIM, bits, tables, 1, torch.float32, CPU).matrix.double().numpy()
    sizes = []
    for number, result in enumerate(run(case, method)):
        for row, start in enumerate(LENGTHS):
            for head in range(HEADS):
                length = start + number + 1
                sizes.append(check_head(case, method, matrix, result, row, head, start, length))
    assert np.mean(sizes) > 0
    assert method.window or np.mean(sizes) < max(LENGTHS) / 2  # a part is sampled, not all


def check_head(
    case: Case, method: Sampled, matrix: np.ndarray, result: StepResult, row: int, head: int, start: int, length: int
) -> int:
    """Check one head of one step in float64, from the paper's formulas; return how many keys it sampled."""
    keys, values = case.k[row, head // GROUP, :length], case.v[row, head // GROUP, :length]
    query = case.q[row, head, length - 1]
    first = keys[method.sink : max(method.sink, min(start, start + 1 - method.window))]
    centre = first.mean(0) if len(first) and method.centred else np.zeros(DIM)
    above = [(one @ matrix > 0).reshape(method.num_tables, -1) for one in (query, *(keys - centre))]
    offloaded = range(method.sink, length - method.window)
    chosen = [at for at in offloaded if (above[0] == above[at + 1]).all(1).sum() >= 2]
    logits, log_u = keys @ query / math.sqrt(DIM), np.zeros(length)
    for at in chosen:
        held = keys[at] - centre
        angle = np.arccos(held @ query / np.linalg.norm(held) / np.linalg.norm(query))
        log_u[at] = np.log(inclusion((1 - angle / np.pi) ** method.bits_per_table, method.num_tables))
    read = sorted({*chosen, *range(min(method.sink, length)), *range(max(0, length - method.window), length)})
    if not read:
        assert result.lse[row, head] == -math.inf
        return 0
    weights = np.exp(logits[read] - log_u[read])
    np.testing.assert_allclose(result.out[row, head], weights @ values[read] / weights.sum(), atol=METHOD_FLOAT32)
    assert abs(result.lse[row, head].item() - np.log(weights.sum())) < METHOD_FLOAT32
    assert result.keys_scored[row, head].item() == len(read)
    return len(chosen)


def layer(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[PromptLayer, Step]:
    """Return a prompt of all keys but the last and the step of the last one; query `[requests, heads, dim]`."""
    context = keys.shape[2]
    lengths = torch.full((len(keys),), context)
    prompt = PromptLayer(0, query[:, :, None], query[:, :, None], keys, values, lengths - 1, context - 1)
    return prompt, Step(0, query, query, keys, values, lengths, context)


def masses(seeds: range) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return numerators `[seeds, dim]` and masses `[seeds]` of one head over projections, and the true ones."""
    draw = torch.Generator().manual_seed(6)
    query, keys, values = (torch.randn(1, 1, *shape, generator=draw) for shape in ((32,), (200, 32), (200, 32)))
    prompt, step = layer(1.5 * query, keys + 0.3, values)
    dense, tops, bottoms = Full().step(step, None), [], []
    for seed in seeds:
        method = parse_method(f"sampled:bits_per_table=4,num_tables=12,sink=2,window=4,seed={seed}")
        result = method.step(step, method.begin(prompt))
        mass = (result.lse[0, 0] - dense.lse[0, 0]).exp().double()
        bottoms.append(mass)
        tops.append(mass * result.out[0, 0].double())
    return torch.stack(tops), torch.stack(bottoms), dense.out[0, 0].double(), torch.ones((), dtype=torch.float64)


def test_numerator_and_mass_are_unbiased_over_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    tops, bottoms, out, mass = masses(range(400))
    for found, wanted in ((tops, out), (bottoms, mass)):
        error = found.std(0) / math.sqrt(len(found))
        assert ((found.mean(0) - wanted).abs() < SAMPLED_MEAN_SIGMAS * error).all()
        assert (error < 0.05 * wanted.abs().max()).all()
    monkeypatch.setattr(sampled, "log_inclusion", lambda cosine, bits, tables: torch.zeros_like(cosine.double()))
    _, bottoms, _, _ = masses(range(40))
    error = bottoms.std(0) / math.sqrt(len(bottoms))
    assert abs(bottoms.mean() - 1) > SAMPLED_MEAN_SIGMAS * error  # unweighted, the mass is that of the sample alone


def test_with_every_key_sampled_it_equals_dense() -> None:
    case = Case(21)
    method = parse_method("sampled:bits_per_table=1,num_tables=400,sink=1,window=2")
    for mine, dense in zip(run(case, method), run(case, Full()), strict=True):
        torch.testing.assert_close(mine.keys_scored, dense.keys_scored)
        torch.testing.assert_close(mine.out, dense.out, atol=METHOD_FLOAT32, rtol=0)
        torch.testing.assert_close(mine.lse, dense.lse, atol=METHOD_FLOAT32, rtol=0)
    partly = parse_method("sampled:bits_per_table=3,num_tables=8,sink=1,window=2")
    assert (run(case, partly)[0].out - run(case, Full())[0].out).abs().max() > METHOD_FLOAT32


def test_rows_read_count_resident_rows_once_a_group_and_the_lookup() -> None:
    case = Case(22)
    result = run(case, parse_method("sampled:bits_per_table=3,num_tables=8,sink=2,window=3"))[0]
    sampled_keys = result.keys_scored.view(len(LENGTHS), KV_HEADS, GROUP) - 5
    lookup = result.rows_read - 5 - sampled_keys.sum(-1)
    least = GROUP * (8 * 8 + 2 * 2 * sampled_keys.sum(-1) / GROUP) / (4 * DIM)  # two entries a sampled key, and offsets
    assert (lookup >= least - METHOD_FLOAT32).all()
    assert (lookup < 2 * GROUP * (8 * 8 + 2 * 8 * max(LENGTHS)) / (4 * DIM)).all()


def test_without_centring_almost_nothing_is_sampled_from_keys_that_oppose_the_query() -> None:
    """Section 5.3: keys in a narrow cone opposite to the query."""
    draw = torch.Generator().manual_seed(7)
    axis = torch.randn(128, generator=draw)
    axis /= axis.norm()
    keys = torch.randn(1, 1, 4096, 128, generator=draw) - 20 * axis
    query = torch.randn(1, 8, 128, generator=draw) + 20 * axis
    prompt, step = layer(query, keys, keys)
    share = {}
    for centred in ("true", "false"):
        method = parse_method(f"sampled:centred={centred}")
        assert isinstance(method, Sampled)
        read = method.step(step, method.begin(prompt)).keys_scored.mean().item()
        share[centred] = (read - 68) / (4096 - 68)
    assert share["false"] < 0.001
    assert 0.5 * TABLE_8[10, 150] < share["true"] < 2 * TABLE_8[10, 150]


TABLE_8 = {
    (bits, tables): percent / 100
    for bits, row in {
        7: (14, 21, 27, 35, 48, 66),
        8: (5, 8, 11, 15, 22, 36),
        9: (1.6, 2.7, 4, 5.4, 8.5, 15.4),
        10: (0.5, 0.9, 1.5, 2, 3, 6),
        11: (0.15, 0.3, 0.5, 0.6, 1, 2),
    }.items()
    for tables, percent in zip((75, 100, 120, 150, 200, 300), row, strict=True)
}


@pytest.mark.parametrize("bits", range(7, 12))
def test_well_spread_keys_are_read_as_often_as_the_paper_measured(bits: int) -> None:
    """Directions spread evenly in 128 dimensions. Table 8 is this, not equation 21, which takes every cosine for 0."""
    draw = torch.Generator().manual_seed(8)
    keys, query = torch.randn(1, 1, 2048, 128, generator=draw), torch.randn(1, 64, 128, generator=draw)
    lines = []
    for tables in (75, 100, 120, 150, 200, 300):
        method = parse_method(f"sampled:bits_per_table={bits},num_tables={tables},sink=0,window=1")
        prompt, step = layer(query, keys, keys)
        share = (method.step(step, method.begin(prompt)).keys_scored.mean().item() - 1) / 2047
        paper, even = TABLE_8[bits, tables], even_bucket_fraction(bits, tables)
        lines.append(f"K {bits} L {tables}: read {share:.2%}, table 8 {paper:.2%}, equation 21 {even:.2%}")
        assert abs(share / paper - 1) < TABLE_8_RTOL, lines[-1]
        assert bits < 9 or share > even
        rate = 0.5**bits
        plain = 1 - (1 - rate) ** tables - tables * rate * (1 - rate) ** (tables - 1)
        assert even == pytest.approx(plain, rel=1e-6)
    print("\n".join(lines))
