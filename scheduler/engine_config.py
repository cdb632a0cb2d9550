"""Define the settings of the scheduler, and the message that starts an engine process.

`favour` sets the defaults of three settings. Each of them can also be set by itself:

| favour | prefill.chunk_tokens | token_gap_target_ms | prefill.share |
|---|---|---|---|
| latency | 2,048 | 100 | 0.8 |
| auto | up to 16,384 | 100 | 0.8, or all that the gap target leaves while many prompts wait, or a short one |
| throughput | up to 16,384 | 4,000 | 0.95 |

"Many prompts" are four or more, and at least a quarter of the running streams. Decode steps between their units would
have few rows and delay all of them. A prompt is short if its prefill takes no longer than the gap target. Streams do
not notice it, and spreading it over their steps would only delay it. The gap between tokens stays within its target in
both cases. Beside longer prompts, streams keep a fifth of the time.

A larger unit computes more prompts per launch. Streams do not wait longer for it, because the gap target bounds the
time of a unit, not its tokens. It costs memory. The plan therefore takes the largest of 16,384, 8,192, 4,096 and 2,048
tokens that shortens no context and leaves nearly all pages (`scheduler.planning.engine_memory`): 97 %, and 93 % of
16,384, which compute the attention of most prompts in one launch a layer.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from gpu.config import GpuConfig, ModelConfig, Profiles
from gpu.memory.plan import MemoryPlan
from gpu.model.adapter_file import AdapterFile, read_adapter
from gpu.model.spec import Architecture
from gpu.profiles import FULL_ATTENTION, add_by_name
from transfer.disk.disk_config import DiskConfig
from transfer.host_config import DocumentsConfig, HostConfig
from transfer.settings_model import Settings

CHUNK_TOKENS = 2048
LARGER_CHUNKS = {16_384: 0.93, 8192: 0.97, 4096: 0.97}
"""The units that `favour: auto` and `throughput` try first, in order, each with the share of pages that must be left.
Pages that are evicted instead are read slowly."""
LARGER_CHUNKS_OF_EXPERTS = {16_384: 0.9, 8192: 0.9, 4096: 0.95}
"""The same for a mixture of experts: its layers have many short launches, which take the host as long as units of 4,096
tokens take the device."""
_MANY_PROMPTS, _PROMPTS_A_STREAM = 4, 0.25
"""From so many waiting prompts on, `favour: auto` gives prefill all the time that the gap target leaves."""
_SHARE = 0.8
_THROUGHPUT_GAP_MS, _THROUGHPUT_SHARE = 4000.0, 0.95


class PrefillConfig(Settings):
    chunk_tokens: int = Field(
        CHUNK_TOKENS,
        ge=16,
        description="most tokens of one prefill unit (one layer over one chunk); default: on a GPU, by `favour` and "
        "memory up to 16384",
    )
    max_hidden_tokens: int | None = Field(
        None, gt=0, description="most tokens with hidden states, over all running prefills; default: derived"
    )
    max_jobs: int = Field(8, ge=1, description="most prefill jobs that run at once")
    share: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="prefill's share of the time while streams run, within the token gap target; default: 0.8, with "
        "`favour: auto` all that the target leaves while many prompts wait or a short one does, with `throughput` 0.95",
    )
    block_us: float | None = Field(
        None,
        ge=0,
        description="longest time that a thread block of prefill attention occupies a GPU core while rows wait for the "
        "host; 0: no limit; default: derived",
    )
    oldest_share: float = Field(
        1 / 3,
        ge=0,
        le=0.5,
        description="least share of prefill's time for the oldest prompt; shorter prompts may overtake it with the "
        "rest",
    )


class SchedulerConfig(Settings):
    max_running: int = Field(64, ge=1, description="most sequences that hold pages at once")
    max_queue: int = Field(256, ge=0, description="most sequences that wait; one more is answered with 429")
    max_context_tokens: int | None = Field(
        None, gt=0, description="most tokens of prompt and output; default: the model's"
    )
    favour: Literal["auto", "latency", "throughput"] = Field(
        "auto",
        description="latency: small prefill units, spread over the steps of streams; auto: large units, within the "
        "same gap between tokens; throughput: large units, and streams wait longer for prompts (0.4 s in simulated "
        "loads, 4 s at most)",
    )
    token_gap_target_ms: float = Field(
        100.0, gt=0, description="target for the time between two tokens of a stream; default: by `favour`"
    )
    prefix_cache: bool = True
    session_seconds: float = Field(
        600.0,
        ge=0,
        description="a session is alive for so long after its last request; the beginning of its prompts (system "
        "message and tools) is then evicted last, up to half of the pages",
    )
    jump_forward: bool = Field(
        True, description="tokens that a grammar leaves no choice about are computed in one step"
    )
    prefill: PrefillConfig = PrefillConfig()
    default_profile: str | None = Field(
        None,
        description="attention profile of requests that name none; default: `indexed` on a GPU with a `host` section, "
        "if `tandem plan` finds that it pays; else `exact`, or `offloaded` if one context of `max_context_tokens` does "
        "not fit on the card",
    )

    @model_validator(mode="before")
    @classmethod
    def _take_favour(cls, given: Any) -> Any:
        """Fill in the defaults of `favour: throughput` for settings that are not given."""
        if not isinstance(given, Mapping) or given.get("favour") != "throughput":
            return given
        prefill = given.get("prefill", {})
        if isinstance(prefill, Mapping):
            prefill = {"share": _THROUGHPUT_SHARE} | dict(prefill)
        elif isinstance(prefill, PrefillConfig) and "share" not in prefill.model_fields_set:
            prefill = prefill.model_copy(update={"share": _THROUGHPUT_SHARE})
        return {"token_gap_target_ms": _THROUGHPUT_GAP_MS} | dict(given) | {"prefill": prefill}

    def prefill_share(self, num_prompts: int, prompt_s: float | None, num_running: int) -> float:
        """Return the share of the time that prefill may have; 1.0: all that the gap target leaves.

        num_prompts: prompts that wait or prefill. prompt_s: seconds of prefill left for the next of them; None:
        unknown. num_running: streams, which wait meanwhile.
        """
        if self.prefill.share is not None:
            return self.prefill.share
        are_many = num_prompts >= max(_MANY_PROMPTS, _PROMPTS_A_STREAM * num_running)
        is_short = prompt_s is not None and prompt_s <= self.token_gap_target_ms / 1e3
        return 1.0 if self.favour == "auto" and (are_many or is_short) else _SHARE

    def larger_chunks(self, has_experts: bool) -> Mapping[int, float]:
        """Return the larger units to try before `prefill.chunk_tokens`, with the share of pages that each must leave;
        none if that was set.
        """
        if "chunk_tokens" in self.prefill.model_fields_set or self.favour == "latency":
            return {}
        return LARGER_CHUNKS_OF_EXPERTS if has_experts else LARGER_CHUNKS


AdapterName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


class EngineConfig(Settings):
    """The settings of an engine: a deployment without its server."""

    model: ModelConfig
    gpu: GpuConfig = GpuConfig()
    host: HostConfig | None = None
    disk: DiskConfig | None = None
    documents: DocumentsConfig | None = None
    profiles: Profiles = {}
    adapters: dict[AdapterName, Path] = Field(
        {},
        description="LoRA adapters by name: folders of PEFT; a request asks for one as `model: NAME:ADAPTER`",
    )
    scheduler: SchedulerConfig = SchedulerConfig()

    @property
    def default_profile(self) -> str:
        """Return the profile of requests that name none: the configured one, else full attention."""
        return self.scheduler.default_profile or FULL_ATTENTION

    @property
    def drafts_by_head(self) -> bool:
        """Return whether a profile drafts with the checkpoint's own draft head."""
        return any(one.draft is not None and one.draft.uses_head for one in self.all_profiles.values())

    @property
    def all_profiles(self) -> Profiles:
        """Return the configured profiles, and the default profile if it is a built-in method that needs memory."""
        return add_by_name(self.profiles, self.default_profile)


def read_adapters(config: EngineConfig, architecture: Architecture) -> list[AdapterFile]:
    """Read the configured adapters, in the order of their numbers (the first is 1). Raises ModelError."""
    return [read_adapter(folder, architecture) for folder in config.adapters.values()]


class EngineStart(Settings):
    """The first message to an engine process. memory: the plan that the engine allocates. tells_blocks: whether the
    engine sends `CacheChanges`.
    """

    config: EngineConfig
    memory: MemoryPlan
    log_level: str
    tells_blocks: bool = False
