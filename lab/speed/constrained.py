"""Time streams that are held to a JSON schema beside streams that are not: `python -m lab constrained`.

The same prompts through one engine, in turns: as many streams as twice `streams`, all free, and with one half of them
held: token by token, and with what must come taken at once. Tokens a second are those of all answers, whether they were
the only ones that could come or not, while all streams run: text that is forced is text all the same. Beside that,
those that were drawn alone, and those of the streams that are free in both. The vocabulary is the model's, or,
of random weights, one made up: bytes, JSON's signs and words, as many as the logits have. Gate: what each held stream
wrote begins a text of the schema, by a matcher of bytes that shares nothing with the engine's masks.
"""

import random
import time
from dataclasses import asdict, dataclass, fields

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from rich.console import Console

from bench.benchmark_rows import Row, require
from bench.rates import device_name
from gpu.model.architecture import load_architecture
from gpu.sampling_params import SamplingParams
from scheduler.constraints.constraints import Constraints, read_tokens
from scheduler.constraints.grammar import bytes_alone
from scheduler.engine.engine import Engine
from scheduler.engine.load_engine import load_engine
from scheduler.messages import EngineRequest, pack_tokens
from scheduler.planning.engine_memory import plan_engine
from server.deployment import Deployment
from server.grammar.structured import schema_grammar
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
_FREE, _ONE_BY_ONE, _AT_ONCE = _KINDS = ("free", "token by token", "at once")
_MOST_AHEAD = 12  # times as many tokens as a free stream's may a held one come to
_SIGNS = ['{"', '", "', '": ', '": "', '"}', '}, {"', "]", "[]", '["', '"]', "null", "true", "false", ", ", ": ", "}]"]


@dataclass(frozen=True, slots=True)
class ConstrainedBenchmark:
    """The settings of the benchmark: `streams` of each half, of `tokens` each behind `prompt_tokens`; both kinds run
    `rounds` times in turn.
    """

    streams: int
    tokens: int
    prompt_tokens: int
    rounds: int
    temperature: float


def run_constrained_benchmark(benchmark: ConstrainedBenchmark, deployment: Deployment, console: Console) -> list[Row]:
    """Return a row of each kind of held streams. Raises GateError where one wrote what its schema does not allow."""
    machine = probe_machine()
    scheduler = deployment.scheduler.model_copy(
        update={"prefix_cache": False, "max_running": 4 * benchmark.streams, "max_queue": 2 * benchmark.streams}
    )
    deployment = deployment.model_copy(update={"scheduler": scheduler})
    architecture = load_architecture(deployment.model)
    vocabulary = choose_vocabulary(deployment, architecture.vocab_size)
    plan = plan_engine(deployment, architecture, machine)
    engine, _ = load_engine(deployment, plan, lambda *_: None)
    engine.scheduler.constraints = Constraints(architecture.vocab_size, lambda: vocabulary)
    grammar = schema_grammar("schema", SCHEMA)
    console.print(f"{2 * benchmark.streams} streams, of which none or half are held to a schema; no floor", style="dim")
    rounds: dict[str, list[_Round]] = {kind: [] for kind in _KINDS}
    try:
        for number in range(benchmark.rounds + 1):
            for kind, told in rounds.items():
                engine.scheduler.jumps.is_on = kind == _AT_ONCE
                told.append(_run(engine, benchmark, architecture.vocab_size, "" if kind == _FREE else grammar, number))
                for text in told[-1].texts if kind != _FREE else []:
                    _require_schema(grammar, vocabulary.decode_bytes(text))
    finally:
        engine.shutdown()
    device = torch.device(plan.device)
    rows = []
    free = _mean(rounds[_FREE][1:])  # the first one of each warms up
    for kind in _KINDS[1:]:
        held = _mean(rounds[kind][1:])
        times = [one.step_ms for one in rounds[kind][1:]]
        extras = {
            "tokens_per_s": held.tokens_per_s,
            "peer_tokens_per_s": free.tokens_per_s,
            "of_unconstrained": held.tokens_per_s / free.tokens_per_s,
            "drawn_of_unconstrained": held.drawn_per_s / free.tokens_per_s,
            "beside_of_unconstrained": held.beside_per_s / free.beside_per_s,
            "loop_step_ms": held.loop_step_ms,
            "mask_ms_a_step": held.mask_ms,
            "forced_share": _forced_share(grammar, vocabulary, rounds[kind][-1].texts[0]),
            "jumped_share": 1.0 - held.drawn_per_s / held.tokens_per_s,
            "vocabulary": architecture.vocab_size,
        }
        console.print(
            f"{kind}: tokens/s {held.tokens_per_s:.0f}, unconstrained {free.tokens_per_s:.0f}: "
            f"{extras['of_unconstrained']:.3f}, counting drawn ones alone {extras['drawn_of_unconstrained']:.3f}, "
            f"of the free streams beside {extras['beside_of_unconstrained']:.3f}; masks {held.mask_ms:.3f} ms a step "
            f"of {held.loop_step_ms:.3f}; {extras['forced_share']:.1%} of held tokens were the only ones",
            highlight=False,
        )
        rows.append(
            Row(
                name=f"step with half of its rows held, {kind}",
                shape=f"{architecture.name}, {2 * benchmark.streams} streams", device=device_name(device),
                ms=float(np.median(times)), p10=min(times), p90=max(times), floor="none measured", floor_ms=None,
                peer="the same streams, none held", peer_ms=free.step_ms, rates={}, extras=extras,
                config=asdict(benchmark) | {"torch": torch.__version__},
            )
        )  # fmt: skip
    return rows


