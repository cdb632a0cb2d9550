"""Settings of the scheduler, and the message that starts an engine process."""

from pydantic import Field

from gpu.config import GpuConfig, ModelConfig, Profiles
from gpu.memory.plan import MemoryPlan
from transfer.host_config import DocumentsConfig, HostConfig
from transfer.settings_model import Settings


class PrefillConfig(Settings):
    chunk_tokens: int = Field(2048, ge=16, description="most tokens of one prefill unit (one layer over one chunk)")
    max_hidden_tokens: int | None = Field(None, gt=0, description="hidden states of all prefills under way; derived")
    max_jobs: int = Field(8, ge=1, description="prefill jobs under way at once")
    share: float = Field(0.8, gt=0, lt=1, description="of the time while streams run, within the token gap target")
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
    token_gap_target_ms: float = Field(100.0, gt=0, description="aim for the gap between a stream's tokens")
    prefix_cache: bool = True
    jump_forward: bool = Field(True, description="text that a grammar leaves no choice of takes no step for each token")
    prefill: PrefillConfig = PrefillConfig()
    default_profile: str = Field("exact", description="attention profile of requests that name none")


class EngineConfig(Settings):
    """The settings of an engine: a deployment without its server."""

    model: ModelConfig
    gpu: GpuConfig = GpuConfig()
    host: HostConfig | None = None
    documents: DocumentsConfig | None = None
    profiles: Profiles = {}
    scheduler: SchedulerConfig = SchedulerConfig()


class EngineStart(Settings):
    """The first message to an engine process. `memory` was planned before: what is allocated is what it says."""

    config: EngineConfig
    memory: MemoryPlan
    log_level: str
