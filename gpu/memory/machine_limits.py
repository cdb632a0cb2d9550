"""Resolve the device, its dtype, the format of rows in pages and memory limits from machine and settings. No torch.

Invariant: an error names the setting to change.
"""

import math
from typing import Literal

from gpu.config import GpuConfig
from gpu.cpu_step.step_arrays import HALF_ROW_STEP, has_plain_layers
from gpu.memory.demand import Place, PlanError
from gpu.model.architecture import Architecture
from gpu.page_layout import CODE_FORMATS, KvFormat
from transfer.machine import GIB, GpuProfile, MachineProfile

GPU_SHARE = 0.92  # of the card, where no limit is set: a desktop's other programs need the rest
HOST_SHARE = 0.5  # of the host, where the CPU is the device and no limit is set
SMALLEST_CONTEXT_TOKENS = 2048  # a machine that cannot hold one such sequence is refused
CODES_DIM_STEP = 16  # elements of a row of codes that one load takes


def in_gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def least_gib(num_bytes: int) -> str:
    """Return `num_bytes` in GiB, rounded up to three digits or two decimals: the least value that a setting needs."""
    if not num_bytes:  # pages of a model that keeps windows alone
        return "0 GiB"
    gib = num_bytes / GIB
    scale = 10 ** max(2, 2 - math.floor(math.log10(gib)))
    return f"{math.ceil(gib * scale) / scale:g} GiB"


def resolve_device(gpu: GpuConfig, machine: MachineProfile) -> Literal["cuda", "cpu"]:
    if gpu.device == "cpu" or (gpu.device == "auto" and machine.gpu is None):
        return "cpu"
    require_gpu(machine.gpu, machine.name)
    return "cuda"


def require_gpu(gpu: GpuProfile | None, machine_name: str) -> GpuProfile:
    if gpu is None:
        raise PlanError(
            f"gpu.device: asked cuda, machine {machine_name!r} has no usable NVIDIA GPU; use auto or cpu, or "
            "plan for another machine with --machine (deploy/machines has some)"
        )
    if gpu.compute_capability < (8, 0):
        major, minor = gpu.compute_capability
        raise PlanError(f"gpu.device: {gpu.name} has compute capability {major}.{minor}, wanted 8.0; use device: cpu")
    return gpu


def require_memory(asked: int, total: int, what: str) -> None:
    if asked > total:
        raise PlanError(f"gpu.memory_limit_gib: asked {in_gib(asked)}, {what} has {in_gib(total)}; lower it")


def resolve_dtype(gpu: GpuConfig, device: str) -> Literal["bfloat16", "float32"]:
    if gpu.dtype == "auto":
        return "bfloat16" if device == "cuda" else "float32"
    return gpu.dtype


def resolve_kv(
    gpu: GpuConfig, machine: MachineProfile, dtype: Literal["bfloat16", "float32"], shape: Architecture,
    leaves_pages: bool = False,
) -> KvFormat:  # fmt: skip
    """Return the format of rows in pages. "auto" chooses bfloat16 on a CPU only if `gpu.dtype` is "auto" too.

    leaves_pages: whether rows are also copied to host memory or to document chunks. Raises PlanError for a format that
    this model or device does not support.
    """
    on_cpu = resolve_device(gpu, machine) == "cpu"
    holds_halves = on_cpu and not leaves_pages and shape.latent is None
    if gpu.kv == "auto":
        is_read = machine.has_vectors and has_plain_layers(shape) and shape.dim % HALF_ROW_STEP == 0
        return "bfloat16" if gpu.dtype == "auto" and holds_halves and is_read else dtype
    if gpu.kv == "bfloat16" and dtype == "float32" and not holds_halves:
        of = "on a GPU" if not on_cpu else "of latents" if shape.latent is not None else "beside `host` or `documents`"
        raise PlanError(
            f"gpu.kv: asked bfloat16, but gpu.dtype is {dtype} here, and rows {of} have that dtype; wanted auto, "
            "float32, fp8 or int8, or dtype: bfloat16"
        )
    if gpu.kv == "float32" and dtype != "float32":
        raise PlanError(f"gpu.kv: asked float32, gpu.dtype is {dtype} here; wanted auto, fp8 or int8")
    odd = [dim for dim in (shape.dim, shape.window_heads.dim) if dim % CODES_DIM_STEP]
    if gpu.kv in CODE_FORMATS and odd:
        raise PlanError(
            f"gpu.kv: {gpu.kv} rows need a multiple of {CODES_DIM_STEP} elements, heads of {shape.name} have {odd[0]}; "
            "use auto"
        )
    return gpu.kv


def resolve_draft_kv(
    gpu: GpuConfig, machine: MachineProfile, dtype: Literal["bfloat16", "float32"], draft: Architecture
) -> KvFormat:
    """Return the format of rows in a draft model's pages, for `gpu.kv` of the main model: the same codes, or the dtype.

    bfloat16 beside float32 is used only where "auto" would choose it, so settings that are resolved already give the
    same format. Raises PlanError.
    """
    if gpu.kv == dtype:
        return dtype
    asked = {} if gpu.kv in CODE_FORMATS else {"kv": "auto", "dtype": "auto"}
    return resolve_kv(gpu.model_copy(update=asked), machine, dtype, draft)


def resolve_limits(gpu: GpuConfig, device: str, machine: MachineProfile) -> dict[Place, int]:
    asked = None if gpu.memory_limit_gib is None else int(gpu.memory_limit_gib * GIB)
    if device == "cuda" and machine.gpu is not None:
        total, share, what = machine.gpu.memory_bytes, GPU_SHARE, machine.gpu.name
    else:
        total, share, what = machine.memory_bytes, HOST_SHARE, f"machine {machine.name!r}"
    if asked is not None:
        require_memory(asked, total, what)
    limit = int(total * share) if asked is None else asked
    return {"gpu": limit, "host": machine.memory_bytes} if device == "cuda" else {"host": limit}
