"""Of which decode steps the CPU computes experts in host memory, and which fetch them: by rates, before anything is
loaded.

No torch. It refuses to know how either is done. Invariant: the text says what was taken and what the other way would
cost, whoever chose, so that a resolved deployment resolves to itself.
"""

from dataclasses import dataclass
from typing import Literal

from gpu.config import GpuConfig
from gpu.memory.demand import PlanError
from gpu.memory.expert_shares import MOST_COMPUTED_ROWS, ExpertShares, why_not_computed
from gpu.memory.plan import MemoryPlan
from gpu.model.architecture import Architecture
from gpu.model.matrix_format import Kind
from transfer.rates import Rates

Way = Literal["auto", "fetch", "compute"] | int  # as `gpu.host_experts` is asked for
READ_SHARE = 0.85  # of a stream's rate, what products of rows with a few vectors reach (docs/LAB.md)
# What a core makes of bytes and multiplies, in 1e9 numbers a second, by how they are stored (None: bf16), and products
# with one more row each, where several take an expert: seven tenths of what AVX2 reached on one core (docs/LAB.md), of
# the slowest groups. Of few bits few cores may be slower than their memory.
CORE_NUMBERS: dict[Kind | None, float] = {None: 9.0, "int4": 10.0, "int8": 8.0, "fp8": 8.0}
CORE_PRODUCTS = 35.0
HOP_MS = 0.06  # of a layer: the ask over the link, a region's start and its three stages, the answer seen


@dataclass(frozen=True, slots=True)
class ExpertTimes:
    """What a step's experts in host memory take, either way. Rates in 1e9 bytes a second; threads: of the CPU."""

    shares: ExpertShares
    link_gb_s: float
    host_gb_s: float
    threads: int

    def fetch_ms(self, num_rows: int) -> float:
        return self.shares.fetched_bytes(num_rows) / self.link_gb_s / 1e6

    def compute_ms(self, num_rows: int) -> float:
        """Bytes from memory or arithmetic, whichever takes longer, and a hop a layer."""
        hops_ms = HOP_MS * self.shares.num_host_layers
        return max(self._read_ms(num_rows), self._arithmetic_ms(num_rows)) + hops_ms

    def is_bound_by_cores(self, num_rows: int) -> bool:
        return self._arithmetic_ms(num_rows) > self._read_ms(num_rows)

    def _read_ms(self, num_rows: int) -> float:
        return self.shares.fetched_bytes(num_rows) / (READ_SHARE * self.host_gb_s) / 1e6

    def _arithmetic_ms(self, num_rows: int) -> float:
        numbers = self.shares.computed_numbers(num_rows)
        core_ms = sum(
            (read / CORE_NUMBERS[kind] + max(products - read, 0.0) / CORE_PRODUCTS) / 1e6
            for kind, (read, products) in numbers.items()
        )
        return core_ms / self.threads

    def most_computed_rows(self) -> int:
        """Up to so many the CPU is expected to be no slower than the link: rows that take the same experts cost the CPU
        arithmetic, and the link nothing.
        """
        found = 0
        while found < MOST_COMPUTED_ROWS and self.compute_ms(found + 1) <= self.fetch_ms(found + 1):
            found += 1
        return found


def find_times(shares: ExpertShares, rates: Rates, threads: int) -> ExpertTimes:
    return ExpertTimes(shares, rates.of["host_to_device_gb_s"], rates.of["host_stream_gb_s"], threads)


def asked_rows(asked: Way) -> int | None:
    """Up to how many rows of a step are to be computed; None: rates decide."""
    if asked == "auto":
        return None
    return {"fetch": 0, "compute": MOST_COMPUTED_ROWS}[asked] if isinstance(asked, str) else asked


def captured_rows(gpu: GpuConfig, max_running: int, most: int) -> int:
    """Of the largest captured step of no more than `most`; 0: there is none. Steps of other sizes run in the graph of
    the next larger one.
    """
    return max((size for size in _captured_sizes(gpu, max_running) if size <= most), default=0)


def _captured_sizes(gpu: GpuConfig, max_running: int) -> list[int]:
    return [min(size, max_running) for size in gpu.graph_batch_sizes]


def choose(
    asked: Way,
    gpu: GpuConfig,
    max_running: int,
    shape: Architecture,
    plan: MemoryPlan,
    shares: ExpertShares,
    rates: Rates,
) -> tuple[int, str | None]:
    """Of how many rows at most a step has them computed by the CPU, 0: none has, and what to say of it, None where no
    experts lie in host memory. Raises PlanError where what was asked for cannot be had.
    """
    if plan.device == "cpu" or not shares.host_bytes:
        if asked != "auto":
            raise PlanError(
                f"gpu.host_experts: asked {asked}, no expert lies in host memory beside the device; leave it out, or "
                "set gpu.experts_gib"
            )
        return 0, None
    times, most = find_times(shares, rates, plan.threads), asked_rows(asked)
    if most is None:
        most = times.most_computed_rows()
    computed_rows = captured_rows(gpu, max_running, most)
    reason = why_not_computed(shape) or _why_not_captured(gpu, computed_rows, most) or _why_not_plain(plan)
    if reason is not None:
        if asked_rows(asked):
            raise PlanError(f"gpu.host_experts: asked {asked}, but {reason}; use fetch, or auto")
        return 0, f"experts in host memory are fetched: {reason}"
    fetch, compute = times.fetch_ms(1), times.compute_ms(1)
    said = f"the host reads {times.host_gb_s:g} GB/s, the link {times.link_gb_s:g}{_tell_assumed(rates)}"
    if times.is_bound_by_cores(1):
        said = f"{said}; its {plan.threads} threads are slower than that at such numbers"
    if computed_rows:
        sizes = _captured_sizes(gpu, max_running)
        next_size = min((size for size in sizes if computed_rows < size <= MOST_COMPUTED_ROWS), default=None)
        if next_size is not None:
            said = (
                f"{said}; at {next_size} rows {times.compute_ms(next_size):,.1f} and {times.fetch_ms(next_size):,.1f}"
            )
        rows = "one row" if computed_rows == 1 else f"up to {computed_rows} rows"
        return computed_rows, (
            f"experts in host memory are computed by the CPU in decode steps of {rows}: by "
            f"rates {compute:,.1f} ms a token, fetched they would take {fetch:,.1f} ({said})"
        )
    return 0, (
        f"experts in host memory are fetched: by rates {fetch:,.1f} ms a token, computed by the CPU they would take "
        f"{compute:,.1f} ({said})"
    )


def _tell_assumed(rates: Rates) -> str:
    """What of the two rates nobody has measured."""
    sources = {"the host's": rates.sources["host_stream_gb_s"], "the link's": rates.sources["host_to_device_gb_s"]}
    assumed = [whose for whose, source in sources.items() if source == "assumed"]
    return f"; {' and '.join(assumed)} assumed, `tandem doctor --measure` measures" if assumed else ""


def _why_not_captured(gpu: GpuConfig, computed_rows: int, most: int) -> str | None:
    if gpu.check_coverage:
        return "only captured steps have them computed, and gpu.check_coverage captures none"
    if most and not computed_rows:
        few = f"only captured steps of up to {most} rows have them computed"
        return f"{few}, and gpu.graph_batch_sizes names none"
    return None


def _why_not_plain(plan: MemoryPlan) -> str | None:
    return None if plan.dtype == "bfloat16" else f"the CPU computes them in bfloat16, and gpu.dtype is {plan.dtype}"
