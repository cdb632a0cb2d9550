"""Define the answers about the server itself: the model, its tokenizer, the engine's limits and load, its health."""

from typing import Literal

import msgspec

from server.loading.served_model import ModelState
from server.routes.answer import Answer, Count


class Model(Answer):
    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    root: str
    max_model_len: int | None
    attention_profiles: list[str]
    state: ModelState
    load_error: str | None


class Models(Answer):
    object: Literal["list"]
    data: list[Model]


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """The settings of the model's tokenizer, as they are, and the template in use."""

    chat_template: str | None
    bos_token: str | None = None
    eos_token: str | None = None


class ServerInfo(Answer):
    """The description of the server, in SGLang's format."""

    model_id: str
    served_model_name: str
    model_path: str
    version: str
    tp_size: Count
    dp_size: Count
    max_total_tokens: Count
    max_running_requests: Count
    max_prefill_tokens: Count
    page_size: Count
    context_length: Count


class Load(Answer):
    """The load of one rank. The counts come once the engine has told them; the shares are from 0 to 1.

    num_waiting_uncached_tokens: of prompts, that are still to be computed. num_total_tokens: in pages, and of prompts
    that wait. gen_throughput: tokens a second, generated in the last ten to twenty.
    """

    dp_rank: Count
    max_total_num_tokens: Count
    max_running_requests: Count
    num_running_reqs: Count | None = None
    num_waiting_reqs: Count | None = None
    num_total_reqs: Count | None = None
    num_waiting_uncached_tokens: Count | None = None
    num_used_tokens: Count | None = None
    num_total_tokens: Count | None = None
    token_usage: float | None = None
    gen_throughput: float | None = None
    cache_hit_rate: float | None = None
    utilization: float | None = None


class Loads(Answer):
    timestamp: str
    version: str
    dp_rank_count: Count
    loads: list[Load]


class Health(Answer):
    """The status, with `stage` and `fraction` while the model loads."""

    status: Literal["ready", "loading", "draining", "hung", "dead", "failed", "unloaded"]
    stage: str | None = None
    fraction: float | None = None


class PlannedItem(Answer):
    """An item of the memory plan."""

    name: str
    bytes: Count
    note: str


class PlannedPlace(Answer):
    """The plan of the device's memory, or of the host's."""

    place: Literal["gpu", "host"]
    limit_bytes: Count
    items: list[PlannedItem]


class GeneratedTokens(Answer):
    """Count tokens by steps of so many seconds, oldest first; the last step is not over."""

    step_seconds: Count
    tokens: list[Count]


class Activity(Health, kw_only=True):
    """Tell what is served within which limits, where memory is, and the tokens of the last minutes.

    `profiles`: the longest prompt and answer of each, once the engine has told.
    """

    model: str
    version: str
    uptime_seconds: float
    device: str | None
    profiles: dict[str, Count]
    default_profile: str | None
    max_running: Count
    max_queue: Count
    page_tokens: Count
    has_chat: bool
    has_documents: bool
    disk_limit_bytes: Count | None
    memory: list[PlannedPlace]
    generated: GeneratedTokens


class Live(Answer):
    status: Literal["alive", "dead"]


class Version(Answer):
    version: str
