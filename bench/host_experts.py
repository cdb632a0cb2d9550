"""`tandem bench kernel host-experts`: steps and prompts of a mixture of experts that does not fit the card.

Random weights, drawn on the device and, of experts in host memory, copied down. The allocator is held to the memory
that was asked for. The floor of a step is what it fetched, counted on the device, over the link, and what it reads over
the card's rate, both measured in the same run; a prompt's is its products, or all experts in host memory over the link,
whichever takes longer. The gate: a layer gives what it gives with all of its experts on the card; whether it gives the
same bits stands in the row.
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import torch
from rich.console import Console

from bench.decode_loop import decode
from bench.engine import draw_prompts, measure_floor_rates
from bench.rates import device_name
from bench.rows import Row, announce, require, summarise
from gpu.config import GpuConfig
from gpu.load import DTYPES, RANDOM_SEED
from gpu.memory.demand import CUDA_RUNTIME_BYTES
from gpu.memory.expert_shares import ExpertShares
from gpu.memory.plan import MemoryPlan, plan_memory
from gpu.model.architecture import Architecture, named_shape
from gpu.model.host_experts import joined
from gpu.model.matrix_formats import OF_EXPERTS, rounded, step_weight_bytes
from gpu.model.projections import Projections
from gpu.model.weights import LayerWeights, Weights, random_weights
from gpu.runner import Runner
from gpu.sampling.params import SamplingParams
from gpu.step import PageWrite, PrefillJob, PrefillPrompt, PrefillUnit, StepPlan
from transfer.machine import GIB, MachineProfile, count_physical_cores, probe_machine

PROMPT_TOKENS = 64  # of a decode step's contexts
WARMUP_STEPS = 4
GATED_TOKENS = (1, 3, 200)
MOST_OFF = 2.0**-6  # of the largest number of a result: four roundings of bf16


@dataclass(frozen=True, slots=True)
class HostExpertsBenchmark:
    """on_card: experts of each layer, None: what the plan of `memory_gib` says, for the longest of `prompts`."""

    shape: str
    weights: str | None
    memory_gib: float
    on_card: int | None
    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    chunk_tokens: int
    steps: int

    @property
    def context(self) -> int:
        return max(*self.prompts, PROMPT_TOKENS + self.steps) + 1


def host_expert_rows(benchmark: HostExpertsBenchmark, device: torch.device, console: Console) -> list[Row]:
    """A row a batch and a prompt. Raises GateError, PlanError or ModelError."""
    shape = rounded(named_shape(benchmark.shape), benchmark.weights, "--weights")
    plan = _plan(benchmark, shape, device, probe_machine())
    dtype, on_card = DTYPES[plan.dtype], benchmark.on_card if benchmark.on_card is not None else plan.experts_on_card
    require(on_card is not None, f"all experts of {benchmark.shape} lie in the memory that computes; give --on-card")
    assert on_card is not None
    shares = ExpertShares(shape, plan.dtype_bytes, on_card)
    step_bytes = step_weight_bytes(shape, plan.dtype_bytes, device.type == "cuda", 1)
    rates, stream_gb_s = measure_floor_rates(step_bytes, count_physical_cores(), device)
    if device.type == "cuda":
        share = (benchmark.memory_gib * GIB - CUDA_RUNTIME_BYTES) / torch.cuda.get_device_properties(
            device
        ).total_memory
        torch.cuda.set_per_process_memory_fraction(min(share, 1.0))
    began = time.perf_counter()
    weights = random_weights(shape, RANDOM_SEED, dtype, device, lambda fraction: None, on_card)
    console.print(f"{shares.host_bytes / GIB:.1f} GiB of experts in host memory, all weights drawn in "
                  f"{time.perf_counter() - began:.1f} s", highlight=False)  # fmt: skip
    has_same_bits = _check(shape, weights, device)
    bench = _Bench(benchmark, shape, plan, shares, rates, stream_gb_s, device, console, has_same_bits)
    return list(bench.rows(weights))


def _plan(
    benchmark: HostExpertsBenchmark, shape: Architecture, device: torch.device, machine: MachineProfile
) -> MemoryPlan:
    is_cuda = device.type == "cuda"
    gpu = GpuConfig(
        device="cuda" if is_cuda else "cpu", memory_limit_gib=benchmark.memory_gib, dtype="bfloat16",
        experts_gib="auto" if is_cuda else None, graph_batch_sizes=benchmark.batches,
    )  # fmt: skip
    return plan_memory(
        shape, gpu, host=None, kept=None, states=(), max_running=max(benchmark.batches),
        chunk_tokens=benchmark.chunk_tokens, max_context_tokens=benchmark.context, max_hidden_tokens=None,
        machine=machine,
    )  # fmt: skip


def _check(shape: Architecture, weights: Weights, device: torch.device) -> bool:
    """Whether the first layer with experts in host memory, which is put together on the device for a moment, gives the
    same bits. Raises GateError where it gives other numbers.
    """
    number = next(index for index, layer in enumerate(weights.layers) if layer.experts and layer.experts.host)
    split = weights.layers[number]
    one = replace(shape, num_layers=1, layer_pattern=(shape.layers[number],))
    whole = Projections(replace(weights, layers=[_together(split, device)]), one)
    other = Projections(replace(weights, layers=[split]), one)
    generator = torch.Generator(device=device).manual_seed(1)
    has_same_bits = True
    for tokens in GATED_TOKENS:
        hidden = torch.randn(tokens, shape.hidden, generator=generator, device=device, dtype=weights.embedding.dtype)
        wanted, got = whole.mlp(0, hidden), other.mlp(0, hidden)
        off = float((got - wanted).abs().max() / wanted.abs().max())
        require(off < MOST_OFF, f"{tokens} tokens are {off:.2g} off what all experts on the card make of them")
        has_same_bits &= torch.equal(got, wanted)
    return has_same_bits


def _together(layer: LayerWeights, device: torch.device) -> LayerWeights:
    assert layer.experts is not None, "a layer with experts"
    gate_up, down = (joined(layer.stacks(name), device) for name in OF_EXPERTS)
    return replace(layer, experts=replace(layer.experts, gate_up=gate_up, down=down, host=None))


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
        """On the CPU there is none, and experts are copied within its memory."""
        return self.rates.get("host_to_device_gb_s", self.stream_gb_s)

    def rows(self, weights: Weights) -> Iterator[Row]:
        plan = self.plan
        runner = Runner(
            self.shape, weights, num_pages=plan.num_pages, page_tokens=plan.page_tokens,
            max_running=max(self.benchmark.batches), max_context_tokens=plan.max_context_tokens,
            max_hidden_tokens=plan.max_hidden_tokens, dtype=weights.embedding.dtype, device=self.device, tier=None,
            parts=(),
        )  # fmt: skip
        counted = torch.zeros(1, dtype=torch.int64, device=self.device)
        runner.warm_up(min(self.benchmark.chunk_tokens, plan.max_context_tokens - 1))
        staged = runner.decode_steps.loop.decoder.projections.staged
        assert staged is not None, "a mixture with experts in host memory"
        staged.watch = lambda listed: counted.add_(listed.count)
        runner.capture(self.benchmark.batches, lambda fraction: None)
        for batch in self.benchmark.batches:
            yield self._decode_row(runner, batch, counted)
        for length in self.benchmark.prompts:
            yield self._prefill_row(runner, length)

    def _decode_row(self, runner: Runner, batch: int, counted: torch.Tensor) -> Row:
        prompts = draw_prompts(batch, PROMPT_TOKENS, self.shape.vocab_size)
        decode(runner, prompts, WARMUP_STEPS)
        fetched_before = int(counted)
        decoded = decode(runner, prompts, self.benchmark.steps)
        num_layers = sum(spec.experts is not None for spec in self.shape.layers)
        one_bytes = self.shares.host_bytes / (num_layers * self.shares.on_host)
        per_step = (int(counted) - fetched_before) / self.benchmark.steps  # and what short prefills listed: none
        fetched, read = per_step * one_bytes, step_weight_bytes(self.shape, self.plan.dtype_bytes, True, batch)
        floor_ms = fetched / self.link_gb_s / 1e6 + read / self.stream_gb_s / 1e6
        floor = (
            f"{fetched / 1e9:.3f} GB of {per_step:.0f} experts over {self.link_gb_s:.1f} GB/s, {read / 1e9:.3f} of "
            f"weights over {self.stream_gb_s:.0f}"
        )
        announce(self.console, f"decode step, batch {batch}", floor, floor_ms)
        expected = self.shares.fetched_bytes(batch)
        return self._row("decode step", f"batch {batch}", decoded.step_ms[WARMUP_STEPS:], floor, floor_ms,
                         {"fetched_bytes": fetched, "expected_bytes": expected})  # fmt: skip

    def _prefill_row(self, runner: Runner, length: int) -> Row:
        products = 2.0 * length * self.shape.num_layers * self.shape.num_layer_weights
        products += 4.0 * self.shape.num_heads * self.shape.dim * self.shape.num_pairs(0, length)
        tflop_s = self.rates.get("bf16_matmul_tflop_s") or self.rates.get("host_matmul_tflop_s") or 1.0
        copied_ms, products_ms = self.shares.host_bytes / self.link_gb_s / 1e6, products / tflop_s / 1e9
        floor = (
            f"the longer of {self.shares.host_bytes / 1e9:.1f} GB over {self.link_gb_s:.1f} GB/s, {copied_ms:.0f} ms, "
            f"and {products / 1e12:.1f} TFLOP at {tflop_s:.0f}, {products_ms:.0f} ms"
        )
        floor_ms = max(copied_ms, products_ms)
        announce(self.console, f"prefill, {length:,} tokens", floor, floor_ms)
        times = [self._prefill_ms(runner, length) for _ in range(3)][1:]
        return self._row("prefill", f"{length:,} tokens", times, floor, floor_ms, {"products_ms": products_ms})

    def _prefill_ms(self, runner: Runner, length: int) -> float:
        prompt = draw_prompts(1, length, self.shape.vocab_size)[0]
        chunk = self.benchmark.chunk_tokens
        pages = list(range(-(-length // self.plan.page_tokens)))
        job = PrefillJob(0, [PrefillPrompt(0, prompt, 0, length, SamplingParams(temperature=0.0), "exact")])
        units = [
            PrefillUnit(0, layer, begin, min(begin + chunk, length))
            for layer in range(self.shape.num_layers)
            for begin in range(0, length, chunk)
        ]
        began = time.perf_counter()
        runner.launch(StepPlan(page_writes=[PageWrite(0, 0, pages)], new_jobs=[job], units=units)).collect()
        took = 1e3 * (time.perf_counter() - began)
        runner.launch(StepPlan(released_slots=[0])).collect()
        return took

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
