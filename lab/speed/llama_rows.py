"""Time one row of a peer with llama.cpp's own benchmark: a step after a context, or a prompt."""

import json
import subprocess
from pathlib import Path

from lab.speed.peer_rows import PeerRow

_UNIT_TOKENS = 2048  # of a prompt's units: llama.cpp's default of 512 is slower


class BenchError(RuntimeError):
    """llama.cpp's benchmark failed. The message has its last line."""


def command_of(bench: Path, model: Path, row: PeerRow, kv: str, layers: int) -> list[str]:
    """Return the benchmark's command line. Asserts that it can time the row."""
    assert row.load.requests == 1, f"llama.cpp: a row of {row.load.requests} requests"
    of = ["-p", str(row.load.tokens_in), "-n", "0"]
    if row.kind == "step":
        depth = row.load.tokens_in if row.load.tokens_in > row.load.tokens_out else 0
        of = ["-p", "0", "-n", str(row.load.tokens_out), "-d", str(depth)]
    return [str(bench), "-m", str(model), *of, "-ctk", kv, "-ctv", kv, "-fa", "on", "-ngl", str(layers),
            "-ub", str(_UNIT_TOKENS), "-b", str(_UNIT_TOKENS), "-r", "1", "-o", "jsonl"]  # fmt: skip


def time_row(bench: Path, model: Path, row: PeerRow, kv: str, layers: int) -> dict[str, float]:
    """Run the benchmark, and return the row's summary. Raises BenchError."""
    done = subprocess.run(command_of(bench, model, row, kv, layers), capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()
        raise BenchError(f"{bench.name}: {row.name} with {kv}: status {done.returncode}: {said[-1]}")
    return read_line(row, lines[-1])


def read_line(row: PeerRow, text: str) -> dict[str, float]:
    """Return a row's summary from a line of the benchmark's JSON."""
    line = json.loads(text)
    seconds = line["avg_ns"] / 1e9
    summary = {"seconds": seconds, "tokens_per_s": line["avg_ts"]}
    return summary | ({"step_s": seconds / line["n_gen"]} if row.kind == "step" else {"first_s_p50": seconds})
