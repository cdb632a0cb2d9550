"""`tandem launch`: what each agent is told, and what a person is told where it cannot be started."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.commands.launch import AGENTS, Launch, LaunchError, Target, plan_launch
from tests.server.program import Program

TARGET = Target("http://127.0.0.1:8000", "qwen", "key", 40_000)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    program = Program({})
    yield program.ready()
    program.process.terminate()
    program.end()


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server.commands", "launch", *words]
    environment = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"} | variables
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


def test_claude_code_is_told_the_address_and_that_every_model_is_this_one() -> None:
    launch = plan_launch("claude", TARGET, ["-p", "hi"])
    assert launch.command == ("claude", "-p", "hi")
    assert launch.variables["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8000", "its client adds /v1"
    assert launch.variables["ANTHROPIC_AUTH_TOKEN"] == "key"
    assert {launch.variables[f"ANTHROPIC_{name}_MODEL"] for name in ("SMALL_FAST", "DEFAULT_HAIKU")} == {"qwen"}
    assert launch.variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "10000", "a fourth of the context"


def test_codex_is_told_by_settings_that_its_parser_reads() -> None:
    launch = plan_launch("codex", TARGET, ["exec", "hi"])
    assert launch.command[-2:] == ("exec", "hi")
    settings = [word for flag, word in zip(launch.command, launch.command[1:], strict=False) if flag == "-c"]
    assert 'model_providers.tandem.wire_api="responses"' in settings
    assert 'model_providers.tandem.base_url="http://127.0.0.1:8000/v1"' in settings
    assert "model_context_window=40000" in settings
    assert launch.variables == {"TANDEM_API_KEY": "key"}


def test_opencode_gets_a_provider_and_no_file() -> None:
    launch = plan_launch("opencode", TARGET, [])
    given = json.loads(launch.variables["OPENCODE_CONFIG_CONTENT"])
    assert given["model"] == given["small_model"] == "tandem/qwen"
    provider = given["provider"]["tandem"]
    assert provider["options"]["baseURL"] == "http://127.0.0.1:8000/v1"
    assert provider["models"]["qwen"]["limit"] == {"context": 40_000, "output": 10_000}
    assert "key" not in launch.variables["OPENCODE_CONFIG_CONTENT"].replace("apiKey", ""), "it is in a variable alone"


def test_without_a_key_or_a_length_agents_get_what_they_need_all_the_same() -> None:
    bare = Target("http://h", "m", None, None)
    for agent in AGENTS:
        assert "none" in plan_launch(agent, bare, []).variables.values()
    assert not any("model_context_window" in word for word in plan_launch("codex", bare, []).command)
    with pytest.raises(LaunchError, match="wanted one of claude, codex, opencode, aider"):
        plan_launch("vim", bare, [])


def test_what_is_printed_can_be_given_to_a_shell() -> None:
    text = Launch(("echo", "it's"), {"A": "one 'two'"}).as_text()
    assert subprocess.run(["sh", "-c", f'{text}; echo "$A"'], capture_output=True, text=True).stdout == (
        "it's\none 'two'\n"
    )


def test_the_program_is_started_with_the_servers_model_in_its_environment(url: str, tmp_path: Path) -> None:
    program = tmp_path / "claude"
    program.write_text('#!/bin/sh\necho "$ANTHROPIC_BASE_URL $ANTHROPIC_MODEL $@"\n')
    program.chmod(0o755)
    done = run("claude", "--url", url, "--", "-p", "hi", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (done.returncode, done.stdout) == (0, f"{url} reference -p hi\n"), done.stderr
    shown = run("aider", "--url", url, "--print")
    assert f"export OPENAI_API_BASE={url}/v1" in shown.stdout
    assert "aider --model openai/reference" in shown.stdout


def test_what_cannot_be_started_is_told_in_one_line(url: str, tmp_path: Path) -> None:
    missing = run("codex", "--url", url, PATH=str(tmp_path))
    assert missing.returncode == 1
    assert "'codex' is not on PATH; install it: npm install -g @openai/codex" in missing.stderr
    other = run("codex", "--url", url, "--model", "gpt")
    assert "'gpt' is not served" in other.stderr
    silent = run("codex", "--url", "http://127.0.0.1:9")
    assert "no server answers" in silent.stderr
    for done in (missing, other, silent):
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
