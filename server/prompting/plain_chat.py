"""Turn a chat into what its template reads: messages, tools and variables as plain trees, every client text spelled.

Calls have their arguments as objects, which is what templates read. Every text of a client passes through `spell`.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from server.bodies.chat_message import Message, message_text, message_texts
from server.bodies.chat_tools import Tool
from server.bodies.generation_bodies import ChatBody
from server.bodies.json_size import MOST_LEVELS, count_levels

Tree = dict[str, Any]

_STRENGTHS = {"none": "low", "minimal": "low", "max": "xhigh"}  # of an effort, where a template knows low to xhigh
Spell = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat.

    `tools`: what is offered, as OpenAI writes it. `variables`: what else the template is given. `continues`: the prompt
    ends inside the last message, which the answer continues; else, with `begins_answer`, it ends with the beginning of
    an answer's turn.
    """

    messages: list[Message]
    tools: list[Tree] = field(default_factory=list)
    variables: Tree = field(default_factory=dict)
    continues: bool = False
    begins_answer: bool = True

    def texts(self) -> Iterator[str]:
        """Yield every text of the client."""
        for message in self.messages:
            yield from strings_of(plain_message(message, str, with_parts=True))
            yield "".join(message_texts(message))  # as a template may write parts
        yield from strings_of(self.tools)
        yield from strings_of(self.variables)

    @property
    def has_tools(self) -> bool:
        """Return whether tools are offered, or were called before."""
        return bool(self.tools) or any(message.tool_calls or message.role == "tool" for message in self.messages)

    @property
    def continued(self) -> str | None:
        """Return the text of the last message if the answer continues it."""
        return message_text(self.messages[-1]) if self.continues else None

    @property
    def num_chars(self) -> int:
        return sum(map(len, self.texts()))


def read_conversation(body: ChatBody) -> Conversation:
    """Return what a chat's template is given; tools that must not be called are not offered."""
    tools = [plain_tool(tool) for tool in body.offered_tools()]
    variables: Tree = {}
    if body.reasoning_effort is not None:
        reasons = body.reasoning_effort != "none"
        variables = {"reasoning_effort": body.reasoning_effort, "enable_thinking": reasons, "thinking": reasons}
        variables["reasoning_strength"] = _STRENGTHS.get(body.reasoning_effort, body.reasoning_effort)  # Muse Glimmer's
    return Conversation(
        body.messages, tools, variables | (body.chat_template_kwargs or {}), bool(body.continue_final_message)
    )


def plain_tool(tool: Tool) -> Tree:
    assert tool.function is not None
    function = {"name": tool.function.name, "description": tool.function.description or ""}
    parameters = tool.function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function | {"parameters": parameters}}


def plain_message(message: Message, spell: Spell, with_parts: bool) -> Tree:
    """Return a message as a tree.

    `with_parts`: the content is a list of text parts, as OpenAI writes it; else one text.
    """
    content = _plain_parts(message, spell) if with_parts else spell(message_text(message))
    plain: Tree = {"role": message.role, "content": content}
    if message.name:
        plain["name"] = spell(message.name)
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": spell(call.id),
                "type": "function",
                "function": {
                    "name": spell(call.function.name),
                    "arguments": spell_tree(read_arguments(call.function.arguments), spell),
                },
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = spell(message.tool_call_id)
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        plain["reasoning_content"] = spell(reasoning)
        if not content:  # gpt-oss's template calls it so, and refuses it beside content
            plain["thinking"] = spell(reasoning)
    return plain


def _plain_parts(message: Message, spell: Spell) -> list[Tree]:
    """Return the content's parts; one part where they would together spell out what none of them does alone."""
    texts = message_texts(message)
    spelled = [spell(text) for text in texts]
    if "".join(spelled) != spell("".join(texts)):
        spelled = [spell(message_text(message))]
    return [{"type": "text", "text": text} for text in spelled]


def read_arguments(text: str) -> Tree:
    """Return a call's arguments; a text that is no object, or too deep for a body, becomes the argument `arguments`."""
    try:
        is_deep = count_levels(text.encode("utf-8", "surrogatepass")) > MOST_LEVELS
        tree = None if is_deep else json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        tree = None
    return tree if isinstance(tree, dict) else {"arguments": text}


def spell_tree(tree: Any, spell: Spell) -> Any:
    """Return the tree with every text in it spelled, keys too."""
    if isinstance(tree, str):
        return spell(tree)
    if isinstance(tree, list):
        return [spell_tree(item, spell) for item in tree]
    if isinstance(tree, dict):
        return {spell(key): spell_tree(value, spell) for key, value in tree.items()}
    return tree


def strings_of(tree: Any) -> Iterator[str]:
    """Yield every text in a tree, keys too."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, list):
        for item in tree:
            yield from strings_of(item)
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield key
            yield from strings_of(value)
