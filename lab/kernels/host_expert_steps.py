"""Run `python -m lab kernel host-experts`: steps and prompts of a mixture of experts that does not fit the device.

Weights are random, drawn on the device; experts for host memory are copied there. The allocator is limited to the
requested memory. Steps run both ways with the same weights: their experts are fetched, or computed by the CPU. The
floor of a fetching step is what it fetched, counted on the device, over the link. That of a computing step is what the
CPU read, counted there, over the rate of a stream from host memory. To both comes what the step reads on the device
over the device's rate. A prompt's floor is its products, or all experts in host memory over the link, whichever takes
longer. All rates are measured in the same run. A computing step's row also has the time of its products by the threads'
own measured rate, by which `auto` chooses. The gate: both ways a layer gives what it gives with all experts on the
device. The row also says whether fetched experts give the same bits.
"""

import gc
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal

import torch
import typer
from rich.console import Console

from bench.benchmark_rows import Row, announce, require, summarise
from bench.decode_loop import decode, prefill_ms, served_graph_sizes
from bench.engine_steps import draw_prompts, measure_floor_rates
from bench.memory_cap import cap_memory
from bench.rates import device_name
from cpu.expert_rates import measure_core_rates
from cpu.experts import HostExperts
from cpu.memory_rates import measure_host_rates
from gpu.config import GpuConfig
from gpu.exchange.device_experts import ExpertExchange
from gpu.layers.computed_experts import open_exchanges
from gpu.layers.projections import Projections
from gpu.load import DTYPES, RANDOM_SEED
from gpu.memory.plan import MemoryPlan, MemoryRequest, PlannedSizes, plan_memory
from gpu.model.architecture import Architecture, named_shape
from gpu.model.gguf.kinds import BLOCK_KINDS
from gpu.model.gguf_translation.tensor_names import stored_as
from gpu.model.matrix_formats import OF_EXPERTS, rounded, step_weight_bytes
from gpu.runner import Runner
from gpu.runner_settings import RunnerSettings
from gpu.weights.drawing import random_packed_weights
from gpu.weights.expert_shares import MOST_COMPUTED_ROWS, ExpertShares, most_experts, why_not_computed
from gpu.weights.host_experts import joined
from gpu.weights.weights import LayerWeights, Weights
from scheduler.planning.expert_choice import ExpertTimes
from scheduler.planning.step_bytes import prompt_flops
from transfer.machine import GIB, MachineProfile, count_physical_cores, probe_machine
from transfer.machine_rates import core_rate

PROMPT_TOKENS = 64  # tokens of a context before the decode steps
WARMUP_STEPS = 4
GATED_TOKENS = (1, 3, 200)
Way = Literal["fetch", "compute"]
MOST_OFF = 2.0**-6  # largest error, relative to the largest number: four roundings of bf16


@dataclass(frozen=True, slots=True)
class HostExpertsBenchmark:
    """The settings of the benchmark. weights: as `model.weights`, or a GGUF file's format; None: bf16. on_card: experts
    of each layer on the device; None: as planned for `memory_gib` and the longest of `prompts`. ways: in which steps
    are timed, in this order. threads: of the CPU that computes; None: physical cores.
    """

    shape: str
    weights: str | None
    memory_gib: float
    on_card: int | None
    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    chunk_tokens: int
    steps: int
    ways: tuple[Way, ...] = ("fetch", "compute")
    threads: int | None = None

    @property
    def num_threads(self) -> int:
        return self.threads or count_physical_cores()

    @property
    def context(self) -> int:
        """Return the tokens of the longest context, which also holds the prompts of a step's rows as one job."""
        return max(*self.prompts, PROMPT_TOKENS + self.steps, max(self.batches) * PROMPT_TOKENS) + 1


def parse_ways(text: str) -> tuple[Way, ...]:
    """Parse `fetch,compute` to ways. Raises typer.BadParameter for an unknown way."""
    found: list[Way] = []
    for word in text.split(","):
        if word not in ("fetch", "compute"):
            raise typer.BadParameter(f"--ways: got {word!r}; wanted fetch, compute, or both with a comma")
        found.append(word)
    return tuple(found)


