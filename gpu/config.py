"""Settings of the device side: the model, the device, and attention profiles."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    SerializerFunctionWrapHandler,
    StringConstraints,
    field_validator,
    model_serializer,
    model_validator,
)

from transfer.settings_model import Settings


class ModelConfig(Settings):
    """A Hugging Face folder, a GGUF file, or random weights of a named shape (for benchmarks without a checkpoint)."""

    path: Path | None = Field(
        None,
        description="folder with config.json, *.safetensors and the tokenizer, or a GGUF file (of several, the first), "
        "or hf:OWNER/NAME, which `serve` and `plan` fetch",
    )
    random_weights: str | None = Field(None, description="a named shape, for instance llama-3.1-8b")
    tokenizer: Path | None = Field(None, description="folder or GGUF file of the tokenizer; defaults to `path`")
    name: str | None = Field(None, description="the id in /v1/models; defaults to the folder's or the shape's name")
    aliases: tuple[str, ...] = Field((), description="further ids by which requests may name the model")
    shape: str | None = Field(None, description="named shape to plan with while the folder `path` does not exist yet")
    weights: Literal["bfloat16", "fp8", "int8", "int4"] | None = Field(
        None,
        description="format that matrices of an unquantised checkpoint are rounded to at load, and keep on a GPU; "
        "bfloat16: they stay as they are. Leave it out for a quantised checkpoint, which is served as it is",
    )
    products: Literal["auto", "own", "integers", "humming", "fp8"] = Field(
        "auto",
        description="kernels for quantised matrices. own: Tandem's, which multiply floats. integers: Tandem's; on a "
        "CPU, those for 4 and 8 bits and FP4 round activations to 16 bits and multiply integers. This is faster, and "
        "next-token distributions stay within 3e-7 (KL) of floats. auto: integers on a CPU, and for the experts that "
        "the CPU computes beside a GPU; own on a GPU. humming: on a GPU the library humming-kernels (the extra "
        "`humming`), for the formats that it supports; the log names the others. Its kernels are compiled at the "
        "first start and kept in the user's cache folder. fp8: where 16 tokens or more are multiplied by an FP8 matrix "
        "with a scale a row (or one for all), the tokens are rounded to FP8, too. Prompts are faster, and a little "
        "quality is lost (docs/MODELS.md). Not every GPU has this product; the start says so",
    )
    rope: dict[str, int | float | bool | str | list[float]] | None = Field(
        None,
        description="replaces `rope_scaling` of config.json and takes its keys, and also `rope_theta` and "
        "`max_position_embeddings`: {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32768}",
    )
    ignore_config_keys: tuple[str, ...] = Field(
        (),
        description="keys of config.json, or of a GGUF file's architecture, to ignore although Tandem does not know "
        "them; any other unknown key is an error",
    )
    chat_template: Path | None = Field(None, description="jinja file; defaults to the tokenizer's own")
    tool_parser: str = Field(
        "auto",
        description="format in which the model writes tool calls. auto: from `response_template` of the tokenizer's "
        "settings, or else guessed from the chat template. none: calls stay text. The formats are listed at the end "
        "of this page",
    )
    reasoning_parser: str = Field(
        "auto", description="format in which the model marks its reasoning; auto and none as for `tool_parser`"
    )
    pooling: Literal["last", "mean"] | None = Field(
        None,
        description="what /v1/embeddings returns: the last token's hidden state, or the mean of all. Default: as in "
        "the folder's 1_Pooling/config.json, or last",
    )
    nested_embeddings: bool = Field(
        False,
        description="embeddings may be cut to their first entries (Matryoshka), so requests may set `dimensions`",
    )
    ranking: Literal["cosine", "yes_no"] | None = Field(
        None,
        description="how /v1/rerank scores documents: by the cosine of embeddings, or as Qwen3-Reranker does, by the "
        "logits of yes and no. Default: the route refuses requests",
    )

    @model_validator(mode="after")
    def _one_source(self) -> "ModelConfig":
        if (self.path is None) == (self.random_weights is None):
            raise ValueError("model: give either `path` or `random_weights`, and not both")
        return self

    @model_validator(mode="after")
    def _distinct_ids(self) -> "ModelConfig":
        ids = [self.name or self.random_weights or (self.path.name if self.path else ""), *self.aliases]
        for i, alias in enumerate(self.aliases):
            if not alias or alias in ids[: i + 1]:
                raise ValueError(f"aliases: got {alias!r}; wanted further ids, none of them empty or there twice")
        return self


class GpuConfig(Settings):
    """The device, its memory and its CUDA graphs. A value of None is derived from the machine."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    devices: int = Field(
        1,
        ge=1,
        le=16,
        description="GPUs of this host that the model is split over (tensor parallel). Each has a part of every layer, "
        "and keys and values of some heads. The other settings here apply to each device (docs/TENSOR_PARALLEL.md)",
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field("auto", description="auto: bfloat16 on cuda, float32 on cpu")
    memory_limit_gib: float | None = Field(
        None,
        gt=0,
        description="limit of all device memory. Default: nearly all of the card. Without a card: weights, workspaces "
        "and the longest context of each running sequence, of at most four, within half of the host's memory",
    )
    kv_cache_gib: float | None = Field(
        None,
        gt=0,
        description="memory of KV pages; default: what the limit leaves. With too few, running requests are preempted "
        "(`tandem_preemptions_total`)",
    )
    kv_windows: int | None = Field(
        None,
        ge=1,
        description="how many windows to reserve in `kv_cache_gib`, for layers that keep only a sliding window. "
        "Default: two for each running sequence, within half of that memory, or up to 64 where these take 2 % of it",
    )
    states_gib: float | None = Field(
        None,
        gt=0,
        description="part of `kv_cache_gib` for states of recurrent layers: one for each running sequence, and "
        "snapshots at the ends of prompts, from which prompts with the same prefix go on. Default: two states for "
        "each running sequence, within half of that memory",
    )
    host_states_gib: float | None = Field(
        None,
        gt=0,
        description="host memory for snapshots of recurrent layers' states, pinned where there is a GPU. Snapshots on "
        "the card are copied there, and a prompt goes on from either. Default: none",
    )
    snapshot_tokens: int = Field(
        2048,
        ge=64,
        description="tokens of an answer between two snapshots: the most that a next turn computes again, if there is "
        "room for all snapshots. A prompt leaves a snapshot at the end of its last block, at the end of the system "
        "message, and, if it is long, so many tokens before its end",
    )
    state_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="dtype of recurrent layers' states; bfloat16 takes half the memory, and rounds in every step",
    )
    kv: Literal["auto", "bfloat16", "float32", "fp8", "int8"] = Field(
        "auto",
        description="format of keys and values on the device: `dtype`, or 8-bit codes with a scale for each token and "
        "KV head, of which int8 rounds less and is read faster. auto: `dtype`; but bfloat16 on a CPU if `dtype` is "
        "auto too, the compiled step computes the model, and there is no `host` and no `documents`. That halves the "
        "bytes, with next-token distributions within 5e-5 (KL). A draft model has the same format, but not bfloat16 "
        "where auto would choose float32 for it. `host.rows` sets the format in host memory. On a CPU the compiled "
        "step reads all formats but fp8, which runs layer by layer",
    )
    experts_gib: float | Literal["auto"] | None = Field(
        None,
        description="memory of experts on the card. The other experts are in pinned host memory, and a step fetches "
        "those that it uses. auto: what weights, workspaces and `kv_cache_gib` leave; without `kv_cache_gib`, three "
        "quarters of what the rest leaves. Default: all experts are on the card",
    )
    host_experts: Literal["auto", "fetch", "compute"] | int = Field(
        "auto",
        description="how decode steps use experts in host memory. fetch: copy them to the card. compute: the CPU "
        "computes them, in steps of up to 32 rows. A number: the same, in steps of up to so many rows. auto: in steps "
        "of up to as many rows as the CPU is faster for, by measured rates. Prompts and larger steps fetch",
    )
    page_tokens: Literal[16, 32, 64] = 16
    graph_batch_sizes: tuple[int, ...] = Field((1, 2, 4, 8, 16, 24, 32, 48, 64), description="CUDA graphs of decode")
    prefill_graph_sizes: tuple[PositiveInt, ...] | Literal["auto"] = Field(
        "auto",
        description="sizes in tokens of prefill units whose layers are captured as CUDA graphs. A size that is not "
        "faster on this machine than single kernel launches is dropped at start, or kept only for units of exactly "
        "that size; the log says which. auto: 128, 256, 512 and 1,024, with recurrent layers also `chunk_tokens` up to "
        "2,048; of these the first that take under 3 % of the KV pages, with recurrent layers 20 %. []: none",
    )
    threads: int | None = Field(None, gt=0, description="CPU threads of torch; default: physical cores")
    check_coverage: bool = Field(
        False,
        description="check in every decode step that each token is attended to exactly once, and stop if not; slow",
    )

    @field_validator("host_experts", mode="before")
    @classmethod
    def _way_or_rows(cls, given: Any) -> Any:
        is_number = isinstance(given, int) and not isinstance(given, bool) and 0 <= given <= 32
        if given not in ("auto", "fetch", "compute") and not is_number:
            raise ValueError(
                "wanted auto, fetch, compute, or the most rows of a step whose experts are computed, 0 to 32"
            )
        return given

    @field_validator("experts_gib", mode="before")
    @classmethod
    def _bytes_or_auto(cls, given: Any) -> Any:
        is_number = isinstance(given, int | float) and not isinstance(given, bool) and given >= 0
        if given not in (None, "auto") and not is_number:
            raise ValueError("wanted GiB, 0 or more, or auto")
        return given


