"""Time the products of a mixture of experts on a GPU, several configurations each: `python -m` this module.

A layer of Qwen3-30B-A3B, random; each call has other tokens, which take other experts, so weights come from memory;
launches run in a CUDA graph. Every configuration is compared with plain torch before it is timed. What is found best
stands in the tables for what is timed after it, at last whole MLPs by tiles and, of bf16, by rows. A configuration
marked * is for cards with more shared memory than 99 KiB, and is not taken. Floor: bytes of the experts that are taken,
or FLOPs, over what the card was measured to do. The last line is JSON.

    python -m lab.kernels.experts_sweep --compile 0/8     what this part of the configurations needs, and no more
    python -m lab.kernels.experts_sweep --seconds 40
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from gpu.layers import expert_mlp as mlp
from gpu.model.matrix_format import MatrixFormat
from gpu.model.shapes import NAMED_SHAPES
from gpu.model.spec import Experts
from gpu.operations.experts import expert_rows, expert_tiles, routing, tile_configs
from gpu.operations.experts.experts_reference import experts_reference
from gpu.operations.linear.packed_matrix import Packed
from gpu.weights.drawing import draw_packed
from gpu.weights.weights import ExpertWeights, allocate_packed
from lab.kernels.gpu_kernels_sweep import graph_us, measured_bytes_per_s, relative_error

SHAPE = "qwen3-30b-a3b"
DRAWS = 8  # sets of tokens that calls take in turn
PREFILL_TOKENS = 8192
MOST_ERROR = 2e-2  # two products in bf16, one behind the other
SHARED_BYTES = 99 * 1024  # of a program, on cards that users own

Config = tuple[int, ...]
GRIDS: dict[str, list[Config]] = {
    "gate_up rows": [(1, 256, 4, 1), (1, 256, 4, 2), (1, 256, 4, 4), (1, 512, 4, 1), (1, 512, 4, 2), (1, 512, 8, 2),
                     (1, 512, 8, 4), (1, 1024, 8, 1), (2, 256, 8, 2), (1, 128, 2, 4), (1, 256, 2, 2)],
    "down rows": [(1, 256, 2, 3), (1, 256, 4, 3), (2, 256, 4, 1), (2, 256, 4, 3), (2, 128, 2, 3), (2, 128, 4, 6),
                  (4, 256, 8, 3), (4, 128, 4, 3), (2, 256, 8, 3), (1, 256, 1, 3)],
    "gate_up tiles of 16": [(32, 128, 4, 4), (32, 128, 4, 3), (64, 64, 4, 4), (32, 256, 4, 2), (16, 256, 4, 3),
                            (32, 64, 2, 6), (64, 64, 4, 5), (16, 128, 2, 4), (128, 64, 4, 3), (64, 64, 8, 4)],
    "down tiles of 16": [(64, 128, 4, 4), (64, 128, 4, 3), (32, 128, 4, 4), (32, 256, 4, 3), (64, 64, 4, 5),
                         (128, 64, 4, 4), (64, 256, 4, 2), (32, 128, 2, 4)],
    "packed gate_up tiles of 16": [(64, 4, 3), (64, 4, 2), (32, 4, 3), (32, 2, 3), (64, 8, 2), (16, 1, 3)],
    "packed down tiles of 16": [(64, 4, 4), (64, 4, 2), (32, 4, 3), (32, 2, 3), (16, 1, 3)],
    "gate_up tiles of 128": [(64, 64, 8, 3), (64, 64, 4, 3), (64, 32, 8, 4), (128, 32, 8, 3), (128, 32, 8, 4),
                             (128, 64, 8, 2), (128, 64, 8, 4)],
    "down tiles of 128": [(128, 64, 8, 3), (128, 64, 4, 3), (128, 32, 8, 4), (256, 32, 8, 3), (256, 32, 8, 4),
                          (64, 64, 4, 4), (256, 64, 8, 4)],
    "packed gate_up tiles of 64": [(64, 8, 3), (64, 4, 3), (64, 4, 2), (32, 4, 3), (128, 8, 2)],
    "packed down tiles of 64": [(64, 4, 3), (64, 8, 3), (64, 4, 2), (128, 8, 2), (32, 4, 3)],
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One product to time. what: of GRIDS; tokens: of a call; key: of the configuration in its table."""

    what: str
    tokens: int
    is_gate_up: bool
    is_packed: bool
    table: dict[Any, Any]
    key: Any

    @property
    def name(self) -> str:
        return f"{self.what}, {self.tokens} tokens"


