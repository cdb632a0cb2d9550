"""What a call's trace is made of: the times of its sequences, and what was asked and answered, as attributes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler.messages import Delta
from server import logs
from server.bodies.generation_bodies import GenerationBody
from server.engine.traces import AttributeValue, CallSpan, Stage, Traces, carrier

if TYPE_CHECKING:
    from server.generation.generation import Generation

_EMBEDDINGS, _TEXT, _CHAT = "embeddings", "text_completion", "chat"
_TEXT_KINDS = ("cmpl", "slot")


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What is known of a call when it comes; kind: what its id begins with; profile: that attends to its prompts."""

    kind: str
    body: GenerationBody
    model: str
    profile: str


@dataclass(slots=True)
class _Times:
    """Seconds of one sequence, as the engine measured them, and when it ended; None: it is not known."""

    queue: float | None = None
    prefill: float | None = None
    ended_s: float | None = None


class CallTrace:
    """Collects the times of a call from its arrival on, and records its spans when it ends."""

    def __init__(self, traces: Traces, facts: CallFacts, arrival_s: float, num_choices: int) -> None:
        self._traces = traces
        self._facts = facts
        self._carrier = carrier.get()
        self._arrival_s = arrival_s
        self._times = [_Times() for _ in range(num_choices)]

    def observe(self, index: int, delta: Delta, now: float) -> None:
        """Note what a message tells of a sequence's times."""
        times = self._times[index]
        times.queue = delta.queue_seconds if times.queue is None else times.queue
        times.prefill = delta.prefill_seconds if times.prefill is None else times.prefill
        times.ended_s = now

    def record(self, generation: "Generation", now: float, error: str) -> None:
        """Record a call that is over; error: what it failed with; "": nothing."""
        attributes = _attributes(self._facts, generation)
        operation = attributes["gen_ai.operation.name"]
        whole = Stage(f"{operation} {attributes['gen_ai.request.model']}", self._arrival_s, now, attributes)
        stages = [stage for index in range(len(self._times)) for stage in self._stages(generation, index)]
        self._traces.record(CallSpan(whole, stages, error, self._carrier))

    def _stages(self, generation: "Generation", index: int) -> Sequence[Stage]:
        """Return what a sequence went through, if it began."""
        times, choice = self._times[index], generation.choices[index]
        if times.queue is None or times.prefill is None or times.ended_s is None:
            return ()
        admitted_s = self._arrival_s + times.queue
        drawn_s = admitted_s + times.prefill
        shared = {"tandem.choice": index} if len(self._times) > 1 else {}
        num_prompt_tokens = len(generation.job_of(index).prompt.token_ids)
        found = {
            "gen_ai.usage.input_tokens": num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": choice.num_cached_tokens,
        }
        stages = [
            Stage("queue", self._arrival_s, admitted_s, shared),
            Stage("prefill", admitted_s, drawn_s, shared | found),
        ]
        if choice.num_tokens:
            drawn = {"gen_ai.usage.output_tokens": choice.num_tokens}
            stages.append(Stage("decode", drawn_s, max(drawn_s, times.ended_s), shared | drawn))
        return stages


def _attributes(facts: CallFacts, generation: "Generation") -> dict[str, AttributeValue]:
    body, model = facts.body, facts.model
    operation = _TEXT if facts.kind in _TEXT_KINDS else _CHAT
    operation = _EMBEDDINGS if generation.jobs[0].pooling is not None else operation
    asked: dict[str, AttributeValue | None] = {
        "gen_ai.request.max_tokens": None if operation == _EMBEDDINGS else generation.jobs[0].max_tokens,
        "gen_ai.request.temperature": body.temperature,
        "gen_ai.request.top_p": body.top_p,
        "gen_ai.request.top_k": body.top_k,
        "gen_ai.request.frequency_penalty": body.frequency_penalty,
        "gen_ai.request.presence_penalty": body.presence_penalty,
        "gen_ai.request.seed": body.seed,
        "gen_ai.request.choice.count": generation.num_each if generation.num_each > 1 else None,
        "gen_ai.conversation.id": generation.session or None,
        "tandem.request_id": logs.request_id.get(),
    }
    reasons = [choice.finish_reason for choice in generation.choices if choice.finish_reason is not None]
    told: dict[str, AttributeValue] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "tandem",
        "gen_ai.request.model": body.model or model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": generation.id,
        "gen_ai.response.finish_reasons": reasons,
        "gen_ai.usage.input_tokens": generation.num_prompt_tokens,
        "gen_ai.usage.output_tokens": generation.num_generated_tokens,
        "gen_ai.usage.cache_read.input_tokens": generation.num_cached_tokens,
        "tandem.attention_profile": facts.profile,
    }
    return told | {name: value for name, value in asked.items() if value is not None}
