"""What a chat's answer is to be read as, and held to: its tools, and how the model marks calls and reasoning.

`read_with` makes what `generation.Job.read` is; `hold_calls` its grammar. Everything that serves chats of any shape
uses the same two. Raises ApiError 400 for tools that cannot be kept.
"""

from collections.abc import Callable
from dataclasses import dataclass

from server.bodies import ChatBody, NamedTool
from server.conversation import Conversation
from server.message.call_grammar import write_calls
from server.message.formats import AnswerFormat, hold_format
from server.message.reader import MessageReader
from server.message.tools import Tools
from server.prompts import Prompt
from server.service import Service
from server.structured import lark_grammar, schema_in_lark
from server.text_pool import INLINE_CHARS


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`names`: of the tools that must be called, one of them at least; empty where none must be."""

    conversation: Conversation
    names: tuple[str, ...]
    most_calls: int | None

    @property
    def tools(self) -> Tools | None:
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.conversation.tools}
        return Tools(offered, self.most_calls) if offered else None


def choose_tools(body: ChatBody, conversation: Conversation) -> ToolUse:
    names: tuple[str, ...] = ()
    if isinstance(body.tool_choice, NamedTool):
        names = (body.tool_choice.function.name,)
    elif body.tool_choice == "required":
        names = tuple(tool["function"]["name"] for tool in conversation.tools)
    is_one = body.parallel_tool_calls is False or isinstance(body.tool_choice, NamedTool)
    return ToolUse(conversation, names, 1 if is_one else None)


def read_with(service: Service, use: ToolUse, prompt: Prompt) -> Callable[[], MessageReader | None]:
    """What makes a reader for each answer to the prompt."""
    answer_format = _format_of(service, use)
    if answer_format is None or not (use.tools or answer_format.reasoning or answer_format.is_own):
        return lambda: None
    opening, tools = answer_format.template.opening(prompt.end), use.tools
    return lambda: MessageReader(answer_format, opening, tools)


async def hold_calls(service: Service, use: ToolUse, prompt: Prompt) -> str:
    """The grammar of an answer that must call; "" where it need not."""
    answer_format = _format_of(service, use)
    if not use.names or answer_format is None:
        return ""
    reader = read_with(service, use, prompt)()

    def compile_grammar() -> str:
        terms = [
            (
                name,
                schema_in_lark(f"tools[{i}].function.parameters", {"type": "object"} | tool["function"]["parameters"]),
            )
            for i, tool in enumerate(use.conversation.tools)
            if (name := tool["function"]["name"]) in use.names
        ]
        assert answer_format is not None
        assert answer_format.held is not None
        is_reasoning = reader is not None and reader.is_reasoning
        text = write_calls(
            terms, answer_format.held, use.most_calls != 1, answer_format.reasoning, is_reasoning, service.tokenizer
        )
        return lark_grammar("tools", text)

    return await service.texts.run(INLINE_CHARS, compile_grammar)


def _format_of(service: Service, use: ToolUse) -> AnswerFormat | None:
    """The deployment's; where a call must come, one that a grammar can hold."""
    if use.names:
        return hold_format(service.answer_format)
    return service.answer_format
