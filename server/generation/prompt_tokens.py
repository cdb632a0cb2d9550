"""Convert prompts to token ids off the event loop, and check that ids are in range and the answer has room."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from gpu.profiles import why_unknown
from scheduler.messages import Ready
from server.api_error import NoRoom, PromptTooLong, invalid
from server.bodies.chat_message import message_text, message_texts
from server.bodies.generation_bodies import MAX_VARIABLES, WHOLE_CONTEXT, ChatBody, CompletionBody, GenerationBody
from server.grammar.structured import asks_form, form_grammar
from server.parsing.response_template import END_CHARS
from server.prompting.chat_template import ChatTemplate
from server.prompting.document_prompt import ChunkedPrompt, PlacedDocument, encode_pieces, render_documents
from server.prompting.plain_chat import Conversation
from server.service.service import Service
from server.stores.conversation_tails import Turn
from server.stores.document_texts import Documents, GivenText
from server.text.chunker import Chunks, count_tokens
from server.text.model_tokenizer import Tokenizer, TooManyTokens
from server.text.text_pool import INLINE_CHARS
from server.text.text_stream import TextDecoder

_DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of a prompt.

    text: what `echo` repeats. num_added: first tokens that are not part of it (BOS).
    chunks: half-open ranges of tokens that are document chunks.
    documents: the chunks of each document.
    end: the end of a chat's rendered prompt.
    num_front: the tokens of its system message and tools.
    conversation: a name for the conversation that it continues; "": none is known.
    turn: where it differs from the turn before.
    """

    token_ids: list[int]
    text: str
    num_added: int
    chunks: tuple[tuple[int, int], ...] = ()
    documents: tuple[Chunks, ...] = ()
    end: str = ""
    num_front: int = 0
    conversation: str = ""
    turn: Turn | None = None


@dataclass(frozen=True, slots=True)
class Truncation:
    """How to truncate a prompt: keep its last `keep` tokens, or with `is_right` its first ones."""

    keep: int
    is_right: bool

    def cut(self, prompt: Prompt, tokenizer: Tokenizer) -> Prompt:
        if len(prompt.token_ids) <= self.keep:
            return prompt
        token_ids = prompt.token_ids[: self.keep] if self.is_right else prompt.token_ids[-self.keep :]
        text = spell(tokenizer, token_ids) if prompt.text else ""
        num_front = min(prompt.num_front, len(token_ids)) if self.is_right else 0
        return Prompt(token_ids, text, 0, end="" if self.is_right else prompt.end, num_front=num_front)


def choose_truncation(body: GenerationBody, context: int, num_answer: int) -> Truncation | None:
    """Return how a body wants long prompts truncated; None: they are refused.

    num_answer: tokens that are left free for the answer if `truncate_prompt_tokens` is -1.
    """
    keep = body.truncate_prompt_tokens
    if keep is None:
        return None
    return Truncation(max(1, context - num_answer) if keep == WHOLE_CONTEXT else keep, body.truncation_side == "right")


def max_tokens_to_read(service: Service, cut: Truncation | None, context: int) -> int:
    """Return the most tokens of a text to tokenise. If it is truncated, it may have as many as /tokenize accepts."""
    return context if cut is None else max(context, service.max_tokenize_items)


async def completion_prompts(
    service: Service, body: CompletionBody, limits: Ready, field: str = "prompt"
) -> list[Prompt]:
    """Return the prompts of a body. field: the name of the field in errors. Raises ApiError 400."""
    context = context_of(body, limits)
    asked = body.max_tokens
    cut = choose_truncation(
        body, context, service.settings.default_max_tokens or _DEFAULT_COMPLETION_TOKENS if asked is None else asked
    )
    most = max_tokens_to_read(service, cut, context)
    prompts: list[Prompt] = []
    size = 0  # of all prompts so far, since many short ones take as long as one long one
    for name, given in _split(field, body.prompt):
        size += len(given)
        if isinstance(given, str):
            prompt = await encode_text(service, name, given, size, most)
        else:
            if len(given) > context and cut is None:
                raise PromptTooLong(name, str(len(given)), context)
            check_token_ids(name, given, limits.vocab_size)
            text = await service.texts.run(size, spell, service.tokenizer, given) if body.echo else ""
            prompt = Prompt(given, text, 0)
        if not prompt.token_ids:
            raise invalid(name, "empty; wanted at least one token")
        if cut is not None:
            kept = prompt if body.echo else replace(prompt, text="")
            prompt = await service.texts.run(len(given), cut.cut, kept, service.tokenizer)
        prompts.append(prompt)
    return prompts