def host_expert_rows(benchmark: HostExpertsBenchmark, device: torch.device, console: Console) -> list[Row]:
    """Return a row for each way and batch, and one for each prompt. Raises GateError, PlanError or ModelError."""
    shape, kind = named_shape(benchmark.shape), benchmark.weights
    is_block = kind is not None and kind in BLOCK_KINDS
    shape = stored_as(shape, kind) if is_block else rounded(shape, kind, "--weights")
    plan = _plan(benchmark, shape, device, probe_machine())
    dtype, on_card = DTYPES[plan.dtype], benchmark.on_card if benchmark.on_card is not None else plan.experts_on_card
    require(on_card is not None, f"all experts of {benchmark.shape} lie in the memory that computes; give --on-card")
    assert on_card is not None
    shares = ExpertShares(shape, plan.dtype_bytes, on_card)
    reason = why_not_computed(shape) if "compute" in benchmark.ways else None
    require(reason is None, f"{reason}; leave compute out of --ways")
    require(
        shares.host_bytes > 0,
        f"--on-card: asked {on_card}, a layer of {benchmark.shape} has {most_experts(shape)} experts and none lies in "
        "host memory; lower it",
    )
    step_bytes = step_weight_bytes(shape, plan.dtype_bytes, plan.is_packed, 1)
    rates, stream_gb_s = measure_floor_rates(step_bytes, count_physical_cores(), device)
    most = max(benchmark.batches)
    require(
        "compute" not in benchmark.ways or most <= MOST_COMPUTED_ROWS,
        f"the CPU computes steps of up to {MOST_COMPUTED_ROWS} rows, asked {most}; lower --batch, or leave compute out "
        "of --ways",
    )
    if "compute" in benchmark.ways:
        if "host_stream_gb_s" not in rates:
            rates = rates | measure_host_rates(benchmark.num_threads)
        stored = [kind or "bf16" for kind in shares.computed_numbers(1)]
        rates = rates | measure_core_rates(benchmark.num_threads, stored=stored)
    cap_memory(int(benchmark.memory_gib * GIB), device)
    began = time.perf_counter()
    weights = random_packed_weights(shape, RANDOM_SEED, dtype, device, lambda fraction: None, on_card)
    console.print(f"{shares.host_bytes / GIB:.1f} GiB of experts in host memory, all weights drawn in "
                  f"{time.perf_counter() - began:.1f} s", highlight=False)  # fmt: skip
    has_same_bits = _check(shape, weights, device, benchmark)
    gc.collect()  # frees the layer that was put together: pages need its memory
    bench = _Bench(benchmark, shape, plan, shares, rates, stream_gb_s, device, console, has_same_bits)
    rows = []
    for way in benchmark.ways:
        rows += list(bench.rows(weights, way, prompts=benchmark.prompts if way == benchmark.ways[0] else ()))
        gc.collect()  # frees a runner and its graphs: the next one needs the memory
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def _plan(
    benchmark: HostExpertsBenchmark, shape: Architecture, device: torch.device, machine: MachineProfile
) -> MemoryPlan:
    is_cuda = device.type == "cuda"
    gpu = GpuConfig(
        device="cuda" if is_cuda else "cpu", memory_limit_gib=benchmark.memory_gib, dtype="bfloat16",
        experts_gib="auto" if is_cuda else None, graph_batch_sizes=served_graph_sizes(benchmark.batches),
    )  # fmt: skip
    return plan_memory(
        MemoryRequest(
            shape,
            gpu,
            host=None,
            kept=None,
            states=(),
            sizes=PlannedSizes(_max_running(benchmark), benchmark.chunk_tokens, benchmark.context, None),
            machine=machine,
        )
    )


def _max_running(benchmark: HostExpertsBenchmark) -> int:
    """Return the rows of the largest captured step: the largest batch, padded as a server pads it."""
    return max((*benchmark.batches, *served_graph_sizes(benchmark.batches)))


