"""A server with contexts on disk and in host memory through kills and restarts: `python -m tests.server.disk_soak`.

Clients hold conversations over HTTP while the server is killed (SIGKILL, at times its engine with it) or ended
(SIGTERM) in turn, each time after less than a minute, now and then while it still loads. Between two lives bits of
files are flipped. Each turn's text is that of a server that keeps nothing; what was streamed before a kill is the
beginning of it. The folder, host memory and what processes leave behind stay within their limits.
"""

import argparse
import json
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import httpx
import psutil

from tests.server.test_end_to_end import FILLER, serve
from tests.server.test_host_end_to_end import gauge

LIMIT_GIB = 0.02
HOST = {"memory_limit_gib": 0.4, "threads": 1, "resident_tokens": 256, "residency": "fixed"}
SETTINGS = {
    "host": HOST,
    "profiles": {"whole": {"host": "offloaded"}},
    "gpu": {"kv_cache_gib": 0.25},
}
PLACES = ("amber", "birch", "cedar", "delta", "ember", "flint")
MOST_TURNS = 6
MOST_TOKENS = 24
LEFT_SECONDS = 20.0  # for an engine to notice that its server was killed


@dataclass
class Conversation:
    """What one client says: a document with numbers in it, then a question in each turn."""

    name: str
    profile: str
    messages: list[dict[str, str]] = field(default_factory=list)
    num_turns: int = 0

    def begin(self, random: Random) -> None:
        """Begin a new one, which may share its beginning with others."""
        numbers = Random(random.randrange(3))
        facts = [
            f"The special magic number for {place}-falcon is {numbers.randrange(10**6, 10**7)}." for place in PLACES
        ]
        text = " ".join(f"{FILLER * numbers.randrange(2, 6)}{fact}" for fact in facts)
        self.messages = [{"role": "user", "content": f"{text}\n\n{self._question(random)}"}]
        self.num_turns = 0

    def go_on(self, said: str, random: Random) -> None:
        self.num_turns += 1
        asked = {"role": "user", "content": self._question(random)}
        self.messages = [*self.messages, {"role": "assistant", "content": said}, asked]

    @staticmethod
    def _question(random: Random) -> str:
        return f"What is the special magic number for {random.choice(PLACES)}-falcon?"


class Killed(Exception):
    """The server went away in the middle; args[0]: what it had said."""


def ask(url: str, conversation: Conversation) -> tuple[str, dict[str, int]]:
    """Return an answer and where its cached tokens were. Raises Killed, and httpx's errors before anything is said."""
    body = {
        "model": "reference", "messages": conversation.messages, "temperature": 0, "max_tokens": MOST_TOKENS,
        "attention_profile": conversation.profile, "stream": True, "stream_options": {"include_usage": True},
        "session_id": conversation.name,
    }  # fmt: skip
    said, where, is_over = "", {}, False
    try:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                data = line.removeprefix("data: ")
                is_over |= data == "[DONE]"
                event = json.loads(data) if data.startswith("{") else {}
                if "error" in event:
                    raise Killed(said)
                said += "".join(choice["delta"].get("content") or "" for choice in event.get("choices", []))
                if event.get("usage"):
                    where = event["usage"]["prompt_tokens_details"]["cached_tokens_from"]
    except httpx.HTTPError as error:
        raise Killed(said) from error
    if not is_over:
        raise Killed(said)
    return said, where


