"""Describe the machine of a deployment: its GPUs, and the cores and the memory that this process may use.

The figures are those that the process may use, not those of the whole host: cgroup limits, the CPU affinity mask and
CUDA_VISIBLE_DEVICES are respected. A profile may carry rates, but none are measured here, and torch is not loaded. A
profile can be written to JSON and read back, so that a plan can be made on another machine.
"""

import math
import os
import platform
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Literal

import psutil
import pynvml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

GIB = 2**30
CGROUP_ROOT = Path("/sys/fs/cgroup")
_CGROUP_MEMORY = (  # for versions 2 and 1: the limit, the memory in use, and how much of that can be reclaimed
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
INSTRUCTION_SET_PREFIXES = ("avx2", "avx512", "avx_vnni", "amx", "fma", "f16c", "asimd", "sve")


RateName = Literal[
    "device_stream_gb_s", "device_copy_gb_s", "host_to_device_gb_s", "device_to_host_gb_s", "bf16_matmul_tflop_s",
    "host_stream_gb_s", "host_random_rows_gb_s", "host_matmul_tflop_s",
    "core_bf16_gflop_s", "core_int4_gflop_s", "core_int8_gflop_s", "core_fp8_gflop_s", "core_fp4_gflop_s",
]  # fmt: skip
PositiveRate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class MachineError(Exception):
    """A machine profile that cannot be read; the message is one line."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GpuProfile(_Record):
    name: str
    compute_capability: tuple[int, int]
    memory_bytes: int = Field(gt=0)
    pcie_generation: int | None = Field(description="what card and slot can do; None: the driver does not say")
    pcie_width: int | None = Field(description="lanes that card and slot can do")
    driver: str | None = None


class MachineProfile(_Record):
    """What a process may use of its machine.

    physical_cores, memory_bytes: those that it may use.
    gpu: the first GPU that it would use, or None. num_gpus: how many equal ones there are; None: not recorded.
    rates: by the names of `transfer.machine_rates`; None: not recorded.
    rates_from: their source.
    """

    name: str
    gpu: GpuProfile | None
    cpu: str
    physical_cores: int = Field(ge=1)
    instruction_sets: tuple[str, ...]
    numa_nodes: int = Field(ge=1)
    memory_bytes: int = Field(gt=0)
    rates: dict[RateName, PositiveRate] | None = None
    rates_from: str | None = None
    num_gpus: int | None = Field(None, ge=1)

    @property
    def has_vectors(self) -> bool:
        """Return whether the processor has the vector instructions that kernels need (`transfer.simd.features`)."""
        return {"avx2", "fma", "f16c"} <= set(self.instruction_sets)


@cache
def probe_machine() -> MachineProfile:
    """Return the machine under this process, probed once."""
    processor = read_processor(Path("/proc/cpuinfo"))
    return MachineProfile(
        name=platform.node() or "unnamed",
        gpu=probe_gpu(),
        num_gpus=count_gpus(),
        cpu=processor.get("model name", platform.machine()),
        physical_cores=count_physical_cores(),
        instruction_sets=select_instruction_sets(processor.get("flags", processor.get("Features", "")).split()),
        numa_nodes=max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))),
        memory_bytes=min([psutil.virtual_memory().total, *cgroup_memory_limits(Path("/proc/self/cgroup"))]),
    )


def read_processor(path: Path) -> dict[str, str]:
    """Return Linux's description of the first processor, by Linux's names; empty if the file cannot be read."""
    first = _read(path).split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def load_machine(path: Path) -> MachineProfile:
    """Read a recorded profile. Raises MachineError for a file that is missing or not a profile."""
    try:
        return MachineProfile.model_validate_json(path.read_text())
    except FileNotFoundError:
        raise MachineError(f"machine: {path} is missing; `tandem doctor --profile FILE` writes one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise MachineError(f"machine: {path} cannot be read: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "(top)"
        raise MachineError(f"machine: {path}: {key}: {first['msg']}") from None


def probe_gpu() -> GpuProfile | None:
    """Return the first GPU that CUDA would show this process, or None without a driver or a visible GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    first = "0" if visible is None else visible.split(",")[0].strip()
    if first in ("", "-1", "NoDevFiles"):
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handle = (
            pynvml.nvmlDeviceGetHandleByIndex(int(first))
            if first.isdigit()
            else pynvml.nvmlDeviceGetHandleByUUID(first.encode())
        )
        return GpuProfile(
            name=str(pynvml.nvmlDeviceGetName(handle)),
            compute_capability=pynvml.nvmlDeviceGetCudaComputeCapability(handle),
            memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            pcie_generation=_query_driver(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
            pcie_width=_query_driver(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
            driver=str(pynvml.nvmlSystemGetDriverVersion()),
        )
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def count_gpus() -> int | None:
    """Return how many GPUs CUDA would show this process, or None without one."""
    if probe_gpu() is None:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:  # CUDA shows the GPUs in front of the first invalid entry
        return len(list(takewhile(lambda one: one.strip() not in ("", "-1"), visible.split(","))))
    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _query_driver(question, handle) -> int | None:  # type: ignore[no-untyped-def]
    try:
        return int(question(handle))
    except pynvml.NVMLError:
        return None


def count_physical_cores() -> int:
    """Count physical cores under this process's affinity mask and CPU quota; hyperthreads of one core count once."""
    cpus = os.sched_getaffinity(0)
    cores = set()
    for cpu in cpus:
        core = physical_core(cpu)
        if core is None:
            return max(1, min(len(cpus), psutil.cpu_count(logical=False) or len(cpus)))
        cores.add(core)
    quota = cpu_quota(Path("/proc/self/cgroup"))
    return max(1, len(cores) if quota is None else min(len(cores), math.ceil(quota)))


def physical_core(cpu: int) -> tuple[int, int] | None:
    """Return the package and the core that a logical CPU belongs to; None if the system does not tell."""
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        return int((topology / "physical_package_id").read_text()), int((topology / "core_id").read_text())
    except OSError:
        return None


def select_instruction_sets(flags: list[str]) -> tuple[str, ...]:
    """Return the vector and matrix sets among processor flags, sorted; `avx512_bf16` and `avx512bf16` are one name."""
    names = {flag.replace("avx512_", "avx512") for flag in flags if flag.startswith(INSTRUCTION_SET_PREFIXES)}
    return tuple(sorted(names))


def cgroup_memory_limits(membership: Path) -> list[int]:
    """Return the memory limits in bytes of this process's cgroup and those above it (version 2 or 1); may be empty."""
    limits = []
    for folder in _cgroup_folders(membership, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name)
            if text.isdigit():
                limits.append(int(text))
    return limits


def available_memory() -> int:
    """Return the bytes that this process may still take: of the machine, and of its cgroup and the ones above it."""
    free = [psutil.virtual_memory().available]
    for folder in _cgroup_folders(Path("/proc/self/cgroup"), "memory"):
        for limit, used, cached in _CGROUP_MEMORY:
            most, taken = _read(folder / limit), _read(folder / used)
            if most.isdigit() and taken.isdigit():
                stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
                free.append(int(most) - int(taken) + int(stat.get(cached, 0)))
    return max(0, min(free))


def cpu_quota(membership: Path) -> float | None:
    """Return the CPU time that the cgroups allow, in cores; None: all."""
    quotas = []
    for folder in _cgroup_folders(membership, "cpu"):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if not quota:
            quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _cgroup_folders(membership: Path, controller: str) -> list[Path]:
    """Return folders that may limit `controller`, from this process's own cgroup up to the root of the mount."""
    folders = []
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = CGROUP_ROOT / (controller if controllers else "")
        own = root / path.lstrip("/")
        folders += [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]
    return folders


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
