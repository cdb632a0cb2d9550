"""Time the gated delta rule of fla-core beside ours: `python -m lab.speed.delta_rule_peers`, on a GPU.

Both compute what a layer of Qwen3.5 27B has between its projections, from the same bf16 rows: a causal convolution,
gates, the rule, and the gated norm of its output. Both are compared with `run_segment` in float64. fla-core chooses
each kernel among some configurations, at its first call: `--workers` processes compile these first, side by side, so
that only their timing is left to this process. Without fla-core ours is timed alone.

fla-core and einops are pure Python: `python -m zipfile -e WHEEL FOLDER` and `PYTHONPATH=FOLDER` install them.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.benchmark_rows import measure
from bench.op.frame import Work, capture, relative_error
from bench.rates import device_name, measure_device_rates
from gpu.model.architecture import named_shape
from gpu.model.spec import Recurrent
from gpu.operations.recurrent import delta_step as delta_step_module
from gpu.operations.recurrent.delta_net import LayerStates, RecurrentWeights, run_segment
from gpu.operations.recurrent.delta_prefill import Span, delta_prefill, plan_spans
from gpu.operations.recurrent.delta_step import delta_step
from gpu.operations.recurrent.state_arrays import CHUNK_TOKENS, MOST_STEP_ROWS, ring_length

EPS = 1e-6
SHAPE = "qwen3.5-27b"
LAYERS = 48  # so many that no cache holds their states together
PEER = "fla-core"


@dataclass(frozen=True, slots=True)
class Drawn:
    """The input of a layer's part: mixed bf16 `[tokens, projected_width]`, gates bf16 `[tokens, 2 * value_heads]`."""

    own: Recurrent
    weights: RecurrentWeights
    mixed: Tensor
    gates: Tensor

    def qkv_and_z(self) -> tuple[Tensor, Tensor]:
        """Return queries, keys and values `[1, tokens, conv_width]`, and z, each contiguous in memory."""
        inputs, z = self.mixed.split([self.own.conv_width, self.own.value_width], 1)
        return inputs[None].contiguous(), z.contiguous()


@dataclass(frozen=True, slots=True)
class Told:
    """A row of the table. Errors are relative, of norms. out_error: None if outputs are not normed. eager_ms: launched
    call by call. graph_ms: replayed; None: it cannot be captured. first_s: until the first result, with compilation.
    peak_bytes: allocated by a call, outputs included.
    """

    what: str
    floor: str
    floor_ms: float | None
    eager_ms: float
    graph_ms: float | None
    out_error: float | None
    state_error: float
    first_s: float
    peak_bytes: int


def draw(own: Recurrent, tokens: int, device: torch.device) -> Drawn:
    """Draw rows and weights as a model starts with: heads forget within some tokens, or within some thousand."""
    generator = torch.Generator(device).manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def uniform() -> Tensor:
        return torch.rand(own.value_heads, generator=generator, device=device)

    decay, time_steps = (1 + 15 * uniform()).log(), (0.001 * 100 ** uniform()).double()
    bias = (time_steps + (-(-time_steps).expm1()).log()).float()  # softplus of it is the step of time
    conv, norm = normal(own.conv_width, 1, own.conv_tokens) * 0.5, normal(own.norm_width) * 0.1 + 1.0
    narrow = [one.to(torch.bfloat16) for one in (normal(own.gate_rows, 8), conv, norm)]
    weights = RecurrentWeights(narrow[0], narrow[1], decay, bias, narrow[2])
    rows = (normal(tokens, own.projected_width), normal(tokens, own.gate_rows))
    return Drawn(own, weights, *(one.to(torch.bfloat16) for one in rows))


def empty_states(own: Recurrent, count: int, dtype: torch.dtype, device: torch.device) -> LayerStates:
    """Return states of zeros. dtype: of the computation."""
    wide = torch.promote_types(dtype, torch.float32)
    return LayerStates(
        torch.zeros(count, own.value_heads, own.key_dim, own.value_dim, dtype=wide, device=device),
        torch.zeros(count, ring_length(own.conv_tokens), own.conv_width, dtype=dtype, device=device),
        torch.zeros(count, MOST_STEP_ROWS - 1, own.gate_rows, dtype=dtype, device=device),
    )


def exact(drawn: Drawn) -> tuple[Tensor, Tensor]:
    """Return outputs `[tokens, value_width]` and the state after them in float64, from the rounded rows."""
    held, own = empty_states(drawn.own, 1, torch.float64, drawn.mixed.device), drawn.weights
    parts = (one.double() for one in (own.gates, own.conv, own.decay, own.time_bias, own.norm))
    out = run_segment(drawn.mixed.double(), drawn.gates.double(), RecurrentWeights(*parts), drawn.own, EPS, held, 0, 0)
    return out, held.states[0]


