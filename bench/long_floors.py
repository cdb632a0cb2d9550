"""Compute floors of contexts larger than the device's memory: a decode step, a prompt's prefill, and a turn over an
offloaded prefix.

A floor counts the necessary work (bytes that are read or cross the link once, FLOPs of products), and divides it by
this machine's measured rates. It assumes that weights and rows are read one after the other, so steps in which these
overlap can beat the floor.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from bench.host_rate import measure_attend_rate
from bench.rates import measure_device_rates, measure_host_matmul
from cpu.memory_rates import GIB, default_gib, measure_host_rates, measure_read_rate
from gpu.load import DTYPES
from gpu.memory.plan import MemoryPlan
from gpu.model.architecture import Architecture, load_architecture
from gpu.model.matrix_formats import step_weight_bytes
from gpu.profiles import Profile
from scheduler.engine_config import EngineConfig
from scheduler.planning.engine_memory import find_tier_shape, plan_engine
from scheduler.planning.step_bytes import StepBytes
from scheduler.sequences.capacity import HostCapacity, host_capacity
from transfer.host_memory import CODE_BYTES
from transfer.machine import count_physical_cores, probe_machine
from transfer.tier_shape import TierShape


class Floor(NamedTuple):
    """A floor in milliseconds. text: which work over which rate gives `ms`."""

    text: str
    ms: float


@dataclass(frozen=True, slots=True)
class LongFloors:
    """The floors of one deployment on this machine. stream_gb_s: the rate at which the device reads its weights. shape,
    capacity: None if the deployment has no host tier.
    """

    architecture: Architecture
    plan: MemoryPlan
    shape: TierShape | None
    capacity: HostCapacity | None
    rates: dict[str, float]
    stream_gb_s: float

    def decode(
        self, profile: Profile, context: int, batch: int, rows_read: float | None, kept_tokens: int = 0
    ) -> Floor:
        """Return the floor of a step of `batch` rows. rows_read: keys, and as many values, that the CPU reads in it;
        None: not counted yet, so the floor is the device's part alone.
        """
        return self._decode(profile, context, batch, rows_read, kept_tokens, self.rates["host_stream_gb_s"])

    def decode_as_attended(
        self, profile: Profile, context: int, batch: int, rows_read: float, kept_tokens: int
    ) -> Floor:
        """Return the same floor with the best rate of the CPU's attention, in place of that of plain reads."""
        return self._decode(profile, context, batch, rows_read, kept_tokens, self.rates["host_attend_gb_s"])

    def _decode(
        self, profile: Profile, context: int, batch: int, rows_read: float | None, kept_tokens: int, host_gb_s: float
    ) -> Floor:
        weight_bytes = self.step.weights(batch)
        kept_bytes = kept_tokens * len(self.shape.layers) * self.step.layer_token if self.shape else 0
        kv_bytes = batch * self.step.device_kv(context, self._offloaded(profile, context)) + kept_bytes
        ms = (weight_bytes + kv_bytes) / self.stream_gb_s / 1e6
        text = f"{weight_bytes / 1e9:.3f} GB of weights, {kv_bytes / 1e9:.3f} of KV over {self.stream_gb_s:.0f} GB/s"
        fetched_bytes = self.step.fetched(batch)
        if fetched_bytes:
            computes = self.step.computes(batch)
            gb_s = self.rates["host_stream_gb_s" if computes else "host_to_device_gb_s"]
            beside_ms = self.step.beside(batch) / self.stream_gb_s / 1e6  # already counted with the weights
            ms += max(fetched_bytes / gb_s / 1e6 - beside_ms, 0.0)
            text += (
                f", {fetched_bytes / 1e9:.3f} of experts {'on the CPU' if computes else 'over the link'} at {gb_s:.0f}"
            )
        if rows_read is None:
            return Floor(f"{text}; the rows that the CPU reads come on top, once counted", ms)
        if not self.shape:
            return Floor(text, ms)
        ms += rows_read * self.step.host_row / host_gb_s / 1e6
        return Floor(f"{text}, {rows_read:,.0f} rows over {host_gb_s:.0f} GB/s", ms)

    def prefill(self, profile: Profile, num_tokens: int) -> Floor:
        """Return the floor of a prompt of `num_tokens`: its products, or the offload of its rows and codes, whichever
        is slower.
        """
        num_bytes = 0
        if self.shape:
            code_bytes = self.shape.num_tables * CODE_BYTES if profile.reading.has_tables else 0
            down_rows = self._offloaded(profile, num_tokens) * self.step.host_rows_of_token
            num_bytes = down_rows * (self.step.host_row + code_bytes)
        return self._slower(self.step.flops(0, num_tokens), num_bytes, "down", "device_to_host_gb_s")

    def next_turn(self, profile: Profile, first_prompt: int, begin: int, end: int) -> Floor:
        """Return the floor of tokens `[begin, end)` over an offloaded prefix: products, or the reload of rows."""
        num_bytes = 0
        if self.shape:
            num_bytes = self._offloaded(profile, first_prompt) * self.step.host_rows_of_token * self.step.host_row
        return self._slower(self.step.flops(begin, end), num_bytes, "up", "host_to_device_gb_s")

    @property
    def step(self) -> StepBytes:
        return StepBytes(self.architecture, self.plan, self.shape)

    def _offloaded(self, profile: Profile, num_tokens: int) -> int:
        """Return how many tokens of a prompt are offloaded."""
        if not profile.offloads or self.capacity is None:
            return 0
        return self.capacity.of(profile.name).most_run_tokens(num_tokens)

    def _slower(self, flops: float, num_bytes: int, way: str, link: str) -> Floor:
        """Return the slower one of products and copies. If the CPU is the device, there are no copies."""
        tflop_s = self.rates.get("bf16_matmul_tflop_s") or self.rates["host_matmul_tflop_s"]
        products = Floor(f"{flops / 1e12:.4g} TFLOP at {tflop_s:.3g} TFLOP/s", flops / tflop_s / 1e9)
        if link not in self.rates:
            return products
        gb_s = self.rates[link]
        copies = Floor(f"{num_bytes / 1e9:.3g} GB {way} at {gb_s:.0f} GB/s", num_bytes / gb_s / 1e6)
        return max(products, copies, key=lambda floor: floor.ms)


