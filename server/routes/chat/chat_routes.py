"""Serve `/v1/completions` and `/v1/chat/completions`."""

from starlette.responses import Response

from server.bodies.field_table import CHAT, COMPLETION
from server.bodies.generation_bodies import ChatBody, CompletionBody, check_chat, check_completion
from server.generation.generation import Generation, Job
from server.generation.prompt_tokens import (
    check_num_sequences,
    completion_max_tokens,
    completion_prompts,
    form_grammar_of,
)
from server.routes.chat.chat_answers import ChatChunk, ChatCompletion, Completion, CompletionChunk
from server.routes.chat.chat_shapes import ChatShape, CompletionShape
from server.routes.generate import chat_job, respond, start_generation
from server.routes.route import ENGINE_ERRORS, Call, Route
from server.service.service import Service
from server.stores.document_texts import note_use


async def complete(call: Call[CompletionBody]) -> Response:
    """Generate the completions of one prompt or several. Raises ApiError."""
    service, body = call.service, call.body
    check_completion(body)
    limits = service.supervisor.ready()
    is_many = isinstance(body.prompt, list) and not (body.prompt and isinstance(body.prompt[0], int))
    check_num_sequences(service, len(body.prompt) if is_many else 1, body.n or 1)
    prompts = await completion_prompts(service, body, limits)
    grammar = await form_grammar_of(service, body)
    skips = body.skip_special_tokens is not False
    jobs = [
        Job(prompt, completion_max_tokens(service, body, prompt, limits), grammar=grammar, skip_special_tokens=skips)
        for prompt in prompts
    ]
    generation = start_generation(call, "cmpl", body, jobs, limits)
    shape = CompletionShape(generation, body, service.tokenizer, service.model_name)
    await generation.submit(body.logprobs, body.logprobs if body.echo else None, "prompt")
    return await respond(call, body, generation, shape)


async def complete_chat(call: Call[ChatBody]) -> Response:
    """Generate the answers to a chat, with its documents if it names some. Raises ApiError."""
    service, body = call.service, call.body
    check_chat(body)
    check_num_sequences(service, 1, body.n or 1)
    limits = service.supervisor.ready()
    jobs = [await chat_job(service, body, limits, call.owner)]
    generation = start_generation(call, "chatcmpl", body, jobs, limits)
    shape = ChatShape(generation, body, service.tokenizer, service.model_name)
    await generation.submit((body.top_logprobs or 0) if body.logprobs else None, None, "messages")
    await _keep_documents(service, body, generation, call.owner)
    return await respond(call, body, generation, shape)


async def _keep_documents(service: Service, body: ChatBody, generation: Generation, owner: str) -> None:
    """Store what came with a chat that the engine has accepted, while the engine works on it."""
    if not body.documents or service.documents is None:
        return
    service.metrics.document_chats.inc()
    service.metrics.document_tokens.inc(sum(end - begin for begin, end in generation.jobs[0].prompt.chunks))
    try:
        prompt = generation.jobs[0].prompt
        await note_use(service.documents, owner, body.documents, prompt.documents, generation.cache_salt)
    except BaseException:
        generation.close()
        raise


ROUTES = (
    Route(
        "post",
        "/v1/chat/completions",
        complete_chat,
        "Answer a chat",
        ChatCompletion,
        CHAT,
        {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32},
        ChatChunk,
        ENGINE_ERRORS,
    ),
    Route(
        "post",
        "/v1/completions",
        complete,
        "Continue a text",
        Completion,
        COMPLETION,
        {"prompt": "Once upon a time", "max_tokens": 32},
        CompletionChunk,
        ENGINE_ERRORS,
    ),
)
