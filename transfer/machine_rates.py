"""Find how fast a machine's memories, link and arithmetic are, for plans, and where each number comes from. No torch.

Figures that `tandem doctor --measure` has kept (`transfer.measured`) come first, then those of the machine profile,
then assumptions from the number of cores and the link. Names and units are those of `bench.rates`: 1e9 bytes a second,
TFLOP/s, and GFLOP/s of one core with all cores busy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from transfer.machine import MachineProfile, RateName
from transfer.measured import keep_measured, read_measured

RateSource = Literal["measured", "profile", "assumed"]
WHAT = "rates"  # the name of such entries in the measured file

DEVICE_GB_S = 800.0  # a card of compute capability 8.0 with 24 GiB reads at least at this rate
DEVICE_TFLOP_S = 70.0  # and multiplies bf16 at least at this rate
LANE_GB_S = 0.985  # a lane of PCIe 3; each generation doubles it
LINK_SHARE = 0.8  # the share of it that copies from pinned memory reach
CORE_GB_S = 8.0  # read by one core ...
NODE_GB_S = 45.0  # ... up to the rate of a memory node with two channels
RANDOM_SHARE = 0.5  # random rows of 256 bytes, relative to a stream: 0.4 to 0.6 on the hosts that were measured
CORE_TFLOP_S = 0.05
# A core multiplying a token by experts in host memory, in any format: between the rate of a virtual machine's thread,
# which is half a core, and that of a desktop's core, both for few bits (lab/LAB.md).
CORE_GFLOP_S = 10.0
STORED_AS = ("bf16", "int4", "int8", "fp8", "fp4")


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates by name. `of[name]` is in the unit that the name ends with. text: a sentence on the sources of all."""

    of: Mapping[str, float]
    sources: Mapping[str, RateSource]
    text: str


def core_rate(stored: str | None) -> str:
    """Return the name of a core's rate for rows of that number format; None: bf16."""
    return f"core_{stored or 'bf16'}_gflop_s"


def find_rates(machine: MachineProfile, measured_file: Path) -> Rates:
    """Return the rates of this or another machine. Measured rates are taken from a machine with the same card and
    cores.
    """
    assumed, measured = _assume(machine), _read(machine, measured_file)
    profile = {str(name): rate for name, rate in (machine.rates or {}).items()}
    of = {name: measured.get(name, profile.get(name, rate)) for name, rate in assumed.items()}
    sources: dict[str, RateSource] = {
        name: "measured" if name in measured else "profile" if name in profile else "assumed" for name in of
    }
    said = {
        "measured": f"measured by `tandem doctor --measure` ({measured_file})",
        "profile": f"machine profile {machine.name!r}" + (f" ({machine.rates_from})" if machine.rates_from else ""),
        "assumed": "assumed for want of a measurement; `tandem doctor --measure` makes one",
    }
    parts = []
    for source, words in said.items():
        names = [name for name, one in sources.items() if one == source]
        if names:
            parts.append(words if len(names) == len(of) else f"{', '.join(names)}: {words}")
    return Rates(of, sources, "; ".join(parts))


def keep_rates(machine: MachineProfile, rates: Mapping[str, float], measured_file: Path) -> None:
    """Write measured rates of this machine to the measured file."""
    keep_measured(measured_file, WHAT, _identify(machine), rates)


def with_rates(machine: MachineProfile, rates: Mapping[str, float]) -> MachineProfile:
    """Return the profile with measured rates, for plans that are made on another machine."""
    known = {name: rate for name, rate in rates.items() if name in get_args(RateName)}
    return machine.model_copy(update={"rates": known, "rates_from": "measured by `tandem doctor --measure`"})


def _read(machine: MachineProfile, measured_file: Path) -> dict[str, float]:
    """Return the last rates kept for such a machine, without entries that are not positive numbers."""
    found: dict[str, Any] = {}
    for entry in read_measured(measured_file):
        if entry["what"] == WHAT and entry["of"] == _identify(machine) and isinstance(entry["result"], dict):
            found = entry["result"]
    return {name: float(rate) for name, rate in found.items() if isinstance(rate, int | float) and rate > 0}


def _identify(machine: MachineProfile) -> dict[str, Any]:
    gpu = None if machine.gpu is None else machine.gpu.name
    return {"gpu": gpu, "cpu": machine.cpu, "physical_cores": machine.physical_cores}


def _assume(machine: MachineProfile) -> dict[str, float]:
    host = min(CORE_GB_S * machine.physical_cores, NODE_GB_S * machine.numa_nodes)
    found = {
        "host_stream_gb_s": host,
        "host_random_rows_gb_s": RANDOM_SHARE * host,
        "host_matmul_tflop_s": CORE_TFLOP_S * machine.physical_cores,
    } | {core_rate(stored): CORE_GFLOP_S for stored in STORED_AS}
    if machine.gpu is None:
        return found
    generation, width = machine.gpu.pcie_generation or 4, machine.gpu.pcie_width or 16
    link = LINK_SHARE * LANE_GB_S * 2.0 ** (generation - 3) * width
    return found | {
        "device_stream_gb_s": DEVICE_GB_S,
        "bf16_matmul_tflop_s": DEVICE_TFLOP_S,
        "host_to_device_gb_s": link,
        "device_to_host_gb_s": link,
    }
