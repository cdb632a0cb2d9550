"""Leave out of a chat's instructions the lines that a client changes with each request and that tell a model nothing.

One such line near the front changes every block behind it, so that nothing cached could be used again.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from msgspec import structs

from server.bodies.chat_message import Message, Part
from server.prompting.plain_chat import Conversation

_INSTRUCTIONS = ("system", "developer")


class LeftOut:
    """The patterns of `server.left_out`. `count` is called with a pattern and how often it was found."""

    def __init__(self, patterns: Sequence[str], count: Callable[[str, int], None]) -> None:
        self._patterns = [re.compile(pattern) for pattern in patterns]
        self._count = count

    def clean(self, conversation: Conversation) -> Conversation:
        """Return a conversation without these texts in its instructions; a message of nothing else is left out.

        What users, tools and the model said is never changed. The last message stays, whatever is left of it.
        """
        cleaned: list[Message] = []
        for message in conversation.messages:
            kept = self._clean(message) if message.role in _INSTRUCTIONS else message
            if kept is not None:
                cleaned.append(kept)
        return replace(conversation, messages=cleaned or [Message(role="system", content="")])

    def _clean(self, message: Message) -> Message | None:
        """Return the message itself where nothing was found, and None where nothing else was in it."""
        if isinstance(message.content, list):
            texts = [(part, self._strip(part.text or "")) for part in message.content]
            if all(text == part.text for part, text in texts):
                return message
            parts = [Part(type="text", text=text) for _, text in texts if text]
            return structs.replace(message, content=parts) if parts else None
        text = self._strip(message.content or "")
        if text == message.content:
            return message
        return structs.replace(message, content=text) if text else None

    def _strip(self, text: str) -> str:
        """Return the text without what the patterns find, nor the blanks that are at its end then."""
        for pattern in self._patterns:
            text, num_found = pattern.subn("", text)
            if num_found:
                self._count(pattern.pattern, num_found)
                text = text.rstrip()
        return text
