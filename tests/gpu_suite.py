"""The tests that need a GPU, in parts of under ten minutes each: `python -m tests.gpu_suite [PART ...]`.

A part is `kernels`, `engine`, `server`, or 1/3, 2/3, 3/3; none named means all, one after another. Runs with the
interpreter that runs it and installs nothing: what it lacks is named, and the status is 2. Ends with a table of counts
and a line of JSON. A part that was run before, of the same clean commit, keeps its row; the total is of the rows shown.
The commit is COMMIT in the environment, else git's, else `unknown`.

Invariant: the status is 0 only if every part that was asked for ran to its end, passed something and failed nothing.
"""

import argparse
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "build" / "gpu-suite"
PART_SECONDS = 560  # a host may end a command after ten minutes; an interrupted part still reports what it did
END_SECONDS = 20  # an interrupted pytest stops its fixtures' servers

# Patterns of the files with tests marked `gpu`, about equal in time.
PARTS: dict[str, tuple[str, ...]] = {
    "kernels": (
        "tests/gpu/test_humming.py",
        "tests/gpu/test_kernels_*.py",
        "tests/gpu/test_momo.py",
        "tests/gpu/test_sampler*.py",
        "tests/gpu/test_simhash.py",
        "tests/transfer/test_*.py",
    ),
    "engine": (
        "tests/gpu/test_d*.py",
        "tests/gpu/test_host_read*.py",
        "tests/gpu/test_computed_*.py",
        "tests/gpu/test_families_on_gpu.py",
        "tests/gpu/test_adapters.py",
        "tests/gpu/test_hybrids.py",
        "tests/gpu/test_fp8_tokens.py",
        "tests/gpu/test_fusion_on_gpu.py",
        "tests/gpu/test_host_experts.py",
        "tests/gpu/test_known_tokens.py",
        "tests/gpu/test_gguf.py",
        "tests/gpu/test_kv_codes.py",
        "tests/gpu/test_lane_streams.py",
        "tests/gpu/test_layer_graphs.py",
        "tests/gpu/test_mac_graphs.py",
        "tests/gpu/test_masked_steps.py",
        "tests/gpu/test_predicted_graphs.py",
        "tests/gpu/test_reading.py",
        "tests/gpu/test_prefill_*.py",
        "tests/gpu/test_restoring.py",
        "tests/scheduler/test_disk_of_a_model.py",
        "tests/gpu/test_row_transfer.py",
        "tests/gpu/test_split_experts.py",
        "tests/gpu/test_split_on_gpu.py",
        "tests/bench/test_engine_benchmark.py",
        "tests/bench/test_rates.py",
        "lab/tests/test_step_trace.py",
        "lab/tests/test_served_sampling.py",
    ),
    "server": ("tests/end_to_end/test_server_on_gpu.py", "tests/end_to_end/test_soak.py"),
}
# What they import, and the distribution that it comes with.
MODULES = {
    "llguidance": "llguidance", "pytest": "pytest", "pytest_timeout": "pytest-timeout", "hypothesis": "hypothesis",
    "numpy": "numpy", "gguf": "gguf",
    "torch": "torch", "triton": "triton", "numba": "numba", "scipy": "scipy", "safetensors": "safetensors",
    "tokenizers": "tokenizers", "transformers": "transformers", "fbgemm_gpu": "fbgemm-gpu-cpu", "pydantic": "pydantic",
    "msgspec": "msgspec", "zmq": "pyzmq", "fastapi": "fastapi", "starlette": "starlette", "uvicorn": "uvicorn",
    "httptools": "httptools", "uvloop": "uvloop", "httpx": "httpx", "jinja2": "jinja2", "psutil": "psutil",
    "pynvml": "nvidia-ml-py", "prometheus_client": "prometheus-client", "rich": "rich",
    "typer": "typer", "yaml": "pyyaml", "packaging": "packaging", "aiohttp": "aiohttp",
    "matplotlib": "matplotlib", "rapidfuzz": "rapidfuzz", "xxhash": "xxhash",
}  # fmt: skip


class SuiteError(Exception):
    """The suite cannot run here; one line or more that say why and what to do."""


@dataclass(frozen=True)
class Machine:
    gpu: str
    torch: str
    python: str


@dataclass(frozen=True)
class PartResult:
    """What a part did. `ended` says how: `whole`, `cut` at its time limit, or `broken` (pytest itself failed)."""

    part: str
    commit: str
    machine: Machine
    passed: int
    skipped: int
    failed: int
    seconds: float
    ended: str

    @property
    def is_good(self) -> bool:
        return self.ended == "whole" and self.passed > 0 and self.failed == 0


def part_names(asked: Iterable[str]) -> list[str]:
    """Names of parts; `2/3` is the second. Raises SuiteError for what is no part."""
    names = list(PARTS)
    numbers = {f"{index}/{len(names)}": name for index, name in enumerate(names, 1)}
    chosen = [numbers.get(part, part) for part in asked]
    for part in chosen:
        if part not in PARTS:
            raise SuiteError(f"part: got {part}, wanted one of {', '.join([*names, *numbers])}")
    return [name for name in names if name in chosen] if chosen else names


def part_files(part: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for pattern in PARTS[part] for path in ROOT.glob(pattern))


