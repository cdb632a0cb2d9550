"""Serve `/v1/embeddings` and `/rerank`: prompts become vectors.

A vector is a generation of no token, so limits, metrics and cancellation are those of every generation.
"""

import base64
import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.responses import Response

from gpu.pooling import Pooling
from scheduler.messages import Ready
from server import logs
from server.api_error import invalid
from server.bodies.chat_message import Message
from server.bodies.generation_bodies import CompletionBody, check_completion
from server.bodies.schema_limits import Tree
from server.generation.event_stream import CLIENT_GONE, watched
from server.generation.generation import Disconnected, Generation, Job, collect
from server.generation.prompt_tokens import Prompt, chat_prompt, check_room, completion_prompts, context_of
from server.prompting.plain_chat import Conversation
from server.routes.generate import start_generation
from server.routes.route import ENGINE_ERRORS, Call, Route, json_response
from server.routes.vectors.vector_answers import Embeddings, Ranking
from server.routes.vectors.vector_bodies import (
    EMBEDDINGS,
    MAX_INPUTS,
    RERANK,
    EmbeddingsBody,
    RankedText,
    RerankBody,
    VectorBody,
)
from server.service.service import Service

RANKING_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")

_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
_NO_THOUGHT = "<think>\n\n</think>\n\n"
_NO_RANKING = "this model is not known to rank; set model.ranking to cosine (embeddings) or yes_no (Qwen3-Reranker)"


async def embed(call: Call[EmbeddingsBody]) -> Response:
    service, body = call.service, call.body
    try:
        rows, num_tokens = await embed_texts(call, body, "input")
    except Disconnected:
        return Response(status_code=CLIENT_GONE)
    return await service.texts.run(rows.size, _write_embeddings, service, body, rows, _count(num_tokens))


async def embed_texts(call: Call[Any], body: EmbeddingsBody, name: str) -> tuple[np.ndarray, int]:
    """Return embeddings of length 1, float32 `[inputs, entries]`, and the number of the inputs' tokens.

    `name`: what errors call the input. Raises ApiError and Disconnected.
    """
    service = call.service
    pooling = _embedding_of(service)
    if body.dimensions is not None and not service.vectors.is_nested:
        raise invalid(
            "dimensions", "embeddings of this model have one size (model.nested_embeddings is not set); leave it out"
        )
    prompts = await _prompts(service, body, name, body.input, service.supervisor.ready())
    vectors = await _pool(call, body, prompts, pooling, name)
    size = vectors.shape[1]
    if body.dimensions is not None and body.dimensions > size:
        raise invalid("dimensions", f"got {body.dimensions}, an embedding of this model has {size}")
    return _normalised(vectors[:, : body.dimensions]), _num_tokens(prompts)


async def rerank(call: Call[RerankBody]) -> Response | Tree:
    """Return the documents by their relevance to the query, best first. Raises ApiError."""
    service, body = call.service, call.body
    texts = [document.text if isinstance(document, RankedText) else document for document in body.documents]
    try:
        scores, prompts = await _score(call, texts)
    except Disconnected:
        return Response(status_code=CLIENT_GONE)
    best = sorted(range(len(texts)), key=lambda index: (-scores[index], index))[: body.top_n]
    results = [
        {"index": index, "relevance_score": float(scores[index])}
        | ({} if body.return_documents is False else {"document": {"text": texts[index]}})
        for index in best
    ]
    usage = _count(_num_tokens(prompts))
    return {"id": f"rerank-{uuid.uuid4().hex}", "model": service.model_name, "results": results, "usage": usage}


async def _score(call: Call[RerankBody], texts: list[str]) -> tuple[np.ndarray, list[Prompt]]:
    """Return the score of each text, and the prompts that it took. Raises ApiError and Disconnected."""
    service, body = call.service, call.body
    ranking, limits = service.vectors.ranking, service.supervisor.ready()
    if ranking is None:
        raise invalid("model", _NO_RANKING, "unsupported_value")
    if ranking.yes_no is not None:
        prompts = await _questions(service, body, texts, limits)
        yes, no = (await _pool(call, body, prompts, ranking.yes_no, "documents")).T
        return 1 / (1 + np.exp(no.astype(np.float64) - yes)), prompts
    if body.instruction is not None:
        raise invalid("instruction", "this model compares embeddings, which take no instruction; leave it out")
    prompts = await _prompts(service, body, "query", body.query, limits)
    prompts += await _prompts(service, body, "documents", list(texts), limits)
    rows = _normalised(await _pool(call, body, prompts, _embedding_of(service), "documents"))
    return rows[1:] @ rows[0], prompts


async def _prompts(
    service: Service, body: VectorBody, name: str, given: str | list[str | int | list[int]], limits: Ready
) -> list[Prompt]:
    """Return the prompts of an input, as those of completions. Raises ApiError 400 that names the input."""
    is_many = isinstance(given, list) and not (given and isinstance(given[0], int))
    if is_many and len(given) > MAX_INPUTS:
        raise invalid(name, f"{len(given)} inputs, at most {MAX_INPUTS} are allowed")
    asked = _generation_body(body, given)
    check_completion(asked)
    context = context_of(asked, limits)
    prompts = await completion_prompts(service, asked, limits, name)
    for i, prompt in enumerate(prompts):
        check_room(f"{name}[{i}]" if is_many else name, prompt, context)
    return prompts


