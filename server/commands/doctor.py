"""Report what the machine has, and whether it and the installed libraries fit each other.

It changes nothing and imports no library that it reports on (versions come from package metadata). Each
finding is `good`, `note` (works, could be better; says how) or `bad` (will not work; says what to do).
"""

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.version import Version
from rich.console import Console
from rich.table import Table

from transfer.machine import GIB, MachineProfile
from transfer.measured import measured_path, read_measured

Verdict = Literal["good", "note", "bad"]
LIBRARIES = ("torch", "triton", "numba", "numpy", "transformers", "tokenizers", "safetensors", "gguf")
FBGEMM = ("fbgemm-gpu", "fbgemm-gpu-cpu")
FBGEMM_TORCH_MINOR = 5  # fbgemm 1.x is built against torch 2.(x + 5): 1.6 with 2.11, 1.8 with 2.13
LEAST_TRITON = Version("3.6")
MEASURE_SECONDS = 600
RATE_UNITS = {"_gb_s": "GB/s", "_tflop_s": "TFLOP/s", "_gflop_s": "GFLOP/s", "": ""}


class DoctorError(Exception):
    """Report in one line that measuring failed."""


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    value: str
    verdict: Verdict
    advice: str = ""


def examine(machine: MachineProfile) -> list[Finding]:
    return [
        *examine_machine(machine),
        *examine_system(Path("/")),
        *examine_libraries(installed_versions()),
        *examine_measured(machine, read_measured(measured_path())),
    ]


def examine_machine(machine: MachineProfile) -> list[Finding]:
    gpu = machine.gpu
    if gpu is None:
        rows = [Finding("GPU", "none", "note", "the CPU is the device: for small models")]
    else:
        major, minor = gpu.compute_capability
        new = gpu.compute_capability >= (8, 0)
        text = f"{gpu.name}, {gpu.memory_bytes / GIB:.1f} GiB, compute capability {major}.{minor}"
        rows = [Finding("GPU", text, "good" if new else "bad", "" if new else "8.0 or later is served")]
        known = gpu.pcie_generation is not None and gpu.pcie_width is not None
        narrow = known and (gpu.pcie_width or 0) < 16
        link = f"PCIe {gpu.pcie_generation} x{gpu.pcie_width}" if known else "the driver does not say"
        rows.append(Finding("link", link, "note" if narrow else "good", "a x16 slot is faster" if narrow else ""))
    vectors = any(name.startswith("avx512") for name in machine.instruction_sets)
    least = machine.has_vectors
    return [
        *rows,
        Finding("processor", f"{machine.cpu}, {machine.physical_cores} physical cores to use", "good"),
        Finding(
            "instruction sets",
            " ".join(machine.instruction_sets) or "none known",
            "good" if vectors else "note" if least else "bad",
            "" if vectors else "AVX-512 would be faster" if least else "AVX2, FMA and F16C are needed",
        ),
        Finding(
            "NUMA nodes",
            str(machine.numa_nodes),
            "good" if machine.numa_nodes == 1 else "note",
            "" if machine.numa_nodes == 1 else "keep the process on the GPU's node (numactl)",
        ),
        Finding("memory", f"{machine.memory_bytes / GIB:.1f} GiB to use", "good"),
    ]


def examine_system(root: Path) -> list[Finding]:
    """Check huge pages and locked memory; `root` is the folder that holds `sys`."""
    path = root / "sys/kernel/mm/transparent_hugepage/enabled"
    try:
        text = path.read_text()
        mode = text[text.index("[") + 1 : text.index("]")]
    except (OSError, ValueError):
        mode = "unknown"
    off = mode in ("never", "unknown")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = locked == resource.RLIM_INFINITY
    return [
        Finding(
            "huge pages",
            f"transparent: {mode}",
            "note" if off else "good",
            f"write madvise to {path}: reading KV from memory is 4 to 20 % faster" if off else "",
        ),
        Finding(
            "locked memory",
            "unlimited" if unlimited else f"{locked / GIB:.3f} GiB",
            "good" if unlimited else "note",
            "" if unlimited else "ulimit -l unlimited, where a container or a driver counts pinned memory",
        ),
    ]


