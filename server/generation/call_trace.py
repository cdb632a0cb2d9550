"""Gather the content of a call's trace: the times of its sequences, and attributes of the request and the answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler.messages import Delta
from server import logs
from server.bodies.generation_bodies import GenerationBody
from server.engine.traces import Attributes, AttributeValue, CallSpan, Origin, Stage, Traces, origin

if TYPE_CHECKING:
    from server.generation.generation import Generation

_EMBEDDINGS, _TEXT, _CHAT = "embeddings", "text_completion", "chat"
_TEXT_KINDS = ("cmpl", "slot")


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What is known of a call when it arrives. kind: the prefix of its id. profile: its attention profile."""

    kind: str
    body: GenerationBody
    model: str
    profile: str


@dataclass(slots=True)
class _Times:
    """Times of one sequence; None: it is not known.

    queue, prefill: seconds, as the engine measured them. begun_s: when the first progress of its prefill came.
    ended_s: when it ended.
    """

    queue: float | None = None
    prefill: float | None = None
    begun_s: float | None = None
    ended_s: float | None = None


class CallTrace:
    """Collects the times of a call, and records its spans when it ends.

    queued_s: when it was ready for the engine; its span begins when the request arrived.
    """

    def __init__(self, traces: Traces, facts: CallFacts, queued_s: float, num_choices: int) -> None:
        whence = origin.get() or Origin()
        self.is_accepted = False  # by the engine
        self._traces = traces
        self._facts = facts
        self._carrier = whence.carrier
        self._begin_s = whence.begin(queued_s)
        self._queued_s = queued_s
        self._times = [_Times() for _ in range(num_choices)]

    def observe_progress(self, index: int, now: float) -> None:
        """Note that a sequence's prefill has begun."""
        times = self._times[index]
        times.begun_s = now if times.begun_s is None else times.begun_s

    def observe(self, index: int, delta: Delta, now: float) -> None:
        """Note the times of a sequence that a message reports."""
        times = self._times[index]
        times.queue = delta.queue_seconds if times.queue is None else times.queue
        times.prefill = delta.prefill_seconds if times.prefill is None else times.prefill
        times.ended_s = now

    def record(self, generation: "Generation", now: float, error: str) -> None:
        """Record a finished call. error: why it failed; "": it did not."""
        attributes = _attributes(self._facts, generation)
        operation = attributes["gen_ai.operation.name"]
        whole = Stage(f"{operation} {attributes['gen_ai.request.model']}", self._begin_s, now, attributes)
        of_each = range(len(self._times)) if self.is_accepted else ()
        stages = [stage for index in of_each for stage in self._stages(generation, index, now)]
        self._traces.record(CallSpan(whole, stages, error, self._carrier))

    def _stages(self, generation: "Generation", index: int, now: float) -> Sequence[Stage]:
        """Return the stages of a sequence that the engine accepted, up to `now`."""
        times, choice = self._times[index], generation.choices[index]
        shared = {"tandem.choice": index} if len(self._times) > 1 else {}
        if times.queue is None or times.prefill is None or times.ended_s is None:
            return self._stages_begun(times, now, shared)
        admitted_s = self._queued_s + times.queue
        drawn_s = admitted_s + times.prefill
        num_prompt_tokens = len(generation.job_of(index).prompt.token_ids)
        found = {
            "gen_ai.usage.input_tokens": num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": choice.num_cached_tokens,
        }
        stages = [
            Stage("queue", self._queued_s, admitted_s, shared),
            Stage("prefill", admitted_s, drawn_s, shared | found),
        ]
        if choice.num_tokens:
            drawn = {"gen_ai.usage.output_tokens": choice.num_tokens}
            stages.append(Stage("decode", drawn_s, max(drawn_s, times.ended_s), shared | drawn))
        return stages

    def _stages_begun(self, times: _Times, now: float, shared: Attributes) -> Sequence[Stage]:
        """Return the stages of a sequence that ended before the engine reported its times."""
        begun_s = now if times.begun_s is None else times.begun_s
        queue = Stage("queue", self._queued_s, begun_s, shared)
        return (queue,) if times.begun_s is None else (queue, Stage("prefill", begun_s, now, shared))


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