def exact_steps(drawn: Drawn) -> tuple[Tensor, Tensor]:
    """Return the same as `exact` for rows that are each a sequence's first token, with states `[rows, ..]`."""
    rows = [slice(row, row + 1) for row in range(len(drawn.mixed))]
    outs, states = zip(*(exact(replace(drawn, mixed=drawn.mixed[row], gates=drawn.gates[row])) for row in rows),
                       strict=True)  # fmt: skip
    return torch.cat(outs), torch.stack(states)


def our_prompt(drawn: Drawn) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a call of the engine's kernels."""
    held = empty_states(drawn.own, 1, torch.bfloat16, drawn.mixed.device)
    planned = plan_spans([Span(0, 0, len(drawn.mixed), 0, 0)], held.rings.shape[1], drawn.mixed.device)

    def call() -> tuple[Tensor, Tensor]:
        out = delta_prefill(drawn.mixed, drawn.gates, drawn.weights, drawn.own, EPS, held, planned)
        return out, held.states[0]

    return call


def peer_prompt(drawn: Drawn, has_ends: bool = True) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a call of fla-core's kernels.

    has_ends: with its convolution and its gated norm; else the rule alone, whose outputs are not normed.
    """
    own, weights = drawn.own, drawn.weights
    rule, convolve, norm = (_peer(*name) for name in (
        ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"), ("fla.modules.causal_conv1d.ops", "causal_conv1d"),
        ("fla.modules.norm.fused_norm_gate", "rms_norm_gated"),
    ))  # fmt: skip
    inputs, z = drawn.qkv_and_z()
    taps = weights.conv[:, 0].contiguous()
    share, time_of = (one[None].contiguous() for one in drawn.gates.chunk(2, 1))

    def parts() -> tuple[Tensor, Tensor, Tensor]:
        convolved = convolve(inputs, taps, activation="silu")[0]
        query, key, value = convolved.split([own.key_width, own.key_width, own.value_width], 2)
        heads = (own.key_heads, own.key_dim)
        return query.unflatten(2, heads), key.unflatten(2, heads), value.unflatten(2, (own.value_heads, -1))

    def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        made, state = rule(
            query, key, value, time_of, share, output_final_state=True, use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, A_log=weights.decay, dt_bias=weights.time_bias, use_beta_sigmoid_in_kernel=True,
        )  # fmt: skip
        return made[0], state[0]

    def whole() -> tuple[Tensor, Tensor]:
        made, state = attend(*parts())
        rows = made.reshape(-1, own.value_dim)
        return norm(rows, z.view(-1, own.value_dim), weights.norm, None, eps=EPS).view(len(made), -1), state

    if has_ends:
        return whole
    ready = tuple(one.contiguous() for one in parts())
    return lambda: attend(*ready)


def our_steps(drawn: Drawn) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a call that computes one more token in each of LAYERS layers. The rows of `drawn` are sequences."""
    own, device, batch = drawn.own, drawn.mixed.device, len(drawn.mixed)
    layers = [empty_states(own, batch, torch.bfloat16, device) for _ in range(LAYERS)]
    slots = torch.arange(batch, dtype=torch.int32, device=device)
    cells, none = torch.ones(batch, dtype=torch.int64, device=device), torch.zeros_like(slots)

    def call() -> tuple[Tensor, Tensor]:
        outs = [delta_step(drawn.mixed, drawn.gates, drawn.weights, own, EPS, held, slots, slots, cells, none)
                for held in layers]  # fmt: skip
        return outs[0], layers[0].states

    return call


def peer_steps(drawn: Drawn) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a call of fla-core's rule alone, on tokens that are already convolved, as `our_steps`."""
    own, weights, batch = drawn.own, drawn.weights, len(drawn.mixed)
    rule = _peer("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule")
    states = [
        torch.zeros(batch, own.value_heads, own.key_dim, own.value_dim, device=drawn.mixed.device)
        for _ in range(LAYERS)
    ]
    convolved = torch.nn.functional.silu(drawn.mixed[:, : own.conv_width].float() * weights.conv[:, 0, -1])
    rows = convolved.to(drawn.mixed.dtype)[:, None]
    query, key, value = rows.split([own.key_width, own.key_width, own.value_width], 2)
    query, key = (one.unflatten(2, (own.key_heads, -1)).contiguous() for one in (query, key))
    value = value.unflatten(2, (own.value_heads, -1)).contiguous()
    share, time_of = (one[:, None].contiguous() for one in drawn.gates.chunk(2, 1))

    def call() -> tuple[Tensor, Tensor]:
        outs = [
            rule(query, key, value, g=time_of, beta=share, initial_state=state, output_final_state=True,
                 use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=weights.decay, dt_bias=weights.time_bias,
                 use_beta_sigmoid_in_kernel=True)
            for state in states
        ]  # fmt: skip
        return outs[0][0][:, 0].flatten(1), outs[0][1]

    return call


