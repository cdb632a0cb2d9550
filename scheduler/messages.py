"""Define the messages between the API process and the engine process: msgspec structs as MessagePack over ZeroMQ.

Each engine process has its own pair of sockets (PUSH/PULL), so messages of a dead engine never reach a new one. Times
are seconds of `time.monotonic()`, a clock that all processes of a Linux host share.
"""

from array import array
from collections.abc import Iterable
from typing import Self

import msgspec

from gpu.methods.counters import RequestFigure
from gpu.pooling import Pooling
from gpu.sampling_params import SamplingParams
from scheduler.block_changes import CacheChanges
from transfer.disk.disk_counts import DiskCounts

_TOKEN_BYTES = 4

PREEMPTIONS = "preemptions"
ACCEPTED, REJECTED = "accepted_prediction_tokens", "rejected_prediction_tokens"
FIGURES = {
    PREEMPTIONS: RequestFigure(
        "how often the request was preempted, to make room for another or for itself, or since blocks of its prompt on "
        "disk were lost"
    ),
    ACCEPTED: RequestFigure("tokens that a draft had guessed: each took no step of its own"),
    REJECTED: RequestFigure("drafted tokens that were computed and not drawn"),
}
"""The scheduler's own figures of a request, by name."""

PREEMPTED_AGAIN = "preempted_tokens_recomputed"
"""The figure of a request that counts tokens computed again after its preemptions. It is in the server's log alone."""

CACHED_FROM = {
    "card": RequestFigure("prompt tokens found in pages of the device", True, "cached_tokens_from_card"),
    "host": RequestFigure("prompt tokens found in host memory", True, "cached_tokens_from_host"),
    "disk": RequestFigure("prompt tokens found on disk", True, "cached_tokens_from_disk"),
}
"""Figures that count a prompt's cached tokens, by the place where they were found. An answer's usage groups them."""

FASTER, PAUSED = "computing_is_faster", "reads_paused"
PASSED_OVER = {
    FASTER: RequestFigure(
        "prompt tokens on disk that were computed, since that is faster than reading them",
        True, f"disk_tokens_passed_over_{FASTER}",
    ),
    PAUSED: RequestFigure(
        "prompt tokens on disk that were computed, since reads are paused for lack of open files or memory",
        True, f"disk_tokens_passed_over_{PAUSED}",
    ),
}  # fmt: skip
"""Figures that count a prompt's tokens that are on disk but were computed, by the reason."""

COMPUTED_AGAIN = "computed_again_tokens"
AGAIN = RequestFigure(
    "prompt tokens whose keys and values are cached and that were computed again, since no state or window is kept "
    "behind them", True, "cached_tokens_computed_again",
)  # fmt: skip
"""The figure COMPUTED_AGAIN: tokens computed again for recurrent or sliding-window layers, which keep no row of each.
"""


def cached_figure(place: str) -> str:
    """Return the name of the figure that counts cached tokens found in this place."""
    return f"cached_from_{place}"


