"""Define the answers of embeddings and of ranking."""

from typing import Literal

from server.routes.answer import Answer, Count


class VectorUsage(Answer):
    prompt_tokens: Count
    total_tokens: Count


class Embedding(Answer):
    """An embedding of length 1; as base64 of little-endian float32 if that is asked for."""

    object: Literal["embedding"]
    index: Count
    embedding: list[float] | str


class Embeddings(Answer):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: VectorUsage


class RankedDocument(Answer):
    text: str


class RankedResult(Answer):
    """A ranked document. `relevance_score`: a cosine, or the probability of yes against no."""

    index: Count
    relevance_score: float
    document: RankedDocument | None = None


class Ranking(Answer):
    """Hold ranked documents, best first."""

    id: str
    model: str
    results: list[RankedResult]
    usage: VectorUsage