async def cut_chat_prompt(service: Service, body: ChatBody, conversation: Conversation, context: int) -> Prompt:
    """Return the prompt of a chat's messages, truncated if the body says so. Raises ApiError 400."""
    cut = choose_truncation(body, context, body.max_completion_tokens or body.max_tokens or 1)
    prompt = await chat_prompt(service, conversation, max_tokens_to_read(service, cut, context))
    return prompt if cut is None else cut.cut(prompt, service.tokenizer)


async def follow_turn(
    service: Service, prompt: Prompt, conversation: Conversation, whose: Sequence[str], context: int
) -> Prompt:
    """Match a chat's prompt with an earlier turn that has the same first user message.

    Its text is unchanged. Where tokens that the model wrote spell the same text, the prompt gets these tokens, so that
    their cached keys and values can be used. whose: keeps conversations of different callers apart.
    """
    opening = next((message_text(message) for message in conversation.messages if message.role == "user"), "")
    digest = hashlib.blake2b("\0".join([*whose, opening]).encode("utf-8", "surrogatepass"), digest_size=16)
    name, size = digest.hexdigest(), len(prompt.token_ids)
    if not any(message.role == "assistant" for message in conversation.messages):
        return replace(prompt, conversation=name)  # a first turn; other conversations may open in the same way
    turn = await service.texts.run(size, service.tails.follow, name, prompt.token_ids, context - 1)
    return replace(prompt, token_ids=turn.token_ids, conversation=name, turn=turn if turn.parted else None)


async def chat_prompt(service: Service, conversation: Conversation, context: int) -> Prompt:
    """Render and tokenise a chat. Control tokens count only where the template writes them, not in messages.

    Raises ApiError 400.
    """
    template, control_tokens, tokenizer = _template(service), service.control_tokens, service.tokenizer
    if len(conversation.messages) > context:
        num_messages = len(conversation.messages)
        raise invalid("messages", f"{num_messages} messages, the attention profile has room for {context} tokens")

    def render() -> tuple[str, str | None]:
        mark = control_tokens.choose_mark(conversation.texts())
        return template.render(conversation, str if mark is None else partial(control_tokens.hide, mark=mark)), mark

    text, mark = await service.texts.render(render)
    size = INLINE_CHARS + conversation.num_chars
    try:
        if mark is None:
            token_ids = await service.texts.run(size, tokenizer.encode_within, text, False, context)
        else:
            token_ids = await service.texts.run(size, control_tokens.encode, text, mark, context)
    except TooManyTokens as error:
        raise PromptTooLong("messages", f"at least {error.num_tokens}", context) from None
    if not token_ids:
        raise invalid("messages", "the chat template rendered an empty prompt")
    num_front = 0 if mark is not None else await service.fronts.count(template, conversation, text)
    return Prompt(token_ids, "", 0, end=text[-END_CHARS:], num_front=num_front)


def check_variables(service: Service, variables: dict[str, object]) -> None:
    """Check the names of template variables. Raises ApiError 400 for too many, and for reserved names."""
    if len(variables) > MAX_VARIABLES:
        raise invalid("chat_template_kwargs", f"{len(variables)} names, at most {MAX_VARIABLES} are allowed")
    taken = sorted(_template(service).own_variables & set(variables)) if variables else []
    if taken:
        raise invalid(f"chat_template_kwargs.{taken[0]}", "this name has a value already; leave it out")


