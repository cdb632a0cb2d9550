"""Place the instructions of a chat: messages of the roles `system` and `developer`, which are one to templates.

None of their text is lost, and their order stays. A later one keeps its place, so that cached tokens in front of it can
be used again. If the template takes no system message there, it becomes a reminder in the turn before it.
"""

from msgspec import structs

from server.bodies.chat_message import Message, Part, message_text


def place_systems(messages: list[Message], takes_system: bool, takes_later: bool) -> list[Message]:
    """Return the chat with every instruction under the role `system`.

    Those that open it are one message. If the template does not take later ones, they are reminders. If it takes none,
    the first ones are the beginning of what the user says first.
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
    """Return a chat that no system message opens, with each as a text behind the user's turn or the result before it.

    Behind an answer it is a turn of the user.
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
