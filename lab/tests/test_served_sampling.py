"""The torch method of the evals and what serves draw the same keys, weigh them alike and answer the same.

Served: `gpu.host.row_transfer` stores rows and codes, `gpu.exchange.device_slots` asks, the CPU's tier answers. Both
get the same keys, queries and hyperplanes. Requests of the one, and layers of the other, hold the same keys, and values
that name them: token t's is zero but in request or layer t // DIM, and there but in channel t % DIM. Where the two
differ by design: the method has one centre, the mean of what its first step finds offloaded, and the tier one for each
segment, of the tokens that it began with; here there is one segment of just those. A token that leaves the window later
is sampled at once by the method, about that centre, and read exactly by the tier until its tail is full. The method
holds keys in their own type, and has no int8 rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import cpu.segment_jobs
from cpu.cpu_tier import CpuTier, open_tier
from cpu.tables import build_tables
from evals.methods.attention_method import PromptLayer, Step
from gpu.exchange.device_slots import SlotExchange
from gpu.host.row_transfer import RowTransfer
from gpu.methods.sampled.codes import Codes
from gpu.methods.sampled.encode import arrange, encode_queries
from gpu.methods.sampled.hyperplanes import draw_projections
from lab.methods.sampled import Sampled
from tests.tolerances import METHOD_FLOAT32, SAME_CODES, SERVED_WEIGHT
from transfer.copies import Streams
from transfer.host_tier import ContextRead
from transfer.partial import Partial, merge
from transfer.reading import Reading
from transfer.slot_shape import SlotShape
from transfer.tier_shape import TierShape

KV_HEADS, GROUP, DIM = 2, 2, 64
HEADS = KV_HEADS * GROUP
BITS, TABLES, SEED = 8, 60, 11
SINK, WINDOW, OFFLOADED = 4, 9, 2048
PROMPT = SINK + OFFLOADED + WINDOW - 1  # the first step's own token is in the window
STEPS = 3
PASSES = -(-(PROMPT + STEPS) // DIM)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
UNDECIDED = 5e-6  # of a product with a hyperplane: float32 sums of 64 in another order are 5e-7 apart


@dataclass(frozen=True)
class Case:
    """keys: bfloat16 `[kv_heads, tokens, dim]`, sixteenths, so that float32 sums of them are exact in any order, as is
    a mean over 2,048; queries: float32 `[steps, heads, dim]`; values: float32 `[passes, kv_heads, tokens, dim]` (the
    method rounds weights to the type of values).
    """

    keys: torch.Tensor
    queries: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class Attended:
    """Of a step: weights `[heads, tokens]`, whose sum's logarithm is the lse `[heads]`; out `[passes, heads, dim]`."""

    weights: np.ndarray
    out: np.ndarray
    lse: np.ndarray


