"""Contexts on disk through restarts: `python -m tests.scheduler.restart_soak --seconds 600`.

An engine in a process of its own takes turns of conversations that fork, take turns back, are saved by name and are
forgotten. It is killed at random moments, or ends; between two lives bits of files are flipped now and then. Each text
is that of an engine that keeps nothing, and the folder stays within its limit.
"""

import argparse
import multiprocessing
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

from msgspec import structs

from scheduler.engine.engine import Engine
from scheduler.messages import AskSessions, SaveContext
from scheduler.residence.kept_sessions import answer_sessions, save_context
from tests.scheduler import test_disk_of_windows as of_windows
from tests.scheduler.test_disk_of_a_model import FEW_PAGES_GIB, make_engine
from tests.scheduler.test_states_of_a_model import ask, draw, serve

LIMIT_GIB = 0.01
LONGEST = 800
MODELS = ("tiny", "tiny-qwen3.5")
_SPAWN = multiprocessing.get_context("forkserver")
_SPAWN.set_forkserver_preload(["tests.scheduler.test_disk_of_windows", "tests.scheduler.test_disk_of_a_model"])


def open_engine(folder: Path | None, name: str) -> Engine:
    if name == "tiny":
        return make_engine(folder, FEW_PAGES_GIB, prefix_cache=folder is not None, limit_gib=LIMIT_GIB)
    engine = of_windows.make_engine(folder, name, prefix_cache=folder is not None)
    if folder is not None:
        engine.scheduler.residence.disk.side.store.folder.limit_bytes = int(LIMIT_GIB * 2**30)
    return engine


def live(told: Connection, folder: Path, name: str) -> None:
    """Serve what comes, until nothing does."""
    engine = open_engine(folder, name)
    told.send("ready")
    while (asked := told.recv()) is not None:
        requests, saved, forgotten = asked
        residence = engine.scheduler.residence
        if forgotten:
            answer_sessions(residence, AskSessions("f", "", forgotten))
        if saved:
            save_context(residence, SaveContext("s", "", saved, 0))
        told.send([serve(engine, [request])[0] for request in requests])
    counts = engine.scheduler.residence.disk.side.store.counts()
    engine.shutdown()
    told.send(counts)


@dataclass
class Soak:
    """A folder and its conversations."""

    folder: Path
    name: str
    random: Random
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.cold = open_engine(None, self.name)
        first = _SPAWN.Process(target=time.time)  # the server of processes imports what all of them need
        first.start()
        first.join()
        self.histories = {number: draw(200 + 70 * number, number % 2) for number in range(4)}

    def run(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            self.live_once(ends)
            held = sum(path.stat().st_size for path in self.folder.rglob("*.*") if path.suffix in (".kv", ".end"))
            assert held <= LIMIT_GIB * 2**30, held
            self.counts["most_bytes"] = max(self.counts["most_bytes"], held)
            if self.random.random() < 0.3:
                self.damage()

    def live_once(self, ends: float) -> None:
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=live, args=(theirs, self.folder, self.name))
        process.start()
        theirs.close()
        killer = threading.Timer(self.random.uniform(0.0, 6.0), process.kill)
        try:
            ours.recv()
            if self.random.random() < 0.7:
                killer.start()
            for _ in range(self.random.randrange(1, 12)):
                if time.monotonic() > ends:
                    break
                self.take_turn(ours)
            ours.send(None)
            counts = ours.recv()
            for what in ("damaged", "evicted", "written"):
                self.counts[what] += getattr(counts, what)
            assert counts.failed == 0
        except (EOFError, ConnectionError):
            pass  # it was killed
        killer.cancel()
        ours.close()
        process.join(60)
        assert process.exitcode in (0, -9), process.exitcode
        self.counts["lives"] += 1
        self.counts["killed"] += process.exitcode == -9

    def take_turn(self, engine: Connection) -> None:
        number, draws = self.random.choice(list(self.histories)), self.random
        history = self.histories[number]
        if draws.random() < 0.2:  # a turn is taken back
            history = history[: max(100, len(history) - draws.randrange(150))] + draw(30, draws.randrange(1000))
        request = ask("r", history, draws.choice((1, 20, 40)))
        saved = f"name {draws.randrange(3)}" if draws.random() < 0.1 else ""
        forgotten = f"session {draws.randrange(4)}" if draws.random() < 0.05 else ""
        engine.send(([structs.replace(request, session=f"session {number}")], saved, forgotten))
        ((said, found),) = engine.recv()
        wanted = serve(self.cold, [request])[0][0]
        assert said == wanted, (self.name, number, len(history), found)
        self.counts["texts"] += 1
        self.counts["found_tokens"] += found
        grown = [*history, *said, *draw(draws.randrange(60), number)]
        self.histories[number] = grown if len(grown) < LONGEST else draw(200, draws.randrange(5))

    def damage(self) -> None:
        files = [path for path in self.folder.rglob("*.*") if path.is_file() and path.name != "written.json"]
        for path in self.random.sample(files, min(2, len(files))):
            raw = bytearray(path.read_bytes())
            if raw:
                raw[self.random.randrange(len(raw))] ^= 1 << self.random.randrange(8)
                path.write_bytes(raw[: self.random.choice((len(raw), len(raw), len(raw) // 2))])
                self.counts["flipped"] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            soak = Soak(Path(folder), name, Random(asked.seed))
            soak.run(asked.seconds / len(MODELS))
            print(name, dict(soak.counts), flush=True)


if __name__ == "__main__":
    main()
