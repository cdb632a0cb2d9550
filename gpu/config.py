"""Settings of the device side: the model and where it runs. Resolving against the machine returns a new tree."""

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
    shape: str | None = Field(None, description="named shape to plan with while the folder `path` is not there yet")
    weights: Literal["bfloat16", "fp8", "int8", "int4"] | None = Field(
        None,
        description="matrices of a plain checkpoint are rounded to this as they are loaded, and stay so on a GPU; "
        "bfloat16: as they are. Leave it out for a quantised checkpoint, which is served as it is",
    )
    products: Literal["auto", "own", "integers", "humming"] = Field(
        "auto",
        description="kernels for quantised matrices. own: Tandem's, which multiply floats. integers: Tandem's, and on "
        "a CPU those of 4 and 8 bits and of FP4 round activations to 16 bits and multiply integers: faster, and next "
        "tokens' distributions within 3e-7 (KL) of floats'. auto: integers on a CPU, and for the experts that it "
        "computes beside a GPU; own on a GPU. humming: on a GPU the "
        "library humming-kernels (the extra `humming`), as far as it has them. The log names what is left out. Its "
        "kernels are compiled at the first start and kept in the user's cache folder",
    )
    rope: dict[str, int | float | bool | str | list[float]] | None = Field(
        None,
        description="in place of `rope_scaling` in config.json, with its keys, and beside them `rope_theta` and "
        "`max_position_embeddings`: {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32768}",
    )
    ignore_config_keys: tuple[str, ...] = Field(
        (),
        description="keys of config.json, or of a GGUF file's architecture, that may be passed over, though nothing "
        "here knows what they mean",
    )
    chat_template: Path | None = Field(None, description="jinja file; defaults to the tokenizer's own")
    tool_parser: str = Field(
        "auto",
        description="how the model writes calls of tools; auto: as `response_template` of the tokenizer's settings "
        "says, else as the chat template looks; none: calls are text. The formats are listed at the end of this page",
    )
    reasoning_parser: str = Field(
        "auto", description="how the model marks its reasoning; auto and none as for `tool_parser`"
    )
    pooling: Literal["last", "mean"] | None = Field(
        None,
        description="of /v1/embeddings, the last token's hidden state or the mean of all; default: what the folder's "
        "1_Pooling/config.json says, or last",
    )
    nested_embeddings: bool = Field(
        False,
        description="the first entries of an embedding are one (Matryoshka), so requests may ask for `dimensions`",
    )
    ranking: Literal["cosine", "yes_no"] | None = Field(
        None,
        description="of /v1/rerank: by the cosine of embeddings, or as Qwen3-Reranker, by what speaks for yes and for "
        "no; default: it is refused",
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
    """One device. What is None is derived from the machine."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    devices: int = Field(
        1,
        ge=1,
        le=16,
        description="of this host over which the model is split (tensor parallel): each has a part of every layer, and "
        "keys and values of some heads. What else is asked for here is of each (docs/TENSOR_PARALLEL.md)",
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field("auto", description="auto: bfloat16 on cuda, float32 on cpu")
    memory_limit_gib: float | None = Field(
        None,
        gt=0,
        description="of device memory, all included; default: nearly all of a card; without one, what weights and "
        "workspaces take beside the longest context of each running sequence, of four at most, in half of the host",
    )
    kv_cache_gib: float | None = Field(
        None,
        gt=0,
        description="KV pages; default: what the limit leaves. With too few, running requests are preempted "
        "(`tandem_preemptions_total`)",
    )
    kv_windows: int | None = Field(
        None,
        ge=1,
        description="windows of layers that keep no more, of `kv_cache_gib`; default: two a running sequence, "
        "in half of what there is, or more (up to 64) where these take 2 % of it",
    )
    states_gib: float | None = Field(
        None,
        gt=0,
        description="states of recurrent layers, of `kv_cache_gib`: one for each running sequence, and snapshots where "
        "prompts ended, from which those that begin alike go on; default: two a running sequence, in half of what "
        "there is",
    )
    host_states_gib: float | None = Field(
        None,
        gt=0,
        description="snapshots of recurrent layers' states in host memory, pinned where there is a GPU: those of the "
        "card are copied there, and a prompt goes on from either; default: none",
    )
    snapshot_tokens: int = Field(
        2048,
        ge=64,
        description="tokens of an answer between two snapshots, which a next turn computes again at most if there is "
        "room for all; prompts leave one at their last block's end, where the system message ends, and long ones so "
        "many tokens in front of their end",
    )
    state_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="states of recurrent layers; bfloat16 takes half the memory, and rounds in every step"
    )
    kv: Literal["auto", "bfloat16", "float32", "fp8", "int8"] = Field(
        "auto",
        description="rows of keys and values on the device: in codes of 8 bits, with a scale a token and KV head, or "
        "as `dtype`. auto: as `dtype`, but in bfloat16 on a CPU where `dtype` is auto, too, of models that the "
        "compiled step computes, without `host` and `documents`: half of the bytes, and next tokens' distributions "
        "within 5e-5 (KL). A model that drafts has rows alike, but none in bfloat16 where auto would take float32 for "
        "it. Rows in host memory are as `host.rows` says. On a CPU the compiled step reads all but fp8, which goes "
        "layer by layer",
    )
    experts_gib: float | Literal["auto"] | None = Field(
        None,
        description="experts' matrices on the card; the others lie in pinned host memory, and those that a step takes "
        "are fetched from there. auto: what weights, workspaces and `kv_cache_gib` leave, or, without that, all but a "
        "quarter of what is left beside experts. Default: all lie on the card",
    )
    host_experts: Literal["auto", "fetch", "compute"] | int = Field(
        "auto",
        description="what decode steps do with experts in host memory. fetch: copy those that they take. compute: the "
        "CPU computes them where they lie, in steps of up to 32 rows. A number: the same, up to so many rows. auto: up "
        "to as many rows as the CPU is faster for, by the machine's rates. Prompts and other steps fetch",
    )
    page_tokens: Literal[16, 32, 64] = 16
    graph_batch_sizes: tuple[int, ...] = Field((1, 2, 4, 8, 16, 24, 32, 48, 64), description="CUDA graphs of decode")
    prefill_graph_sizes: tuple[PositiveInt, ...] | Literal["auto"] = Field(
        "auto",
        description="CUDA graphs of layers of prefill units, by their tokens; a size that is not faster on this "
        "machine than launching kernels one by one is dropped at start, or kept for units of the whole size, as the "
        "log says. auto: 128, 256, 512 and 1,024, with recurrent layers also `chunk_tokens` up to 2,048, or as many of "
        "the first as cost under 3 % of the KV pages, with recurrent layers 20 %. []: none",
    )
    threads: int | None = Field(None, gt=0, description="CPU threads of torch; default: physical cores")
    check_coverage: bool = Field(
        False, description="count in every decode step who covers which tokens, and stop where one is lost; slow"
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
        description="ngram: what followed the last tokens where they stood before, in prompt and answer; mtp: the head "
        "that comes with a checkpoint, of families that have one (docs/methods/drafts.md)",
    )
    profile: str | None = Field(
        None,
        description="in place of `source`: a profile that reads the same keys and values for less, and drafts by steps "
        "of its own: `indexed`, or one of it or of `predicted`; what it drafts is verified by the method of `host`",
    )
    model: Path | None = Field(
        None,
        description="in place of `source`: a folder or GGUF file of a smaller model of the same vocabulary, which runs "
        "on the same device, with pages of its own",
    )
    cache_tokens: int = Field(
        32_768, ge=64, description="with `model`: of all contexts together that it drafts for, in its pages"
    )
    most_tokens: int = Field(
        7, ge=1, le=31, description="drafted for a sequence in a step, at most; fewer by what pays"
    )
    least_match: int = Field(3, ge=2, le=16, description="tokens that must have stood before, one behind another")

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
            raise ValueError(f"{given[0]}: of n-grams, beside `{others[0]}`; leave out one of them")
        if self.source == "mtp" and "least_match" in self.model_fields_set:
            raise ValueError("least_match: of n-grams, beside `source: mtp`; leave it out")
        if len(others) > 1:
            raise ValueError("model: beside `profile`; leave out one of them")
        if self.model is None and "cache_tokens" in self.model_fields_set:
            raise ValueError("cache_tokens: is of a draft model's pages, and there is no `model`; leave it out")
        return self

    @model_serializer(mode="wrap")
    def _only_given(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what was left out, which may not stand beside what was given when this is read again."""
        return {key: value for key, value in write(self).items() if key in self.model_fields_set}

    @property
    def uses_ngrams(self) -> bool:
        return self.profile is None and self.model is None and self.source == "ngram"

    @property
    def uses_head(self) -> bool:
        """Return whether the head that comes with the checkpoint drafts."""
        return self.source == "mtp"

    @property
    def name(self) -> str:
        """Return what drafts: a source, a profile, or a model."""
        return self.profile or (self.model.name if self.model is not None else self.source)


class Composition(Settings):
    """Attention profiles beside the built-in ones. The built-in ones are the methods of the slot `host` by their names,
    without those that plan device memory for each sequence (`rings`). A profile has a name of your own and, for each
    slot, a method's name or a mapping with `method` and its settings. A request may name one in `attention_profile`,
    and so may `scheduler.default_profile`. The methods are listed at the end of this page. A slot that is left out
    has its default. A key without a value is an error.
    """

    prefill: MethodChoice | None = Field(None, description="how prompts are attended to; default: all of them, exactly")
    reuse: MethodChoice | None = Field(None, description="what is kept of attention from one token to the next")
    host: MethodChoice = Field(
        MethodChoice(method="exact"), description="what becomes of a context that outgrows the device"
    )
    draft: DraftConfig | None = Field(
        None, description="tokens that may follow are computed ahead of their draws, where that pays: `draft: ngram`"
    )

    @model_validator(mode="before")
    @classmethod
    def _by_slot(cls, given: Any) -> Any:
        if not isinstance(given, dict | cls):
            raise ValueError("wanted a mapping of slots to methods, like `{host: sampled}`")
        return given


ProfileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Profiles = dict[ProfileName, Composition]
