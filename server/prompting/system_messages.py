"""Place the instructions of a chat: messages of the roles `system` and `developer`, which are one to templates.

No text of theirs is lost, and their order stays.
"""

from msgspec import structs

from server.bodies.chat_message import Message, message_text


def place_systems(messages: list[Message], takes_system: bool, takes_later: bool) -> list[Message]:
    """Return the chat with every instruction under the role `system`.

    Those that open it are one message; so are all of them, at the front, if the template does not take later ones. If
    it takes none, they are the beginning of what the user says first.
    """
    named = [
        structs.replace(message, role="system") if message.role == "developer" else message for message in messages
    ]
    num_first = next((i for i, message in enumerate(named) if message.role != "system"), len(named))
    front, others = named[:num_first], named[num_first:]
    if not (takes_system and takes_later):
        front += [message for message in others if message.role == "system"]
        others = [message for message in others if message.role != "system"]
    if not front or (len(front) == 1 and takes_system):
        return front + others
    text = "\n\n".join(filter(None, map(message_text, front)))
    return [Message(role="system", content=text), *others] if takes_system else _begin_user(text, others)


def _begin_user(text: str, messages: list[Message]) -> list[Message]:
    first = next((i for i, message in enumerate(messages) if message.role == "user"), None)
    if first is None:
        return [Message(role="user", content=text), *messages]
    asked = structs.replace(messages[first], content=f"{text}\n\n{message_text(messages[first])}")
    return [*messages[:first], asked, *messages[first + 1 :]]
