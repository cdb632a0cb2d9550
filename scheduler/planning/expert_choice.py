"""Choose for which batch sizes the CPU computes the experts in host memory, and for which they are fetched.

Invariant: the text states the choice and what the other way would cost, so a resolved deployment resolves to itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gpu.config import GpuConfig
from gpu.memory.demand import PlanError
from gpu.memory.plan import MemoryPlan
from gpu.model.architecture import Architecture
from gpu.weights.expert_shares import MOST_COMPUTED_ROWS, ExpertShares, why_not_computed
from transfer.machine_rates import STORED_AS, Rates, core_rate

Way = Literal["auto", "fetch", "compute"] | int  # a value of `gpu.host_experts`
READ_SHARE = 0.85  # products of rows with few vectors reach this share of the streaming rate (lab/LAB.md)
FURTHER_ROWS = 3.5  # the second and later rows of an expert are multiplied so many times as fast (lab/LAB.md)
HOP_MS = 0.06  # of a layer: the host request over the link, the start and three stages of the threads, the answer


@dataclass(frozen=True, slots=True)
class ExpertTimes:
    """The time that a step's experts in host memory take, fetched or computed. Rates are in 1e9 bytes a second.

    threads: of the CPU. core_gflop_s: each thread's rate for products of one row, by the names of
    `transfer.machine_rates`. For weights with few bits, cores may be slower than their memory.
    """

    shares: ExpertShares
    link_gb_s: float
    host_gb_s: float
    threads: int
    core_gflop_s: Mapping[str, float]

    def fetch_ms(self, num_rows: int) -> float:
        return self.shares.fetched_bytes(num_rows) / self.link_gb_s / 1e6

    def compute_ms(self, num_rows: int) -> float:
        """Return the longer of the times of memory and of arithmetic, plus one hop for each layer."""
        hops_ms = HOP_MS * self.shares.num_host_layers
        return max(self._read_ms(num_rows), self.arithmetic_ms(num_rows)) + hops_ms

    def is_bound_by_cores(self, num_rows: int) -> bool:
        return self.arithmetic_ms(num_rows) > self._read_ms(num_rows)

    def _read_ms(self, num_rows: int) -> float:
        return self.shares.fetched_bytes(num_rows) / (READ_SHARE * self.host_gb_s) / 1e6

    def arithmetic_ms(self, num_rows: int) -> float:
        """Return the time of arithmetic at the threads' measured rates."""
        numbers = self.shares.computed_numbers(num_rows)
        core_ms = sum(
            2 * (read + max(products - read, 0.0) / FURTHER_ROWS) / self.core_gflop_s[core_rate(kind)] / 1e6
            for kind, (read, products) in numbers.items()
        )
        return core_ms / self.threads

    def most_computed_rows(self) -> int:
        """Return the largest number of rows at which the CPU is expected to be no slower than the link.

        Further rows with the same experts cost the CPU arithmetic, and the link nothing.
        """
        found = 0
        while found < MOST_COMPUTED_ROWS and self.compute_ms(found + 1) <= self.fetch_ms(found + 1):
            found += 1
        return found


def find_times(shares: ExpertShares, rates: Rates, threads: int) -> ExpertTimes:
    cores = {core_rate(stored): rates.of[core_rate(stored)] for stored in STORED_AS}
    return ExpertTimes(shares, rates.of["host_to_device_gb_s"], rates.of["host_stream_gb_s"], threads, cores)


def configured_rows(asked: Way) -> int | None:
    """Return the configured number of rows up to which experts are computed; None: rates decide."""
    if asked == "auto":
        return None
    return {"fetch": 0, "compute": MOST_COMPUTED_ROWS}[asked] if isinstance(asked, str) else asked


def captured_rows(gpu: GpuConfig, max_running: int, most: int) -> int:
    """Return the rows of the largest captured step of no more than `most`; 0: there is none.

    Steps of other sizes run in the graph of the next larger one.
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
    """Return up to how many rows of a step the CPU computes experts (0: never), and a note that explains it.

    The note is None if no experts are in host memory. Raises PlanError if the configured way is not possible.
    """
    if plan.device == "cpu" or not shares.host_bytes:
        if asked != "auto":
            raise PlanError(
                f"gpu.host_experts: asked {asked}, no expert lies in host memory beside the device; leave it out, or "
                "set gpu.experts_gib"
            )
        return 0, None
    times, most = find_times(shares, rates, plan.threads), configured_rows(asked)
    cannot = why_not_computed(shape)
    if most is None:
        most = 0 if cannot is not None else times.most_computed_rows()
    computed_rows = captured_rows(gpu, max_running, most)
    reason = cannot or _why_not_captured(gpu, computed_rows, most) or _why_not_plain(plan)
    if reason is not None:
        if configured_rows(asked):
            raise PlanError(f"gpu.host_experts: asked {asked}, but {reason}; use fetch, or auto")
        return 0, f"experts in host memory are fetched: {reason}"
    fetch, compute = times.fetch_ms(1), times.compute_ms(1)
    said = f"the host reads {times.host_gb_s:g} GB/s, the link {times.link_gb_s:g}"
    if times.is_bound_by_cores(1):
        said = f"{said}; its {plan.threads} threads are slower than that at such numbers"
    said = f"{said}{_describe_assumed_rates(times, rates)}"
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


def _describe_assumed_rates(times: ExpertTimes, rates: Rates) -> str:
    """Name the rates in the comparison that are assumed and not measured; "": none."""
    names = {"the host's": ["host_stream_gb_s"], "the link's": ["host_to_device_gb_s"]}
    if times.is_bound_by_cores(1):
        names["the threads'"] = [core_rate(kind) for kind in times.shares.computed_numbers(1)]
    assumed = [whose for whose, found in names.items() if any(rates.sources[name] == "assumed" for name in found)]
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
