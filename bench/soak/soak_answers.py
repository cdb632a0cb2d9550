"""Read the answer to a request, and compare it with the first answer to the same one."""

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from bench.soak.requests import SoakRequest

Verdict = Literal["same", "level", "other"]


@dataclass(slots=True)
class Answer:
    """An answer. text: includes the arguments of tool calls. gaps: between the two best log probabilities, by token."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    finish_reason: str | None = None


class RefusedError(Exception):
    """The server answered with an error, before a stream or in it. code: empty if the error has none."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"status {status}, code {code!r}: {message[:200]}")
        self.status, self.code = status, code


async def read_answer(client: httpx.AsyncClient, request: SoakRequest) -> Answer:
    """Send a request and return its whole answer. Raises RefusedError, and httpx's errors if a connection breaks."""
    answer = Answer()
    async with client.stream("POST", request.path, json=request.body) as response:
        if response.status_code != httpx.codes.OK:
            raise _refused(response.status_code, (await response.aread()).decode(errors="replace"))
        if not request.body["stream"]:
            _take(answer, json.loads(await response.aread())["choices"][0])
        else:
            await _read_stream(response, answer)
    if answer.finish_reason is None:
        raise RefusedError(response.status_code, "", "the answer ends without a finish_reason and without an error")
    return answer


async def _read_stream(response: httpx.Response, answer: Answer) -> None:
    async for line in response.aiter_lines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise _refused(response.status_code, line[6:])
        for choice in event["choices"]:
            _take(answer, choice)


def _refused(status: int, text: str) -> RefusedError:
    try:
        error = json.loads(text)["error"]
        return RefusedError(status, str(error["code"] or ""), str(error["message"]))
    except (ValueError, KeyError, TypeError):
        return RefusedError(status, "", text)


def _take(answer: Answer, choice: dict[str, Any]) -> None:
    """Add a choice of a whole answer, or of one event of a stream."""
    said = choice.get("delta") or choice.get("message") or {}
    answer.text += choice.get("text") or said.get("content") or ""
    answer.text += "".join(call["function"].get("arguments") or "" for call in said.get("tool_calls") or ())
    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    logprobs = choice.get("logprobs") or {}
    if "content" in logprobs:
        entries = logprobs["content"] or []
        answer.tokens += [entry["token"] for entry in entries]
        tops = [[top["logprob"] for top in entry["top_logprobs"]] for entry in entries]
    else:
        answer.tokens += logprobs.get("tokens") or []
        tops = [list(top.values()) for top in logprobs.get("top_logprobs") or []]
    for top in tops:
        best = sorted(top, reverse=True)
        answer.gaps.append(best[0] - best[1] if len(best) > 1 else float("inf"))


def compare(answer: Answer, first: Answer, level_gap: float) -> Verdict:
    """Compare an answer with the first one.

    "level": they differ first at a token where the first answer's two best log probabilities are within `level_gap`.
    Another batch sums in another order, which may change such a choice.
    """
    if answer.text == first.text and answer.tokens == first.tokens and answer.finish_reason == first.finish_reason:
        return "same"
    pairs = enumerate(zip(answer.tokens, first.tokens, strict=False))
    at = next((index for index, (ours, theirs) in pairs if ours != theirs), None)
    return "other" if at is None or first.gaps[at] > level_gap else "level"
