"""Ten turns of each agent: every turn computes what is new, a block at most beside it, and what its client changed."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from server.text.model_tokenizer import Tokenizer
from tests.server.agent_clients import UUID, Aider, Chat, ClaudeCode, Codex
from tests.server.fake_engine import PAGE
from tests.server.live_server import REFERENCE, Running, fake_command, make_deployment, running_server
from tests.server.scripted_model import HERMES, Script, make_model, scripted_deployment
from tests.server.test_client_bodies import STRICT

TURNS = 10
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls -l"}}\n</tool_call>'
CLIENTS: dict[str, tuple[Callable[[], Any], str]] = {  # and how an answer of its model is, as its template has it
    "claude_code": (ClaudeCode, f"I look.\n</think>\n\n{CALL}"),
    "cline": (lambda: Chat(empty=None), f"I look.{CALL}"),
    "codex": (Codex, f"I look.{CALL}"),
    "continue": (lambda: Chat(empty=""), CALL),
    "opencode": (lambda: Chat("", {"x-session-id": "ses_1", "x-session-affinity": "ses_1"}), f"I look.{CALL}"),
}


async def converse(live: Running, client: Any) -> list[tuple[int, int, int]]:
    """Ask ten turns; return the tokens of each prompt, those that were cached, and those of its answer."""
    counts = []
    for turn in range(TURNS):
        answer = await live.http.post(client.path, json=client.body(turn), headers=client.headers)
        assert answer.status_code == 200, answer.text
        counts.append(client.count(answer.json()))
        client.take(answer.json())
    return counts


def excess(counts: list[tuple[int, int, int]]) -> list[int]:
    """Return the tokens that each turn but the first computes beyond what is new in it."""
    found = []
    for (before, _, written), (prompt, cached, _) in pairwise(counts):
        found.append(prompt - cached - max(0, prompt - before - written))
    return found


@pytest.mark.parametrize(
    ("name", "source"), [*((name, "") for name in CLIENTS), ("claude_code", STRICT), ("codex", STRICT)]
)
async def test_a_turn_computes_what_is_new_and_a_block_at_most(name: str, source: str, tmp_path: Path) -> None:
    make, says = CLIENTS[name]
    folder = make_model(tmp_path / "model", source + HERMES)
    script = Script(tmp_path / "script", Tokenizer(folder, REFERENCE))
    script.add(*[says] * (TURNS - 1), "It has two files.")
    command = fake_command(script=str(script.path), prefixes=1)
    async with running_server(scripted_deployment(folder), command) as live:
        counts = await converse(live, make())
        assert max(excess(counts)) <= PAGE, counts
        assert counts[0][1] == 0
        assert counts[-1][0] > counts[0][0] + 8 * 40, "it grew"
        sessions = (await live.http.get("/v1/sessions")).json()["data"]
        named = {"claude_code": UUID, "codex": UUID, "opencode": "ses_1"}
        assert sessions[0]["id"] == named.get(name, sessions[0]["id"])
    assert script.is_over


async def test_without_the_list_claude_codes_lines_cost_the_whole_prompt_each_turn(tmp_path: Path) -> None:
    """The fault that the list is against, so that the test above is known to see it."""
    folder = make_model(tmp_path / "model", HERMES)
    script = Script(tmp_path / "script", Tokenizer(folder, REFERENCE))
    script.add(*[CLIENTS["claude_code"][1]] * TURNS)
    deployment = scripted_deployment(folder)
    server = make_deployment(left_out=[]).server
    command = fake_command(script=str(script.path), prefixes=1)
    async with running_server(deployment.model_copy(update={"server": server}), command) as live:
        counts = await converse(live, ClaudeCode())
    assert len({cached for _, cached, _ in counts[1:]}) == 1, "the tools, which this template writes in front"
    assert counts[-1][1] < counts[0][0] // 2


async def test_aider_moves_its_rules_and_files_and_computes_no_more_than_these_anew(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", HERMES)
    tokenizer = Tokenizer(folder, REFERENCE)
    script = Script(tmp_path / "script", tokenizer)
    says = "notes.txt\n```\n<<<<<<< SEARCH\n1\n=======\n2\n>>>>>>> REPLACE\n```\nDone."
    script.add(*[says] * TURNS)
    async with running_server(scripted_deployment(folder), fake_command(script=str(script.path), prefixes=1)) as live:
        counts = await converse(live, Aider())
    moved = len(tokenizer.encode(f"{says} Write 1. {Aider.RULES} added files {'x' * 40} Ok, any changes", False)) + 60
    assert PAGE < max(excess(counts)) <= moved + PAGE
    assert max(excess(counts)[1:]) - min(excess(counts)[1:]) <= PAGE, "what is behind does not grow"