@dataclass(frozen=True, slots=True)
class Stand:
    """A layer in one format."""

    experts: Experts
    hidden: int
    weights: ExpertWeights
    bytes_of_expert: float

    @property
    def is_packed(self) -> bool:
        return isinstance(self.weights.gate_up, Packed)

    @property
    def plain(self) -> tuple[Tensor, Tensor]:
        """Return the matrices that rows are of: gates and ups, and downs."""
        gate_up, down = self.weights.gate_up, self.weights.down
        assert isinstance(gate_up, Tensor), "experts of few bits take tiles"
        assert isinstance(down, Tensor), "experts of few bits take tiles"
        return gate_up, down

    def draw(self, tokens: int) -> list[tuple[Tensor, Tensor]]:
        """Return tokens behind the norm, and their logits, DRAWS times."""
        device = self.weights.router.device
        return [(torch.randn(tokens, self.hidden, dtype=torch.bfloat16, device=device),
                 3 * torch.randn(tokens, self.experts.num_experts, device=device)) for _ in range(DRAWS)]  # fmt: skip


def stand_for(kind: str, device: torch.device) -> Stand:
    shape = NAMED_SHAPES[SHAPE]
    experts = shape.layer_pattern[0].experts
    assert experts is not None
    count, width, hidden = experts.num_experts, experts.intermediate, shape.hidden
    matrices = []
    for rows, inner in ((2 * count * width, hidden), (count * hidden, width)):
        if kind == "bf16":
            matrices.append(torch.randn(rows, inner, dtype=torch.bfloat16, device=device).mul_(inner**-0.5))
        else:
            stored = MatrixFormat("int4", 128, has_zeros=True)
            packed = allocate_packed(rows, inner, stored, torch.bfloat16, device, torch.bfloat16)
            draw_packed(packed, inner**-0.5, torch.Generator(device=device))
            matrices.append(packed)
    router = torch.randn(count, hidden, dtype=torch.bfloat16, device=device).mul_(3 * hidden**-0.5)
    weights = ExpertWeights(router, *matrices)
    return Stand(experts, hidden, weights, sum(one.nbytes for one in matrices) / count)


def cases(kind: str) -> Iterator[Case]:
    is_packed = kind != "bf16"
    prefix, per_tile = ("packed ", 64) if is_packed else ("", 128)
    tiles = tile_configs.PACKED if is_packed else tile_configs.PLAIN
    for name, gates in (("gate_up", True), ("down", False)):
        for tokens in () if is_packed else (4, 1):  # the last one decides
            yield Case(f"{name} rows", tokens, gates, is_packed, expert_rows.CONFIGS, name)
        for tokens in (1, 16, 4):
            yield Case(f"{prefix}{name} tiles of 16", tokens, gates, is_packed, tiles, (16, gates))
        yield Case(f"{prefix}{name} tiles of {per_tile}", PREFILL_TOKENS, gates, is_packed, tiles, (per_tile, gates))