@dataclass(frozen=True, slots=True)
class _Round:
    """From where all streams have a token to where the first one has its last. step_ms: time for as many tokens as
    there are streams; loop_step_ms: for a step. drawn_per_s: without tokens that came without a draw; beside_per_s: of
    streams that are never held. texts: of the others.
    """

    step_ms: float
    tokens_per_s: float
    drawn_per_s: float
    beside_per_s: float
    loop_step_ms: float
    mask_ms: float
    texts: list[list[int]]


def _mean(rounds: list[_Round]) -> _Round:
    """Return the median of each number."""
    names = [name.name for name in fields(_Round) if name.name != "texts"]
    return _Round(**{name: float(np.median([getattr(one, name) for one in rounds])) for name in names}, texts=[])


def _run(engine: Engine, benchmark: ConstrainedBenchmark, vocab_size: int, grammar: str, number: int) -> _Round:
    """Return more tokens than streams that are held to a schema come to."""
    draw = np.random.default_rng(number)
    requests = []
    for stream in range(2 * benchmark.streams):
        is_held = bool(grammar) and stream < benchmark.streams
        requests.append(
            EngineRequest(
                request_id=str(stream),
                prompt=pack_tokens(draw.integers(256, vocab_size // 2, benchmark.prompt_tokens).tolist()),
                sampling=SamplingParams(temperature=benchmark.temperature, seed=stream),
                max_tokens=benchmark.tokens * (_MOST_AHEAD if is_held else 1),
                stop_token_ids=[],
                attention_profile="exact",
                arrival_s=time.monotonic(),
                grammar=grammar if is_held else "",
            )
        )
    engine.submit(requests)
    texts: dict[str, list[int]] = {request.request_id: [] for request in requests}
    has_ended = False
    began, at_begin, before = 0.0, dict.fromkeys(texts, 0), engine.stats()
    while not has_ended:
        for delta in engine.step():
            require(delta.error is None, f"no stream fails: {delta.error}")
            texts[delta.request_id] += delta.token_ids
            has_ended |= delta.finish_reason is not None
        if not began and all(texts.values()):
            began, before = time.perf_counter(), engine.stats()
            at_begin = {name: len(text) for name, text in texts.items()}
    seconds, after = time.perf_counter() - began, engine.stats()
    engine.cancel(list(texts))
    while engine.has_work:
        engine.step()
    written = [len(text) - at_begin[name] for name, text in texts.items()]
    steps = after.steps - before.steps
    jumped = after.masks.jumped_tokens - before.masks.jumped_tokens
    return _Round(
        step_ms=1e3 * seconds * len(written) / sum(written),
        tokens_per_s=sum(written) / seconds,
        drawn_per_s=(sum(written) - jumped) / seconds,
        beside_per_s=sum(written[benchmark.streams :]) / seconds,
        loop_step_ms=1e3 * seconds / steps,
        mask_ms=1e3 * (after.masks.mask_seconds - before.masks.mask_seconds) / steps,
        texts=[texts[str(stream)] for stream in range(benchmark.streams)],
    )


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
    """Return the model's, or one made up."""
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
