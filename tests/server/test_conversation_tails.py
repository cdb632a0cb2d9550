"""Where a turn's prompt parts from the answer before it, and why: as metrics say, and as its cached tokens do."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from scheduler.messages import pack_tokens
from server.parsing.answer_parts import CallArguments, CallBegun, Content, Reasoning
from server.stores.conversation_tails import (
    REASONS,
    TOKENS,
    AnswerRecord,
    ConversationTails,
    count_same,
)
from server.text.model_tokenizer import Tokenizer
from tests.server.fake_engine import PAGE
from tests.server.live_server import REFERENCE, Running, fake_command, running_server
from tests.server.scripted_model import HERMES, Script, make_model, scripted_deployment

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls -l"}}\n</tool_call>'
LONG = " ".join(["There are two files in it: notes.txt has ten bytes, and size.txt has three of them."] * 3)
SYSTEM = {"role": "system", "content": "You count files. Today's date is 2026-11-29. " * 4}
ASKED = {"role": "user", "content": "How many files are there, and how large is each of them?"}
NO_REASONING = HERMES.replace("{% if m.reasoning_content %}", "{% if false %}")
OWN_CALLS = HERMES.replace("{{ call.function | tojson }}", "{{ call.function.arguments | tojson }}")


def edit(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    return [*messages[:-2], messages[-2] | {"content": text}, messages[-1]]


def turns(live: Running) -> Any:
    """Return, by reason, how many turns there were and the tokens that they lost."""

    async def read() -> dict[str, tuple[int, int]]:
        text = (await live.http.get("/metrics")).text
        found: dict[str, list[int]] = {}
        for name in ("tandem_turns_total", "tandem_turn_tokens_parted_total"):
            for reason, number in re.findall(rf'{name}{{parted="(\w+)"}} (\S+)', text):
                found.setdefault(reason, []).append(int(float(number)))
        return {reason: (one[0], one[1]) for reason, one in found.items()}

    return read()


async def two_turns(live: Running, change: Any = None, **fields: Any) -> tuple[int, int]:
    """Ask, and ask again behind the answer; return what the second prompt computes and what is new in it."""
    body = {"messages": [SYSTEM, ASKED], "tools": [TOOL], "max_tokens": 300} | fields
    first = (await live.http.post(CHAT, json=body)).json()
    message = first["choices"][0]["message"]
    told = {"role": "assistant", "content": message["content"]}
    told |= {key: message[key] for key in ("tool_calls", "reasoning_content") if message.get(key)}
    behind = {"role": "user", "content": "And now?"}
    if "tool_calls" in told:
        behind = {"role": "tool", "tool_call_id": told["tool_calls"][0]["id"], "content": "notes.txt"}
    messages = [SYSTEM, ASKED, told, behind]
    body["messages"] = messages if change is None else change(messages)
    second = (await live.http.post(CHAT, json=body)).json()
    usage, before = second["usage"], first["usage"]
    new = usage["prompt_tokens"] - before["prompt_tokens"] - before["completion_tokens"]
    return usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"], new


def other_date(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [SYSTEM | {"content": SYSTEM["content"].replace("29.", "30.")}, *messages[1:]]


def other_question(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Summarise what was said, as clients do whose context is full; the question stands as it did."""
    return [messages[0], messages[1], {"role": "assistant", "content": "Files were counted."}, messages[1]]


@pytest.mark.parametrize(
    ("source", "says", "change", "reason"),
    [
        (HERMES, LONG, None, "nowhere"),
        (HERMES, f"I look.{CALL}", None, "nowhere"),
        (HERMES, f"I look.\n\n{CALL}", None, "whitespace"),
        (OWN_CALLS, f"I look.{CALL}", None, "call"),
        (HERMES, LONG, lambda messages: edit(messages, "Another answer than the one that was given."), "text"),
        (HERMES, LONG, other_date, "instructions"),
    ],
)
async def test_metrics_say_where_a_turn_parts_and_why(
    source: str, says: str, change: Any, reason: str, tmp_path: Path
) -> None:
    async with served(tmp_path, source, says, "Well.") as live:
        computed, new = await two_turns(live, change)
        ((found, (num_turns, num_lost)),) = (await turns(live)).items()
        assert (found, num_turns) == (reason, 1)
        if reason == "nowhere":
            assert computed <= new + PAGE
            assert num_lost == 0
        else:
            assert num_lost > 0
            if reason != "instructions":
                assert computed <= new + num_lost + PAGE


async def test_a_template_that_drops_reasoning_is_told_of(tmp_path: Path) -> None:
    says = f"I think of the files in the folder, and of how to count them.\n</think>\n\n{LONG}"
    for source, reason in ((HERMES, "nowhere"), (NO_REASONING, "reasoning")):
        folder = tmp_path / reason
        folder.mkdir()
        async with served(folder, source, says, f"So.\n</think>\n\n{LONG}") as live:
            await two_turns(live, reasoning_effort="high")
            assert list(await turns(live)) == [reason]


async def test_a_history_that_was_shortened_is_told_of(tmp_path: Path) -> None:
    async with served(tmp_path, HERMES, LONG, LONG, "Well.") as live:
        messages = [SYSTEM, ASKED]
        for text in ("And now?", "And then?"):
            answer = (await live.http.post(CHAT, json={"messages": messages, "max_tokens": 300})).json()
            told = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
            messages += [told, {"role": "user", "content": text}]
        shortened = [*messages[:2], {"role": "assistant", "content": "Two files."}, messages[-1]]
        await live.http.post(CHAT, json={"messages": shortened, "max_tokens": 300})
        found = await turns(live)
        assert found["nowhere"] == (1, 0)
        assert found["text"][0] == 1, "it parts from the first answer, and from the second prompt where that has it"


