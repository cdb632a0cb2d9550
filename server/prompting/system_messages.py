"""Place the instructions of a chat: messages of the roles `system` and `developer`, which templates do not distinguish.

None of their text is lost, and their order stays. A later instruction keeps its place, so that cached tokens before it
can be reused. If the template accepts no system message there, it becomes a reminder in the turn before it.
"""

from msgspec import structs

from server.bodies.chat_message import Message, Part, message_text


def place_systems(messages: list[Message], takes_system: bool, takes_later: bool) -> list[Message]:
    """Return the chat with every instruction under the role `system`.

    Those at the beginning become one message. If the template does not accept later ones, they become reminders. If it
    accepts none, the first ones are put at the beginning of the user's first message.
    """
    named = [
        structs.replace(message, role="system") if message.role == "developer" else message for message in messages
    ]
    num_first = next((i for i, message in enumerate(named) if message.role != "system"), len(named))
    front, others = named[:num_first], named[num_first:]
    if not (takes_system and takes_later):
        others = _remind(others)
    if not front or (len(front) == 1 and takes_system):
        return front + others
    text = "\n\n".join(filter(None, map(message_text, front)))
    return [Message(role="system", content=text), *others] if takes_system else _begin_user(text, others)


def _remind(messages: list[Message]) -> list[Message]:
    """Turn system messages into texts at the end of the user's turn, or of the tool result, before each.

    After an answer, such a text becomes a turn of the user. The chat must not begin with a system message.
    """
    placed: list[Message] = []
    for message in messages:
        if message.role != "system":
            placed.append(message)
            continue
        text = f"<system-reminder>\n{message_text(message)}\n</system-reminder>"
        if placed[-1].role == "assistant":
            placed.append(Message(role="user", content=text))
        else:
            placed[-1] = _add_text(placed[-1], text)
    return placed


def _add_text(message: Message, text: str) -> Message:
    if isinstance(message.content, list):
        return structs.replace(message, content=[*message.content, Part(type="text", text=text)])
    return structs.replace(message, content=f"{message.content or ''}\n\n{text}")


def _begin_user(text: str, messages: list[Message]) -> list[Message]:
    first = next((i for i, message in enumerate(messages) if message.role == "user"), None)
    if first is None:
        return [Message(role="user", content=text), *messages]
    asked = structs.replace(messages[first], content=f"{text}\n\n{message_text(messages[first])}")
    return [*messages[:first], asked, *messages[first + 1 :]]
