"""instructor: pydantic models as answers, through tools, with its own retry where one does not validate."""

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field
from script import REFERENCE_URL, SCRIPTED_URL, call, check_over, say


class Person(BaseModel):
    name: str
    age: int = Field(ge=0)


client = instructor.from_openai(OpenAI(base_url=SCRIPTED_URL, api_key="k", max_retries=0), mode=instructor.Mode.TOOLS)
ASKED = {"model": "scripted", "messages": [{"role": "user", "content": "Ada is 36."}], "response_model": Person}
ADA = {"name": "Ada", "age": 36}

say(call("Person", **ADA))
assert client.chat.completions.create(**ASKED, max_retries=0).model_dump() == ADA

say(call("Person", name="Ada", age=-1), call("Person", **ADA))
assert client.chat.completions.create(**ASKED, max_retries=2).model_dump() == ADA  # it makes a subclass of Person
check_over()


class Sum(BaseModel, extra="forbid"):
    value: int = Field(ge=0, le=999)


held = instructor.from_openai(
    OpenAI(base_url=REFERENCE_URL, api_key="k", max_retries=0), mode=instructor.Mode.JSON_SCHEMA
)
asked = {"model": "reference", "messages": [{"role": "user", "content": "2 + 3?"}], "max_tokens": 64}
assert 0 <= held.chat.completions.create(**asked, response_model=Sum, max_retries=0).value <= 999
