"""Settings of the scheduler, and the message that starts an engine process.

`favour` stands for three settings, of which each may be set by itself:

| favour | prefill.chunk_tokens | token_gap_target_ms | prefill.share |
|---|---|---|---|
| latency | 2,048 | 100 | 0.8 |
| auto | up to 8,192 | 100 | 0.8, or all that the gap target leaves while many prompts wait, or a short one |
| throughput | up to 8,192 | 4,000 | 0.95 |

Many prompts wait where they are four or more, and at least a quarter of the streams that run. Decode steps between
their units would have few rows and put off all of them. A prompt is short where it takes no longer than the target: it
is over before streams would notice, and to spread it over their steps would only let it begin later. The gap between
tokens stays within its target all the same. Beside longer prompts streams keep a fifth of the time.

A larger unit computes more prompts per launch. A stream waits no longer for it: what a unit may take is bounded by the
gap target, not by its tokens. What it costs is memory, so the plan takes the largest of 8,192, 4,096 and 2,048 tokens
that costs no context and next to no pages (`scheduler.planning.engine_memory`).
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
LARGER_CHUNKS = (8192, 4096)
"""What `favour: auto` and `throughput` try first, in order."""
_MANY_PROMPTS, _PROMPTS_A_STREAM = 4, 0.25
"""From which on `favour: auto` gives prefill all that the gap target leaves."""
_SHARE = 0.8
_THROUGHPUT_GAP_MS, _THROUGHPUT_SHARE = 4000.0, 0.95


class PrefillConfig(Settings):
    chunk_tokens: int = Field(
        CHUNK_TOKENS,
        ge=16,
        description="most tokens of one prefill unit (one layer over one chunk); default: on a GPU, by `favour` and "
        "memory up to 8192",
    )
    max_hidden_tokens: int | None = Field(None, gt=0, description="hidden states of all prefills under way; derived")
    max_jobs: int = Field(8, ge=1, description="prefill jobs under way at once")
    share: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="of the time while streams run, within the token gap target; default: 0.8, with `favour: auto` all "
        "that the target leaves while many prompts wait, or one that takes no longer than it, with `throughput` 0.95",
    )
    block_us: float | None = Field(
        None,
        ge=0,
        description="that a block of attention may keep a GPU core while rows wait for the host; 0: any; derived",
    )
    oldest_share: float = Field(
        1 / 3,
        ge=0,
        le=0.5,
        description="of prefill's time, at least, for the prompt that came first; shorter ones pass",
    )


class SchedulerConfig(Settings):
    max_running: int = Field(64, ge=1, description="sequences that hold pages at once")
    max_queue: int = Field(256, ge=0, description="sequences that wait; one more is answered with 429")
    max_context_tokens: int | None = Field(None, gt=0, description="prompt and output; default: the model's")
    favour: Literal["auto", "latency", "throughput"] = Field(
        "auto",
        description="latency: small units of prefill, spread over steps of streams; auto: large ones, within the same "
        "gap between tokens; "
        "throughput: large ones, and streams wait longer for prompts (0.4 s in simulated loads, 4 s at most)",
    )
    token_gap_target_ms: float = Field(
        100.0, gt=0, description="aim for the gap between a stream's tokens; default: by `favour`"
    )
    prefix_cache: bool = True
    session_seconds: float = Field(
        600.0,
        ge=0,
        description="after its last request a session is alive for so long: what its prompts begin with, the system's "
        "words and the tools, is the last to be evicted, up to half of the pages",
    )
    jump_forward: bool = Field(True, description="text that a grammar leaves no choice of takes no step for each token")
    prefill: PrefillConfig = PrefillConfig()
    default_profile: str | None = Field(
        None,
        description="attention profile of requests that name none; default: `indexed` where a `host` section is there, "
        "on a GPU, and `tandem plan` finds that it pays; else `exact`, or `offloaded` where the card has no room for "
        "one context of `max_context_tokens`",
    )

    @model_validator(mode="before")
    @classmethod
    def _take_favour(cls, given: Any) -> Any:
        """Fill in what `favour: throughput` stands for and is not given."""
        if not isinstance(given, Mapping) or given.get("favour") != "throughput":
            return given
        prefill = given.get("prefill", {})
        if isinstance(prefill, Mapping):
            prefill = {"share": _THROUGHPUT_SHARE} | dict(prefill)
        elif isinstance(prefill, PrefillConfig) and "share" not in prefill.model_fields_set:
            prefill = prefill.model_copy(update={"share": _THROUGHPUT_SHARE})
        return {"token_gap_target_ms": _THROUGHPUT_GAP_MS} | dict(given) | {"prefill": prefill}

    def prefill_share(self, num_prompts: int, prompt_s: float | None, num_running: int) -> float:
        """Return the share of the time that prefill may have, 1.0: all that the gap target leaves.

        num_prompts: that wait or are under way. prompt_s: of work that are left for the next of them; None: unknown.
        num_running: streams that wait for it.
        """
        if self.prefill.share is not None:
            return self.prefill.share
        are_many = num_prompts >= max(_MANY_PROMPTS, _PROMPTS_A_STREAM * num_running)
        is_short = prompt_s is not None and prompt_s <= self.token_gap_target_ms / 1e3
        return 1.0 if self.favour == "auto" and (are_many or is_short) else _SHARE

    @property
    def larger_chunks(self) -> tuple[int, ...]:
        """Return the larger units to try before `prefill.chunk_tokens`; none where that was set."""
        is_set = "chunk_tokens" in self.prefill.model_fields_set
        return () if is_set or self.favour == "latency" else LARGER_CHUNKS


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
        """Return the profile of requests that name none; where nobody has chosen one, that of full attention."""
        return self.scheduler.default_profile or FULL_ATTENTION

    @property
    def drafts_by_head(self) -> bool:
        """Return whether a profile drafts by the head that comes with the checkpoint."""
        return any(one.draft is not None and one.draft.uses_head for one in self.all_profiles.values())

    @property
    def all_profiles(self) -> Profiles:
        """Return the named profiles, and the default one's if that is a method which plans memory for sequences."""
        return add_by_name(self.profiles, self.default_profile)


def read_adapters(config: EngineConfig, architecture: Architecture) -> list[AdapterFile]:
    """Return the adapters in the order of their numbers, from 1 on. Raises ModelError."""
    return [read_adapter(folder, architecture) for folder in config.adapters.values()]


class EngineStart(Settings):
    """The first message to an engine process. `memory` was planned before: what is allocated is what it says.
    `tells_blocks`: whether `CacheChanges` are sent.
    """

    config: EngineConfig
    memory: MemoryPlan
    log_level: str
    tells_blocks: bool = False
