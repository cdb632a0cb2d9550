"""Serve Ollama's routes: `/api/chat`, `/api/generate`, `/api/embed`, and `/api/embeddings`, the older one."""

import time
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from server.bodies.generation_bodies import check_completion
from server.bodies.keep_alive import read_keep_alive
from server.bodies.schema_limits import Tree
from server.generation.event_stream import CLIENT_GONE
from server.generation.generation import Disconnected, Job
from server.generation.prompt_tokens import (
    completion_max_tokens,
    completion_prompts,
    context_of,
    form_grammar_of,
    profile_of,
)
from server.generation.time_limit import choose_limit
from server.routes.generate import respond, start_generation
from server.routes.ollama.ollama_answers import (
    OllamaChat,
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaError,
    OllamaText,
)
from server.routes.ollama.ollama_bodies import (
    OLLAMA_CHAT,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
    OLLAMA_GENERATE,
    OllamaBody,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
)
from server.routes.ollama.ollama_shape import OllamaShape, now, write_idle_line
from server.routes.ollama.ollama_translation import (
    NAMES,
    asked_tokens,
    translate_chat,
    translate_prompt,
    translate_settings,
    translate_text,
)
from server.routes.route import ENGINE_ERRORS, Call, Route
from server.routes.translation import Translation, generate_chat, rename_errors
from server.routes.vectors.vector_bodies import EmbeddingsBody
from server.routes.vectors.vector_routes import embed_texts


async def chat(call: Call[OllamaChatBody]) -> Response | Tree:
    if not call.body.messages:
        return _tell_loaded(call, {"message": {"role": "assistant", "content": ""}})
    return await _answer(call, translate_chat(call.body), "messages", is_chat=True)


async def generate(call: Call[OllamaGenerateBody]) -> Response | Tree:
    if not call.body.prompt:
        return _tell_loaded(call, {"response": ""})
    if call.body.raw:
        return await _continue_text(call)
    return await _answer(call, translate_prompt(call.body), "prompt", is_chat=False)


def _tell_loaded(call: Call[Any], said: Tree) -> Tree:
    """Answer a request for nothing, by which clients load a model, or unload it with a `keep_alive` of 0.

    Raises ApiError 503 unless it is loaded, and 400 for what no request may say.
    """
    choose_limit(call.request.headers, None, None)
    told = {"model": _name(call), "created_at": now(), **said, "done": True}
    if call.models.is_managed and _asks_to_unload(call.body):
        call.models.unload_when_idle(call.model)
        return told | {"done_reason": "unload"}
    with rename_errors((), NAMES):
        settings = translate_settings(call.body)
        check_completion(settings)
        profile_of(settings, call.service.supervisor.ready())
    return told | {"done_reason": "load"}


def _asks_to_unload(body: OllamaChatBody | OllamaGenerateBody) -> bool:
    asked = body.messages if isinstance(body, OllamaChatBody) else body.prompt
    return not asked and read_keep_alive(body.keep_alive) == 0


def _needs_engine(body: OllamaChatBody | OllamaGenerateBody) -> bool:
    return not _asks_to_unload(body)


def _idle_line(call: Call[Any]) -> bytes:
    return write_idle_line(_name(call), is_chat=isinstance(call.body, OllamaChatBody))


async def _answer(call: Call[Any], translated: Translation, param: str, is_chat: bool) -> Response:
    generation = await generate_chat(call, translated, "ollama", param)
    shape = OllamaShape(generation, _name(call), _num_ctx(call.body), is_chat)
    return await respond(call, translated.chat, generation, shape, shape.keepalive)


async def _continue_text(call: Call[OllamaGenerateBody]) -> Response:
    """Continue a text as it is, without a template."""
    service, body = call.service, call.body
    completion = translate_text(body)
    with rename_errors((), NAMES):
        check_completion(completion)
        limits = service.supervisor.ready()
        prompts = await completion_prompts(service, completion, limits)
        grammar = await form_grammar_of(service, completion)
        [prompt] = prompts
        room = context_of(completion, limits) - len(prompt.token_ids)
        asked = asked_tokens(body)
        job = Job(prompt, completion_max_tokens(service, completion, prompt, limits), grammar=grammar)
        job = replace(job, max_tokens=room if asked is None else min(asked, room))
        generation = start_generation(call, "ollama", completion, [job], limits)
        await generation.submit(None, None, "prompt")
    shape = OllamaShape(generation, _name(call), _num_ctx(body), is_chat=False)
    return await respond(call, completion, generation, shape, shape.keepalive)


def _name(call: Call[Any]) -> str:
    """Return the model's name as the request spelled it."""
    return call.body.model or call.service.model_name


def _num_ctx(body: OllamaBody) -> int | None:
    return None if body.options is None else body.options.num_ctx


async def embed(call: Call[OllamaEmbedBody]) -> Response | Tree:
    """Return embeddings of length 1; texts that are too long are cut unless `truncate` is false. Raises ApiError."""
    body, began_s = call.body, time.monotonic()
    cuts = body.truncate is not False
    asked = EmbeddingsBody(
        model=body.model,
        input=list(body.input) if isinstance(body.input, list) else body.input,
        dimensions=body.dimensions,
        truncate_prompt_tokens=-1 if cuts else None,
    )
    try:
        rows, num_tokens = await embed_texts(call, asked, "input")
    except Disconnected:
        return Response(status_code=CLIENT_GONE)
    return {
        "model": _name(call),
        "embeddings": rows.tolist(),
        "total_duration": round(1e9 * (time.monotonic() - began_s)),
        "load_duration": 0,
        "prompt_eval_count": num_tokens,
    }


async def embed_one(call: Call[OllamaEmbeddingsBody]) -> Response | Tree:
    try:
        rows, _ = await embed_texts(
            call, EmbeddingsBody(model=call.body.model, input=call.body.prompt, truncate_prompt_tokens=-1), "prompt"
        )
    except Disconnected:
        return Response(status_code=CLIENT_GONE)
    return {"embedding": rows[0].tolist()}


ROUTES = (
    Route(
        "post",
        "/api/chat",
        chat,
        "Answer a chat of Ollama's clients",
        OllamaChat,
        OLLAMA_CHAT,
        {"messages": [{"role": "user", "content": "Hello!"}], "stream": False, "options": {"num_predict": 9}},
        errors=ENGINE_ERRORS,
        error=OllamaError,
        line=OllamaChat,
        needs_engine=_needs_engine,
        idle_line=_idle_line,
    ),
    Route(
        "post",
        "/api/generate",
        generate,
        "Answer a prompt of Ollama's clients",
        OllamaText,
        OLLAMA_GENERATE,
        {"prompt": "Hello!", "stream": False, "options": {"num_predict": 9}},
        errors=ENGINE_ERRORS,
        error=OllamaError,
        line=OllamaText,
        needs_engine=_needs_engine,
        idle_line=_idle_line,
    ),
    Route(
        "post",
        "/api/embed",
        embed,
        "Texts as vectors, for Ollama's clients",
        OllamaEmbeddings,
        OLLAMA_EMBED,
        {"input": ["Hello!"]},
        errors=ENGINE_ERRORS,
        error=OllamaError,
    ),
    Route(
        "post",
        "/api/embeddings",
        embed_one,
        "One text as a vector, for older ones",
        OllamaEmbedding,
        OLLAMA_EMBEDDINGS,
        {"prompt": "Hello!"},
        errors=ENGINE_ERRORS,
        error=OllamaError,
    ),
)