@dataclass
class ServerSoak:
    """A folder, and the servers that have it one after another."""

    folder: Path
    random: Random
    num_clients: int = 3
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._cold_texts: dict[str, str] = {}
        self._cold_lock, self._lock = threading.Lock(), threading.Lock()
        self._url: str | None = None
        self._is_over = threading.Event()

    def run(self, seconds: float, least_life: float = 3.0, most_life: float = 45.0) -> None:
        """Run for so long; `faults` has what was wrong."""
        (self.folder / "cold").mkdir()
        cold, self._cold_url = serve(self.folder / "cold", SETTINGS | {"scheduler": {"prefix_cache": False}})
        clients = [threading.Thread(target=self._converse, args=(number,)) for number in range(self.num_clients)]
        for client in clients:
            client.start()
        ends, is_kill = time.monotonic() + seconds, True
        try:
            while time.monotonic() < ends and not self.faults:
                self._live_once(is_kill, self.random.uniform(least_life, most_life))
                self._check_folder()
                is_kill = not is_kill
                if self.random.random() < 0.3:
                    self._damage()
        finally:
            self._is_over.set()
            for client in clients:
                client.join(180)
            end(cold, signal.SIGTERM)

    def _live_once(self, is_kill: bool, seconds: float) -> None:
        disk = {"folder": str(self.folder / "contexts"), "block_tokens": 64, "choose": "always", "limit_gib": LIMIT_GIB}
        (self.folder / "warm").mkdir(exist_ok=True)
        self.counts["lives"] += 1
        if is_kill and self.random.random() < 0.2:  # while it loads
            killer = threading.Timer(self.random.uniform(0.5, 8.0), self._kill_children)
            killer.start()
            with suppress(AssertionError, httpx.HTTPError):
                process, _ = serve(self.folder / "warm", SETTINGS | {"disk": disk})
                process.kill()
            killer.join()
            self.counts["killed while loading"] += 1
            return
        process, url = serve(self.folder / "warm", SETTINGS | {"disk": disk})
        with self._lock:
            self._url = url
        self._is_over.wait(seconds)
        self._check_gauges(url)
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        with suppress(psutil.Error):
            self.counts["most MiB of a server"] = max(
                self.counts["most MiB of a server"], sum(one.memory_info().rss for one in family) >> 20
            )
        if is_kill:
            for one in family if self.random.random() < 0.5 else family[:1]:  # the engine ends by itself, or with it
                with suppress(psutil.Error):
                    one.kill()
            process.wait()
            self.counts["killed"] += 1
        else:
            code = end(process, signal.SIGTERM)
            self.counts["ended" if code == 0 else "ended badly"] += 1
            if code:
                log = (self.folder / "warm" / "server.log").read_text()
                self.faults.append(f"SIGTERM: it ended with {code}: {log[-3000:]}")
        with self._lock:
            self._url = None
        _, left = psutil.wait_procs(family[1:], LEFT_SECONDS)
        if left:
            self.faults.append(f"processes that are left: {left}")

    def _kill_children(self) -> None:
        for one in psutil.Process().children():
            with suppress(psutil.Error):
                if str(self.folder / "warm") in " ".join(one.cmdline()):
                    one.kill()

    # --- clients ------------------------------------------------------------------------------------------------------

    def _converse(self, number: int) -> None:
        random = Random(f"{number}")
        one = Conversation(f"session {number}", ("exact", "whole")[number % 2])
        one.begin(random)
        while not self._is_over.is_set():
            with self._lock:
                url = self._url
            if url is None:
                time.sleep(0.2)
                continue
            try:
                said, where = ask(url, one)
            except Killed as killed:
                if killed.args[0]:
                    self._compare(one, str(killed.args[0]), is_whole=False)
                time.sleep(0.2)
                continue
            self._compare(one, said, is_whole=True)
            with self._lock:
                for place, num_tokens in where.items():
                    self.counts[f"tokens from {place}"] += num_tokens
            with suppress(httpx.HTTPError):
                self._rearrange(url, one, random)
            if one.num_turns < MOST_TURNS:
                one.go_on(said, random)
            else:
                one.begin(random)

    def _rearrange(self, url: str, one: Conversation, random: Random) -> None:
        """Save, restore or forget something now and then."""
        draw, name = random.random(), f"note {random.randrange(3)}"
        if draw < 0.1:
            self._note("saves", httpx.post(f"{url}/slots/{one.name}?action=save", json={"filename": name}, timeout=60))
        elif draw < 0.15:
            body = {"filename": name}
            self._note("restores", httpx.post(f"{url}/slots/{one.name}?action=restore", json=body, timeout=60))
        elif draw < 0.2:
            self._note("deletes", httpx.delete(f"{url}/v1/sessions/{one.name}", timeout=60))
        elif draw < 0.25:
            self._note("deletes", httpx.delete(f"{url}/v1/saved_contexts/{name}", timeout=60))

    def _note(self, what: str, answer: httpx.Response) -> None:
        with self._lock:
            self.counts[what] += answer.status_code == 200
            if answer.status_code == 500:
                self.faults.append(f"{what}: {answer.text}")

    def _compare(self, one: Conversation, said: str, is_whole: bool) -> None:
        wanted = self._cold_text(one)
        is_right = said == wanted if is_whole else wanted.startswith(said)
        with self._lock:
            self.counts["texts compared" if is_whole else "beginnings compared"] += 1
            if not is_right:
                self.faults.append(f"{one.profile}, {one.messages[-1]}: said {said!r}, a cold server {wanted!r}")

    def _cold_text(self, one: Conversation) -> str:
        key = json.dumps([one.profile, one.messages])
        with self._cold_lock:
            if key not in self._cold_texts:
                self._cold_texts[key] = ask(self._cold_url, one)[0]
            return self._cold_texts[key]

    # --- limits -------------------------------------------------------------------------------------------------------

    def _check_gauges(self, url: str) -> None:
        with suppress(httpx.HTTPError):
            held, most = gauge(url, "tandem_host_bytes_used"), gauge(url, "tandem_host_bytes_capacity")
            if held > most:
                self.faults.append(f"host memory: {held} of {most} bytes")
            for what in ("written", "evicted", "damaged", "refused"):
                self.counts[f"records {what}"] += int(gauge(url, f"tandem_disk_{what}_total"))

    def _check_folder(self) -> None:
        files = [path for path in (self.folder / "contexts").rglob("*") if path.is_file()]
        held = sum(path.stat().st_size for path in files if path.suffix in (".kv", ".end", ".part"))
        self.counts["most bytes on disk"] = max(self.counts["most bytes on disk"], held)
        block = max((path.stat().st_size for path in files if path.suffix == ".kv"), default=0)
        if held > LIMIT_GIB * 2**30 + block:  # one that a kill has left half written
            self.faults.append(f"disk: {held} bytes, limit {LIMIT_GIB} GiB")
        self.counts["most small files"] = max(
            self.counts["most small files"], sum(one.suffix == ".json" for one in files)
        )

    def _damage(self) -> None:
        files = sorted((self.folder / "contexts").rglob("*.kv"))
        for path in self.random.sample(files, min(2, len(files))):
            raw = bytearray(path.read_bytes())
            raw[self.random.randrange(len(raw))] ^= 1 << self.random.randrange(8)
            path.write_bytes(raw)
            self.counts["files flipped"] += 1


def end(process: "subprocess.Popen[str]", number: signal.Signals) -> int:
    process.send_signal(number)
    try:
        return process.wait(90)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--most-life", type=float, default=45.0, help="seconds that a server serves at most")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soak = ServerSoak(Path(folder), Random(asked.seed))
        soak.run(asked.seconds, most_life=asked.most_life)
    print(json.dumps(soak.counts, indent=1), *soak.faults, sep="\n", flush=True)
    return bool(soak.faults)


if __name__ == "__main__":
    raise SystemExit(main())
