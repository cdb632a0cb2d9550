"""Render a chat with documents: the template's text with a sentinel for each document, then their tokens instead.

A template that takes `documents` (each a `title` and a `text`) and gives every sentinel back as it was decides where
they stand. For any other, they stand before the first message of the user (of anybody, if that is nobody), in this
order:

    Document 1: TITLE
    TEXT

    Document 2: TITLE
    TEXT

    the message

A document's token ids are its chunks', wherever it stands, and no sentinel is ever a token.
"""

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from msgspec import structs

from server.api_error import ApiError, invalid
from server.bodies.chat_message import Message, message_text
from server.parsing.response_template import END_CHARS
from server.prompting.chat_template import ChatTemplate
from server.prompting.plain_chat import Conversation
from server.text.chunker import Chunks
from server.text.control_tokens import ControlTokens
from server.text.model_tokenizer import Tokenizer, TooManyTokens

# What templates do to a text shows: as JSON or HTML, in other letters, cut, indented or wrapped.
_BEGIN, _END = "Aa \"'<&>\\\n\t ", " \n zZ"

Pieces = list[str | int]  # a text, or which document


@dataclass(frozen=True, slots=True)
class PlacedDocument:
    title: str
    chunks: Chunks


@dataclass(frozen=True, slots=True)
class ChunkedPrompt:
    """A prompt.

    `chunks`: half-open ranges of `token_ids` that are documents' chunks. `end`: the template's last text.
    """

    token_ids: list[int]
    chunks: tuple[tuple[int, int], ...]
    end: str = ""


@dataclass(frozen=True, slots=True)
class RenderedDocuments:
    """A template's text, cut where documents stand. `mark`: see `ControlTokens.choose_mark`."""

    pieces: Pieces
    mark: str | None


def render_documents(
    template: ChatTemplate, control_tokens: ControlTokens, conversation: Conversation, titles: list[str]
) -> RenderedDocuments:
    """Render a chat with a sentinel for each document. Raises ApiError 400."""
    mark = control_tokens.choose_mark([*conversation.texts(), *titles])
    spell = str if mark is None else partial(control_tokens.hide, mark=mark)
    return RenderedDocuments(render_pieces(template, conversation, titles, spell), mark)


def encode_pieces(
    rendered: RenderedDocuments,
    tokenizer: Tokenizer,
    control_tokens: ControlTokens,
    documents: list[PlacedDocument],
    most_tokens: int,
) -> ChunkedPrompt:
    """Return the prompt, with control tokens from the template alone. Raises ApiError 400 and TooManyTokens."""
    pieces, mark = rendered.pieces, rendered.mark
    token_ids: list[int] = []
    chunks: list[tuple[int, int]] = []
    for piece in pieces:
        if isinstance(piece, int):
            for chunk in documents[piece].chunks:
                chunks.append((len(token_ids), len(token_ids) + len(chunk)))
                token_ids.extend(chunk)
        elif mark is not None:
            token_ids += control_tokens.encode(piece, mark, most_tokens, is_inside=bool(token_ids))
        else:
            tokenizer.check_fits(piece, most_tokens)
            token_ids += tokenizer.encode_inside(piece) if token_ids else tokenizer.encode(piece, False)
        if len(token_ids) > most_tokens:
            raise TooManyTokens(len(token_ids))
    last = pieces[-1] if pieces else ""
    return ChunkedPrompt(token_ids, tuple(chunks), last[-END_CHARS:] if isinstance(last, str) else "")


def render_pieces(
    template: ChatTemplate, conversation: Conversation, titles: list[str], spell: Callable[[str], str]
) -> Pieces:
    """Return the template's text, cut where documents stand.

    `spell`: how a text of a client is written. Raises ApiError.
    """
    nonce = f"{secrets.randbits(127):039d}"  # the same in any letters
    sentinels = [f"{_BEGIN}{nonce} {index}{_END}" for index in range(len(titles))]
    own = [{"title": spell(title), "text": text} for title, text in zip(titles, sentinels, strict=True)]
    try:
        pieces = _cut(template.render(conversation, spell, own), nonce, len(titles))
    except ApiError:  # what is wrong with messages alone is told below
        pieces = None
    if pieces is None:
        placed = _place_by_default(conversation.messages, titles, sentinels)
        pieces = _cut(template.render(replace(conversation, messages=placed), spell), nonce, len(titles))
    if pieces is None:
        raise invalid("documents", "the chat template drops or changes the text of the message that they stand before")
    return pieces


def _place_by_default(messages: list[Message], titles: list[str], sentinels: list[str]) -> list[Message]:
    first = next((i for i, message in enumerate(messages) if message.role == "user"), 0)
    blocks = [
        f"Document {number}{f': {title}' if title else ''}\n{text}\n\n"
        for number, (title, text) in enumerate(zip(titles, sentinels, strict=True), 1)
    ]
    asked = messages[first]
    content = "".join(blocks) + message_text(asked)
    return [*messages[:first], structs.replace(asked, content=content), *messages[first + 1 :]]


def _cut(text: str, nonce: str, num_documents: int) -> Pieces | None:
    """Return the text's pieces, if every sentinel stands in it once and nothing else has come of one."""
    parts = re.split(f"{re.escape(_BEGIN + nonce)} ([0-9]+){re.escape(_END)}", text)
    pieces: Pieces = [int(part) if i % 2 else part for i, part in enumerate(parts) if part]
    placed = sorted(piece for piece in pieces if isinstance(piece, int))
    return pieces if placed == list(range(num_documents)) and text.count(nonce) == num_documents else None
