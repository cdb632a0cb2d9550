"""Messages between the API process and the engine process: msgspec structs, MessagePack over ZeroMQ.

Each engine process has its own pair of sockets (PUSH/PULL), so messages of a dead engine never reach a new one. Times
are `time.monotonic()` seconds, which on Linux all processes of a host share.
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
    PREEMPTIONS: RequestFigure("how often the request was preempted, to make room for another or for itself"),
    ACCEPTED: RequestFigure("tokens that a draft had guessed: each took no step of its own"),
    REJECTED: RequestFigure("drafted tokens that were computed and not drawn"),
}
"""The scheduler's own figures of a request, by name."""

CACHED_FROM = {
    "card": RequestFigure("prompt tokens found in pages of the device", True, "cached_tokens_from_card"),
    "host": RequestFigure("prompt tokens found in host memory", True, "cached_tokens_from_host"),
    "disk": RequestFigure("prompt tokens found on disk", True, "cached_tokens_from_disk"),
}
"""Figures of where a prompt's cached tokens were, by the place: they stand together in an answer's usage."""

FASTER, PAUSED = "computing_is_faster", "reads_paused"
PASSED_OVER = {
    FASTER: RequestFigure(
        "prompt tokens on disk that were computed, since that is faster than to read them",
        True, f"disk_tokens_passed_over_{FASTER}",
    ),
    PAUSED: RequestFigure(
        "prompt tokens on disk that were computed, since reads pause for want of open files or memory",
        True, f"disk_tokens_passed_over_{PAUSED}",
    ),
}  # fmt: skip
"""Figures of a prompt's tokens that are on disk and were computed all the same, by the reason: they stand together."""

COMPUTED_AGAIN = "computed_again_tokens"
AGAIN = RequestFigure(
    "prompt tokens whose keys and values are cached and that were computed again, since no state or window is kept "
    "behind them", True, "cached_tokens_computed_again",
)  # fmt: skip
"""The figure of what a prompt computed again in layers that keep no rows of all tokens, by the name COMPUTED_AGAIN."""


def cached_figure(place: str) -> str:
    """Return the figure's name of tokens that were there."""
    return f"cached_from_{place}"


def passed_figure(why: str) -> str:
    """Return the figure's name of tokens that were passed over on disk for this reason."""
    return f"passed_over_{why}"


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Pack token ids as a prompt has them: int32, in this host's byte order."""
    return array("i", token_ids).tobytes()


class ChunkSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens `[begin, end)` of a prompt, 0-based, are a document's chunk whose keys and values may be stored: computed
    once, at positions from 0.

    `salt` is of the chunk's name beside its token ids: chunks of other salts are not shared (`cache_isolation: key`).
    """

    begin: int
    end: int
    salt: str = ""


class Fusion(msgspec.Struct, frozen=True, kw_only=True):
    """The settings by which a prompt with chunks is computed.

    policy: a name of `gpu.fusion.fusion_plan`.
    ratio: of all prompt tokens, recomputed, in [0, 1].
    select_layer, seam_tokens: of policies that choose.
    """

    policy: str
    ratio: float
    select_layer: int
    seam_tokens: int = 0


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request to generate one sequence. `max_tokens` bounds the output, and prompt + output never exceed the model's
    context.

    `prompt` is packed (`pack_tokens`); requests that share one share the object, and it is hashed once for all of them.
    `stop_token_ids` end it (the stop token is reported in `Delta.token_ids`), and are not drawn before the output has
    `min_tokens` without them; stop strings are the API process's work. `max_tokens` 0 computes the prompt alone (for
    `echo` with `logprobs`, or for a `pooling`). One with a grammar also ends where that allows nothing more.
    """

    request_id: str
    prompt: bytes
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: list[int]
    min_tokens: int = 0
    attention_profile: str
    arrival_s: float
    priority: int = 0  # less is earlier
    pooling: Pooling | None = None
    cache_salt: str = ""  # prefixes are shared among requests of one salt alone
    chunks: list[ChunkSpan] = []  # of the prompt, in its order; they do not overlap
    fusion: Fusion | None = None  # None: vanilla, `chunks` are ignored
    grammar: str = ""  # what the output is held to, as llguidance writes it down; "": nothing
    allowed_token_ids: list[int] = []  # the only ones drawn; none: all
    bad_token_ids: list[list[int]] = []  # runs of tokens that the output does not contain
    prediction: bytes = b""  # packed: tokens that the output may repeat, for a profile that drafts
    owner: str = ""  # whose sessions it may name
    session: str = ""  # that it says it is part of; "": none
    front_tokens: int = 0  # of the prompt: what the system says, with the tools
    slot: int = -1  # that its conversation takes (`SaveContext`); -1: any
    adapter: int = 0  # of `EngineConfig.adapters`, by its number from 1 on; 0: none
    epsilon: float | None = None  # the error of a head that is too large; None: as the profile has it

    @property
    def prefix_salt(self) -> str:
        """Return what requests have alike that share prefixes: what is decoded depends on epsilon, too."""
        return f"{self.adapter} {self.told_salt}" if self.adapter else self.told_salt

    @property
    def told_salt(self) -> str:
        """Return the salt that cache events tell beside the adapter: the request's own, with its epsilon in front."""
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
    """Accept all of these or none: answered by one `Accepted` or `Refused` with the same `submit_id`.

    A prompt travels once: one that a request shares with the request before it is left out, and no prompt is empty.
    """

    submit_id: str
    packed: list[EngineRequest]

    @classmethod
    def of(cls, submit_id: str, requests: list[EngineRequest]) -> Self:
        """Pack requests: prompts that are one object are left out but for the first of them in a row."""
        packed: list[EngineRequest] = []
        before: bytes | None = None
        for request in requests:
            is_shared = request.prompt is before
            packed.append(msgspec.structs.replace(request, prompt=b"") if is_shared else request)
            before = request.prompt
        return cls(submit_id, packed)

    def requests(self) -> list[EngineRequest]:
        """Return each request with its prompt; those that share one share the object."""
        whole: list[EngineRequest] = []
        for request in self.packed:
            whole.append(request if request.prompt else msgspec.structs.replace(request, prompt=whole[-1].prompt))
        return whole


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Forget these requests; their pages are free after the step under way. Unknown ids are ignored. No reply."""

    request_ids: list[str]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Exit now; the API process sends it once it has drained."""


class StoreChunks(msgspec.Struct, frozen=True, tag=True):
    """Compute these chunks' keys and values, behind requests, and store them: answered by one `ChunksStored`.

    Each is packed token ids (`pack_tokens`); `salt` as in `ChunkSpan`.
    """

    request_id: str
    chunks: list[bytes]
    salt: str


class NamedChunk(msgspec.Struct, frozen=True, array_like=True):
    """A chunk of documents, of whatever model. `tokens`: `digest_tokens`; `salt` as in `ChunkSpan`."""

    tokens: str
    num_tokens: int
    salt: str


class DropChunks(msgspec.Struct, frozen=True, tag=True):
    """A message to drop chunks that no document has any more. Requests that read them go on."""

    chunks: list[NamedChunk]


class Expect(msgspec.Struct, frozen=True, tag=True):
    """A message that the answers to these requests called tools, so that their conversations will go on. No reply."""

    request_ids: list[str]