def passed_figure(why: str) -> str:
    """Return the name of the figure that counts tokens not read from disk for this reason."""
    return f"passed_over_{why}"


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Pack token ids into a prompt's format: int32, in this host's byte order."""
    return array("i", token_ids).tobytes()


class ChunkSpan(msgspec.Struct, frozen=True, array_like=True):
    """A document chunk in a prompt: tokens `[begin, end)`, 0-based. Its keys and values, computed at positions from 0,
    may be stored and reused.

    salt: becomes part of the chunk's name, so that requests with another salt do not share it (`cache_isolation: key`).
    """

    begin: int
    end: int
    salt: str = ""


class Fusion(msgspec.Struct, frozen=True, kw_only=True):
    """How a prompt with document chunks is computed.

    policy: the name of a policy in `gpu.fusion.fusion_plan`.
    ratio: the share of all prompt tokens that is recomputed, in [0, 1].
    select_layer, seam_tokens: settings of policies that choose tokens.
    """

    policy: str
    ratio: float
    select_layer: int
    seam_tokens: int = 0


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request to generate one sequence. Prompt and output together never exceed the model's context.

    prompt: packed (`pack_tokens`). Requests with the same prompt share the object, and it is hashed once for all.
    stop_token_ids: any of them ends the output, and is reported in `Delta.token_ids`. None is drawn before the output
        has `min_tokens` tokens. The API process handles stop strings.
    max_tokens: bounds the output; 0 computes the prompt alone (for `echo` with `logprobs`, or for `pooling`).
    grammar: also ends the output once it allows nothing more.
    """

    request_id: str
    prompt: bytes
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    min_tokens: int = 0
    attention_profile: str
    arrival_s: float
    priority: int = 0  # lower ones are admitted first
    pooling: Pooling | None = None
    cache_salt: str = ""  # only requests with the same salt share prefixes
    chunks: tuple[ChunkSpan, ...] = ()  # document chunks in the prompt's order; they do not overlap
    fusion: Fusion | None = None  # None: vanilla, `chunks` are ignored
    grammar: str = ""  # of the output, in llguidance's format; "": none
    allowed_token_ids: tuple[int, ...] = ()  # only these are drawn; empty: all tokens
    bad_token_ids: tuple[tuple[int, ...], ...] = ()  # token sequences that the output must not contain
    prediction: bytes = b""  # packed: tokens that the output may repeat, for a profile that drafts
    owner: str = ""  # the API key's owner, whose sessions it may name
    session: str = ""  # the session that it belongs to; "": none
    front_tokens: int = 0  # length of the prompt's system message and tools
    slot: int = -1  # the slot of its conversation (`SaveContext`); -1: any
    adapter: int = 0  # number of the adapter in `EngineConfig.adapters`, from 1; 0: none
    epsilon: float | None = None  # a head's attention error above this is too large; None: the profile's value

    @property
    def prefix_salt(self) -> str:
        """Return the salt for prefix hashes: requests share prefixes only if adapter, epsilon and salt are equal."""
        return f"{self.adapter} {self.told_salt}" if self.adapter else self.told_salt

    @property
    def told_salt(self) -> str:
        """Return the salt that cache events report beside the adapter: epsilon, if set, and the request's own salt."""
        return self.cache_salt if self.epsilon is None else f"{self.epsilon!r} {self.cache_salt}"

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt) // _TOKEN_BYTES

    @property
    def prompt_token_ids(self) -> list[int]:
        """Return the prompt as a new list."""
        return array("i", self.prompt).tolist()


# --- API process -> engine -------------------------------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Requests to accept all together or not at all; answered by one `Accepted` or `Refused` with this `submit_id`.

    No prompt is empty, so an empty one in `packed` means: the same prompt as the request before.
    """

    submit_id: str
    packed: list[EngineRequest]

    @classmethod
    def of(cls, submit_id: str, requests: list[EngineRequest]) -> Self:
        """Pack requests: a prompt that is the same object as that of the request before is left out."""
        packed: list[EngineRequest] = []
        before: bytes | None = None
        for request in requests:
            is_shared = request.prompt is before
            packed.append(msgspec.structs.replace(request, prompt=b"") if is_shared else request)
            before = request.prompt
        return cls(submit_id, packed)

    def requests(self) -> list[EngineRequest]:
        """Unpack the requests; those that share a prompt share the object."""
        whole: list[EngineRequest] = []
        for request in self.packed:
            whole.append(request if request.prompt else msgspec.structs.replace(request, prompt=whole[-1].prompt))
        return whole


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Drop these requests; their pages become free after the running step. Unknown ids are ignored. No reply."""

    request_ids: list[str]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Exit now; the API process sends it once it has drained."""


class StoreChunks(msgspec.Struct, frozen=True, tag=True):
    """Compute and store keys and values of document chunks while no request waits; answered by one `ChunksStored`.

    chunks: packed token ids of each (`pack_tokens`). salt: as in `ChunkSpan`.
    """

    request_id: str
    chunks: list[bytes]
    salt: str


class NamedChunk(msgspec.Struct, frozen=True, array_like=True):
    """Names a document chunk for any model. tokens: digest of its tokens (`digest_tokens`). salt: see `ChunkSpan`."""

    tokens: str
    num_tokens: int
    salt: str


class DropChunks(msgspec.Struct, frozen=True, tag=True):
    """A message to drop chunks that no document contains any more. Requests that read them go on."""

    chunks: list[NamedChunk]


class Expect(msgspec.Struct, frozen=True, tag=True):
    """Reports that the answers to these requests called tools, so that another turn will follow. No reply."""

    request_ids: list[str]


class AskSessions(msgspec.Struct, frozen=True, tag=True):
    """Ask what is kept of an owner's conversations; answered by one `Sessions`. Forgetting comes before the answer.

    forget: a session to forget, except for what other requests read; "": none.
    forget_slot: the slot of one conversation to forget likewise; -1: none.
    forget_saved: the name of a saved context to delete; "": none.
    of_all: whether the answer lists saved contexts of all owners.
    """

    request_id: str
    owner: str
    forget: str = ""
    forget_slot: int = -1
    forget_saved: str = ""
    of_all: bool = False

    @property
    def forgets(self) -> bool:
        return bool(self.forget or self.forget_saved or self.forget_slot >= 0)


class SaveContext(msgspec.Struct, frozen=True, tag=True):
    """Save an owner's conversation on disk under a name: the one in `slot`, or else the last one of `session`. Answered
    by one `ContextSaved` once it is written.
    """

    request_id: str
    owner: str
    name: str
    slot: int = -1
    session: str = ""


class ReadSaved(msgspec.Struct, frozen=True, tag=True):
    """Ask for the tokens of a saved context; answered by one `SavedTokens`."""

    request_id: str
    owner: str
    name: str


ToEngine = Submit | Cancel | Shutdown | StoreChunks | DropChunks | Expect | AskSessions | SaveContext | ReadSaved


# --- engine -> API process -------------------------------------------------------------------------------------------


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Progress of loading. stage: a word to show to people. fraction: in [0, 1]."""

    stage: str
    fraction: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Reports that the engine serves, with the limits that the API process checks requests against.

    profiles: most tokens of prompt and output in each profile when nothing else runs.
    max_context_tokens: the largest of these.
    contexts_folder: the folder of this model's contexts on disk; "": the engine keeps none.
    without_epsilon: for each profile that takes no `EngineRequest.epsilon`, the reason why.
    """

    vocab_size: int
    num_layers: int
    max_context_tokens: int
    profiles: dict[str, int]
    default_profile: str
    num_pages: int
    page_tokens: int
    device: str
    load_seconds: float
    contexts_folder: str = ""
    without_epsilon: dict[str, str] = {}


class Writing(msgspec.Struct, frozen=True, tag=True):
    """Reports that the engine is ending and still writes contexts: bytes written since its start, and bytes left."""

    num_written_bytes: int
    num_left_bytes: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Reports why the engine cannot start, in one line for the operator; then the engine exits."""

    message: str