def _num_pages(benchmark: HostExpertsBenchmark, page_tokens: int) -> int:
    """Return the pages of the longest prompt, or of a step's contexts. Here all layers have whole contexts in pages,
    even those with a window, which the plan counts separately.
    """
    in_steps = max(benchmark.batches) * -(-(PROMPT_TOKENS + benchmark.steps) // page_tokens)
    return max(in_steps, -(-benchmark.context // page_tokens))


def _check(shape: Architecture, weights: Weights, device: torch.device, benchmark: HostExpertsBenchmark) -> bool:
    """Check the first layer that has experts in host memory against the same layer whole on the device.

    Returns whether it gives the same bits with fetched experts. Raises GateError if either way gives other numbers.
    """
    number = next(index for index, layer in enumerate(weights.layers) if layer.experts and layer.experts.host)
    split = weights.layers[number]
    one = replace(shape, num_layers=1, layer_pattern=(shape.layers[number],))
    whole = Projections(replace(weights, layers=[_together(split, device)]), one)
    alone = replace(weights, layers=[split])
    other, exchange = Projections(alone, one), None
    if "compute" in benchmark.ways:
        open_experts = partial(HostExperts, threads=benchmark.num_threads)
        (exchange,) = open_exchanges(alone, one, MOST_COMPUTED_ROWS, device, open_experts, 1)
    generator = torch.Generator(device=device).manual_seed(1)
    has_same_bits = True
    for tokens in GATED_TOKENS:
        hidden = torch.randn(tokens, shape.hidden, generator=generator, device=device, dtype=weights.embedding.dtype)
        wanted, got = whole.mlp(0, hidden), other.mlp(0, hidden)
        off = float((got - wanted).abs().max() / wanted.abs().max())
        require(off < MOST_OFF, f"{tokens} tokens are {off:.2g} off what all experts on the card make of them")
        has_same_bits &= torch.equal(got, wanted)
        if exchange is not None and tokens <= exchange.max_rows:
            off = float((_compute(other, hidden, exchange) - wanted).abs().max() / wanted.abs().max())
            require(off < MOST_OFF, f"{tokens} tokens, computed, are {off:.2g} off what all on the card make of them")
    return has_same_bits


def _compute(projections: Projections, hidden: torch.Tensor, exchange: ExpertExchange) -> torch.Tensor:
    """Return the output of a layer's MLP, with its experts in host memory computed by this thread after the launch (on
    the CPU device within it).
    """
    if exchange.is_at_once:
        return projections.mlp(0, hidden, exchange=exchange)
    exchange.slot.release()  # no kernel may wait for this thread while this thread loads modules
    projections.mlp(0, hidden, exchange=exchange)
    exchange.forget_requests()
    exchange.take_requests()
    made = projections.mlp(0, hidden, exchange=exchange)
    exchange.slot.advance(len(hidden))
    exchange.worker.answer([(exchange.take_requests(), exchange.slot)])
    return made


def _together(layer: LayerWeights, device: torch.device) -> LayerWeights:
    assert layer.experts is not None, "a layer with experts"
    gate_up, down = (joined(layer.stacks(name), device) for name in OF_EXPERTS)
    return replace(layer, experts=replace(layer.experts, gate_up=gate_up, down=down, host=None))


def _count(runner: Runner, way: Way) -> int:
    """Return how many experts were fetched, or computed, since the runner was made. Waits for the device."""
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)
    counts = runner.expert_counts()
    assert counts is not None, "a mixture with experts in host memory"
    return counts.fetched if way == "fetch" else counts.computed


def _computed(runner: Runner) -> tuple[int, float]:
    """Return the bytes of experts that the CPU read, and the seconds from requests to answers, since the runner was
    made.
    """
    counts = runner.computed_counts()
    return sum(one.bytes_read for one in counts), sum(one.compute_s for one in counts)


@dataclass(frozen=True, slots=True)
class _Bench:
    benchmark: HostExpertsBenchmark
    shape: Architecture
    plan: MemoryPlan
    shares: ExpertShares
    rates: dict[str, float]
    stream_gb_s: float
    device: torch.device
    console: Console
    has_same_bits: bool

    @property
    def link_gb_s(self) -> float:
        """Return the link's rate; if the CPU is the device, that of copies within its memory."""
        return self.rates.get("host_to_device_gb_s", self.stream_gb_s)

    def rows(self, weights: Weights, way: Way, prompts: tuple[int, ...]) -> Iterator[Row]:
        plan = self.plan
        open_experts = partial(HostExperts, threads=self.benchmark.num_threads) if way == "compute" else None
        runner = Runner(
            self.shape,
            weights,
            RunnerSettings(
                num_pages=_num_pages(self.benchmark, plan.page_tokens),
                page_tokens=plan.page_tokens,
                max_running=_max_running(self.benchmark),
                max_context_tokens=plan.max_context_tokens,
                max_hidden_tokens=plan.max_hidden_tokens,
                dtype=weights.embedding.dtype,
                device=self.device,
                tier=None,
                parts=(),
                open_experts=open_experts,
                computed_rows=MOST_COMPUTED_ROWS,
            ),
        )
        runner.rehearsal.warm_up(min(self.benchmark.chunk_tokens, plan.max_context_tokens - 1), lambda fraction: None)
        runner.capture(served_graph_sizes(self.benchmark.batches), lambda fraction: None)
        for batch in self.benchmark.batches:
            yield self._decode_row(runner, batch, way)
        for length in prompts:
            yield self._prefill_row(runner, length)
        runner.shutdown()

    def _decode_row(self, runner: Runner, batch: int, way: Way) -> Row:
        prompts = draw_prompts(batch, PROMPT_TOKENS, self.shape.vocab_size)
        decode(runner, prompts, WARMUP_STEPS)
        before, computed_before = _count(runner, way), _computed(runner)
        decoded = decode(runner, prompts, self.benchmark.steps)
        num_layers = sum(spec.experts is not None for spec in self.shape.layers)
        one_bytes = self.shares.host_bytes / (num_layers * self.shares.on_host)
        per_step = (_count(runner, way) - before) / self.benchmark.steps  # short prefills add none to the counter
        moved, read = per_step * one_bytes, step_weight_bytes(self.shape, self.plan.dtype_bytes, True, batch)
        read -= self.shares.fetched_bytes(batch) if way == "compute" else 0  # the device does not read these
        gb_s = self.link_gb_s if way == "fetch" else self.rates["host_stream_gb_s"]
        near = self.shares.near_bytes(batch) if way == "compute" else 0  # the device reads these meanwhile
        floor_ms = read / self.stream_gb_s / 1e6 + max(moved / gb_s - near / self.stream_gb_s, 0.0) / 1e6
        where = "over the link" if way == "fetch" else f"on {self.benchmark.num_threads} threads of the CPU"
        floor = (
            f"{moved / 1e9:.3f} GB of {per_step:.0f} experts {where} at {gb_s:.1f} GB/s, {read / 1e9:.3f} of weights "
            f"over {self.stream_gb_s:.0f}" + (f", {near / 1e9:.3f} of them meanwhile" if near else "")
        )
        extras = {"moved_bytes": moved, "expected_bytes": self.shares.fetched_bytes(batch)}
        if way == "compute":
            extras["products_ms"], said = self._products(batch)
            floor = f"{floor}; {said}"
        announce(self.console, f"decode step, {way}, batch {batch}", floor, floor_ms)
        if way == "compute":
            num_bytes, seconds = (
                after - earlier for after, earlier in zip(_computed(runner), computed_before, strict=True)
            )
            extras["compute_gb_s"] = num_bytes / max(seconds, 1e-9) / 1e9
        return self._row(f"decode step, {way}", f"batch {batch}", decoded.step_ms[WARMUP_STEPS:], floor, floor_ms,
                         extras)  # fmt: skip

    def _products(self, batch: int) -> tuple[float, str]:
        """Return the time of a step's products by the threads' own rate, for randomly chosen experts, and in words."""
        threads, host_gb_s = self.benchmark.num_threads, self.rates["host_stream_gb_s"]
        ms = ExpertTimes(self.shares, self.link_gb_s, host_gb_s, threads, self.rates).arithmetic_ms(batch)
        names = [core_rate(kind) for kind in self.shares.computed_numbers(1)]
        rates = ", ".join(f"{name} {self.rates[name]:.1f}" for name in names)
        return ms, f"products by the threads' own rate {ms:.2f} ms ({rates})"

    def _prefill_row(self, runner: Runner, length: int) -> Row:
        products = prompt_flops(self.shape, 0, length)
        tflop_s = self.rates.get("bf16_matmul_tflop_s") or self.rates.get("host_matmul_tflop_s") or 1.0
        copied_ms, products_ms = self.shares.host_bytes / self.link_gb_s / 1e6, products / tflop_s / 1e9
        floor = (
            f"the longer of {self.shares.host_bytes / 1e9:.1f} GB over {self.link_gb_s:.1f} GB/s, {copied_ms:.0f} ms, "
            f"and {products / 1e12:.1f} TFLOP at {tflop_s:.0f}, {products_ms:.0f} ms"
        )
        floor_ms = max(copied_ms, products_ms)
        announce(self.console, f"prefill, {length:,} tokens", floor, floor_ms)
        prompt = draw_prompts(1, length, self.shape.vocab_size)[0]
        times = [prefill_ms(runner, prompt, self.benchmark.chunk_tokens) for _ in range(3)][1:]
        return self._row("prefill", f"{length:,} tokens", times, floor, floor_ms, {"products_ms": products_ms})

    def _row(
        self, name: str, what: str, times: list[float], floor: str, floor_ms: float, extras: dict[str, float]
    ) -> Row:
        on_card, of_all = self.shares.on_card, self.shares.on_card + self.shares.on_host
        extras = extras | {"has_same_bits": self.has_same_bits}
        if self.device.type == "cuda":
            extras = extras | {"device_gib": torch.cuda.max_memory_reserved(self.device) / GIB}
        timing = summarise(times)
        self.console.print(f"{name}, {what}: {timing.ms:.2f} ms, {timing.ms / floor_ms:.2f} of the floor, {extras}",
                           highlight=False)  # fmt: skip
        return Row(
            name=f"{name}, experts in host memory",
            shape=f"{self.shape.name} {self.benchmark.weights or self.plan.dtype}, {on_card} of {of_all} on the card, "
            f"{what}",
            device=device_name(self.device), **asdict(timing), floor=floor, floor_ms=floor_ms, peer=None, peer_ms=None,
            rates=self.rates, extras=extras, config=asdict(self.benchmark) | {"torch": torch.__version__},
        )  # fmt: skip