@pytest.fixture(scope="module")
def case() -> Case:
    """Draw keys of which some are nearly parallel to a query, and all have a common mean."""
    draw = np.random.default_rng(8)
    queries = draw.standard_normal((STEPS, HEADS, DIM)) * 1.5
    keys = draw.standard_normal((KV_HEADS, PROMPT + STEPS, DIM))
    for place in range(0, PROMPT + STEPS, 20):
        head = place // 20 % HEADS
        query = queries[place // 20 % STEPS, head]
        keys[head // GROUP, place] += 6 * query / np.linalg.norm(query)
    keys = np.round(16 * (keys + 0.5)) / 16
    values = torch.zeros(PASSES, KV_HEADS, PROMPT + STEPS, DIM)
    for token in range(PROMPT + STEPS):
        values[token // DIM, :, token, token % DIM] = 1.0
    return Case(torch.tensor(keys).bfloat16(), torch.tensor(queries).float(), values)


def of_method(case: Case, method: Sampled, steps: int) -> list[Attended]:
    """So many steps of the torch method."""
    keys = case.keys.expand(PASSES, -1, -1, -1)
    first = case.queries[0].expand(PASSES, -1, -1)[:, :, None]
    state = method.begin(PromptLayer(0, first, first, keys, case.values, torch.full((PASSES,), PROMPT), PROMPT))
    attended = []
    for number, query in enumerate(case.queries[:steps]):
        length = PROMPT + number + 1
        queries = query.expand(PASSES, -1, -1)
        rows, values = keys[:, :, :length], case.values[:, :, :length]
        result = method.step(Step(0, queries, queries, rows, values, torch.full((PASSES,), length), length), state)
        attended.append(read_step(result.out, result.lse[0], length))
    return attended


@contextmanager
def small_tier(device: str) -> Iterator[CpuTier]:
    shape = TierShape(tuple(range(PASSES)), HEADS, KV_HEADS, DIM, "bfloat16", BITS, TABLES)
    tier = open_tier(shape, torch.float32, 2**30, num_threads=1, is_pinned=device == "cuda")
    yield tier
    tier.shutdown()


def of_tier(case: Case, device_name: str, steps: int) -> list[Attended]:
    """Return the same steps by the parts that serve; before each, what has left the window is offloaded."""
    device, attended = torch.device(device_name), []
    codes = Codes(arrange(draw_projections(DIM, BITS, TABLES, SEED, torch.float32, device)))
    with small_tier(device_name) as tier:
        row_transfer = RowTransfer(tier.shape, codes.encode_keys, device, Streams(device))
        exchange = SlotExchange(1, SlotShape(HEADS, DIM, TABLES, "float32"), device)
        tier.open(1, Reading.SAMPLE)
        begin = SINK
        for number, query in enumerate(case.queries[:steps]):
            length = PROMPT + number + 1
            end = length - WINDOW
            for room in tier.reserve(1, end - begin):
                send(row_transfer, tier, room, case, begin, end)
            begin = end
            attention, outs = tier.attention([ContextRead(1, begin - SINK)]), []
            for layer in range(PASSES):
                exchange.slot.advance(1)
                asked = query[None].to(device)
                exchange.request(asked, encode_queries(asked, codes.hyperplanes))
                attention.run(layer, exchange.slot)
                merged = merge(resident(case, query, layer, length, device), exchange.answer(1))
                outs.append(merged.out[0].cpu())
            attended.append(read_step(torch.stack(outs), merged.lse[0].cpu(), length))
        tier.close(1)
    return attended


def send(row_transfer: RowTransfer, tier: CpuTier, room, case: Case, begin: int, end: int) -> None:
    keys = case.keys[:, begin:end].to(row_transfer.device)
    for layer in range(PASSES):
        values = case.values[layer, :, begin:end].to(row_transfer.device, torch.bfloat16)
        tier.fill(room, [layer], row_transfer.send(keys[None], values[None], [room.layer(layer)], room.has_centre).done)


def resident(case: Case, query: torch.Tensor, layer: int, length: int, device: torch.device) -> Partial:
    """Return sink and window, exactly."""
    index = [*range(SINK), *range(length - WINDOW, length)]
    keys, values = (rows[:, index].repeat_interleave(GROUP, 0).double() for rows in (case.keys, case.values[layer]))
    logits = torch.einsum("hd,hnd->hn", query.double(), keys) / DIM**0.5
    out = torch.einsum("hn,hnd->hd", logits.softmax(-1), values)
    return Partial(out.float()[None].to(device), logits.logsumexp(-1).float()[None].to(device))


def read_step(out: torch.Tensor, lse: torch.Tensor, length: int) -> Attended:
    shares = out.double().permute(1, 0, 2).flatten(1)[:, :length]  # of the mass; [heads, tokens]
    return Attended((shares * lse.double().exp()[:, None]).numpy(), out.numpy(), lse.numpy())


def decided(case: Case, tokens: int) -> np.ndarray:
    """Return tokens whose codes are the same in whatever order products are summed: bool `[heads, tokens]`."""
    planes = draw_projections(DIM, BITS, TABLES, SEED, torch.float32, torch.device("cpu")).matrix.double()
    centre = case.keys[:, SINK : SINK + OFFLOADED].double().mean(1, keepdim=True)
    products = (case.keys[:, :tokens].double() - centre).float().bfloat16().double() @ planes
    return (products.abs().amin(-1) > UNDECIDED).repeat_interleave(GROUP, 0).numpy()


def assert_same(case: Case, served: Attended, method: Attended) -> None:
    """Compare the first step, when all that is offloaded was there from the beginning."""
    sure = decided(case, served.weights.shape[1])
    assert sure.mean() > SAME_CODES
    is_same = (served.weights != 0) == (method.weights != 0)
    assert is_same[sure].all()
    np.testing.assert_allclose(served.weights[sure], method.weights[sure], rtol=SERVED_WEIGHT, atol=0)
    heads = is_same.all(1)
    assert heads.sum() >= HEADS - 1
    np.testing.assert_allclose(served.lse[heads], method.lse[heads], rtol=0, atol=METHOD_FLOAT32)
    np.testing.assert_allclose(served.out[:, heads], method.out[:, heads], rtol=0, atol=METHOD_FLOAT32)


def torch_method(tables: int = TABLES, centred: bool = True) -> Sampled:
    return Sampled(bits_per_table=BITS, num_tables=tables, sink=SINK, window=WINDOW, seed=SEED, centred=centred)


@pytest.mark.parametrize("device", DEVICES)
def test_what_serves_and_the_torch_method_draw_and_weigh_alike(case: Case, device: str) -> None:
    served, method = of_tier(case, device, STEPS), of_method(case, torch_method(), STEPS)
    down = slice(SINK, SINK + OFFLOADED)
    assert 0 < (method[0].weights[:, down] != 0).mean() < 0.2, "most keys are left unread"
    assert_same(case, served[0], method[0])
    for number, (ours, theirs) in enumerate(zip(served, method, strict=True)):
        sure = decided(case, PROMPT + number + 1)[:, down]
        mine, other = ours.weights[:, down][sure], theirs.weights[:, down][sure]
        np.testing.assert_array_equal(mine != 0, other != 0)
        np.testing.assert_allclose(mine, other, rtol=SERVED_WEIGHT, atol=0)
        tail = slice(SINK + OFFLOADED, PROMPT + number + 1 - WINDOW)
        assert (ours.weights[:, tail] > 0).all(), "an open tail is read exactly"
        assert (theirs.weights[:, tail] == 0).any() or number == 0, "the method samples it"


def test_that_comparison_sees_other_tables(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    (served,) = of_tier(case, "cpu", 1)
    for other in (torch_method(tables=TABLES - 1), torch_method(centred=False)):
        with pytest.raises(AssertionError):
            assert_same(case, served, of_method(case, other, 1)[0])

    def build_flipped(entries: np.ndarray, *others: object) -> None:
        entries ^= np.uint16((1 << BITS) - 1)
        build_tables(entries, *others)

    monkeypatch.setattr(cpu.segment_jobs, "build_tables", build_flipped)
    with pytest.raises(AssertionError):
        assert_same(case, of_tier(case, "cpu", 1)[0], of_method(case, torch_method(), 1)[0])