def _template(service: Service) -> ChatTemplate:
    if service.template is None:
        raise invalid("messages", "this model has no chat template; set model.chat_template or use /v1/completions")
    return service.template


async def document_prompt(
    service: Service, documents: Documents, conversation: Conversation, texts: list[GivenText], context: int
) -> Prompt:
    """Return the prompt of a chat with documents, at the places where the template puts them. Raises ApiError 400."""
    template, control_tokens, tokenizer = _template(service), service.control_tokens, service.tokenizer

    def encode() -> tuple[ChunkedPrompt, list[Chunks]]:
        placed = []
        left = context
        for given in texts:
            chunks = documents.chunker.cut(given.text, context)
            left -= count_tokens(chunks)
            if left < 0:
                raise TooManyTokens(context - left)
            placed.append(PlacedDocument(given.title, chunks))
        encoded = encode_pieces(rendered, tokenizer, control_tokens, placed, context)
        return encoded, [one.chunks for one in placed]

    titles = [given.title for given in texts]
    rendered = await service.texts.render(render_documents, template, control_tokens, conversation, titles)
    size = INLINE_CHARS + conversation.num_chars + sum(len(given.text) for given in texts)
    try:
        prompt, cut = await service.texts.run(size, encode)
    except TooManyTokens as error:
        raise PromptTooLong("documents", f"with the messages at least {error.num_tokens}", context) from None
    return Prompt(prompt.token_ids, "", 0, prompt.chunks, tuple(cut), prompt.end)