class AskSessions(msgspec.Struct, frozen=True, tag=True):
    """Ask what is kept of an owner's conversations; answered by one `Sessions`.

    forget: a session, of which all that nobody reads is forgotten first; "": nothing is.
    forget_slot: likewise of one conversation; -1: of none.
    forget_saved: a saved context that is deleted first.
    of_all: what is told of saved contexts is of all owners.
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
    """Keep on disk, under a name, what is there of an owner's conversation: of that in this slot, or of the last one of
    this session. Answered by one `ContextSaved`, once it is written.
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
    """Progress of loading: `stage` is a word for people, `fraction` in [0, 1]."""

    stage: str
    fraction: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine serves. Limits that the API process checks requests against.

    `profiles`: the longest prompt and output of each, when nothing else runs; `max_context_tokens`: of any of them.
    `contexts_folder`: of this model's records on disk; "": it keeps none.
    `without_epsilon`: of profiles that take no `EngineRequest.epsilon`, the reason, behind the profile's name.
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
    """The engine ends, and writes contexts: bytes that it has written since its start, and those that wait to be."""

    num_written_bytes: int
    num_left_bytes: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start: one line for the operator (a broken checkpoint, too little memory). It exits after."""

    message: str


class Pulse(msgspec.Struct, frozen=True, tag=True):
    """The process is there, and this turn of its loop has taken so long; twice a second, whatever the loop does."""

    turn_seconds: float


class Accepted(msgspec.Struct, frozen=True, tag=True):
    submit_id: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The answer to a request that is not admitted. `code`: `queue_full` (try again later), `too_large` (can never fit)
    or `grammar` (cannot be compiled); `message` names what was asked and had.
    """

    submit_id: str
    code: str
    message: str


class ChunksStored(msgspec.Struct, frozen=True, tag=True):
    """The answer to `StoreChunks`. `num_known` were stored before; `reason`: why the others could not be, or empty."""

    request_id: str
    num_stored: int
    num_known: int
    reason: str


class KeptConversation(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a conversation of a session, which is given a name if it has none: `tokens` of its last prompt
    and answer, of which so many in front are in pages of the device, in host memory, and on disk. idle_seconds: since
    its last request began or ended.
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
    """A context that was saved by name: its tokens, and how many in front and bytes of it are on disk now. created_s:
    Unix time.
    """

    name: str
    session: str
    tokens: int
    disk_tokens: int
    disk_bytes: int
    created_s: int
    owner: str = ""


class Sessions(msgspec.Struct, frozen=True, tag=True):
    """The answer to `AskSessions`: what is kept, used last first. `forgotten_tokens`: in all places together.
    `disk_bytes`: of all that a session has on disk, also of those that nothing else is known of. `deleted`: whether
    there was a saved context to forget.
    """

    request_id: str
    conversations: list[KeptConversation]
    forgotten_tokens: int = 0
    disk_bytes: dict[str, int] = {}
    saved: list[SavedContext] = []
    deleted: bool = False


class ContextSaved(msgspec.Struct, frozen=True, tag=True):
    """The answer to `SaveContext`: tokens and bytes that are kept. `code` says why none are: `no_disk`, `unknown` (no
    such conversation), `running`, `no_room`, or `no_share` (of its key); "": some are.
    """

    request_id: str
    slot: int = -1
    num_tokens: int = 0
    num_bytes: int = 0
    code: str = ""


class SavedTokens(msgspec.Struct, frozen=True, tag=True):
    """The answer to `ReadSaved`: packed tokens, what computed them, and of which session. `code`: `no_disk` or
    `unknown`; "": it is there. block_bytes: of `block_tokens` on disk.
    """

    request_id: str
    tokens: bytes = b""
    profile: str = ""
    session: str = ""
    block_tokens: int = 1
    block_bytes: int = 0
    code: str = ""


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """One token's natural-log probability and the `(token id, logprob)` of the most likely, best first."""

    logprob: float
    top: list[tuple[int, float]]


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """The output that a step added to one request. The last one has a `finish_reason`: stop, length or error."""

    request_id: str
    token_ids: list[int]
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob] | None = None  # with the first token: entry i is of prompt token i + 1
    pooled: bytes | None = None  # float32 in this host's byte order: what the request's `pooling` asked for
    finish_reason: str | None = None
    error: str | None = None  # with finish_reason error
    may_retry: bool = False  # after an error: what was short then may be there later
    num_cached_tokens: int = 0
    figures: dict[str, int] = {}  # of the request so far, by the names of `RequestFigure`s
    queue_seconds: float | None = None  # with the first delta: from arrival to the start of its prefill
    prefill_seconds: float | None = None  # with the first delta: from the start of its prefill to its first draw


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a request's prefill, in tokens of work done (layer-weighted: all layers of one token are one)."""

    request_id: str
    done_tokens: int
    total_tokens: int
    cached_tokens: int


class HostStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and counters of the host tier; counters count since the engine started."""

    bytes_used: int  # by contexts
    bytes_promised: int  # what admission counts: what contexts have, and may still take
    bytes_limit: int
    contexts: int  # held by requests and idle
    tokens: int  # that are offloaded, shared ones once
    tokens_evicted: int  # of these, without pages of all layers on the device
    tokens_resident: int  # with pages of all layers, of contexts that have a part here: not only what is offloaded
    tokens_reloaded: int  # to such pages, since the engine started
    segments: int
    leases: int  # on segments, of steps without an answer and of rows being written to disk
    tables_built: int  # layers of segments
    tables_failed: int  # read exactly
    tokens_covered: int  # in decode, counted for each layer and head
    rows_read: int  # of those, to answer for all
    rows_left_out: int  # of decode steps that did not wait for their contexts
    ready_seconds: float  # decode waited for offloads to land and tables to stand
    wait_seconds: float  # the CPU waited for queries
    attend_seconds: float  # the CPU attended
    answers_estimated: int  # of a head in a layer, whose error was; none of these six where none is
    answers_heavy: int  # of these, with a key of more than a tenth of the weight
    answers_beyond: int  # the configured bound, without such a key
    answers_heavy_beyond: int  # with one
    steps_beyond: int  # with any of them
    answers_in_full: int  # read so, to know the error or since it is too large


class ExpertStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of experts in host memory, since the engine started; see `gpu.runner.ExpertMoves`."""

    fetched: int
    copied: int
    computed: int


class ChunkStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of documents' chunks since the engine started; memory_bytes: what the last used ones take now."""

    memory_bytes: int
    written: int
    refused: int
    evicted: int
    set_aside: int
    lost: int


class MaskStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of what draws are held to, since the engine started. mask_seconds: of the loop, making masks; jumps:
    runs of tokens that had to come and were computed in one step, of `jumped_tokens` together.
    """

    held_requests: int
    masks: int
    mask_seconds: float
    jumps: int = 0
    jumped_tokens: int = 0


class DraftStats(msgspec.Struct, frozen=True):
    """Counters of drafts since the engine started: steps with any, their drafted tokens, those that were drawn, and the
    seconds that steps without would have taken more. declined: steps that had something to draft and did not, since
    that does not pay; model_seconds: that a draft model took.
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
    pages_committed: int  # of all, those whose memory the host has given
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    preemptions: int
    recomputed_tokens: int  # that preempted requests had computed, and computed again
    steps: int
    step_seconds: float
    rings_free: int
    waiting_tokens: int = 0  # of sequences that wait
    waiting_uncached_tokens: int = 0  # of these, and of prompts under way: those that are still to be computed
    running_adapters: list[int] = []  # their numbers, also of prompts under way
    waiting_adapters: list[int] = []
    host: HostStats | None = None  # None: no host tier
    methods: dict[str, list[int]] = {}  # by the counters of `gpu.methods`, all profiles together: one, or one a layer
    masks: MaskStats = MaskStats(held_requests=0, masks=0, mask_seconds=0.0)
    drafts: DraftStats = DraftStats()
    experts: ExpertStats | None = None  # None: all lie on the device
    chunks: ChunkStats | None = None  # None: no documents
    disk: DiskCounts | None = None  # None: no contexts on disk


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """The engine's message about one step."""

    deltas: list[Delta]
    progress: list[Progress]
    stats: Stats | None


Told = Sessions | ContextSaved | SavedTokens
"""What answers a question of the API process, by its `request_id`."""

FromEngine = (
    Loading | Ready | Writing | Failed | Pulse | Accepted | Refused | ChunksStored | Told | Outputs | CacheChanges
)