async def _questions(service: Service, body: RerankBody, texts: list[str], limits: Ready) -> list[Prompt]:
    """Return a prompt for each document that asks Qwen3-Reranker whether it is relevant.

    Raises ApiError 400 that names the document.
    """
    context = context_of(_generation_body(body, ""), limits)
    instruction = _INSTRUCTION if body.instruction is None else body.instruction
    skips_thought = service.tokenizer.vocabulary.token_to_id("</think>") is not None
    ending = service.tokenizer.encode_inside(_NO_THOUGHT) if skips_thought else []
    prompts = []
    for i, text in enumerate(texts):
        question = f"<Instruct>: {instruction}\n<Query>: {body.query}\n<Document>: {text}"
        messages = [Message(role="system", content=_SYSTEM), Message(role="user", content=question)]
        prompt = await chat_prompt(service, Conversation(messages), context)
        prompts.append(Prompt(prompt.token_ids + ending, "", 0))
        check_room(f"documents[{i}]", prompts[-1], context)
    return prompts


async def _pool(call: Call[Any], body: VectorBody, prompts: list[Prompt], pooling: Pooling, param: str) -> np.ndarray:
    """Return the pooled vectors, float32 `[prompts, entries]`; as many prompts go to the engine at a time as it runs.

    Raises ApiError and Disconnected.
    """
    service = call.service
    asked, limits = _generation_body(body, ""), service.supervisor.ready()
    at_once = service.deployment.scheduler.max_running
    began_s = time.monotonic()
    rows: list[np.ndarray] = []
    for begin in range(0, len(prompts), at_once):
        jobs = [Job(prompt, 0, pooling=pooling) for prompt in prompts[begin : begin + at_once]]
        generation = start_generation(call, "vec", asked, jobs, limits, time.monotonic() - began_s)
        async with watched(call.request.receive, generation):
            await generation.submit(None, None, param)
            rows += await _vectors_of(generation)
    return np.stack(rows)


async def _vectors_of(generation: Generation) -> list[np.ndarray]:
    try:
        gathered = await collect(generation)
    except Disconnected:
        logs.info("client_gone", id=generation.id)
        raise
    found = [update.delta.pooled for updates in gathered for update in updates if update.delta.pooled is not None]
    assert len(found) == len(generation.jobs), "the engine tells one vector for each prompt"
    return [np.frombuffer(raw, np.float32) for raw in found]


def _generation_body(body: VectorBody, prompt: str | list[str | int | list[int]]) -> CompletionBody:
    """Return the fields of a body as a completion of no token, which the engine and the prompts read."""
    cut = body if isinstance(body, EmbeddingsBody) else EmbeddingsBody(input="")
    return CompletionBody(
        prompt=prompt,
        model=body.model,
        temperature=0.0,
        max_tokens=0,
        attention_profile=body.attention_profile,
        cache_salt=body.cache_salt,
        priority=body.priority,
        max_seconds=body.max_seconds,
        truncate_prompt_tokens=cut.truncate_prompt_tokens,
        truncation_side=cut.truncation_side or "right",
    )


def _embedding_of(service: Service) -> Pooling:
    if service.vectors.embedding is None:
        raise invalid("model", service.vectors.why_not, "unsupported_value")
    return service.vectors.embedding


def _normalised(rows: np.ndarray) -> np.ndarray:
    """Return the rows with length 1; a row of zeros stays as it is."""
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    return (rows / np.where(lengths == 0, 1, lengths)).astype(np.float32)


def _write_embeddings(service: Service, body: EmbeddingsBody, rows: np.ndarray, usage: dict[str, int]) -> Response:
    def spell(row: np.ndarray) -> str | list[float]:
        if body.encoding_format == "base64":
            return base64.b64encode(row.astype("<f4").tobytes()).decode()
        return [float(entry) for entry in row]

    data = [{"object": "embedding", "index": index, "embedding": spell(row)} for index, row in enumerate(rows)]
    return json_response({"object": "list", "data": data, "model": service.model_name, "usage": usage})


def _num_tokens(prompts: Sequence[Prompt]) -> int:
    return sum(len(prompt.token_ids) for prompt in prompts)


def _count(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def _ranking_route(path: str) -> Route:
    return Route(
        "post",
        path,
        rerank,
        "Rank documents by a query",
        Ranking,
        RERANK,
        {"query": "capital of France", "documents": ["Paris is in France.", "Cats sleep."]},
        errors=ENGINE_ERRORS,
        operation_id=path.strip("/").replace("/", "_"),
    )


ROUTES = (
    Route(
        "post",
        "/v1/embeddings",
        embed,
        "Texts as vectors",
        Embeddings,
        EMBEDDINGS,
        {"input": ["Hello!"]},
        errors=ENGINE_ERRORS,
    ),
    *map(_ranking_route, RANKING_PATHS),
)
