"""Times streams that are held to a JSON schema beside streams that are not: `tandem bench constrained`.

The same prompts through one engine, in turns: as many streams as twice `streams`, all free, and with one half of them
held. No stream ends before its last token, so both have the same rows in each step. The vocabulary is the model's, or,
of random weights, one made up: bytes, JSON's signs and words, as many as the logits have. Gate: what each held stream
wrote begins a text of the schema, by a matcher of bytes that shares nothing with the engine's masks.
"""

import random
import time
from dataclasses import asdict, dataclass

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from rich.console import Console

from bench.rates import device_name
from bench.rows import Row, require
from gpu.load import load_architecture
from gpu.sampling.params import SamplingParams
from scheduler.constraints import Constraints, read_tokens
from scheduler.engine import Engine
from scheduler.grammar import bytes_alone
from scheduler.load import load_engine
from scheduler.memory import plan_engine
from scheduler.messages import EngineRequest, pack_tokens
from server.config import Deployment
from server.structured import schema_grammar
from transfer.machine import probe_machine

SCHEMA = {
    "type": "array",
    "minItems": 100_000,  # it does not end
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["person", "place", "organisation"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 9999},
            "score": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"type": "null"}]},
            "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,12}$"}, "maxItems": 4},
        },
        "required": ["name", "kind", "count", "score", "tags"],
        "additionalProperties": False,
    },
}
_SIGNS = ['{"', '", "', '": ', '": "', '"}', '}, {"', "]", "[]", '["', '"]', "null", "true", "false", ", ", ": ", "}]"]


@dataclass(frozen=True, slots=True)
class ConstrainedBenchmark:
    """`streams` of each half, of `tokens` each behind `prompt_tokens`; both kinds run `rounds` times in turn."""

    streams: int
    tokens: int
    prompt_tokens: int
    rounds: int
    temperature: float


