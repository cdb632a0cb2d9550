"""Request bodies of embeddings and of ranking, and the tables of their fields."""

from typing import Annotated, Literal

import msgspec

from server.bodies.field_table import ATTENTION, TEXT_ONLY
from server.bodies.fields import Each, Fields, Rule, does, refused, served
from server.bodies.generation_bodies import CacheSalt, TruncationSide
from server.bodies.keep_alive import KeepAlive
from server.bodies.schema_limits import NULL, BodyLimits, SchemaLimits, Tree, prompts

MAX_INPUTS = 2048  # OpenAI's
RankedString = Annotated[str, msgspec.Meta(min_length=1)]


class VectorBody(msgspec.Struct, kw_only=True):
    """Declare the fields that both bodies share with those that generate."""

    model: str | None = None
    user: str | None = None
    attention_profile: str | None = None
    cache_salt: CacheSalt | None = None
    keep_alive: KeepAlive | None = None
    priority: int | None = None
    max_seconds: float | None = None


class EmbeddingsBody(VectorBody, kw_only=True):
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=2**20)] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide | None = None


class RankedText(msgspec.Struct, kw_only=True):
    text: RankedString


class RerankBody(VectorBody, kw_only=True):
    """Declare Cohere's and Jina's body.

    `instruction`: what makes a document relevant, for models that are asked yes or no.
    """

    query: RankedString
    documents: Annotated[list[RankedString | RankedText], msgspec.Meta(min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    return_documents: bool | None = None
    instruction: str | None = None


_VECTOR: dict[str, Rule] = {
    **served("model", "user"),
    **ATTENTION,
    **refused(TEXT_ONLY, "mm_processor_kwargs", "media_io_kwargs", at=({},)),
    **refused("the header x-request-id names a request", "request_id"),
    **refused("vectors have length 1 here", "normalize", "use_activation", at=(True,)),
    **refused("vectors are of float32 here", "embed_dtype", at=("float32",)),
    **refused("vectors are in the order of a little-endian host", "endianness", at=("native", "little")),
}


def _embedding_bounds(limits: BodyLimits) -> dict[str, Tree]:
    dimensions: dict[str, Tree] = {} if limits.has_nested_embeddings else {"dimensions": {"enum": [None]}}
    return {"input": prompts(limits, MAX_INPUTS)} | dimensions


EMBEDDINGS = Fields(
    EmbeddingsBody,
    {
        **_VECTOR,
        **served("input", "encoding_format", "dimensions", "truncate_prompt_tokens", "truncation_side"),
        **refused("a text gets its tokenizer's special tokens", "add_special_tokens", at=(True,)),
    },
    SchemaLimits(_embedding_bounds),
)
RANKED_TEXT = Fields(RankedText, served("text"))
RERANK = Fields(
    RerankBody,
    {
        "documents": Each(RANKED_TEXT),
        **_VECTOR,
        **served("query", "top_n", "return_documents"),
        **does("what makes a document relevant, for models that are asked yes or no", "instruction"),
        **refused("documents are read whole; cut them before", "max_tokens_per_doc", "max_chunks_per_doc",
                  "truncate_prompt_tokens"),
        **refused("documents are one text each", "rank_fields", at=(["text"],)),
    },
    SchemaLimits(lambda limits: {"instruction": NULL if limits.ranks_by == "cosine" else {}}),
)  # fmt: skip
