"""Compare a serving profile with full attention on the same tokens, by its log probabilities.

Two stretches of tokens are compared. The profile's prefill computes the end of a given text. The tokens that the
profile then chooses come from its decode steps, where most methods work. The reference decoder, fed the same tokens,
computes full attention. Invariant: a text that fails is counted, and its tokens count as not agreeing.

The KL is over the profile's most likely tokens with all others as one, so it is a lower bound. Errors of layers and the
attention mass kept are not reported, and of a server what was read neither: they cannot be measured from outside.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from evals.distributions import NUM_TOP, divergence, full_logprobs
from evals.forward import ReferenceDecoder
from evals.score_rows import FRACTIONS, Row, count_reasons
from evals.served import DEFAULT, Server
from evals.served_method import PREFIX
from evals.serving import DecodeRequest, ServingEngine
from gpu.methods.registry import list_shares
from server.text.model_tokenizer import Tokenizer

Logprobs = list[tuple[float, dict[int, float]]]
"""For each token its logprob, and the logprobs of the most likely tokens by id, as natural logarithms."""


@dataclass(frozen=True)
class Said:
    """A profile's output for one text: logprobs of the text's last tokens, then its chosen tokens and their
    logprobs.
    """

    end: Logprobs
    chosen: list[int]
    chosen_logprobs: Logprobs
    failure: str | None


Speaker = Callable[[Sequence[list[int]], int], list[Said]]
"""Asks a profile about texts. Takes the texts and the number of last tokens, which is also the number to choose."""


def engine_speaker(engine: ServingEngine, profile: str) -> Speaker:
    """Return a speaker that asks the engine of this process."""

    def ask(texts: Sequence[list[int]], count: int) -> list[Said]:
        asks = [DecodeRequest(str(number), list(text), count, [], NUM_TOP) for number, text in enumerate(texts)]
        said: dict[int, Said] = {}
        for answer in engine.answer(asks, profile):
            end, chosen = ([(one.logprob, dict(one.top)) for one in part]
                           for part in (answer.prompt_logprobs[-count:], answer.logprobs))  # fmt: skip
            said[int(answer.key)] = Said(end, answer.token_ids, chosen, answer.failure)
        return [said[number] for number in range(len(texts))]

    return ask


def server_speaker(server: Server, method: str, model: Path) -> Speaker:
    """Return a speaker that asks a URL by completions with `echo` and `logprobs`, which name tokens by their texts."""
    ids = ids_of_texts(model)
    extra = {} if method == DEFAULT else {"attention_profile": method.removeprefix(PREFIX)}
    headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}

    def ask(texts: Sequence[list[int]], count: int) -> list[Said]:
        with httpx.Client(headers=headers, timeout=server.timeout_s) as client:
            return [ask_one(client, text, count) for text in texts]

    def ask_one(client: httpx.Client, text: list[int], count: int) -> Said:
        body = {"model": server.model, "prompt": text, "temperature": 0, "max_tokens": count, "echo": True,
                "logprobs": NUM_TOP, **extra}  # fmt: skip
        try:
            response = client.post(f"{server.url.rstrip('/')}/completions", json=body)
        except httpx.TransportError as error:
            return Said([], [], [], f"{type(error).__name__}: {error}")
        if response.status_code != httpx.codes.OK:
            return Said([], [], [], f"status {response.status_code}: {response.text[:300]}")
        found = response.json()["choices"][0]["logprobs"]
        if not found or len(found["tokens"]) < len(text):
            return Said([], [], [], "no logprobs of the prompt; the server must echo them")
        logprobs = [
            (one, {ids[name]: value for name, value in (top or {}).items() if name in ids})
            for one, top in zip(found["token_logprobs"], found["top_logprobs"], strict=True)
        ]
        names = found["tokens"][len(text) :]
        known = next((place for place, name in enumerate(names) if name not in ids), len(names))
        chosen = [ids[name] for name in names[:known]]
        return Said(logprobs[len(text) - count : len(text)], chosen, logprobs[len(text) :][:known], None)

    return ask


def ids_of_texts(model: Path) -> dict[str, int]:
    """Return token ids by the texts that logprobs use for them. A text that several tokens share is left out."""
    tokenizer = Tokenizer(model, None)
    ids: dict[str, int] = {}
    twice: set[str] = set()
    for token_id in range(tokenizer.vocabulary.get_vocab_size()):
        text = tokenizer.token_text(token_id)
        if text in ids:
            twice.add(text)
        ids[text] = token_id
    return {text: token_id for text, token_id in ids.items() if text not in twice}


def compare_profile(
    decoder: ReferenceDecoder, texts: Sequence[list[int]], method: str, settings: dict[str, Any], speak: Speaker,
    count: int, advance: Callable[[], None],
) -> Row:  # fmt: skip
    """Compare a profile with full attention, and return one row.

    It has figures over the last `count` tokens of each text, and over as many tokens that the profile generates next.
    """
    sums = {name: [0, 0.0, 0.0, 0.0] for name in ("end", "generated")}  # tokens, agreeing, KL, nll
    failures: list[str | None] = []
    for text, said in zip(texts, speak(texts, count), strict=True):
        failures.append(said.failure)
        if said.failure is not None:
            sums["end"][0] += count
            sums["generated"][0] += count
        else:
            exact = full_logprobs(decoder, text, said.chosen, count)
            for name, part, tokens, wanted in (
                ("end", exact[:count], text[-count:], said.end),
                ("generated", exact[count:], said.chosen, said.chosen_logprobs),
            ):
                add_stretch(sums[name], part, tokens, wanted)
        advance()
    num_failed = len(failures) - failures.count(None)
    answered = count * (len(texts) - num_failed)
    end, generated = sums["end"], sums["generated"]
    nll = end[3] / answered if answered else math.nan
    return {
        "method": method,
        "settings": settings,
        "prompts": len(texts),
        "failures": num_failed,
        "reasons": count_reasons(failures),
        "tokens": count,
        "agreement": end[1] / end[0],
        "kl": end[2] / answered if answered else math.nan,
        "nll": nll,
        "perplexity": math.exp(nll),
        "tokens_generated": generated[0],
        "agreement_generated": generated[1] / generated[0] if generated[0] else None,
        "kl_generated": generated[2] / made if (made := generated[0] - count * num_failed) else None,
        "kl_over": f"the {NUM_TOP} most likely and the rest as one",
        **dict.fromkeys((*FRACTIONS, *list_shares())),
    }


def add_stretch(sums: list[Any], exact: torch.Tensor, tokens: Sequence[int], said: Logprobs) -> None:
    """Add the counts of tokens and of agreeing tokens, KL and negative log-likelihood of one stretch of a text."""
    for row, _, (logprob, top) in zip(exact, tokens, said, strict=True):
        sums[0] += 1
        sums[1] += bool(top) and max(top, key=top.__getitem__) == int(row.argmax())
        sums[2] += divergence(row, top)
        sums[3] -= logprob