class MethodChoice(BaseModel):
    """A method's name, or a mapping with `method` and its settings, which the method checks."""

    model_config = ConfigDict(frozen=True, extra="allow")
    method: str

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        if not isinstance(given, str | dict | cls):
            raise ValueError("wanted a method's name, or a mapping with `method` and its settings")
        return {"method": given} if isinstance(given, str) else given

    @property
    def settings(self) -> dict[str, Any]:
        return self.model_extra or {}

    def __str__(self) -> str:
        return self.method


class DraftConfig(Settings):
    """A source of drafts, or a mapping with `source`, `profile` or `model`, and its settings."""

    source: Literal["ngram", "mtp"] = Field(
        "ngram",
        description="ngram: what followed an earlier occurrence of the last tokens, in prompt and answer. mtp: the "
        "draft head of the checkpoint, for families that have one (docs/methods/drafts.md)",
    )
    profile: str | None = Field(
        None,
        description="in place of `source`: a profile that reads the same keys and values at less cost, and drafts in "
        "steps of its own: `indexed`, or a profile with `indexed` or `predicted`. The method in `host` verifies",
    )
    model: Path | None = Field(
        None,
        description="in place of `source`: folder or GGUF file of a smaller model with the same vocabulary, which runs "
        "on the same device, with pages of its own",
    )
    cache_tokens: int = Field(
        32_768, ge=64, description="with `model`: tokens of all contexts that the draft model's pages hold"
    )
    most_tokens: int = Field(
        7, ge=1, le=31, description="most tokens drafted for a sequence in a step; fewer where fewer pay off"
    )
    least_match: int = Field(3, ge=2, le=16, description="how many last tokens must have occurred before, in a row")

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        if not isinstance(given, str | dict | cls):
            raise ValueError(
                "wanted a source's name (ngram, mtp), or a mapping with `source`, `profile` or `model`, and its "
                "settings"
            )
        return {"source": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _one_source(self) -> "DraftConfig":
        given = sorted({"source", "least_match"} & self.model_fields_set)
        others = [key for key in ("profile", "model") if getattr(self, key) is not None]
        if others and given:
            raise ValueError(f"{given[0]}: is set together with `{others[0]}`; leave out one of them")
        if self.source == "mtp" and "least_match" in self.model_fields_set:
            raise ValueError("least_match: is only for `source: ngram`, got `source: mtp`; leave it out")
        if len(others) > 1:
            raise ValueError("model: is set together with `profile`; leave out one of them")
        if self.model is None and "cache_tokens" in self.model_fields_set:
            raise ValueError("cache_tokens: is only for a draft model, and there is no `model`; leave it out")
        return self

    @model_serializer(mode="wrap")
    def _only_given(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write only the keys that were given: a default beside them could be refused when this is read again."""
        return {key: value for key, value in write(self).items() if key in self.model_fields_set}

    @property
    def uses_ngrams(self) -> bool:
        return self.profile is None and self.model is None and self.source == "ngram"

    @property
    def uses_head(self) -> bool:
        """Return whether the checkpoint's draft head drafts."""
        return self.source == "mtp"

    @property
    def name(self) -> str:
        """Return the name of the source, profile or model that drafts."""
        return self.profile or (self.model.name if self.model is not None else self.source)


class Composition(Settings):
    """Attention profiles beside the built-in ones. Each method of the slot `host` is a built-in profile of the same
    name, unless it needs device memory for each sequence (`rings`). A profile has a name of your own and, for each
    slot, a method's name or a mapping with `method` and its settings. A request chooses one by `attention_profile`;
    `scheduler.default_profile` names the one for all others. The methods are listed at the end of this page. A slot
    that is left out has its default. A key without a value is an error.
    """

    prefill: MethodChoice | None = Field(None, description="attention of prompts; default: to all tokens, exactly")
    reuse: MethodChoice | None = Field(None, description="which results of attention later tokens use again")
    host: MethodChoice = Field(
        MethodChoice(method="exact"), description="how a context that outgrows the device is kept and read"
    )
    draft: DraftConfig | None = Field(
        None, description="speculative decoding: how likely next tokens are drafted, as in `draft: ngram`"
    )

    @model_validator(mode="before")
    @classmethod
    def _by_slot(cls, given: Any) -> Any:
        if not isinstance(given, dict | cls):
            raise ValueError("wanted a mapping of slots to methods, like `{host: sampled}`")
        return given


ProfileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Profiles = dict[ProfileName, Composition]
