"""Count the tokens of a prompt's front: the chat's first instructions and its tools, whatever is said after them."""

import hashlib
from collections import OrderedDict
from dataclasses import replace
from itertools import takewhile

import msgspec

from server.api_error import ApiError
from server.bodies.chat_message import Message
from server.prompting.chat_template import ChatTemplate
from server.prompting.plain_chat import Conversation
from server.text.model_tokenizer import Tokenizer
from server.text.text_pool import INLINE_CHARS, TextPool

_MOST_KEPT = 256  # counts, of chats whose fronts differ
_PROBE = Message(role="user", content="zq_e90b41f7")  # that no chat begins with
_encode = msgspec.json.Encoder().encode


class PromptFronts:
    """The counts of the last fronts: each is rendered and counted once."""

    def __init__(self, tokenizer: Tokenizer, texts: TextPool) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    async def count(self, template: ChatTemplate, conversation: Conversation, text: str) -> int:
        """Return how many first tokens a chat's prompt shares with any other chat that has the same instructions and
        tools; 0 for a chat without either. text: the prompt.
        """
        front = list(takewhile(lambda one: one.role in ("system", "developer"), conversation.messages))
        if not front and not conversation.tools:
            return 0
        key = hashlib.blake2b(_encode([front, conversation.tools, conversation.variables]), digest_size=16).digest()
        if key not in self._counts:
            other = replace(conversation, messages=[*front, _PROBE], continues=False, begins_answer=True)
            try:
                rendered = await self._texts.render(template.render, other, str)
                pairs = enumerate(zip(text, rendered, strict=False))
                shared = text[: next((i for i, (one, two) in pairs if one != two), min(len(text), len(rendered)))]
                found = await self._texts.run(INLINE_CHARS + len(shared), self._tokenizer.encode, shared, False)
            except ApiError:  # of a template that wants more of a chat, or of a server that has too much to do
                return 0
            self._counts[key] = len(found)
            if len(self._counts) > _MOST_KEPT:
                self._counts.popitem(last=False)
        self._counts.move_to_end(key)
        return self._counts[key]
