"""Time `tandem serve` from the command to an answer, and add up the resident memory of all its processes.

`python -m lab.speed.start_and_memory CONFIG [--tokens N]`, with the numba cache that NUMBA_CACHE_DIR names; an empty
folder gives a machine's first start. `--tokens`: a prompt of so many tokens is read before memory is measured, right
after the answer and again after the engine has rested. `pss` divides shared pages among all processes that have them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

QUESTION = "What is the capital of France?"
_WORDS = " and then one more word"  # five tokens of most vocabularies
_POLL_S = 0.02
_REST_S = 1.0  # time in which an idle engine gives memory back


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--port", default="8077")
    parser.add_argument("--tokens", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.NamedTemporaryFile("w+") as log:
        command = [sys.executable, "-m", "server.commands", "serve", arguments.config, "--port", arguments.port]
        began = time.monotonic()
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            measured = measure(server, f"http://127.0.0.1:{arguments.port}", began, arguments.tokens)
            print(json.dumps(measured | {"load": psutil.getloadavg()[0]}, indent=1))
        finally:
            server.terminate()
            server.wait()
            print("".join(line for line in Path(log.name).read_text().splitlines(True) if line.endswith(" s\n")))


def measure(server: "subprocess.Popen[bytes]", url: str, began: float, num_tokens: int) -> dict[str, object]:
    """Return seconds to the first answer over HTTP, to ready and to a token, CPU seconds, and megabytes."""
    seconds: dict[str, float] = {}
    with httpx.Client(base_url=url, timeout=600) as client:
        while "ready" not in seconds:
            assert server.poll() is None, "the server ended"
            try:
                status = client.get("/health").status_code
            except httpx.HTTPError:
                time.sleep(_POLL_S)
                continue
            seconds.setdefault("http", time.monotonic() - began)
            if status == 200:
                seconds["ready"] = time.monotonic() - began
            time.sleep(_POLL_S)
        ask(client, QUESTION)
        seconds["token"] = time.monotonic() - began
        processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        cpu_s = sum(sum(one.cpu_times()[:2]) for one in processes)
        if num_tokens:
            ask(client, _WORDS * (num_tokens // 5))
        answered = sum_up(memory_of(processes))
        time.sleep(_REST_S)
        memory = memory_of(processes)
    return {
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "processor_s": round(cpu_s, 1),
        "answered": answered,
        "at_rest": sum_up(memory),
        "megabytes": memory,
    }


def memory_of(processes: list[psutil.Process]) -> dict[str, dict[str, float]]:
    """Return the megabytes of each running process, by its command."""
    return {" ".join(one.cmdline()[1:4])[:60]: megabytes(one) for one in processes if runs(one)}


def runs(process: psutil.Process) -> bool:
    """Return whether a process still runs. One that compiled may have ended."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def sum_up(memory: dict[str, dict[str, float]]) -> dict[str, float]:
    return {kind: round(sum(one[kind] for one in memory.values())) for kind in ("rss", "pss")}


def ask(client: httpx.Client, text: str) -> None:
    """Have one token generated."""
    model = client.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": text}]}
    client.post("/v1/chat/completions", json=body).raise_for_status()


def megabytes(process: psutil.Process) -> dict[str, float]:
    found = process.memory_full_info()
    return {"rss": round(found.rss / 1e6), "pss": round(found.pss / 1e6)}


if __name__ == "__main__":
    main()
