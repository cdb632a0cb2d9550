"""An engine process without a model: the real protocol, scripted tokens.

`fake_engine.py SETTINGS REQUESTS REPLIES PARENT_ID`.
It repeats the prompt: output token i is prompt token i (shifted by the seed if the temperature is not 0), then the end
token if that is asked for. The attention profile of a request chooses what goes wrong with it. With a `script`, a file
of lists of token ids, one a line, a request says the first of them instead, and takes it out. `models` has settings of
those that have a name; `shift` turns the prompt by so many tokens. With `prefixes` it knows the blocks of every prompt
and answer so far, as a prefix cache without limits does.
"""

import json
import os
import sys
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import msgspec
import zmq

from gpu.pooling import Pooling
from scheduler.engine.heartbeat import Heartbeat
from scheduler.messages import (
    Accepted,
    AskSessions,
    Cancel,
    ChunksStored,
    ContextSaved,
    Delta,
    DropChunks,
    EngineRequest,
    Expect,
    Failed,
    FromEngine,
    HostStats,
    KeptConversation,
    Loading,
    Logprob,
    Outputs,
    Progress,
    ReadSaved,
    Ready,
    Refused,
    SaveContext,
    SavedContext,
    SavedTokens,
    Sessions,
    Shutdown,
    Stats,
    StoreChunks,
    ToEngine,
    Writing,
    pack_tokens,
)

VOCAB = 8192
PAGE = 16
CONTEXT = 16384
EOS = 5
CACHED = 7  # of every prompt longer than this
PROFILES = dict.fromkeys(["exact", "slow", "long_prefill", "dies", "breaks", "too_large", "long_step"], CONTEXT) | {
    "narrow": 100
}
HOST_STATS = HostStats(
    bytes_used=5000, bytes_promised=6000, bytes_limit=9000, contexts=3, tokens=400, tokens_evicted=300,
    tokens_resident=150, tokens_reloaded=70, segments=2, leases=0,
    tokens_covered=8000, rows_read=160, rows_left_out=7,
    ready_seconds=0.5, wait_seconds=0.25, attend_seconds=1.5,
    method_counts={"host_tables_built": 60, "host_tables_failed": 1},
)  # fmt: skip


@dataclass
class Running:
    request: EngineRequest
    due_s: float
    prefill_ends_s: float
    num_tokens: int = 0
    started: bool = field(default=False)
    reused: dict[str, int] = field(default_factory=dict)
    says: list[int] | None = None
    drawn: list[int] = field(default_factory=list)
    num_cached: int = 0

    def __post_init__(self) -> None:
        self.prompt = self.request.prompt_token_ids


def logprob_of(token_id: int, rank_count: int | None) -> Logprob:
    top = [((token_id + rank) % VOCAB, -0.25 - 0.5 * rank) for rank in range(rank_count or 0)]
    return Logprob(-0.25, top)


def digest(chunk: bytes) -> str:
    """Return the digest of packed tokens. numpy is imported here alone: it takes most of a start."""
    import numpy as np

    from transfer.chunks.chunk_format import digest_tokens

    return digest_tokens(np.frombuffer(chunk, np.int32))


def pool(prompt: list[int], pooling: Pooling) -> bytes:
    """Count how often tokens of each remainder come, of all or of the last three; of logits: how long the prompt is."""
    if pooling.kind == "logits":
        return array("f", [len(prompt) / 100, *([0.0] * (len(pooling.token_ids) - 1))]).tobytes()
    counted = prompt if pooling.kind == "mean" else prompt[-3:]
    return array("f", [sum(token % 8 == entry for token in counted) for entry in range(8)]).tobytes()


def blocks_of(tokens: list[int]) -> Iterator[bytes]:
    """Yield a name of each full block, which all tokens to its end are part of."""
    name = b""
    for begin in range(0, len(tokens) - PAGE + 1, PAGE):
        name = blake2b(array("i", tokens[begin : begin + PAGE]).tobytes(), key=name, digest_size=16).digest()
        yield name


