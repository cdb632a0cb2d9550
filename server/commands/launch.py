"""Run `tandem launch`: start a coding agent that uses a running server, configured by its environment.

None of the user's files is read or written: agents get all settings from variables and arguments.
"""

import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from server.commands.chat import list_models

NO_KEY = "none"  # agents want one; a server without keys reads none
_MOST_ANSWER_TOKENS = 32_000
_ANSWER_SHARE = 4  # of a context, a fourth is for an answer at most


class LaunchError(Exception):
    """An agent cannot be started; the message is one line."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and the model that it is asked for. `context_tokens`: None if the server does not say."""

    url: str
    model: str
    api_key: str | None
    context_tokens: int | None

    @property
    def key(self) -> str:
        return self.api_key or NO_KEY

    @property
    def answer_tokens(self) -> int:
        """Return the longest answer that an agent should ask for, which leaves room for its prompt."""
        most = self.context_tokens or _ANSWER_SHARE * _MOST_ANSWER_TOKENS
        return min(_MOST_ANSWER_TOKENS, most // _ANSWER_SHARE)


@dataclass(frozen=True, slots=True)
class Launch:
    """A command, and the variables that it needs beside the environment."""

    command: tuple[str, ...]
    variables: Mapping[str, str]

    def as_text(self) -> str:
        """Return the command and its variables as lines for a shell."""
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return "\n".join([*exports, shlex.join(self.command)])


def _claude(target: Target) -> Launch:
    """Return how to start Claude Code: every model name of its own is the served model."""
    models = ("MODEL", "SMALL_FAST_MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL")
    return Launch(
        ("claude",),
        {
            "ANTHROPIC_BASE_URL": target.url,
            "ANTHROPIC_AUTH_TOKEN": target.key,
            **{f"ANTHROPIC_{name}": target.model for name in models},
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(target.answer_tokens),
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    )


def _codex(target: Target) -> Launch:
    provider = {"name": "Tandem", "base_url": f"{target.url}/v1", "wire_api": "responses", "env_key": "TANDEM_API_KEY"}
    settings = {"model": target.model, "model_provider": "tandem"}
    settings |= {f"model_providers.tandem.{key}": value for key, value in provider.items()}
    words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    if target.context_tokens is not None:
        words.append(f"model_context_window={target.context_tokens}")
    return Launch(("codex", *(word for each in words for word in ("-c", each))), {"TANDEM_API_KEY": target.key})


def _opencode(target: Target) -> Launch:
    model: dict[str, object] = {"name": target.model}
    if target.context_tokens is not None:
        model["limit"] = {"context": target.context_tokens, "output": target.answer_tokens}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Tandem",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": "{env:TANDEM_API_KEY}"},
        "models": {target.model: model},
    }
    name = f"tandem/{target.model}"
    given = {"provider": {"tandem": provider}, "model": name, "small_model": name}
    return Launch(("opencode",), {"OPENCODE_CONFIG_CONTENT": json.dumps(given), "TANDEM_API_KEY": target.key})


def _aider(target: Target) -> Launch:
    variables = {"OPENAI_API_BASE": f"{target.url}/v1", "OPENAI_API_KEY": target.key}
    return Launch(("aider", "--model", f"openai/{target.model}", "--no-show-model-warnings"), variables)


AGENTS: Mapping[str, tuple[Callable[[Target], Launch], str]] = {
    "claude": (_claude, "npm install -g @anthropic-ai/claude-code"),
    "codex": (_codex, "npm install -g @openai/codex"),
    "opencode": (_opencode, "npm install -g opencode-ai"),
    "aider": (_aider, "python -m pip install aider-chat"),
}
"""What starts each agent, and what installs it."""


def find_target(url: str, model: str | None, api_key: str | None) -> Target:
    """Ask a server for its model and its longest context. Raises ChatError if it does not answer, and LaunchError."""
    models = {str(one["id"]): one for one in list_models(url, api_key)}
    name = model or next(iter(models))
    if name not in models:
        raise LaunchError(f"launch: --model: {name!r} is not served at {url}; it has {', '.join(models)}")
    length = models[name].get("max_model_len")
    return Target(url, name, api_key, length if isinstance(length, int) else None)


def plan_launch(agent: str, target: Target, arguments: Sequence[str]) -> Launch:
    """Return how an agent is started with these arguments of its own. Raises LaunchError for one that is not known."""
    if agent not in AGENTS:
        raise LaunchError(f"launch: {agent!r} is not known; wanted one of {', '.join(AGENTS)}; see docs/AGENTS.md")
    launch = AGENTS[agent][0](target)
    return Launch((*launch.command, *arguments), launch.variables)


def start(agent: str, launch: Launch) -> None:
    """Become the agent's program. Raises LaunchError if it is not installed."""
    program = shutil.which(launch.command[0])
    if program is None:
        how = AGENTS[agent][1]
        raise LaunchError(f"launch: {launch.command[0]!r} is not on PATH; install it: {how}; or see it with --print")
    os.execve(program, launch.command, os.environ | launch.variables)