def run_constrained_benchmark(benchmark: ConstrainedBenchmark, deployment: Deployment, console: Console) -> list[Row]:
    """Of a step with all streams. Raises GateError where a held stream wrote what its schema does not allow."""
    machine = probe_machine()
    scheduler = deployment.scheduler.model_copy(
        update={"prefix_cache": False, "max_running": 2 * benchmark.streams, "max_queue": 2 * benchmark.streams}
    )
    deployment = deployment.model_copy(update={"scheduler": scheduler})
    architecture = load_architecture(deployment.model)
    vocabulary = choose_vocabulary(deployment, architecture.vocab_size)
    plan = plan_engine(deployment, architecture, machine)
    engine, _ = load_engine(deployment, plan, lambda *_: None)
    engine.scheduler.constraints = Constraints(architecture.vocab_size, lambda: vocabulary)
    grammar = schema_grammar("schema", SCHEMA)
    console.print(f"{2 * benchmark.streams} streams, of which none or half are held to a schema; no floor", style="dim")
    free_ms: list[float] = []
    held_ms: list[float] = []
    try:
        for number in range(benchmark.rounds + 1):
            free = _run(engine, benchmark, architecture.vocab_size, "", number)
            before = engine.stats().masks
            held = _run(engine, benchmark, architecture.vocab_size, grammar, number)
            masks = engine.stats().masks
            for text in held.texts:
                _require_schema(grammar, vocabulary.decode_bytes(text))
            if number:  # the first round warms up
                free_ms.append(free.step_ms)
                held_ms.append(held.step_ms)
    finally:
        engine.shutdown()
    free_step, held_step = float(np.median(free_ms)), float(np.median(held_ms))
    mask_ms = 1e3 * (masks.mask_seconds - before.mask_seconds) / benchmark.tokens
    ratio = free_step / held_step
    device = torch.device(plan.device)
    forced = _forced_share(grammar, vocabulary, held.texts[0])
    extras = {
        "tokens_per_s": 2e3 * benchmark.streams / held_step,
        "peer_tokens_per_s": 2e3 * benchmark.streams / free_step,
        "of_unconstrained": ratio,
        "mask_ms_a_step": mask_ms,
        "forced_share": forced,
        "vocabulary": architecture.vocab_size,
    }
    console.print(
        f"tokens/s {extras['tokens_per_s']:.0f}, unconstrained {extras['peer_tokens_per_s']:.0f}: {ratio:.3f}; "
        f"masks {mask_ms:.3f} ms a step; {forced:.1%} of held tokens were the only ones", highlight=False,
    )  # fmt: skip
    return [
        Row(
            name="step with half of its rows held", shape=f"{architecture.name}, {2 * benchmark.streams} streams",
            device=device_name(device), ms=held_step, p10=min(held_ms), p90=max(held_ms), floor="none measured",
            floor_ms=None, peer="the same streams, none held", peer_ms=free_step, rates={}, extras=extras,
            config=asdict(benchmark) | {"torch": torch.__version__},
        )
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Round:
    """texts: of the streams that were held."""

    step_ms: float
    texts: list[list[int]]


def _run(engine: Engine, benchmark: ConstrainedBenchmark, vocab_size: int, grammar: str, number: int) -> _Round:
    draw = np.random.default_rng(number)
    requests = []
    for stream in range(2 * benchmark.streams):
        requests.append(
            EngineRequest(
                request_id=str(stream),
                prompt=pack_tokens(draw.integers(256, vocab_size // 2, benchmark.prompt_tokens).tolist()),
                sampling=SamplingParams(temperature=benchmark.temperature, seed=stream),
                max_tokens=benchmark.tokens,
                stop_token_ids=[],
                attention_profile="exact",
                arrival_s=time.monotonic(),
                grammar=grammar if stream < benchmark.streams else "",
            )
        )
    engine.submit(requests)
    texts: dict[str, list[int]] = {request.request_id: [] for request in requests}
    began, at_begin = 0.0, 0
    while engine.has_work:
        for delta in engine.step():
            require(delta.error is None, f"no stream fails: {delta.error}")
            texts[delta.request_id] += delta.token_ids
        if not began and all(texts.values()):
            began, at_begin = time.perf_counter(), sum(map(len, texts.values()))
    seconds = time.perf_counter() - began
    steps = (sum(map(len, texts.values())) - at_begin) / len(requests)
    return _Round(1e3 * seconds / steps, [texts[str(stream)] for stream in range(benchmark.streams)])


def _require_schema(grammar: str, raw: bytes) -> None:
    matcher = LLMatcher(bytes_alone(), grammar)
    taken = matcher.try_consume_tokens([byte + 1 for byte in raw])
    require(taken >= len(raw) - 3, f"a held stream wrote what its schema allows; byte {taken} of {raw[:200]!r}")


def _forced_share(grammar: str, vocabulary: LLTokenizer, token_ids: list[int]) -> float:
    """Of an output, tokens that were the only ones allowed: what need not have been computed one by one."""
    matcher = LLMatcher(vocabulary, grammar)
    num_forced = 0
    for place in range(len(token_ids)):
        forced = matcher.compute_ff_tokens()
        num_forced += bool(forced)
        require(matcher.consume_token(token_ids[place]), "a held stream wrote what its schema allows")
    return num_forced / max(1, len(token_ids))


def choose_vocabulary(deployment: Deployment, vocab_size: int) -> LLTokenizer:
    """The model's, or one made up."""
    if deployment.model.tokenizer is not None or deployment.model.path is not None:
        return read_tokens(deployment.model, vocab_size)
    return LLTokenizer(TokenizerWrapper(_Words(vocab_size)))


class _Words:
    """Bytes, JSON's signs, numbers, and words with and without a space before them; the last token ends a text."""

    bos_token_id = None

    def __init__(self, vocab_size: int) -> None:
        draw = random.Random(0)
        found = dict.fromkeys([bytes([byte]) for byte in range(256)] + [sign.encode() for sign in _SIGNS])
        found |= dict.fromkeys(str(number).encode() for number in range(1000))
        while len(found) < vocab_size - 1:
            word = "".join(draw.choices("etaoinshrdlcumwfgypbvkjxqz", k=draw.randint(2, 9)))
            shown = draw.choice([word, " " + word, word.capitalize(), " " + word.capitalize()])
            found[shown.encode()] = None
        self.tokens = [*list(found)[: vocab_size - 1], b"<end>"]
        self.eos_token_id = vocab_size - 1
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, raw: bytes) -> list[int]:
        return list(raw)
