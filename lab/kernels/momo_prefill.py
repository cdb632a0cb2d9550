"""Time MOMO's attention of one layer over whole prompts, part by part, beside dense attention: `momo`.

A prompt goes by units, as when it is served; of a long one some units are timed, evenly spread, and the sum of all is
that of straight lines between them. The peer is the faster of FlashAttention and cuDNN on the same units. Results are
compared with float64 before anything is timed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import get_args

import torch
from rich.console import Console
from torch import Tensor

from bench.benchmark_rows import Row, announce, measure, require
from bench.rates import device_name, measure_device_rates
from gpu.attention.prefill_query import PrefillQuery
from gpu.methods.momo.attend import correct, sparse_attention
from gpu.methods.momo.block_sparse import block_sparse_attention
from gpu.methods.momo.prefill import Momo
from gpu.methods.momo.query_sparse import query_sparse_attention
from gpu.methods.momo.settings import MomoSettings, Selection, SelectionName
from gpu.methods.momo.union import unite
from gpu.prefill.dense import Dense
from transfer.partial import Partial, merge

HEADS, KV_HEADS, DIM = 32, 8, 128
MOST_LOOKS = 9  # units of a prompt that are timed
WARMUPS, REPEATS = 1, 3
GATE_TOKENS, GATE_BEGIN = 256, 512
MOST_ERROR = 2e-2  # of outputs of order one, against float64: three bf16 outputs are added
PARTS = ("query-sparse", "union", "block-sparse", "delta")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Keys and values `[kv_heads, tokens, dim]`, and the queries of one unit, which serve every one of them."""

    query: Tensor
    keys: Tensor
    values: Tensor

    @property
    def tokens(self) -> int:
        return self.keys.shape[1]

    def unit(self, begin: int) -> PrefillQuery:
        end = min(begin + len(self.query), self.tokens)
        query, positions = self.query[: end - begin], torch.arange(begin, end, device=self.query.device)
        return PrefillQuery(
            0, query, query, self.keys[:, :end], self.values[:, :end], positions, begin, self.tokens, DIM**-0.5, None
        )


@dataclass(slots=True)
class Sums:
    """Milliseconds of a whole prompt, by what was timed; `flops` likewise."""

    ms: dict[str, float] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)


def make_prompt(tokens: int, unit_tokens: int, device: torch.device) -> Prompt:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    keys, values = (torch.randn(KV_HEADS, tokens, DIM, device=device, dtype=dtype) for _ in range(2))
    return Prompt(torch.randn(min(unit_tokens, tokens), HEADS, DIM, device=device, dtype=dtype), keys, values)