class Pulse(msgspec.Struct, frozen=True, tag=True):
    """A sign of life, twice a second whatever the loop does. turn_seconds: age of the loop's current turn."""

    turn_seconds: float


class Accepted(msgspec.Struct, frozen=True, tag=True):
    submit_id: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The answer to a refused `Submit`. code: `queue_full` (try again later), `too_large` (can never fit) or `grammar`
    (cannot be compiled). message: what was asked for and what there is.
    """

    submit_id: str
    code: str
    message: str


class ChunksStored(msgspec.Struct, frozen=True, tag=True):
    """The answer to `StoreChunks`. num_known: chunks stored before. reason: why others could not be stored, or ""."""

    request_id: str
    num_stored: int
    num_known: int
    reason: str


class KeptConversation(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a conversation. tokens: of its last prompt and answer. device_tokens, host_tokens, disk_tokens:
    how many of these, from the first on, are in each place. session: a name is made up if the request gave none.
    idle_seconds: since its last request began or ended.
    """

    session: str
    slot: int
    turns: int
    running: int
    is_awaited: bool
    tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    idle_seconds: float


class SavedContext(msgspec.Struct, frozen=True, kw_only=True):
    """A context that was saved under a name. disk_tokens, disk_bytes: how many of its tokens, from the first on, are on
    disk now, and their size. created_s: Unix time.
    """

    name: str
    session: str
    tokens: int
    disk_tokens: int
    disk_bytes: int
    created_s: int
    owner: str = ""


class Sessions(msgspec.Struct, frozen=True, tag=True):
    """The answer to `AskSessions`. conversations: the most recently used first. forgotten_tokens: in all places
    together. disk_bytes: by session, also for sessions known only from the disk. deleted: whether the saved context to
    forget existed.
    """

    request_id: str
    conversations: list[KeptConversation]
    forgotten_tokens: int = 0
    disk_bytes: dict[str, int] = {}
    saved: list[SavedContext] = []
    deleted: bool = False


class ContextSaved(msgspec.Struct, frozen=True, tag=True):
    """The answer to `SaveContext`. num_tokens, num_bytes: what was saved. code: why nothing was: `no_disk`, `unknown`
    (no such conversation), `running`, `no_room`, or `no_share` (the API key's share of the disk is used up); or "".
    """

    request_id: str
    slot: int = -1
    num_tokens: int = 0
    num_bytes: int = 0
    code: str = ""