def calls(case: Case, stand: Stand) -> list[Callable[[], Tensor]]:
    """One for each draw: the product alone, of what the one before it makes."""
    experts, weights = stand.experts, stand.weights
    found: list[Callable[[], Tensor]] = []
    for normed, logits in stand.draw(case.tokens)[: 1 if case.tokens == PREFILL_TOKENS else DRAWS]:
        if "rows" in case.what:
            gate_up, down = stand.plain
            product, ids, shares = expert_rows.gate_up_rows(normed, logits, gate_up, experts, "silu")
            if case.is_gate_up:
                found.append(lambda n=normed, s=logits, g=gate_up: expert_rows.gate_up_rows(
                    n, s, g, experts, "silu")[0])  # fmt: skip
            else:
                found.append(lambda p=product, i=ids, s=shares, d=down, n=normed: expert_rows.down_rows(
                    p, i, s, d, n, experts))  # fmt: skip
            continue
        if case.tokens <= expert_tiles.LEAST_PAIRS:
            tiles = expert_tiles.pair_few(logits, experts)
        else:
            tiles = expert_tiles.pair_up(*routing.choose(logits, experts), experts, case.is_packed)
        product = expert_tiles.gate_up_tiles(normed, tiles, weights.gate_up, experts, "silu")
        if case.is_gate_up:
            found.append(lambda n=normed, t=tiles: expert_tiles.gate_up_tiles(n, t, weights.gate_up, experts, "silu"))
        else:
            found.append(lambda p=product, t=tiles, n=normed: expert_tiles.down_tiles(p, t, weights.down, n, experts))
    return found


def is_large(config: Config, case: Case) -> bool:
    """Return whether its buffers are more than every card has."""
    if len(config) < 4 or "tiles" not in case.what:
        return False
    rows, inner, _, stages = config
    pairs = case.key[0]
    return 2 * inner * stages * (rows * (2 if case.is_gate_up else 1) + pairs) > SHARED_BYTES


def floor_us(case: Case, stand: Stand, bytes_per_s: float, flops_per_s: float) -> float:
    part = (2 if case.is_gate_up else 1) / 3
    if case.tokens == PREFILL_TOKENS:
        width = 3 * stand.hidden * stand.experts.intermediate
        return 2 * case.tokens * stand.experts.per_token * width * part / flops_per_s * 1e6
    num_read = stand.experts.per_token * case.tokens if "rows" in case.what else stand.experts.taken(case.tokens)
    return num_read * stand.bytes_of_expert * part / bytes_per_s * 1e6


def timed_us(runs: list[Callable[[], Tensor]], tokens: int) -> float:
    """Of one call; of many tokens without a graph, as launches are short beside them."""
    if tokens < PREFILL_TOKENS:
        return graph_us(runs, 5)
    times = []
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        runs[0]()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return min(times)


def sweep(case: Case, stand: Stand, floor: float, part: tuple[int, int] | None) -> None:
    """Time all and leaves the best in the table; or runs each once that is of the part, so that it is compiled."""
    kept = case.table[case.key]
    timed: list[tuple[float, Config]] = []
    runs = calls(case, stand)
    wanted = runs[0]()
    for index, config in enumerate(dict.fromkeys([kept, *GRIDS[case.what]])):
        if part is not None and index % part[1] != part[0]:
            continue
        case.table[case.key] = config
        try:
            error = relative_error(runs[0](), wanted)
            if not error < MOST_ERROR:
                print(f"{case.name} {config} is wrong: relative error {error:.1e}, wanted below {MOST_ERROR}")
            elif part is None:
                timed.append((timed_us(runs, case.tokens), config))
        except Exception as error:  # a configuration that the card has no room for is one that is not taken
            print(f"{case.name} {config}: {type(error).__name__} {str(error)[:90]}")
    case.table[case.key] = kept
    if not timed:
        return
    timed.sort()
    case.table[case.key] = next((config for _, config in timed if not is_large(config, case)), kept)
    shown = ", ".join(f"{config}{'*' * is_large(config, case)} {us:.1f}" for us, config in timed[:4])
    own = next(us for us, config in timed if config == kept)
    print(f"{case.name:38} floor {floor:7.1f} us | {shown} | was {kept} {own:.1f}", flush=True)


def check(stand: Stand) -> None:
    """What is compared with: products by tiles and, of plain ones, by rows equal plain torch's."""
    experts, weights = stand.experts, stand.weights
    (normed, logits), *_ = stand.draw(3)
    ids, shares = routing.choose(logits, experts)
    wanted = normed + experts_reference(normed, ids, shares, weights.gate_up, weights.down, experts, "silu")
    tiles = expert_tiles.pair_few(logits, experts)
    product = expert_tiles.gate_up_tiles(normed, tiles, weights.gate_up, experts, "silu")
    made = [expert_tiles.down_tiles(product, tiles, weights.down, normed, experts)]
    if not stand.is_packed:
        gate_up, down = stand.plain
        rows = expert_rows.gate_up_rows(normed, logits, gate_up, experts, "silu")
        made.append(expert_rows.down_rows(*rows, down, normed, experts))
    for got in made:
        error = relative_error(got, wanted)
        assert error < MOST_ERROR, f"products of experts are wrong: relative error {error:.1e}"