def momo_rows(
    lengths: Sequence[int], unit_tokens: int, settings: MomoSettings, device: torch.device, console: Console
) -> list[Row]:
    """Return a row a length. Raises GateError."""
    check_result(settings, device)
    rates = measure_device_rates(device)
    rate = rates["bf16_matmul_tflop_s" if device.type == "cuda" else "host_matmul_tflop_s"]
    rows = []
    for tokens in lengths:
        prompt = make_prompt(tokens, unit_tokens, device)
        begins = list(range(0, tokens, unit_tokens))
        looks = sorted({begins[(len(begins) - 1) * look // (MOST_LOOKS - 1)] for look in range(MOST_LOOKS)})
        sums = Sums(flops=count_flops(tokens, settings))
        floor_ms = sum(sums.flops.values()) / rate / 1e9
        floor = f"{sum(sums.flops.values()) / 1e12:.2f} TFLOP at {rate:.0f} TFLOP/s"
        announce(console, f"momo, {tokens:,} tokens", floor, floor_ms)
        timed = {begin: time_unit(prompt, begin, settings, device) for begin in looks}
        for name in next(iter(timed.values())):
            sums.ms[name] = whole_prompt([(begin, timed[begin][name]) for begin in looks], begins)
        peers = {name: sums.ms.pop(name) for name in list(sums.ms) if name.startswith("dense")}
        peer = min(peers, key=peers.__getitem__)
        total = sums.ms.pop("momo")
        rows.append(Row(
            name="momo prefill of a layer", shape=f"{tokens:,} x {HEADS} x {DIM}", device=device_name(device),
            ms=total, p10=total, p90=total, floor=floor, floor_ms=floor_ms, peer="the faster dense kernel",
            peer_ms=peers[peer], rates=rates,
            extras={"peer": peer, **{f"{name}_ms": ms for name, ms in peers.items()},
                    **{f"{name}_ms": ms for name, ms in sums.ms.items()},
                    **{f"{name}_floor_ms": flops / rate / 1e9 for name, flops in sums.flops.items()},
                    "dense_floor_ms": 2 * HEADS * DIM * tokens**2 / rate / 1e9, "timed_units": len(looks),
                    "units": len(begins)},
            config={"unit_tokens": unit_tokens, **settings.model_dump()},
        ))  # fmt: skip
        console.print("  " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in {**sums.ms, **peers}.items()),
                      highlight=False)  # fmt: skip
    return rows


def selection_rows(
    tokens: int, unit_tokens: int, ks: Sequence[int], settings: MomoSettings, device: torch.device, console: Console
) -> list[Row]:
    """Return a row a selection and k: the query-sparse pass of a prompt's last unit (the paper's figure 4)."""
    prompt = make_prompt(tokens, unit_tokens, device)
    begin = (tokens - 1) // unit_tokens * unit_tokens
    last, rows = prompt.unit(begin), []
    rates = measure_device_rates(device)
    rate = rates["bf16_matmul_tflop_s" if device.type == "cuda" else "host_matmul_tflop_s"]
    flops = 4 * HEADS * DIM * len(last.query) * (begin + len(last.query) / 2) / settings.gamma
    floor_ms, floor = flops / rate / 1e9, f"{flops / 1e12:.2f} TFLOP at {rate:.0f} TFLOP/s"
    announce(console, f"query-sparse pass of the last {len(last.query):,} of {tokens:,} tokens", floor, floor_ms)
    for k in ks:
        for name in get_args(SelectionName):
            if (name == "exact" and k > 128) or (name == "estimated" and k <= settings.k_exact):
                continue
            how = Selection(name, k, settings.k_exact)

            def run(how: Selection = how) -> object:
                return query_sparse_attention(
                    last.query, last.keys, last.values, begin, settings.gamma, settings.key_block, how, last.scale
                )

            timing = measure(run, device, WARMUPS, REPEATS)
            rows.append(Row(
                name=f"query-sparse pass, {name}", shape=f"k {k}, {len(last.query):,} of {tokens:,} tokens",
                device=device_name(device), ms=timing.ms, p10=timing.p10, p90=timing.p90, floor=floor,
                floor_ms=floor_ms, peer=None, peer_ms=None, rates=rates,
                config={"selection": name, "k": k, "k_exact": settings.k_exact, "gamma": settings.gamma},
            ))  # fmt: skip
    return rows


def time_unit(prompt: Prompt, begin: int, settings: MomoSettings, device: torch.device) -> dict[str, float]:
    """Return milliseconds of one unit: `momo` whole, its parts, and `dense ...`."""
    query, side = prompt.unit(begin), Momo(settings.model_copy(update={"dense_layers": 0}), Dense())
    size, block, scale = settings.query_block, settings.key_block, query.scale

    def ms(call: Callable[[], object]) -> float:
        return measure(call, device, WARMUPS, REPEATS).ms

    found = {"momo": ms(lambda: side.attend(query)), **dict.fromkeys(PARTS, 0.0)}
    for name, call in dense_calls(query, begin).items():
        found[name] = ms(call)
    end = min(begin + len(query.query), (prompt.tokens - 1) // size * size)
    first = max(begin, -(-settings.dense_until_tokens // size) * size)
    if first >= end:
        return found
    rows = query.query[first - begin : end - begin]
    keys, values = query.keys[:, :end], query.values[:, :end]
    sparse = query_sparse_attention(rows, keys, values, first, settings.gamma, block, settings.how, scale)
    trim = (first // block, size // settings.gamma, size // block, settings.k_trim)
    lists = unite(sparse, *trim)
    out = block_sparse_attention(rows, keys, values, first, size, block, lists, scale).out
    calls: dict[str, Callable[[], object]] = {
        "query-sparse": lambda: query_sparse_attention(
            rows, keys, values, first, settings.gamma, block, settings.how, scale
        ),
        "union": lambda: unite(sparse, *trim),
        "block-sparse": lambda: block_sparse_attention(rows, keys, values, first, size, block, lists, scale),
        "delta": lambda: correct(out, sparse.out, settings.gamma),
    }
    return found | {name: ms(call) for name, call in calls.items()}


def dense_calls(query: PrefillQuery, begin: int) -> dict[str, Callable[[], object]]:
    """Return ways to attend to everything."""
    if not query.query.is_cuda:
        return {"dense": lambda: Dense().attend(query)}
    rows, keys, values = query.query.transpose(0, 1)[None], query.keys[None], query.values[None]

    def flash() -> object:
        return torch.ops.aten._scaled_dot_product_flash_attention(
            rows, keys, values, 0.0, True, False, scale=query.scale
        )

    def part(keys: Tensor, values: Tensor, causal: bool) -> Partial:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            rows, keys, values, None, True, 0.0, causal, False, scale=query.scale
        )
        return Partial(out[0].transpose(0, 1).float(), lse[0, :, :, 0].transpose(0, 1).contiguous())

    def cudnn() -> object:
        own = part(keys[:, :, begin:], values[:, :, begin:], True)
        return merge(part(keys[:, :, :begin], values[:, :, :begin], False), own) if begin else own

    return {"dense flash": flash, "dense cudnn": cudnn}


def whole_prompt(timed: Sequence[tuple[int, float]], begins: Sequence[int]) -> float:
    """Return the sum over all units, straight lines between those that were timed."""
    total = 0.0
    for begin in begins:
        at = max(place for place, (first, _) in enumerate(timed) if first <= begin)
        first, ms = timed[at]
        after, next_ms = timed[min(at + 1, len(timed) - 1)]
        total += ms if after == first else ms + (next_ms - ms) * (begin - first) / (after - first)
    return total


def count_flops(tokens: int, settings: MomoSettings) -> dict[str, float]:
    """Of a whole prompt, by part; the delta's are few."""
    size, one = settings.query_block, 4.0 * HEADS * DIM
    last = (tokens - 1) // size * size
    first = min(last, -(-settings.dense_until_tokens // size) * size)
    most = settings.k_trim * settings.key_block - size
    listed = sum(min(begin, most) + size / 2 for begin in range(first, last, size))
    return {
        "dense rows": one * (first**2 + tokens**2 - last**2) / 2,
        "query-sparse": one * (last**2 - first**2) / 2 / settings.gamma,
        "block-sparse": one * listed * size,
    }


def check_result(settings: MomoSettings, device: torch.device) -> None:
    """The gate: a few query blocks against the plain float64 steps, whose lists are the kernel's own."""
    prompt = make_prompt(GATE_BEGIN + GATE_TOKENS, GATE_TOKENS, device)
    query, begin = prompt.unit(GATE_BEGIN), GATE_BEGIN
    settings = settings.model_copy(update={"k_trim": max(settings.k_trim, (begin + GATE_TOKENS) // settings.key_block),
                                           "k": 64 if settings.selection != "estimated" else 128})  # fmt: skip
    got = sparse_attention(query.query, query.keys, query.values, begin, settings, query.scale)
    key, value = (part.double().repeat_interleave(HEADS // KV_HEADS, 0) for part in (query.keys, query.values))
    logits = query.query.double().transpose(0, 1) @ key.transpose(1, 2) * query.scale
    hidden = torch.arange(prompt.tokens, device=device) > query.positions[:, None]
    wanted = (logits.masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(0, 1)
    error = float((got.double() - wanted).abs().max())
    require(error < MOST_ERROR, f"momo with every block in reach is {error:.1e} off dense attention")
