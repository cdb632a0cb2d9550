"""Run the work of a call in the engine, and answer with its result; used by every route that generates."""

from typing import Any

from starlette.responses import Response

from scheduler.messages import Ready
from server import logs
from server.api_error import invalid
from server.bodies.generation_bodies import DOCUMENTS_OFF, ChatBody, CompletionBody, GenerationBody
from server.generation.event_stream import CLIENT_GONE, EventStream, Shape, watched
from server.generation.generation import Caller, Disconnected, Generation, Job, collect
from server.generation.prompt_tokens import (
    chat_max_tokens,
    check_variables,
    context_of,
    cut_chat_prompt,
    document_prompt,
    follow_turn,
    predicted_tokens,
    profile_of,
)
from server.generation.session_name import find_session
from server.generation.time_limit import choose_limit
from server.generation.tool_use import choose_tools, constrain_answer, make_reader
from server.prompting.plain_chat import read_conversation
from server.routes.route import Call
from server.service.service import Service
from server.stores.document_texts import choose_fusion, find_texts

_MOST_CHAR_BYTES = 4  # of a character in UTF-8


async def chat_job(service: Service, body: ChatBody, limits: Ready, owner: str) -> Job:
    """Return the work of a chat: its prompt, and how its answer is read and constrained.

    Raises ApiError 400 and 404, and RegistryError.
    """
    context = context_of(body, limits)
    conversation = service.left_out.clean(read_conversation(body))
    check_variables(service, body.chat_template_kwargs or {})
    fusion = None
    if not body.documents:
        prompt = await cut_chat_prompt(service, body, conversation, context)
        if body.truncate_prompt_tokens is None:
            whose = owner, body.cache_salt or "", profile_of(body, limits)
            prompt = await follow_turn(service, prompt, conversation, whose, context)
    else:
        documents = service.documents
        if documents is None:
            raise invalid("documents", DOCUMENTS_OFF)
        most_bytes = _MOST_CHAR_BYTES * service.tokenizer.longest_token_chars * context
        if service.adapters.number_of(body.model):
            raise invalid("documents", "they are computed with the model alone; ask for it without an adapter")
        texts = await find_texts(documents, owner, body.documents, most_bytes)
        prompt = await document_prompt(service, documents, conversation, texts, context)
        fusion = choose_fusion(documents.config, body.fusion, limits.num_layers)
    use = choose_tools(body, conversation)
    max_tokens = chat_max_tokens(service, body, prompt, limits)
    grammar = await constrain_answer(service, body, use, prompt)
    prediction = await predicted_tokens(service, body, context, limits.vocab_size)
    return Job(prompt, max_tokens, fusion, grammar, make_reader(service, use, prompt), prediction=prediction)


def start_generation(
    call: Call[Any], kind: str, body: GenerationBody, jobs: list[Job], limits: Ready, elapsed_seconds: float = 0.0
) -> Generation:
    """Return the generation of a call. Raises ApiError 400 for a header that cannot be read.

    elapsed_seconds: the part of the call's time limit that is used up, besides its wait for the model.
    """
    limit_seconds = choose_limit(call.request.headers, body.max_seconds, call.service.settings.max_request_seconds)
    if limit_seconds is not None:
        limit_seconds = max(0.0, limit_seconds - elapsed_seconds - call.waited_seconds)
    caller = Caller(call.cache_salt, limit_seconds, call.owner, find_session(call.request.headers, body))
    return Generation(call.service, kind, body, jobs, limits, caller)


async def respond(
    call: Call[Any],
    body: CompletionBody | ChatBody,
    generation: Generation,
    shape: Shape,
    idle_line: bytes | None = None,
) -> Response:
    """Answer with a stream if the body asks for one, and with the whole answer otherwise.

    `idle_line`: as of `EventStream`.
    """
    service = call.service
    if body.stream:
        return EventStream(generation, shape, service.settings, bool(body.return_progress), idle_line)
    async with watched(call.request.receive, generation):
        try:
            gathered = await collect(generation)
            num_entries = generation.num_prompt_tokens + generation.num_generated_tokens if body.logprobs else 0
            return Response(await service.texts.run(num_entries, shape.whole, gathered), media_type="application/json")
        except Disconnected:
            logs.info("client_gone", id=generation.id)
            return Response(status_code=CLIENT_GONE)