def measure_floors(config: EngineConfig) -> LongFloors:
    """Plan the memory, for the engine to allocate as well, and measure the rates.

    Takes several seconds, and GiB that are free again after. Raises ModelError or PlanError.
    """
    architecture = load_architecture(config.model)
    plan = plan_engine(config, architecture, probe_machine())
    shape = find_tier_shape(config, architecture, plan) if config.host else None
    weight_bytes = step_weight_bytes(architecture, plan.dtype_bytes, plan.is_packed, 1)
    rates = measure_host_rates(count_physical_cores())
    if config.host and shape:
        threads = config.host.threads or plan.threads
        rates["host_attend_gb_s"] = measure_attend_rate(shape, DTYPES[plan.dtype], threads, default_gib())
    if plan.device == "cuda":
        rates |= measure_device_rates(torch.device("cuda"))
        stream = rates["device_stream_gb_s"]
    else:
        rates |= _measure_cpu_device(plan, weight_bytes)
        stream = max(rates["host_stream_gb_s"], rates["host_weights_gb_s"])
    return LongFloors(architecture, plan, shape, host_capacity(plan, shape) if shape else None, rates, stream)


def _measure_cpu_device(plan: MemoryPlan, weight_bytes: int) -> dict[str, float]:
    """Measure `host_weights_gb_s`, of weights that may fit the cache, and `host_matmul_tflop_s` in the faster dtype."""
    torch.set_num_threads(plan.threads)
    return {
        "host_weights_gb_s": measure_read_rate(count_physical_cores(), min(weight_bytes, GIB)),
        "host_matmul_tflop_s": measure_host_matmul({torch.float32, DTYPES[plan.dtype]}),
    }
