"""What clients write anew with each request is left out of instructions, is counted, and nothing else is changed."""

from pathlib import Path

import msgspec
import pytest

from server.bodies.chat_message import Message, Part
from server.deployment import LEFT_OUT, ConfigError, Deployment, load_deployment
from server.prompting.left_out import LeftOut
from server.prompting.plain_chat import Conversation
from tests.server.live_server import Running, fake_command, make_deployment, running_server

BILLING = "x-anthropic-billing-header: cc_version=2.1.332.93d; cc_entrypoint=sdk-cli; cch=eb6c6; cc_prev_turn_index=3;"
LEFT = "<total_tokens>14999436 tokens left</total_tokens>"
HI = Message(role="user", content="Hi")


def clean(*messages: Message, patterns: tuple[str, ...] = LEFT_OUT) -> list[Message]:
    counted: dict[str, int] = {}
    return (
        LeftOut(patterns, lambda pattern, num: counted.update({pattern: num})).clean(Conversation([*messages])).messages
    )


def system(*texts: str) -> Message:
    return Message(role="system", content=[Part(type="text", text=text) for text in texts])


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (system(BILLING, "You are Claude."), [system("You are Claude."), HI]),
        (system(f"{BILLING}\nYou are Claude."), [system("You are Claude."), HI]),
        (Message(role="system", content=f"{BILLING}\nBe."), [Message(role="system", content="Be."), HI]),
        (Message(role="developer", content=f"Be.\n\n{LEFT}\n\n{LEFT}"), [Message(role="developer", content="Be."), HI]),
        (Message(role="system", content=LEFT), [HI]),
        (system(BILLING), [HI]),
        (Message(role="system", content="<total_tokens>Infinite tokens left</total_tokens>"), [HI]),
    ],
)  # fmt: skip
def test_known_lines_of_clients_are_left_out_of_instructions(given: Message, wanted: list[Message]) -> None:
    assert clean(given, HI) == wanted


@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
def test_what_others_say_is_never_changed(role: str) -> None:
    message = Message(role=role, content=f"{BILLING}\n{LEFT}", tool_call_id="c")
    assert clean(HI, message)[1] is message


@pytest.mark.parametrize(
    "text",
    [
        "Today's date is 2026-11-29.",
        "  spaces stay  \n",
        "An x-anthropic-billing-header: is a line.",
        "<total_tokens>few</total_tokens>",
    ],
)
def test_dates_and_all_other_texts_stay_as_they_are(text: str) -> None:
    message = Message(role="system", content=text)
    assert clean(message, HI)[0] is message


def test_a_chat_of_nothing_else_is_still_a_chat() -> None:
    assert clean(system(BILLING)) == [Message(role="system", content="")]
    assert clean(system(BILLING), HI, patterns=()) == [system(BILLING), HI]


@pytest.mark.parametrize(("pattern", "why"), [("(", "no regular expression"), ("a*", "finds the empty text")])
def test_a_pattern_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path, pattern: str, why: str) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_bytes(msgspec.yaml.encode({"model": {"path": "m"}, "server": {"left_out": [pattern]}}))
    with pytest.raises(ConfigError, match=why):
        load_deployment(path)
    assert Deployment.model_validate({"model": {"path": "m"}}).server.left_out == LEFT_OUT


def body(number: int) -> dict[str, object]:
    line = f"x-anthropic-billing-header: cc_version=2.1.332.93d; cc_entrypoint=cli; cch={number:05x};"
    told = [{"type": "text", "text": line}, {"type": "text", "text": "Be brief."}]
    return {"system": told, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40}


async def test_two_requests_that_differ_in_such_a_line_have_one_prompt_and_it_is_counted(live: Running) -> None:
    texts = [(await live.http.post("/v1/messages", json=body(n))).json()["content"][0]["text"] for n in (1, 2)]
    assert texts[0] == texts[1]  # this engine repeats its prompt
    assert "billing" not in texts[0]
    counts = [(await live.http.post("/v1/messages/count_tokens", json=body(n))).json() for n in (1, 99999)]
    assert counts[0] == counts[1]
    metrics = (await live.http.get("/metrics")).text
    assert 'tandem_prompt_texts_left_out_total{pattern="(?m)^x-anthropic-' in metrics


async def test_an_empty_list_leaves_nothing_out() -> None:
    async with running_server(make_deployment(left_out=[]), fake_command()) as live:
        answer = (await live.http.post("/v1/messages", json=body(1))).json()
        assert "x-anthropic-billing-header" in answer["content"][0]["text"]
