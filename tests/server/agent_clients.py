"""Agents as they were seen to ask, one turn after another: what each sends of the answers before, and of its own.

Each is written down from requests that its program sent (`client_bodies/`), in short. A client's `body` is the next
request; `take` gives it the answer, which it runs the called tool of.
"""

import json
from typing import Any

Tree = dict[str, Any]
SYSTEM = "You are an agent that works on code with the user. Read before you write. Be brief. " * 6
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
RESULT = "notes.txt size.txt\n"
UUID = "c2deb283-803c-4222-86ed-60059889d1f3"


class Chat:
    """A client of chats with tools: OpenCode, Continue and Cline differ in headers and in what an empty text is."""

    path = "/v1/chat/completions"

    def __init__(self, empty: str | None, headers: dict[str, str] | None = None) -> None:
        self.headers = headers or {}
        self._empty = empty
        self._messages: list[Tree] = [
            {"role": "system", "content": f"{SYSTEM}\nToday's date: Sun Nov 29 2026"},
            {"role": "user", "content": "Look around and count the files."},
        ]

    def body(self, turn: int) -> Tree:
        function = {"name": "bash", "description": "Runs a command.", "parameters": SCHEMA}
        return {
            "model": "scripted",
            "messages": self._messages,
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "auto",
            "max_tokens": 400,
        }

    def take(self, answer: Tree) -> None:
        message = answer["choices"][0]["message"]
        told: Tree = {"role": "assistant", "content": (message["content"] or "").strip() or self._empty}
        self._messages.append(told | ({"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {}))
        for call in message.get("tool_calls") or []:
            self._messages.append({"role": "tool", "tool_call_id": call["id"], "content": RESULT})

    def count(self, answer: Tree) -> tuple[int, int, int]:
        """Return the tokens of the prompt, of these the cached ones, and those of the answer."""
        usage = answer["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]


class ClaudeCode:
    """Claude Code: lines that change with each request, instructions behind results, thoughts that come back."""

    path = "/v1/messages?beta=true"
    headers = {"x-claude-code-session-id": UUID, "anthropic-version": "2023-06-01"}

    def __init__(self) -> None:
        first = [{"type": "text", "text": "<system-reminder>\nToday's date is 2026-11-29.\n</system-reminder>"}]
        asked = {"type": "text", "text": "Look around and count the files."}
        self._messages: list[Tree] = [
            {"role": "user", "content": [*first, asked]},
            {"role": "system", "content": "Available agent types: claude."},
        ]

    def body(self, turn: int) -> Tree:
        billing = f"x-anthropic-billing-header: cc_version=2.1.332.93d; cc_entrypoint=cli; cch={turn * 7919:05x};"
        cached = {"cache_control": {"type": "ephemeral"}}
        said = json.loads(json.dumps(self._messages))
        if isinstance(said[-1]["content"], list):  # the mark moves with each turn
            said[-1]["content"][-1] |= cached
        else:
            said[-1]["content"] = [{"type": "text", "text": said[-1]["content"]} | cached]
        return {
            "model": "scripted",
            "max_tokens": 400,
            "system": [{"type": "text", "text": billing}, {"type": "text", "text": SYSTEM} | cached],
            "messages": said,
            "tools": [{"name": "bash", "description": "Runs a command.", "input_schema": SCHEMA}],
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "metadata": {"user_id": json.dumps({"device_id": "7166", "account_uuid": "", "session_id": UUID})},
        }

    def take(self, answer: Tree) -> None:
        self._messages.append({"role": "assistant", "content": answer["content"]})
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": RESULT}
            for block in answer["content"]
            if block["type"] == "tool_use"
        ]
        if results:
            left = 200_000 - 100 * len(self._messages)
            self._messages.append({"role": "user", "content": results})
            self._messages.append({"role": "system", "content": f"<total_tokens>{left} tokens left</total_tokens>"})

    def count(self, answer: Tree) -> tuple[int, int, int]:
        usage = answer["usage"]
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached, usage["output_tokens"]


class Codex:
    """Codex: items with ids of their own, and no response that is kept."""

    path = "/v1/responses"
    headers = {"session-id": UUID}

    def __init__(self) -> None:
        self._items: list[Tree] = [
            _item("developer", SYSTEM),
            _item("user", "<environment_context>\n  <cwd>/home/user</cwd>\n</environment_context>"),
            _item("user", "Look around and count the files."),
        ]

    def body(self, turn: int) -> Tree:
        tool = {"type": "function", "name": "bash", "description": "Runs a command.", "strict": False}
        return {
            "model": "scripted",
            "input": self._items,
            "tools": [tool | {"parameters": SCHEMA}, {"type": "web_search"}],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"summary": "auto"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": UUID,
            "client_metadata": {"turn_id": f"turn-{turn}", "x-codex-window-id": f"{UUID}:0"},
            "max_output_tokens": 400,
        }

    def take(self, answer: Tree) -> None:
        for item in answer["output"]:
            self._items.append(item)
            if item["type"] == "function_call":
                output = f"Chunk ID: ea113c\nWall time: 0.0000 seconds\nOutput:\n{RESULT}"
                self._items.append({"type": "function_call_output", "call_id": item["call_id"], "output": output})

    def count(self, answer: Tree) -> tuple[int, int, int]:
        usage = answer["usage"]
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]


class Aider(Chat):
    """Aider: no tools. Its rules and the files stand behind what was said before, and move with each turn."""

    RULES = "# *SEARCH/REPLACE block* Rules:\n\nEvery block must use this format.\n"

    def __init__(self) -> None:
        super().__init__(empty="")
        self._messages = [{"role": "system", "content": SYSTEM}]

    def body(self, turn: int) -> Tree:
        files = f"I have *added these files to the chat*.\n\nnotes.txt\n```\n{turn}\n```\n"
        asked = f"Write {turn + 1}."
        self._asked = asked
        added = [{"role": "user", "content": files}, {"role": "assistant", "content": "Ok, any changes are to those."}]
        last = {"role": "user", "content": f"{asked}\n\n{self.RULES}"}
        return {"model": "scripted", "messages": [*self._messages, *added, last], "temperature": 0, "max_tokens": 400}

    def take(self, answer: Tree) -> None:
        self._messages.append({"role": "user", "content": self._asked})
        super().take(answer)
        self._messages += [
            {"role": "user", "content": "I updated the files."},
            {"role": "assistant", "content": "Ok."},
        ]


def _item(role: str, text: str) -> Tree:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}