def spell(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """Return the text of a prompt that was given as token ids, with special tokens spelled out."""
    decoder = TextDecoder(tokenizer, skip_special_tokens=False)
    return "".join(map(decoder.step, token_ids)) + decoder.finish()


async def encode_text(service: Service, name: str, text: str, size: int, context: int) -> Prompt:
    """Tokenise a text prompt. Raises ApiError 400 if it is too long; most of a far too long text is not read."""
    try:
        token_ids = await service.texts.run(size, service.tokenizer.encode_within, text, True, context)
    except TooManyTokens as error:
        raise PromptTooLong(name, f"at least {error.num_tokens}", context) from None
    return Prompt(token_ids, text, service.tokenizer.num_leading_specials(text, token_ids))


async def predicted_tokens(service: Service, body: ChatBody, context: int, vocab_size: int) -> list[int]:
    """Return the tokens of the text that a chat's answer may repeat (`prediction`); [] without one.

    Raises ApiError 400 if it is too long, or has tokens that the model does not have.
    """
    if body.prediction is None:
        return []
    text = "\n".join(message_texts(body.prediction))
    try:
        token_ids = await service.texts.run(len(text), service.tokenizer.encode_within, text, False, context)
    except TooManyTokens as error:
        raise PromptTooLong("prediction", f"at least {error.num_tokens}", context) from None
    check_token_ids("prediction", token_ids, vocab_size)
    return token_ids


def check_num_sequences(service: Service, num_prompts: int, n: int) -> None:
    """Check that all sequences of a request could run or wait together. Raises ApiError 400."""
    most = service.max_sequences
    if num_prompts * n > most:
        field = "prompt" if num_prompts > most else "n"
        raise invalid(field, f"{num_prompts * n} sequences in one request (prompts times n), at most {most} fit")


def check_token_ids(field: str, token_ids: list[int], vocab_size: int) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        bad = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise invalid(field, f"token id {bad} is out of range, the vocabulary has {vocab_size}")


def check_text_tokens(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Check that the model has all tokens of a text, since its tokenizer may have more. Raises ApiError 400."""
    if token_ids and (largest := max(token_ids)) >= vocab_size:
        raise invalid(field, f"its text has token {largest}, the model has {vocab_size:,}; correct model.tokenizer")


def spell_words(tokenizer: Tokenizer, words: list[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of each word, as it is spelled inside a text and after a space."""
    texts = [text for word in words for text in (word.lstrip(" ") or word, f" {word.lstrip(' ')}")]
    found = dict.fromkeys(tuple(tokenizer.encode_inside(text)) for text in texts)
    return tuple(token_ids for token_ids in found if token_ids)


def completion_max_tokens(service: Service, body: CompletionBody, prompt: Prompt, limits: Ready) -> int:
    default = service.settings.default_max_tokens or _DEFAULT_COMPLETION_TOKENS
    return _room("prompt", prompt, context_of(body, limits), "max_tokens", body.max_tokens, default)


def chat_max_tokens(service: Service, body: ChatBody, prompt: Prompt, limits: Ready) -> int:
    """Return the most tokens of a chat's answer; without a limit it may fill the context."""
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    context = context_of(body, limits)
    return _room("messages", prompt, context, field, asked, service.settings.default_max_tokens or context)


def check_room(name: str, prompt: Prompt, context: int) -> None:
    """Check that a prompt fits the context without an answer. Raises ApiError 400."""
    if len(prompt.token_ids) > context:
        raise PromptTooLong(name, str(len(prompt.token_ids)), context)


def context_of(body: GenerationBody, limits: Ready) -> int:
    """Return the most tokens of prompt and answer in the body's profile; for an unknown profile, the most of any."""
    return limits.profiles.get(body.attention_profile or limits.default_profile, limits.max_context_tokens)


def profile_of(body: GenerationBody, limits: Ready) -> str:
    """Return the attention profile of a body. Raises ApiError 400 for one that is not served."""
    profile = body.attention_profile or limits.default_profile
    if profile not in limits.profiles:
        raise invalid("attention_profile", why_unknown(profile[:80], limits.profiles))
    return profile


def epsilon_of(body: GenerationBody, limits: Ready) -> float | None:
    """Return the body's `attention_epsilon`; None: the profile's own value. Raises ApiError 400 if the profile takes
    none.
    """
    given = body.attention_epsilon
    if given is None:
        return None
    profile = profile_of(body, limits)
    if why := limits.without_epsilon.get(profile):
        able = ", ".join(name for name in limits.profiles if name not in limits.without_epsilon)
        wanted = f"leave it out, or name as attention_profile one of {able}" if able else "leave it out"
        raise invalid("attention_epsilon", f"got {given}, and profile {profile!r} {why}; {wanted}")
    return given


async def form_grammar_of(service: Service, body: GenerationBody) -> str:
    """Return the grammar of the answer's form that a body asks for; "" if it asks for none. Raises ApiError 400."""
    if not asks_form(body):
        return ""
    return await service.texts.check(form_grammar, body)


def _room(name: str, prompt: Prompt, context: int, field: str, asked: int | None, default: int) -> int:
    """Return the most tokens of the output. A default, but not an explicit limit, is cut to what the context leaves.

    Raises ApiError 400 with both numbers.
    """
    length = len(prompt.token_ids)
    if length > context or (length == context and asked is None):
        raise PromptTooLong(name, str(length), context)
    if asked is None:
        return min(default, context - length)
    if length + asked > context:
        raise NoRoom(field, length, asked, context)
    return asked


def _split(field: str, prompt: str | list[str | int | list[int]]) -> list[tuple[str, str | list[int]]]:
    """Return the prompts in a body's `field`, each with its name for errors."""
    if isinstance(prompt, str):
        return [(field, prompt)]
    if not prompt:
        raise invalid(field, "an empty list; wanted a string, a list of strings, token ids or lists of token ids")
    if len(set(map(type, prompt))) > 1:
        raise invalid(field, "a list of mixed types; wanted all strings, all token ids or all lists of token ids")
    if isinstance(prompt[0], int):
        return [(field, prompt)]  # type: ignore[list-item]
    return [(f"{field}[{i}]", item) for i, item in enumerate(prompt)]  # type: ignore[misc]