def _peer(module: str, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found


def prompt_work(own: Recurrent, tokens: int) -> Work:
    """Return the bytes of rows in and out, and the operations of chunks of C tokens.

    Each value head has five products of C by C by D (keys by keys, queries by keys, written and read values by the
    inverse, outputs), and three of C by D by D (reads by keys, reads by queries, the update of the state).
    """
    num_bytes = 2 * tokens * (own.projected_width + own.gate_rows + own.value_width)
    num_bytes += 4 * own.value_width * own.key_dim
    squares = CHUNK_TOKENS * (3 * own.key_dim + 2 * own.value_dim)
    flops = 2 * tokens * own.value_heads * (squares + 3 * own.key_dim * own.value_dim)
    return Work(num_bytes, "device_stream_gb_s", flops)


def step_work(own: Recurrent, batch: int) -> Work:
    """Return the bytes of a layer's states, read and written, and of its rows."""
    rows = own.projected_width + own.gate_rows + own.value_width + own.conv_width * own.conv_tokens
    return Work(batch * (8 * own.value_width * own.key_dim + 2 * rows), "device_copy_gb_s")


def tell(
    what: str, make: Callable[[], Callable[[], tuple[Tensor, Tensor]]], wanted: tuple[Tensor, Tensor], work: Work,
    rates: dict[str, float], times: int = 1,
) -> Told:  # fmt: skip
    """Time a call and compare it with `wanted`. times: how often one call does the work of `work`."""
    began = time.perf_counter()
    call = make()
    made = [one.clone() for one in call()]
    torch.cuda.synchronize()
    first_s = time.perf_counter() - began
    errors = [relative_error(one.reshape(other.shape), other) for one, other in zip(made, wanted, strict=True)]
    device = wanted[0].device
    eager = measure(call, device, 2, 10).ms / times
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    try:
        graph = measure(capture(call), device, 2, 10).ms / times
    except RuntimeError as error:
        print(f"{what}: not captured: {error}", file=sys.stderr)
        graph = None
    return Told(what, *work.floor(rates), eager, graph, errors[0], errors[1], first_s, peak)


def rows_of(own: Recurrent, lengths: list[int], has_peer: bool, device: torch.device) -> Iterator[Told]:
    """Yield the rows of the table, by length."""
    rates = measure_device_rates(device)
    for tokens in lengths:
        drawn = draw(own, tokens, device)
        wanted, work = exact(drawn), prompt_work(own, tokens)
        yield tell(f"{tokens:,} tokens, ours", lambda drawn=drawn: our_prompt(drawn), wanted, work, rates)
        if has_peer:
            yield tell(f"{tokens:,} tokens, {PEER}", lambda drawn=drawn: peer_prompt(drawn), wanted, work, rates)
            alone = tell("", lambda drawn=drawn: peer_prompt(drawn, False), wanted, work, rates)
            yield replace(alone, what=f"{tokens:,} tokens, {PEER}, the rule alone", out_error=None)
    for batch in (1, 2, 4):
        drawn = draw(own, batch, device)
        wanted, work = exact_steps(drawn), step_work(own, batch)
        yield tell(f"a token of {batch}, ours", lambda drawn=drawn: our_steps(drawn), wanted, work, rates, LAYERS)
        enough, delta_step_module.ENOUGH = delta_step_module.ENOUGH, 0
        yield tell(f"a token of {batch}, a program a head", lambda drawn=drawn: our_steps(drawn), wanted, work, rates,
                   LAYERS)  # fmt: skip
        delta_step_module.ENOUGH = enough
        if has_peer:
            made = tell("", lambda drawn=drawn: peer_steps(drawn), wanted, work, rates, LAYERS)
            yield replace(made, what=f"a token of {batch}, {PEER}, the rule alone", out_error=None)


def compile_share(own: Recurrent, lengths: list[int], index: int, count: int, device: torch.device) -> None:
    """Compile every `count`-th configuration of fla-core's kernels into Triton's cache on disk."""
    drawn = [draw(own, tokens, device) for tokens in lengths]
    for module in ("fla.ops.gated_delta_rule", "fla.modules.causal_conv1d.ops", "fla.modules.norm.fused_norm_gate"):
        import_module(module)
    for tuner in tuners_of(module for name, module in list(sys.modules.items()) if name.startswith("fla.")):
        tuner.configs = tuner.configs[index::count] or [tuner.configs[index % len(tuner.configs)]]
    for one in drawn:
        peer_prompt(one)()
    if index == 0:
        our_prompt(drawn[0])()
    torch.cuda.synchronize()


def tuners_of(modules: Iterator[ModuleType]) -> list[Any]:
    """Return the kernels of modules that are tuned among configurations, each once."""
    found: dict[int, Any] = {}
    for module in modules:
        for value in list(vars(module).values()):
            while value is not None and not isinstance(value, ModuleType | type):
                if hasattr(value, "configs") and hasattr(value, "arg_names"):
                    found[id(value)] = value
                value = getattr(value, "fn", None) if hasattr(value, "arg_names") else None
    return list(found.values())


def tabulate(rows: list[Told], title: str) -> Table:
    """Return rows as a table."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("what", no_wrap=True)
    for column in ("graph ms", "eager ms", "floor ms", "x floor", "error", "of states", "memory MB", "first s"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        ms = row.eager_ms if row.graph_ms is None else row.graph_ms
        times = None if row.floor_ms is None else ms / row.floor_ms
        numbers = ((row.graph_ms, ".4f"), (row.eager_ms, ".4f"), (row.floor_ms, ".4f"), (times, ".2f"),
                   (row.out_error, ".1e"), (row.state_error, ".1e"), (row.peak_bytes / 1e6, ".1f"),
                   (row.first_s, ".1f"))  # fmt: skip
        table.add_row(row.what, *("-" if number is None else format(number, form) for number, form in numbers))
    return table


def main() -> int:
    """Print the table, and the rows as JSON."""
    parser = argparse.ArgumentParser(description="Time fla-core's gated delta rule beside ours.")
    parser.add_argument("--tokens", default="512,4096,16384", help="of prompts, with commas")
    parser.add_argument("--shape", default=SHAPE, help="a model's, by name")
    parser.add_argument("--workers", type=int, default=8, help="processes that compile fla-core's configurations")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the rows there, too")
    parser.add_argument("--compile", default="", metavar="I/N", help="be one of these processes")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: no CUDA device; this compares kernels of a GPU", file=sys.stderr)
        return 1
    torch.set_grad_enabled(False)
    own = named_shape(arguments.shape).recurrent
    assert own is not None, "the shape has recurrent layers"
    own = replace(own, is_tiled=False)  # the order of value heads in checkpoints and in fla-core
    lengths, device = [int(one) for one in arguments.tokens.split(",")], torch.device("cuda")
    if arguments.compile:
        index, count = (int(one) for one in arguments.compile.split("/"))
        compile_share(own, lengths, index, count, device)
        return 0
    has_peer, began = find_spec("fla") is not None, time.perf_counter()
    if not has_peer:
        print("fla-core is not installed: ours alone", file=sys.stderr)
    else:
        command = [
            sys.executable,
            "-m",
            "lab.speed.delta_rule_peers",
            "--shape",
            arguments.shape,
            "--tokens",
            arguments.tokens,
            "--compile",
        ]
        environment = os.environ | {"FLA_CACHE_RESULTS": "0"}
        workers = [subprocess.Popen([*command, f"{index}/{arguments.workers}"], env=environment)
                   for index in range(arguments.workers)]  # fmt: skip
        failed = sum(worker.wait() != 0 for worker in workers)
        took_s = time.perf_counter() - began
        print(f"compiled in {took_s:.1f} s, {failed} of {len(workers)} processes failed", file=sys.stderr, flush=True)
    rows, listed = [], []
    for row in rows_of(own, lengths, has_peer, device):
        rows.append(row)
        print(f"{time.perf_counter() - began:5.1f} s: {row.what}", file=sys.stderr, flush=True)
        listed.append({name: getattr(row, name) for name in Told.__slots__})
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")
    version = "" if not has_peer else f", {PEER} {import_module('fla').__version__}"
    title = (
        f"{device_name(device)}, torch {torch.__version__}{version}: {arguments.shape}, between a layer's projections"
    )
    Console(width=150).print(tabulate(rows, title))
    print(json.dumps(listed), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