async def test_a_text_in_other_tokens_is_computed_in_those_that_were_written(tmp_path: Path) -> None:
    """A model may write `file` as `f`, `ile`: the tokens of a tokenizer would part there, and all behind be lost."""
    async with served(tmp_path, HERMES) as live:
        tokenizer = live.service.tokenizer
        written = [token for character in LONG for token in tokenizer.encode_plain(character)]
        assert written != tokenizer.encode(LONG, False)
        (tmp_path / "script").write_text(f"{json.dumps(written)}\n{json.dumps(tokenizer.encode('Well.', False))}")
        body = {"messages": [SYSTEM, ASKED], "max_tokens": 400}
        first = (await live.http.post(CHAT, json=body)).json()
        told = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        assert told["content"] == LONG
        asked = {"messages": [SYSTEM, ASKED, told, {"role": "user", "content": "And now?"}], "return_token_ids": True}
        second = (await live.http.post(CHAT, json=asked)).json()
        usage = second["usage"]
        assert await turns(live) == {TOKENS: (1, 0)}
        before = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
        computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        assert computed <= usage["prompt_tokens"] - before + PAGE
        spelled = b"".join(map(tokenizer.token_bytes, second["prompt_token_ids"])).decode()
        assert spelled.endswith("And now?<|end|><|assistant|>\n"), "the text is the template's"
        assert LONG in spelled


async def test_a_first_turn_follows_none_that_opens_alike(tmp_path: Path) -> None:
    async with served(tmp_path, HERMES, LONG, LONG) as live:
        for text in ("You count files.", "You count the letters of a text."):
            messages = [{"role": "system", "content": text}, ASKED]
            assert (await live.http.post(CHAT, json={"messages": messages, "max_tokens": 300})).status_code == 200
        assert await turns(live) == {}


async def test_nobody_follows_the_conversation_of_another_key(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", HERMES)
    deployment = scripted_deployment(folder)
    server = deployment.server.model_copy(update={"api_keys": ("one", "two")})
    async with running_server(deployment.model_copy(update={"server": server}), fake_command()) as live:
        for key in ("one", "two"):
            messages = [ASKED, {"role": "assistant", "content": "x"}, ASKED] if key == "two" else [ASKED]
            body = {"messages": messages, "max_tokens": 8}
            answer = await live.http.post(CHAT, json=body, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200
        assert await turns(live) == {}


def test_the_kind_of_what_was_written_is_kept_by_its_tokens() -> None:
    record = AnswerRecord()
    record.take([1], [])
    record.take([2, 3], [Reasoning("so")])
    record.take([4], [Reasoning(" on"), Content("I ")])
    record.take([5], [CallBegun(0, "c", "f"), CallArguments(0, "{")])
    assert (record.token_ids, record.kinds) == ([1, 2, 3, 4, 5], [(4, "reasoning"), (4, "text"), (5, "call")])


@pytest.mark.parametrize("length", [0, 1, 1023, 1024, 1025, 5000])
def test_tokens_in_front_are_counted_wherever_they_differ(length: int) -> None:
    tokens = list(range(300, 300 + length))
    assert count_same(pack_tokens(tokens), pack_tokens(tokens)) == length
    for place in {0, length // 2, length - 1} & set(range(length)):
        other = [*tokens[:place], 7, *tokens[place + 1 :]]
        assert count_same(pack_tokens(tokens), pack_tokens(other)) == place
    assert count_same(pack_tokens(tokens), pack_tokens([*tokens, 1])) == length


def test_the_bytes_of_what_is_kept_are_bounded_and_a_longer_text_gets_no_more_tokens(tokenizer: Tokenizer) -> None:
    counted: list[str] = []
    tails = ConversationTails(tokenizer, lambda reason, _: counted.append(reason), limit_bytes=4000)
    for number in range(50):
        tails.keep(f"c{number % 7}", [number] * 90, 0, AnswerRecord([1, 2], []))
        assert tails.num_bytes <= 4000
        assert tails.num_bytes == sum(len(one.packed) for ones in tails._tails.values() for one in ones)
    (end,) = tokenizer.encode("<|end|>", False)
    written = [token for character in "file" for token in tokenizer.encode_plain(character)]
    tails.keep("tokens", [7], 0, AnswerRecord([*written, end], [(1, "text")]))
    asked = [7, *tokenizer.encode_plain("file"), end, 9]
    assert tails.follow("tokens", asked, 100).token_ids == [7, *written, end, 9]
    assert tails.follow("tokens", asked, len(asked)).token_ids == asked
    assert counted == [TOKENS, TOKENS]
    assert tails.follow("tokens", [7], 100).parted == "", "a prompt that is asked once more follows none"
    assert set(counted) <= set(REASONS)


def served(folder: Path, source: str, *says: str) -> Any:
    model = make_model(folder / "model", source)
    script = Script(folder / "script", Tokenizer(model, REFERENCE))
    script.add(*says)
    return running_server(scripted_deployment(model), fake_command(script=str(script.path), prefixes=1))