def check_modules() -> None:
    lacking = [name for module, name in MODULES.items() if importlib.util.find_spec(module) is None]
    if lacking:
        raise SuiteError(
            f"{sys.executable} ({platform.python_version()}) lacks: {' '.join(lacking)}\n"
            "This command installs nothing. With a network: make install EXTRA=cuda, then PYTHON=.venv/bin/python.\n"
            "Without one: pip download --no-deps --only-binary=:all: --python-version X.Y -d wheels NAME ...,\n"
            "pip install --no-index --no-deps --target site wheels/*.whl here, and PYTHONPATH=site."
        )


def find_machine() -> Machine:
    """Asks torch in a process of its own, so that no CUDA context stays behind. Raises SuiteError without a device."""
    program = "import torch; print(torch.__version__); print(torch.cuda.get_device_name(0))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SuiteError(f"torch finds no CUDA device: {done.stderr.strip().splitlines()[-1]}")
    version, gpu = done.stdout.strip().splitlines()
    return Machine(gpu, version, platform.python_version())


def find_commit() -> str:
    """COMMIT, or git's with `-dirty` where files differ from it, or `unknown` in a copy without a repository."""
    if os.environ.get("COMMIT"):
        return os.environ["COMMIT"]
    if not (ROOT / ".git").exists():
        return "unknown"
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("-dirty" if changed.stdout.strip() else "")


def run_part(part: str, commit: str, machine: Machine) -> PartResult:
    RESULTS.mkdir(parents=True, exist_ok=True)
    report = RESULTS / f"{part}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-rs", "-p", "no:cacheprovider", "-p", "no:xdist",
               "--durations=5", f"--junitxml={report}", *part_files(part)]  # fmt: skip
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)})
    is_cut = False
    try:
        process.wait(timeout=PART_SECONDS)
    except subprocess.TimeoutExpired:
        is_cut = True
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    seconds = time.monotonic() - began
    is_broken = process.returncode not in (0, 1) or not report.exists()
    passed, skipped, failed = read_counts(report) if report.exists() else (0, 0, 0)
    ended = "cut" if is_cut else "broken" if is_broken else "whole"
    return PartResult(part, commit, machine, passed, skipped, failed, round(seconds, 1), ended)


def read_counts(report: Path) -> tuple[int, int, int]:
    """Passed, skipped and failed tests of a JUnit file; a test that fails and whose teardown fails is one."""
    outcomes: dict[tuple[str | None, str | None], str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        tags = {child.tag for child in case}
        outcome = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        key = case.get("classname"), case.get("name")
        if outcomes.get(key) != "failed":
            outcomes[key] = outcome
    counts = list(outcomes.values())
    return counts.count("passed"), counts.count("skipped"), counts.count("failed")


def save(result: PartResult) -> None:
    (RESULTS / f"{result.part}.json").write_text(json.dumps(asdict(result)))


def earlier_result(part: str, commit: str, machine: Machine) -> PartResult | None:
    """The part's last result, if it is of the same clean commit on the same kind of machine."""
    path = RESULTS / f"{part}.json"
    if commit == "unknown" or commit.endswith("-dirty") or not path.exists():
        return None
    saved = json.loads(path.read_text())
    result = PartResult(**saved | {"machine": Machine(**saved["machine"])})
    return result if (result.commit, result.machine) == (commit, machine) else None


def report_lines(results: dict[str, PartResult | None], commit: str, machine: Machine) -> list[str]:
    """A table with a row for each part of the suite and their total, then the same as JSON."""
    lines = [f"GPU suite of {commit} on {machine.gpu}, torch {machine.torch}, Python {machine.python}",
             f"{'part':10}{'passed':>8}{'skipped':>9}{'failed':>8}{'seconds':>9}"]  # fmt: skip
    for part, result in results.items():
        if result is None:
            lines.append(f"{part:10}  not run")
            continue
        note = "" if result.ended == "whole" else f"  {result.ended}"
        counts = f"{result.passed:8}{result.skipped:9}{result.failed:8}{result.seconds:9.0f}"
        lines.append(f"{part:10}{counts}{note}")
    ran = [result for result in results.values() if result is not None]
    total = {name: sum(getattr(result, name) for result in ran) for name in ("passed", "skipped", "failed", "seconds")}
    lines.append(f"{'total':10}{total['passed']:8}{total['skipped']:9}{total['failed']:8}{total['seconds']:9.0f}")
    parts = {result.part: {key: value for key, value in asdict(result).items() if key not in ("commit", "machine")}
             for result in ran}  # fmt: skip
    lines.append(json.dumps({"commit": commit, **asdict(machine), "parts": parts, "total": total}))
    return lines


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Run the tests that need a GPU.")
    parser.add_argument("part", nargs="*", help=f"{', '.join(PARTS)}, or 1/{len(PARTS)} and so on; default: all")
    try:
        asked = part_names(parser.parse_args(arguments).part)
        check_modules()
        commit, machine = find_commit(), find_machine()
    except SuiteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    results = {part: None if part in asked else earlier_result(part, commit, machine) for part in PARTS}
    for part in asked:
        results[part] = run_part(part, commit, machine)
        save(results[part])
    print("\n".join(report_lines(results, commit, machine)))
    return 0 if all(results[part].is_good for part in asked) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
