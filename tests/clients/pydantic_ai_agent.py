"""pydantic-ai: an agent with tools, streamed and not, and one whose answer is a model of its own."""

import asyncio

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from script import REFERENCE_URL, SCRIPTED_URL, call, check_over, say


class Sum(BaseModel):
    value: int = Field(ge=0, le=999)


model = OpenAIChatModel("scripted", provider=OpenAIProvider(base_url=SCRIPTED_URL, api_key="k"))
agent = Agent(model, system_prompt="Be brief.")


@agent.tool_plain
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


say(call("add", a=2, b=3), "It is 5.")
assert agent.run_sync("2 + 3?").output == "It is 5."
check_over()

say(call("add", a="two", b=3), call("add", a=2, b=3), "It is 5.")  # a wrong argument is told, and asked for again
assert agent.run_sync("2 + 3?").output == "It is 5."
check_over()

typed = Agent(model, output_type=Sum)
say(call("final_result", value=5))
assert typed.run_sync("2 + 3?").output == Sum(value=5)
check_over()


async def stream() -> str:
    say(call("add", a=2, b=3), "It is 5.")
    async with agent.run_stream("2 + 3?") as result:
        return "".join([text async for text in result.stream_text(delta=True)])


assert asyncio.run(stream()) == "It is 5."
check_over()

native = Agent(model, output_type=NativeOutput(Sum), tools=[add])
say(call("add", a=2, b=3), '{"value": 5}')
assert native.run_sync("2 + 3?").output == Sum(value=5)
check_over()

reference = OpenAIChatModel("reference", provider=OpenAIProvider(base_url=REFERENCE_URL, api_key="k"))
settings = {"max_tokens": 8, "temperature": 0.0}
assert isinstance(Agent(reference, model_settings=settings).run_sync("Hello there friend").output, str)
held = Agent(reference, output_type=NativeOutput(Sum), model_settings={"max_tokens": 64})
assert isinstance(held.run_sync("2 + 3?").output, Sum)
