"""Drop the oldest turns of a chat whose prompt is longer than the context.

The first instructions and the last question stay. A call is dropped together with its results.
"""

import msgspec

from scheduler.messages import Ready
from server import logs
from server.api_error import PromptTooLong
from server.bodies.chat_message import Message
from server.bodies.generation_bodies import ChatBody
from server.generation.prompt_tokens import chat_prompt, context_of
from server.prompting.plain_chat import read_conversation
from server.service.service import Service

_INSTRUCTIONS = ("system", "developer")


async def kept_messages(service: Service, body: ChatBody, limits: Ready) -> list[int]:
    """Return the indices of the messages that stay, in order: all, or the last ones that leave room for the answer.

    If not even the last question fits with the instructions, all stay, and the prompt is refused as usual.
    """
    everything = list(range(len(body.messages)))
    most = context_of(body, limits) - (body.max_completion_tokens or body.max_tokens or 1)
    if await _fits(service, body, everything, most):
        return everything
    cuts = list_cuts(body.messages)
    least, known = 0, len(cuts)  # those below `least` are too long, those from `known` on fit
    while least < known:
        middle = (least + known) // 2
        if await _fits(service, body, cuts[middle], most):
            known = middle
        else:
            least = middle + 1
    if known == len(cuts):
        return everything
    logs.info("history_cut", messages=len(everything), dropped=len(everything) - len(cuts[known]))
    return cuts[known]


def list_cuts(messages: list[Message]) -> list[list[int]]:
    """Return ever shorter selections of messages, as indices: first without the oldest turns, and then without the
    first answers to the last question.
    """
    num_front = 0
    while num_front < len(messages) and messages[num_front].role in _INSTRUCTIONS:
        num_front += 1
    front, behind = list(range(num_front)), range(num_front, len(messages))
    questions = [i for i in behind if messages[i].role == "user"]
    cuts = [front + list(range(begin, len(messages))) for begin in questions if begin > num_front]
    if questions:
        last = questions[-1]
        answers = [i for i in behind if i > last and messages[i].role == "assistant"]
        cuts += [[*front, last, *range(begin, len(messages))] for begin in answers if begin > last + 1]
    return [cut for cut in cuts if _has_calls([messages[i] for i in cut])]


def _has_calls(messages: list[Message]) -> bool:
    """Return whether each result has its call before it."""
    called: set[str] = set()
    for message in messages:
        called.update(call.id for call in message.tool_calls or ())
        if message.role == "tool" and message.tool_call_id not in called:
            return False
    return True


async def _fits(service: Service, body: ChatBody, kept: list[int], most: int) -> bool:
    if len(kept) > most:
        return False
    chat = msgspec.structs.replace(body, messages=[body.messages[i] for i in kept])
    conversation = service.left_out.clean(read_conversation(chat))
    try:
        prompt = await chat_prompt(service, conversation, most)
    except PromptTooLong:
        return False
    return len(prompt.token_ids) <= most