class SavedTokens(msgspec.Struct, frozen=True, tag=True):
    """The answer to `ReadSaved`. tokens: packed. profile: which one computed them. code: `no_disk` or `unknown`; "":
    the context exists. block_bytes: what `block_tokens` tokens take on disk.
    """

    request_id: str
    tokens: bytes = b""
    profile: str = ""
    session: str = ""
    block_tokens: int = 1
    block_bytes: int = 0
    code: str = ""


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """One token's natural-log probability. top: `(token id, logprob)` of the most likely tokens, best first."""

    logprob: float
    top: list[tuple[int, float]]


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """The output that a step added to one request. The last delta has a `finish_reason`: stop, length or error."""

    request_id: str
    token_ids: list[int]
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob] | None = None  # with the first token: entry i belongs to prompt token i + 1
    pooled: bytes | None = None  # the result of the request's `pooling`: float32 in this host's byte order
    finish_reason: str | None = None
    error: str | None = None  # with finish_reason error
    may_retry: bool = False  # after an error: the same request may succeed later
    num_cached_tokens: int = 0
    figures: dict[str, int] = {}  # the request's counts so far, by the names of `RequestFigure`s
    queue_seconds: float | None = None  # with the first delta: from arrival to the start of its prefill
    prefill_seconds: float | None = None  # with the first delta: from the start of its prefill to its first draw


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a request's prefill, in tokens of work done (layer-weighted: all layers of one token are one)."""

    request_id: str
    done_tokens: int
    total_tokens: int
    cached_tokens: int


class HostStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and counters of the host tier; counters count since the engine started.

    method_counts: counters that methods declare (`Method.host_counters`), by name.
    """

    bytes_used: int  # by contexts
    bytes_promised: int  # what contexts use and may still take; admission compares this with the limit
    bytes_limit: int
    contexts: int  # held by requests, and idle
    tokens: int  # offloaded tokens; shared ones count once
    tokens_evicted: int  # offloaded tokens without pages of all layers on the device
    tokens_resident: int  # tokens with pages of all layers, in contexts that are offloaded in part
    tokens_reloaded: int  # tokens reloaded to such pages
    segments: int
    leases: int  # held on segments by unanswered steps and by writes to disk
    tokens_covered: int  # that decode attended to, counted for each layer and head
    rows_read: int  # key and value rows read for these tokens
    rows_left_out: int  # rows of decode steps that ran without them, as their contexts were not ready
    ready_seconds: float  # decode waited for offloads and tables to be ready
    wait_seconds: float  # the CPU waited for queries
    attend_seconds: float  # the CPU computed attention
    method_counts: dict[str, int] = {}


class ExpertStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of experts in host memory, since the engine started; see `gpu.runner.ExpertMoves`."""

    fetched: int
    copied: int
    computed: int


class ChunkStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of document chunks since the engine started. memory_bytes: what chunks in host memory take now."""

    memory_bytes: int
    written: int
    refused: int
    evicted: int
    set_aside: int
    lost: int


class MaskStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of constrained draws since the engine started. mask_seconds: the loop's time for making masks. jumps:
    runs of forced tokens that were computed in one step. jumped_tokens: the tokens of all these runs.
    """

    held_requests: int
    masks: int
    mask_seconds: float
    jumps: int = 0
    jumped_tokens: int = 0


class DraftStats(msgspec.Struct, frozen=True):
    """Counters of drafts since the engine started. steps: with drafts. proposed, accepted: drafted tokens, and those
    that were drawn. saved_seconds: what steps without drafts would have taken more. declined: steps that could have
    drafted but would not have gained. model_seconds: time of the draft model.
    """

    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    saved_seconds: float = 0.0
    declined: int = 0
    model_seconds: float = 0.0


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and counters of the engine; counters count since it started."""

    num_running: int
    num_prefilling: int
    num_waiting: int
    pages_used: int  # held by requests
    pages_cached: int  # held by the prefix cache alone
    pages_total: int
    pages_committed: int  # whose memory the operating system has given
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    preemptions: int
    recomputed_tokens: int  # computed again after a preemption
    steps: int
    step_seconds: float
    rings_free: int
    waiting_tokens: int = 0  # of waiting sequences
    waiting_uncached_tokens: int = 0  # still to be computed, of waiting sequences and of prompts in prefill
    running_adapters: list[int] = []  # numbers of adapters in use, by decode or prefill
    waiting_adapters: list[int] = []
    host: HostStats | None = None  # None: no host tier
    methods: dict[str, list[int]] = {}  # counters of `gpu.methods` over all profiles: one value, or one for each layer
    masks: MaskStats = MaskStats(held_requests=0, masks=0, mask_seconds=0.0)
    drafts: DraftStats = DraftStats()
    experts: ExpertStats | None = None  # None: all experts are on the device
    chunks: ChunkStats | None = None  # None: no documents
    disk: DiskCounts | None = None  # None: no contexts on disk


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """The engine's message about one step."""

    deltas: list[Delta]
    progress: list[Progress]
    stats: Stats | None


Told = Sessions | ContextSaved | SavedTokens
"""Answers to questions of the API process, matched by `request_id`."""

FromEngine = (
    Loading | Ready | Writing | Failed | Pulse | Accepted | Refused | ChunksStored | Told | Outputs | CacheChanges
)
