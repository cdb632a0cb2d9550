"""`/v1/responses` and `/v1/messages`: chats by other names. What is said here is translated, and nothing else."""

import msgspec
from fastapi import APIRouter, Request, Response

from server.bodies.body_reader import read_body
from server.bodies.chat_message import Message
from server.bodies.generation_bodies import check_chat
from server.bodies.translated_bodies import CountTokensBody, MessagesBody, ResponsesBody
from server.generation.generation import Generation
from server.generation.prompt_tokens import chat_prompt, profile_of
from server.prompting.conversation import read_conversation
from server.routes.chat.chat_routes import chat_job, respond, start_generation
from server.routes.messages.message_shape import MessageShape
from server.routes.responses.response_routes import find_response, resolve_references
from server.routes.responses.response_shape import ResponseShape
from server.routes.translated.translation import Translation, translate_messages, translate_response
from server.service.service import Service, service_of

router = APIRouter()


@router.post("/v1/responses")
async def responses(request: Request) -> Response:
    service, owner = service_of(request), request.state.document_owner
    body = await read_body(request, ResponsesBody, service.body_room, service.texts, service.settings)
    service.check_model(body.model)
    earlier = _earlier(service, owner, body.previous_response_id)
    body.input = resolve_references(service, owner, body.input)
    translated = translate_response(body, earlier)

    def keep(response_id: str, raw: bytes, answer: Message) -> None:
        if body.store is not False:
            service.responses.keep(owner, response_id, raw, [*earlier, *translated.new_messages, answer])

    generation = await _generate(request, translated, "resp", "input")
    shape = ResponseShape(generation, body, service.model_name, keep)
    return await respond(request, service, translated.chat, generation, shape)


@router.post("/v1/messages")
async def messages(request: Request) -> Response:
    service = service_of(request)
    body = await read_body(request, MessagesBody, service.body_room, service.texts, service.settings)
    service.check_model(body.model)
    translated = translate_messages(body)
    generation = await _generate(request, translated, "msg", "messages")
    return await respond(request, service, translated.chat, generation, MessageShape(generation, service.model_name))


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    service = service_of(request)
    body = await read_body(request, CountTokensBody, service.body_room, service.texts, service.settings)
    service.check_model(body.model)
    translated = translate_messages(body)
    with translated.naming():
        check_chat(translated.chat)
        conversation, limits = read_conversation(translated.chat), service.supervisor.ready()
        context = limits.profiles[profile_of(translated.chat, limits)]
        async with service.texts.aside(conversation.num_chars):
            prompt = await chat_prompt(service, conversation, context)
    counted = msgspec.json.encode({"input_tokens": len(prompt.token_ids)})
    return Response(counted, media_type="application/json")


async def _generate(request: Request, translated: Translation, kind: str, param: str) -> Generation:
    """The chat's one answer, accepted by the engine. Raises ApiError that names what was sent."""
    service = service_of(request)
    with translated.naming():
        check_chat(translated.chat)
        limits = service.supervisor.ready()
        jobs = [await chat_job(service, translated.chat, limits, request.state.document_owner)]
        generation = start_generation(request, kind, translated.chat, jobs, limits)
        await generation.submit(None, None, param)
    return generation


def _earlier(service: Service, owner: str, response_id: str | None) -> list[Message]:
    return [] if response_id is None else find_response(service, owner, "previous_response_id", response_id).messages
