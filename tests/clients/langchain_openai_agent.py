"""langchain-openai: a chat model, its tools, its streams, and an agent that goes on until it has an answer."""

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from script import REFERENCE_URL, SCRIPTED_URL, call, check_over, say


class Sum(BaseModel):
    value: int = Field(ge=0, le=999)


@tool
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


model = ChatOpenAI(model="scripted", base_url=SCRIPTED_URL, api_key="k", max_retries=0)

say(call("add", a=2, b=3))
(asked,) = model.bind_tools([add]).invoke("2 + 3?").tool_calls
assert (asked["name"], asked["args"]) == ("add", {"a": 2, "b": 3})

say(f"So: {call('add', a=2, b=3)}")
pieces = list(model.bind_tools([add]).stream("2 + 3?"))
whole = pieces[0]
for piece in pieces[1:]:
    whole = whole + piece
assert whole.tool_calls[0]["args"] == {"a": 2, "b": 3}
assert whole.content == "So:"

say(f"{call('add', a=2, b=3)}\n{call('add', a=20, b=30)}", call("add", a=5, b=50), "It is 55.")
agent = create_agent(model, [add])
messages = agent.invoke({"messages": [("human", "Add these up.")]})["messages"]
assert [message.content for message in messages if message.type == "tool"] == ["5", "50", "55"]
assert messages[-1].content == "It is 55."
check_over()

say(call("add", a=2, b=3), '{"value": 5}')
agent = create_agent(model, [add], response_format=ProviderStrategy(Sum))
assert agent.invoke({"messages": [("human", "2 + 3?")]})["structured_response"] == Sum(value=5)
check_over()

plain = ChatOpenAI(model="reference", base_url=REFERENCE_URL, api_key="k", max_tokens=8, temperature=0, max_retries=0)
answer = plain.invoke("Hello there friend").content
assert "".join(chunk.content for chunk in plain.stream("Hello there friend")) == answer
assert isinstance(plain.bind_tools([add]).invoke("Hello there friend").content, str)

held = ChatOpenAI(model="reference", base_url=REFERENCE_URL, api_key="k", max_tokens=64, max_retries=0)
for strict in (True, False):
    assert isinstance(held.with_structured_output(Sum, method="json_schema", strict=strict).invoke("2 + 3?"), Sum)