def whole(stand: Stand, kind: str, bytes_per_s: float, part: tuple[int, int] | None) -> dict[int, dict[str, float]]:
    """Return microseconds of an MLP with its norm and router, by tiles and, of plain experts, by rows, of each number
    of tokens; and of routers with more programs.
    """
    found: dict[int, dict[str, float]] = {}
    layer = mlp.ExpertMlp(stand.weights, stand.experts, "silu")
    norm = torch.ones(stand.hidden, dtype=torch.bfloat16, device=stand.weights.router.device)
    ways = {"tiles": 0} if stand.is_packed else {"rows": 16, "tiles": 0}
    for tokens in (1, 2, 4, 8, 16):
        runs = [lambda x=x: layer(x, norm, 1e-6) for x, _ in stand.draw(tokens)]
        found[tokens] = {}
        for way, alone in ways.items():
            with patch.object(mlp, "MOST_ALONE", alone):
                runs[0]()
                if part is None:
                    found[tokens][way] = round(graph_us(runs, 5), 1)
        if part is None and tokens in (1, 16):
            routers = []
            for count in (1, 2, 4):
                with patch.object(mlp, "MOST_ALONE", 0), patch.object(routing, "ROUTED_EXPERTS", count):
                    routers.append(f"{count}: {graph_us(runs, 5):.1f}")
            print(f"{kind} MLP by tiles, {tokens} tokens, experts of a router's program: {', '.join(routers)}")
        if part is None:
            floor = stand.experts.taken(tokens) * stand.bytes_of_expert / bytes_per_s * 1e6
            shown = ", ".join(f"{way} {us:.1f} us" for way, us in found[tokens].items())
            print(f"{kind} MLP, {tokens:2} tokens: {shown}, floor {floor:.1f}", flush=True)
    return found


def measured_flops_per_s(device: torch.device) -> float:
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * 8192**3 / graph_us([lambda: a @ b], 3) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--compile", help="I/N: run each configuration of the Ith of N parts once, and time nothing")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further product after so long")
    parser.add_argument("--kinds", default="bf16,int4")
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    part = None
    if asked.compile:
        at, of = map(int, asked.compile.split("/"))
        part = (at, of)
    torch.manual_seed(0)
    tile_configs.PLAIN_OF_LARGER_CARDS.clear()  # so that those that are tried are used
    device, began = torch.device(asked.device), time.monotonic()
    bytes_per_s = flops_per_s = 1.0
    if part is None:
        bytes_per_s, flops_per_s = measured_bytes_per_s(), measured_flops_per_s(device)
        print(f"{torch.cuda.get_device_name()}: {bytes_per_s / 1e12:.2f} TB/s, {flops_per_s / 1e12:.0f} TFLOP/s")
    result: dict[str, Any] = {}
    for kind in asked.kinds.split(","):
        stand = stand_for(kind, device)
        check(stand)
        for case in cases(kind):
            if time.monotonic() - began > asked.seconds:
                print(f"{case.name}: not timed, out of time")
                continue
            sweep(case, stand, floor_us(case, stand, bytes_per_s, flops_per_s), part)
        result[kind] = whole(stand, kind, bytes_per_s, part)
        del stand
        torch.cuda.empty_cache()
    if part is None:
        tables = {"rows": expert_rows.CONFIGS, "tiles": tile_configs.PLAIN,
                  "packed tiles": tile_configs.PACKED}  # fmt: skip
        best = {name: {str(key): value for key, value in table.items()} for name, table in tables.items()}
        print(json.dumps({"device": torch.cuda.get_device_name(), "best": best, "mlp_us": result}))


if __name__ == "__main__":
    main()