class FakeEngine:
    def __init__(self, settings: dict[str, float], requests: str, replies: str) -> None:
        context = zmq.Context()
        self.pull, self.push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self.pull.connect(requests)
        self.push.connect(replies)
        start = json.load(sys.stdin) if "planned" in settings or "models" in settings else {}
        if "models" in settings:
            settings = settings | settings["models"].get(start["config"]["model"]["name"], {})
        self.settings = settings
        self.decode = msgspec.msgpack.Decoder(ToEngine).decode
        self.running: dict[str, Running] = {}
        self.begun: list[EngineRequest] = []
        self.expected: list[str] = []
        self.blocks: set[bytes] = set()
        self.saved: dict[tuple[str, str], EngineRequest] = {}
        self.stored: set[tuple[str, bytes]] = set()
        self.pulse = Heartbeat(replies)
        self.num_pages = start["memory"]["num_pages"] if "planned" in settings else 1024
        self.steps = 0
        self.stats_due_s = 0.0
        self.progress_due_s = 0.0

    def say(self, message: FromEngine) -> None:
        self.push.send(msgspec.msgpack.encode(message))

    def load(self) -> None:
        self.say(Loading(stage="weights", fraction=0.5))
        time.sleep(self.settings.get("load_s", 0.0))
        if "fails" in self.settings or os.path.exists(str(self.settings.get("fails_if", ""))):
            self.say(Failed(message="checkpoint: model.safetensors is cut short"))
            self.push.close()
            sys.exit(1)
        if "exits" in self.settings or os.path.exists(str(self.settings.get("exits_if", ""))):
            sys.exit(3)
        context = int(self.settings.get("context", CONTEXT))
        profiles = {"exact": context} if "context" in self.settings else PROFILES
        self.say(Ready(
            vocab_size=int(self.settings.get("vocab_size", VOCAB)), num_layers=12,
            max_context_tokens=context, profiles=profiles, default_profile="exact",
            num_pages=self.num_pages, page_tokens=PAGE, device="fake", load_seconds=0.1,
            contexts_folder=str(self.settings.get("contexts", "")),
            without_epsilon={"narrow": "bounds no error of a step"} if profiles is PROFILES else {},
        ))  # fmt: skip

    def run(self) -> None:
        self.pulse.start()
        self.load()
        while True:
            self.pulse.begin_turn()
            if self.pull.poll(0 if self.has_due() else 1):
                while self.pull.poll(0):
                    message = self.decode(self.pull.recv())
                    if isinstance(message, Shutdown):
                        self.write_contexts()
                        return
                    self.handle(message)
            self.step()

    def has_due(self) -> bool:
        """Return whether a token is due at once."""
        now = time.monotonic()
        return self.settings.get("token_s", 0.0) == 0 and any(one.due_s <= now for one in self.running.values())

    def handle(self, message: ToEngine) -> None:
        if isinstance(message, Expect):
            self.expected += message.request_ids
            return
        if isinstance(message, AskSessions):
            self.say(self.tell_sessions(message))
            return
        if isinstance(message, SaveContext | ReadSaved):
            self.say(self.save_context(message) if isinstance(message, SaveContext) else self.read_saved(message))
            return
        if isinstance(message, DropChunks):
            gone = {(chunk.tokens, chunk.salt) for chunk in message.chunks}
            self.stored = {(salt, chunk) for salt, chunk in self.stored if (digest(chunk), salt) not in gone}
            return
        if isinstance(message, StoreChunks):
            self.store(message)
            return
        if isinstance(message, Cancel):
            for request_id in message.request_ids:
                self.running.pop(request_id, None)
            return
        requests = message.requests()
        if any(request.attention_profile == "too_large" for request in requests):
            self.say(Refused(message.submit_id, "too_large", "asked 99 pages, the pool has 1"))
            return
        if len(self.running) + len(requests) > self.settings.get("max_requests", 1000):
            self.say(Refused(message.submit_id, "queue_full", "queue: 8 wait, room for 8"))
            return
        if any(request.attention_profile == "long_step" for request in requests):
            time.sleep(self.settings["step_s"])
        now = time.monotonic()
        for request in requests:
            prefill_s = self.settings.get("prefill_s", 1.0) if request.attention_profile == "long_prefill" else 0.0
            running = Running(request, now + prefill_s, now + prefill_s, says=self.next_line())
            self.running[request.request_id] = running
            self.begun.append(request)
        self.say(Accepted(message.submit_id))

    def write_contexts(self) -> None:
        """Write for as long as settings say, and touch the file `written` at the end; `stuck`: write nothing on."""
        begin_s, last = time.monotonic(), self.settings.get("write_s", 0.0)
        while (left := begin_s + last - time.monotonic()) > 0:
            moving = Writing(int(1e6 * (last - left)), int(2**20 * left))
            self.say(Writing(7, 7) if "stuck" in self.settings else moving)
            time.sleep(0.02)
        if "written" in self.settings:
            Path(str(self.settings["written"])).touch()

    def tell_sessions(self, asked: AskSessions) -> Sessions:
        """Tell of each request as a conversation of its own."""
        mine = [one for one in self.begun if one.owner == asked.owner]
        forgotten = [one for one in mine if asked.forget == one.session]
        if asked.forget_slot >= 0:
            forgotten = mine[asked.forget_slot : asked.forget_slot + 1]
        if asked.forget or asked.forget_slot >= 0:
            self.begun = [one for one in self.begun if one not in forgotten]
        shares = self.settings.get("places", [0, 0, 0])  # of each conversation, on the device, host and disk
        kept = [
            KeptConversation(
                session=one.session or f"conversation-{number}", slot=number - 1, turns=1, running=0,
                is_awaited=one.request_id in self.expected,
                tokens=one.num_prompt_tokens, device_tokens=one.front_tokens + int(shares[0] * one.num_prompt_tokens),
                host_tokens=int(shares[1] * one.num_prompt_tokens), disk_tokens=int(shares[2] * one.num_prompt_tokens),
                idle_seconds=1.5,
            )
            for number, one in enumerate(self.begun, 1)
            if one.owner == asked.owner
        ]  # fmt: skip
        has_forgotten = asked.forget or asked.forget_slot >= 0
        num_forgotten = sum(one.num_prompt_tokens for one in forgotten) if has_forgotten else 0
        is_deleted = self.saved.pop((asked.owner, asked.forget_saved), None) is not None
        saved = [
            SavedContext(
                name=name,
                session=one.session,
                tokens=one.num_prompt_tokens,
                disk_tokens=0,
                disk_bytes=0,
                created_s=1,
                owner=owner,
            )
            for (owner, name), one in self.saved.items()
            if asked.of_all or owner == asked.owner
        ]
        return Sessions(asked.request_id, kept[::-1], num_forgotten, {}, saved, is_deleted)

    def save_context(self, asked: SaveContext) -> ContextSaved:
        mine = [one for one in self.begun if one.owner == asked.owner]
        if "disk" not in self.settings:
            return ContextSaved(asked.request_id, code="no_disk")
        by_slot = mine[asked.slot : asked.slot + 1] if asked.slot >= 0 else []
        found = [one for one in mine if one.session == asked.session] if asked.session else by_slot
        if not found:
            return ContextSaved(asked.request_id, code="unknown")
        if found[-1].request_id in self.running:
            return ContextSaved(asked.request_id, code="running")
        if found[-1].num_prompt_tokens < PAGE:
            return ContextSaved(asked.request_id, code="no_room")
        self.saved[asked.owner, asked.name] = found[-1]
        return ContextSaved(asked.request_id, mine.index(found[-1]), found[-1].num_prompt_tokens, 4096)

    def read_saved(self, asked: ReadSaved) -> SavedTokens:
        if "disk" not in self.settings:
            return SavedTokens(asked.request_id, code="no_disk")
        one = self.saved.get((asked.owner, asked.name))
        if one is None:
            return SavedTokens(asked.request_id, code="unknown")
        return SavedTokens(asked.request_id, one.prompt, one.attention_profile, one.session, PAGE, 100)

    def count_cached(self, prompt: list[int]) -> int:
        """Count the tokens of a prompt that are in known blocks, its last one never."""
        if "prefixes" not in self.settings:
            return CACHED if len(prompt) > CACHED else 0
        usable = list(blocks_of(prompt))[: (len(prompt) - 1) // PAGE]
        return PAGE * next((i for i, block in enumerate(usable) if block not in self.blocks), len(usable))

    def next_line(self) -> list[int] | None:
        """Return what the script has for a request, if there is anything left."""
        path = self.settings.get("script")
        lines = Path(str(path)).read_text().splitlines() if path else []
        if not lines:
            return None
        Path(str(path)).write_text("\n".join(lines[1:]))
        return json.loads(lines[0])

    def store(self, message: StoreChunks) -> None:
        if "no_store" in self.settings:
            return
        most = int(self.settings.get("most_chunks", 1000))
        new = {(message.salt, chunk) for chunk in message.chunks} - self.stored
        kept = set(list(new)[: most - len(self.stored)])
        self.stored |= kept
        num_known = len({(message.salt, chunk) for chunk in message.chunks}) - len(new)
        reason = "the disk is full" if len(kept) < len(new) else ""
        self.say(ChunksStored(message.request_id, len(kept), num_known, reason))

    def reuse(self, request: EngineRequest) -> dict[str, int]:
        """Report as reused what is stored, except the request's share of it; store what is not."""
        if request.fusion is None:
            assert not request.chunks, "vanilla needs no chunks"
            return {}
        names = {(c.salt, pack_tokens(request.prompt_token_ids[c.begin : c.end])): c.end - c.begin
                 for c in request.chunks}  # fmt: skip
        found = sum(size for name, size in names.items() if name in self.stored)
        self.stored.update(names)
        again = int(request.fusion.ratio * found)
        return {"reused_tokens": found - again, "recomputed_tokens": again}

    def step(self) -> None:
        now = time.monotonic()
        self.steps += 1
        deltas, progress = [], []
        for request_id, running in list(self.running.items()):
            if running.due_s > now:
                if running.prefill_ends_s > now and now >= self.progress_due_s:
                    progress.append(self.progress(running, now))
                continue
            slow = 0.05 if running.request.attention_profile == "slow" else self.settings.get("token_s", 0.0)
            running.due_s = now + slow
            delta = self.advance(running, now)
            deltas.append(delta)
            if delta.finish_reason:
                del self.running[request_id]
        if progress:
            self.progress_due_s = now + 0.02
        stats = None
        if now >= self.stats_due_s:
            self.stats_due_s = now + 0.02
            stats = Stats(
                num_running=len(self.running), num_prefilling=0, num_waiting=0, pages_used=len(self.running),
                pages_cached=2, pages_total=1024, pages_committed=1024, prefix_queries_tokens=100,
                prefix_hits_tokens=40, preemptions=1, recomputed_tokens=30, steps=self.steps, step_seconds=7.0,
                rings_free=0,
                host=HOST_STATS if "host" in self.settings else None, 
            )  # fmt: skip
        if deltas or progress or stats:
            self.say(Outputs(deltas=deltas, progress=progress, stats=stats))

    def progress(self, running: Running, now: float) -> Progress:
        total = running.request.num_prompt_tokens
        whole_s = self.settings.get("prefill_s", 1.0)
        done = int(total * (1 - (running.prefill_ends_s - now) / whole_s))
        return Progress(
            request_id=running.request.request_id, done_tokens=done, total_tokens=total, cached_tokens=min(CACHED, done)
        )

    def advance(self, running: Running, now: float) -> Delta:
        request, sampling = running.request, running.request.sampling
        prompt = running.prompt
        first = not running.started
        running.started = True
        prompt_logprobs = None
        if first and sampling.num_prompt_logprobs is not None:
            prompt_logprobs = [logprob_of(token, sampling.num_prompt_logprobs) for token in prompt[1:]]
        if first:
            running.reused, running.num_cached = self.reuse(request), self.count_cached(prompt)
            if "computed_again" in self.settings:
                running.reused["computed_again_tokens"] = int(self.settings["computed_again"])
            if "passed_over" in self.settings:
                running.reused["passed_over_computing_is_faster"] = int(self.settings["passed_over"])
        common = {
            "figures": running.reused | {"cached_from_card": running.num_cached},
            "request_id": request.request_id,
            "prompt_logprobs": prompt_logprobs,
            "num_cached_tokens": running.num_cached,
            "queue_seconds": now - request.arrival_s if first else None,
            "prefill_seconds": 0.0 if first else None,
        }
        if request.max_tokens == 0:
            pooled = None if request.pooling is None else pool(prompt, request.pooling)
            return Delta(token_ids=[], finish_reason="length", pooled=pooled, **common)
        if request.attention_profile == "breaks" and running.num_tokens == 2:
            return Delta(token_ids=[], finish_reason="error", error="logits: not finite", **common)
        if request.attention_profile == "dies" and running.num_tokens == 2:
            os._exit(9)
        said = prompt if running.says is None else running.says
        shift = 0 if sampling.temperature == 0 or running.says is not None else sampling.seed % 1000
        shift += int(self.settings.get("shift", 0))
        ends = EOS in request.stop_token_ids and running.num_tokens >= max(len(said), request.min_tokens)
        token = EOS if ends else said[(running.num_tokens + shift) % len(said)]
        running.num_tokens += 1
        running.drawn.append(token)
        reason = "length" if running.num_tokens >= request.max_tokens else None
        if token in request.stop_token_ids and running.num_tokens > request.min_tokens:
            reason = "stop"
        if reason and "prefixes" in self.settings:  # the last token's keys and values are never computed
            self.blocks.update(blocks_of(prompt + running.drawn[:-1]))
        logprobs = None if sampling.num_logprobs is None else [logprob_of(token, sampling.num_logprobs)]
        return Delta(token_ids=[token], logprobs=logprobs, finish_reason=reason, **common)


if __name__ == "__main__":
    FakeEngine(json.loads(sys.argv[1]), *sys.argv[2:4]).run()
