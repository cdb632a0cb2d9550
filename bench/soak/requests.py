"""Make the requests of a soak: a fixed set of prompts, so that each has a first answer to compare later ones with."""

from dataclasses import dataclass, field
from random import Random
from typing import Any

from bench.load.prose import write_prose

_CHARS_A_TOKEN = 3  # of prose, at least, so that no prompt is longer than wanted
_SHORTEST_TOKENS = 20
_TOOL_CALL_TOKENS = 96
_BESIDE_TOKENS = 512  # room for what a chat template with tools adds, and for an answer
EXACT_PROFILES = ("exact", "offloaded", "verified")  # their texts do not depend on where the tokens are
LEFT_SESSIONS = tuple(f"soak-left-{number}" for number in range(8))  # sessions of clients that leave
_Built = tuple[str, dict[str, Any]]  # a path, and fields of a body
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up_weather",
            "description": "The weather of a city on some days.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 12},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
]


@dataclass(frozen=True, slots=True)
class SoakRequest:
    """A request. is_compared: greedy, by a method that reads every token, so that its text is always the same."""

    kind: str
    path: str
    body: dict[str, Any] = field(repr=False)
    is_compared: bool


@dataclass(frozen=True, slots=True)
class Served:
    """What a server reports of itself. profiles: the most tokens of a prompt with its answer, by profile."""

    model: str
    profiles: dict[str, int]
    default_profile: str
    has_chat: bool
    has_documents: bool


@dataclass(frozen=True, slots=True)
class Mix:
    """The mix of requests: prompts of each kind, tokens of the longest prompt, tokens of an answer, and the profiles to
    ask for; None: all of the server's. judged: profiles whose method reads every token, so that texts are compared.
    """

    prompts: int
    longest_tokens: int
    answer_tokens: int
    profiles: tuple[str, ...] | None
    judged: tuple[str, ...] = EXACT_PROFILES


def make_requests(served: Served, mix: Mix) -> list[SoakRequest]:
    """Make all requests of a soak, two thirds of them streamed. Raises ValueError for a profile that is not served."""
    unknown = [name for name in mix.profiles or () if name not in served.profiles]
    if unknown:
        raise ValueError(f"--profiles: got {unknown[0]}; the server has {', '.join(served.profiles)}")
    default = served.default_profile
    kinds = [(f"text, {name}", name, _completion) for name in mix.profiles or served.profiles]
    kinds += [("text, drawn", default, _drawn)]
    kinds += [("chat", default, _chat), ("chat, tools", default, _tool_call)] if served.has_chat else []
    kinds += [("chat, documents", default, _fused)] if served.has_chat and served.has_documents else []
    requests = []
    for index, (kind, profile, build) in enumerate(kinds):
        for number in range(mix.prompts):
            num_chars = _CHARS_A_TOKEN * _length(number, mix, served.profiles[profile])
            text = f"Note {index}-{number}. {write_prose(1000 * index + number, num_chars)}"[:num_chars]
            body = {
                "model": served.model, "temperature": 0.0, "max_tokens": mix.answer_tokens, "ignore_eos": True,
                "stream": number % 3 != 1, "attention_profile": profile, "session_id": f"soak-{index}-{number}",
            }  # fmt: skip
            path, changes = build(text, number)
            requests.append(SoakRequest(kind, path, body | changes, profile in mix.judged and build is not _drawn))
    return requests


def _length(number: int, mix: Mix, limit: int) -> int:
    """Return the tokens of a prompt: from the shortest to the longest in equal ratios."""
    longest = max(_SHORTEST_TOKENS, min(mix.longest_tokens, limit - mix.answer_tokens - _BESIDE_TOKENS))
    return round(_SHORTEST_TOKENS * (longest / _SHORTEST_TOKENS) ** (number / max(1, mix.prompts - 1)))


def _completion(text: str, number: int) -> _Built:
    return "/v1/completions", {"prompt": text, "logprobs": 2}


def _drawn(text: str, number: int) -> _Built:
    drawing = {"temperature": 0.9, "top_p": 0.95, "seed": 1000 + number}
    return "/v1/completions", {"prompt": text, "logprobs": 2, **drawing}


def _chat(text: str, number: int) -> _Built:
    messages = [{"role": "user", "content": f"{text}\n\nWhat happens next?"}]
    return "/v1/chat/completions", {"messages": messages, "logprobs": True, "top_logprobs": 2}


def _tool_call(text: str, number: int) -> _Built:
    path, chat = _chat(text, number)
    call = {"tools": TOOLS, "tool_choice": "required", "max_tokens": _TOOL_CALL_TOKENS, "ignore_eos": False}
    return path, chat | call


def _fused(text: str, number: int) -> _Built:
    path, chat = _chat("", number)
    return path, chat | {"documents": [{"title": f"Report {number}", "text": text}]}


def make_short_lived(served: Served, mix: Mix, random: Random) -> dict[str, Any]:
    """Return the body of a completion whose client leaves before its end, in any of the profiles and LEFT_SESSIONS."""
    profile = random.choice(mix.profiles or [*served.profiles])
    return {
        "model": served.model, "attention_profile": profile,
        "prompt": write_prose(random.randrange(10**6), random.choice((60, 600, 3000))),
        "max_tokens": 300, "ignore_eos": True, "stream": True, "session_id": random.choice(LEFT_SESSIONS),
    }  # fmt: skip
