"""`/v1/completions` and `/v1/chat/completions`: a body becomes jobs for the engine, and their output a response."""

from fastapi import APIRouter, Request, Response

from scheduler.messages import Ready
from server import logs
from server.api_error import invalid
from server.bodies.body_reader import read_body
from server.bodies.generation_bodies import ChatBody, CompletionBody, GenerationBody, check_chat, check_completion
from server.generation.event_stream import EventStream, Shape, watched
from server.generation.generation import Disconnected, Generation, Job, collect
from server.generation.prompt_tokens import (
    chat_max_tokens,
    check_num_sequences,
    check_variables,
    completion_max_tokens,
    completion_prompts,
    context_of,
    cut_chat_prompt,
    document_prompt,
    hold_to_form,
)
from server.generation.time_limit import choose_limit
from server.generation.tool_use import choose_tools, hold_answer, read_with
from server.prompting.conversation import read_conversation
from server.routes.chat.chat_shapes import ChatShape, CompletionShape
from server.service.service import Service, service_of
from server.stores.document_texts import DOCUMENTS_OFF, choose_fusion, find_texts, note_use

router = APIRouter()

_MOST_CHAR_BYTES = 4  # of a character in UTF-8
CLIENT_GONE = 499  # for the log alone: nobody reads it


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    service = service_of(request)
    body = await read_body(request, CompletionBody, service.body_room, service.texts, service.settings)
    service.check_model(body.model)
    check_completion(body)
    limits = service.supervisor.ready()
    is_many = isinstance(body.prompt, list) and not (body.prompt and isinstance(body.prompt[0], int))
    check_num_sequences(service, len(body.prompt) if is_many else 1, body.n or 1)
    prompts = await completion_prompts(service, body, limits)
    grammar = await hold_to_form(service, body)
    skips = body.skip_special_tokens is not False
    jobs = [
        Job(prompt, completion_max_tokens(service, body, prompt, limits), grammar=grammar, skip_special_tokens=skips)
        for prompt in prompts
    ]
    generation = start_generation(request, "cmpl", body, jobs, limits)
    shape = CompletionShape(generation, body, service.tokenizer, service.model_name)
    await generation.submit(body.logprobs, body.logprobs if body.echo else None, "prompt")
    return await respond(request, service, body, generation, shape)


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    service = service_of(request)
    body = await read_body(request, ChatBody, service.body_room, service.texts, service.settings)
    service.check_model(body.model)
    check_chat(body)
    check_num_sequences(service, 1, body.n or 1)
    limits = service.supervisor.ready()
    jobs = [await chat_job(service, body, limits, request.state.document_owner)]
    generation = start_generation(request, "chatcmpl", body, jobs, limits)
    shape = ChatShape(generation, body, service.tokenizer, service.model_name)
    await generation.submit((body.top_logprobs or 0) if body.logprobs else None, None, "messages")
    await _keep_documents(service, body, generation, request.state.document_owner)
    return await respond(request, service, body, generation, shape)


def start_generation(
    request: Request, kind: str, body: GenerationBody, jobs: list[Job], limits: Ready, seconds_gone: float = 0.0
) -> Generation:
    """`seconds_gone`: of the call's time. Raises ApiError 400 for a header that cannot be read."""
    service = service_of(request)
    most_seconds = choose_limit(request.headers, body.max_seconds, service.settings.max_request_seconds)
    if most_seconds is not None:
        most_seconds = max(0.0, most_seconds - seconds_gone)
    return Generation(service, kind, body, jobs, limits, request.state.cache_salt, most_seconds)


async def chat_job(service: Service, body: ChatBody, limits: Ready, owner: str) -> Job:
    """Raises ApiError 400 and 404, and RegistryError."""
    context = context_of(body, limits)
    conversation = read_conversation(body)
    check_variables(service, body.chat_template_kwargs or {})
    fusion = None
    if not body.documents:
        prompt = await cut_chat_prompt(service, body, conversation, context)
    else:
        documents = service.documents
        if documents is None:
            raise invalid("documents", DOCUMENTS_OFF)
        most_bytes = _MOST_CHAR_BYTES * service.tokenizer.longest_token_chars * context
        texts = await find_texts(documents, owner, body.documents, most_bytes)
        prompt = await document_prompt(service, documents, conversation, texts, context)
        fusion = choose_fusion(documents.config, body.fusion, limits.num_layers)
    use = choose_tools(body, conversation)
    max_tokens = chat_max_tokens(service, body, prompt, limits)
    grammar = await hold_answer(service, body, use, prompt)
    return Job(prompt, max_tokens, fusion, grammar, read_with(service, use, prompt))


async def _keep_documents(service: Service, body: ChatBody, generation: Generation, owner: str) -> None:
    """Store what came with a chat that the engine has accepted, and meanwhile works on."""
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


async def respond(
    request: Request, service: Service, body: CompletionBody | ChatBody, generation: Generation, shape: Shape
) -> Response:
    if body.stream:
        return EventStream(generation, shape, service.settings, bool(body.return_progress))
    async with watched(request.receive, generation):
        try:
            gathered = await collect(generation)
            num_entries = generation.num_prompt_tokens + generation.num_generated_tokens if body.logprobs else 0
            return Response(await service.texts.run(num_entries, shape.whole, gathered), media_type="application/json")
        except Disconnected:
            logs.info("client_gone", id=generation.id)
            return Response(status_code=CLIENT_GONE)