def installed_versions() -> dict[str, str]:
    """Return the installed distributions of interest and their versions."""
    found = {}
    for name in (*LIBRARIES, *FBGEMM):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def examine_libraries(versions: dict[str, str]) -> list[Finding]:
    """Check each library against the others."""
    findings = []
    for name in LIBRARIES:
        if name not in versions:
            findings.append(Finding(name, "not installed", "bad", "pip install '.[cpu]' or '.[cuda]'"))
            continue
        clashes = list(find_clashes(name, versions))
        findings.append(Finding(name, versions[name], "bad" if clashes else "good", "; ".join(clashes)))
    return [*findings, examine_fbgemm(versions)]


def find_clashes(name: str, versions: dict[str, str]) -> Iterator[str]:
    """Return the requirements of installed libraries that the others do not meet."""
    try:
        requirements = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return
    for line in requirements:
        requirement = Requirement(line)
        have = versions.get(requirement.name.lower())
        if have is None or (requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})):
            continue
        if not requirement.specifier.contains(have, prereleases=True):
            yield f"wants {requirement.name}{requirement.specifier}, got {have}; install that version"
    if name == "triton" and Version(versions[name]) < LEAST_TRITON:
        yield f"wanted {LEAST_TRITON} or later"


def examine_fbgemm(versions: dict[str, str]) -> Finding:
    """Check that one of the two distributions is installed, in the release that is built against torch."""
    present = [name for name in FBGEMM if name in versions]
    if not present:
        return Finding("fbgemm", "not installed", "bad", "pip install '.[cpu]' or '.[cuda]'")
    text = ", ".join(f"{name} {versions[name]}" for name in present)
    if len(present) == 2:
        return Finding("fbgemm", text, "bad", "both install one module: uninstall both, then install one")
    if "torch" in versions:
        torch, fbgemm = Version(versions["torch"]), Version(versions[present[0]])
        minor = torch.minor - FBGEMM_TORCH_MINOR
        if (torch.major, fbgemm.major) == (2, 1) and fbgemm.minor != minor:
            return Finding("fbgemm", text, "bad", f"torch {torch} goes with fbgemm 1.{minor}; install that version")
    return Finding("fbgemm", text, "good")


def examine_measured(machine: MachineProfile, entries: list[dict[str, Any]]) -> list[Finding]:
    """Return the kernels that engines chose on a GPU like this one, the last choice for each kind of model."""
    if machine.gpu is None:
        return []
    found = [
        (entry["of"], entry["result"])
        for entry in entries
        if entry["what"] == "prefill_attention" and entry["of"].get("gpu") == machine.gpu.name
    ]
    if not found:
        return [Finding("prefill attention", "not measured yet", "note", "an engine measures it when it starts")]
    findings = []
    for of, result in found:
        rates = ", ".join(f"{name} {rate:,.0f}" for name, rate in result["tflop_s"].items())
        chosen = "cudnn" if result["least_past"] else result["whole"]
        model = f"{of['heads']}/{of['kv_heads']} heads of {of['dim']}, {of['dtype']}, torch {of['torch']}"
        out = "; ".join(f"{name} is out: {why}" for name, why in result["out"].items())
        findings.append(Finding("prefill attention", f"{chosen} ({rates} TFLOP/s): {model}", "good", out))
    return findings


def measure_rates() -> dict[str, float]:
    """Measure rates of host and device by name, in a child process, since measuring loads torch.

    Raises DoctorError with the last line that the child wrote, if it fails.
    """
    command = [sys.executable, "-m", "bench.rates", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MEASURE_SECONDS, check=True)
        rows = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise DoctorError(f"doctor: measuring failed: {last}") from None
    except subprocess.TimeoutExpired:
        raise DoctorError(f"doctor: measuring took over {MEASURE_SECONDS} s; is the machine busy?") from None
    return {name: rate for row in rows for name, rate in row["rates"].items()}


def print_rates(rates: dict[str, float], console: Console) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    for name, rate in rates.items():
        what, unit = next(((name.removesuffix(end), unit) for end, unit in RATE_UNITS.items() if name.endswith(end)))
        table.add_row(what.replace("_", " "), f"{rate:,.1f} {unit}")
    console.print(table)


def print_findings(findings: list[Finding], console: Console) -> None:
    marks = {"good": "[green]good[/]", "note": "[yellow]note[/]", "bad": "[red]bad[/]"}
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        table.add_row(marks[finding.verdict], finding.name, finding.value, finding.advice)
    console.print(table)


def as_rows(findings: list[Finding]) -> list[dict[str, str]]:
    return [asdict(finding) for finding in findings]
