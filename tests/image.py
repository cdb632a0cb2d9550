"""Check an image as a cluster would run it: `python -m tests.image IMAGE`, after `docker build` or `podman build`.

The reference model is served by a container with a read-only root, without capabilities, as a user that is not root.
Its health is asked, a chat is answered, and SIGTERM lets a stream end. Status 1 if one of these does not hold.
"""

import argparse
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

NAME = "tandem-image-check"
START_SECONDS = 400
NUM_TOKENS = 300
QUESTION = (
    "The special magic number for amber-falcon is 4815162. Snow fell.\n\nWhat is the special magic number for "
    "amber-falcon?"
)


@dataclass
class Container:
    """A container that runs. engine: the words of the program, `podman` or `docker` with what stands in front of it."""

    engine: list[str]
    url: str
    faults: list[str] = field(default_factory=list)

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self.engine, *words], capture_output=True, text=True)

    def exec(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.call("exec", NAME, *words)

    def expect(self, what: str, holds: bool, seen: object) -> None:
        print(f"{'ok    ' if holds else 'BROKEN'} {what}: {seen}", flush=True)
        if not holds:
            self.faults.append(what)

    def log(self) -> str:
        logged = self.call("logs", NAME)
        return logged.stdout + logged.stderr

    def health(self) -> str:
        try:
            return str(httpx.get(f"{self.url}/health", timeout=5).json()["status"])
        except httpx.TransportError:
            return "no answer"


@contextmanager
def running(engine: list[str], image: str, options: list[str]) -> Iterator[Container]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    container = Container(engine, f"http://127.0.0.1:{port}")
    container.call("rm", "--force", NAME)
    limits = ["--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    started = container.call(
        "run", "--detach", "--name", NAME, *limits, "--publish", f"127.0.0.1:{port}:8000", *options, image,
        "serve", "/deploy/reference.yaml", "--host", "0.0.0.0",
    )  # fmt: skip
    if started.returncode:
        raise SystemExit(f"the container does not start: {started.stderr.strip()}")
    try:
        yield container
    finally:
        container.call("rm", "--force", NAME)


def check_user(container: Container) -> None:
    user = container.exec("id", "-u").stdout.strip()
    container.expect("the user is not root", user == "1000", f"uid {user}")
    status = container.exec("cat", "/proc/1/status").stdout
    held = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff"))
    container.expect("no capabilities", int(held, 16) == 0, held)
    for folder in ("/", "/venv", "/deploy", "/home/tandem"):
        touched = container.exec("touch", f"{folder}/touched")
        container.expect(f"{folder} is read-only", touched.returncode != 0, touched.stderr.strip())
    container.expect("/cache takes files", container.exec("touch", "/cache/touched").returncode == 0, "touched")


def check_health(container: Container) -> None:
    seen, ends = [container.health()], time.monotonic() + START_SECONDS
    while seen[-1] != "ready" and time.monotonic() < ends:
        time.sleep(0.2)
        now = container.health()
        seen += [now] if now != seen[-1] else []
    container.expect("health goes from loading to ready", seen[-2:] == ["loading", "ready"], ", ".join(seen))
    if seen[-1] != "ready":
        raise SystemExit(container.log()[-3000:])
    told = container.call("inspect", "--format", "{{json .Config.Healthcheck}}", NAME).stdout
    check = json.loads(told or "null")
    if not check:
        container.expect("the image has a health check", False, "none; podman and buildah need --format docker")
        return
    checked = container.exec(*check["Test"][1:])
    container.expect("the image's own health check passes", checked.returncode == 0, f"status {checked.returncode}")


def check_chat(container: Container) -> None:
    body = {"model": "reference", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    answer = httpx.post(f"{container.url}/v1/chat/completions", json=body, timeout=120).json()
    said = answer["choices"][0]["message"]["content"]
    container.expect("a chat is answered", "4815162" in said, said)


def check_drain(container: Container) -> None:
    """Stop it in the middle of a stream: that one ends whole, others are refused, and the status is 0."""
    body = {"model": "reference", "prompt": "The harbour was quiet when", "max_tokens": NUM_TOKENS, "ignore_eos": True,
            "stream": True, "temperature": 0, "logprobs": 0}  # fmt: skip
    stopping, num_tokens, is_done, seen = None, 0, False, ""
    with httpx.stream("POST", f"{container.url}/v1/completions", json=body, timeout=120) as answer:
        for line in answer.iter_lines():
            is_done |= line == "data: [DONE]"
            choices = json.loads(line[6:])["choices"] if line.startswith("data: {") else []
            num_tokens += sum(len((choice["logprobs"] or {}).get("tokens", [])) for choice in choices)
            if stopping is None and num_tokens:
                stopping = subprocess.Popen(
                    [*container.engine, "stop", "--time", "90", NAME], stdout=subprocess.DEVNULL
                )
            elif stopping is not None and num_tokens % 20 == 0 and seen != "draining":
                seen = container.health()
    assert stopping is not None
    stopping.wait(120)
    container.expect("health tells of the drain", seen == "draining", seen)
    container.expect(
        "a stream ends whole while it drains", is_done and num_tokens == NUM_TOKENS, f"{num_tokens} tokens"
    )
    status = container.call("inspect", "--format", "{{.State.ExitCode}}", NAME).stdout.strip()
    container.expect("it ends by itself with status 0", status == "0", f"status {status}")
    container.expect("no traceback is logged", "Traceback" not in container.log(), "none")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("image")
    parser.add_argument("--engine", default="", help="the program and words in front of it; default: docker or podman")
    parser.add_argument("--option", action="append", default=[], help="of `run`, as --option=--cgroups=disabled")
    asked = parser.parse_args()
    found = asked.engine.split() or [name for name in ("docker", "podman") if shutil.which(name)][:1]
    if not found:
        print("no container engine: apt-get install podman, or docker", file=sys.stderr)
        return 2
    with running(found, asked.image, asked.option) as container:
        check_user(container)
        check_health(container)
        check_chat(container)
        check_drain(container)
    return bool(container.faults)


if __name__ == "__main__":
    sys.exit(main())
