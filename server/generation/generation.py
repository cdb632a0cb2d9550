"""Run one API call in the engine: submit its requests together, and cancel them when the call ends.

It turns the engine's messages into pieces of text, and updates the metrics.
"""

import asyncio
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import structs

from gpu.pooling import Pooling
from gpu.sampling_params import SamplingParams
from scheduler.messages import (
    CACHED_FROM,
    COMPUTED_AGAIN,
    PASSED_OVER,
    PREEMPTED_AGAIN,
    ChunkSpan,
    Delta,
    EngineRequest,
    Fusion,
    Progress,
    Ready,
    cached_figure,
    pack_tokens,
    passed_figure,
)
from server import logs
from server.api_error import UNSUPPORTED_GRAMMAR, ApiError, internal, invalid, time_up, unavailable
from server.bodies.answer_form import form_param
from server.bodies.generation_bodies import ANY_SEED, GenerationBody
from server.engine.mailbox import ClientGone, EngineLost, Mailbox, Tick, TimeUp
from server.engine.request_figures import figure_names, logged_name
from server.generation.answer_choice import TIME_LIMIT, AnswerPiece, Choice
from server.generation.call_trace import CallFacts, CallTrace
from server.generation.prompt_tokens import (
    Prompt,
    check_text_tokens,
    check_token_ids,
    epsilon_of,
    profile_of,
    spell_words,
)
from server.parsing.message_reader import MessageReader
from server.service.service import Service, join_salts
from server.stores.conversation_tails import AnswerRecord

_SEED_MASK = 2**63 - 1


class SecondsTaken(NamedTuple):
    """The seconds that a call has taken. prompt: its first prefill, as the engine measured it. answer: since the first
    token.
    """

    total: float
    prompt: float
    answer: float


class Disconnected(Exception):
    """The client has disconnected."""


@dataclass(frozen=True, slots=True)
class Update:
    """One step of choice `index`. delta: the engine's message that it comes from."""

    index: int
    delta: Delta
    piece: AnswerPiece


def _as_words() -> None:
    """Return no reader, since all of the answer is content."""


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt and how it is answered.

    fusion: how its documents are computed; None: like other tokens.
    grammar: constrains each answer (`grammar/structured.py`); "": none.
    read: makes the reader of each answer.
    pooling: the vector to make of the prompt; None: none.
    skip_special_tokens: special tokens have no text.
    prediction: tokens that answers may repeat.
    """

    prompt: Prompt
    max_tokens: int
    fusion: Fusion | None = None
    grammar: str = ""
    read: Callable[[], MessageReader | None] = _as_words
    pooling: Pooling | None = None
    skip_special_tokens: bool = True
    prediction: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller. owner, session: under which contexts are kept. cache_salt: of its prefixes. limit_seconds: the time
    limit of the call; None: none.
    """

    cache_salt: str
    limit_seconds: float | None
    owner: str = ""
    session: str = ""


class Generation:
    """The work of a call. Call `submit`, then `updates` until `done`, and always `close`."""

    def __init__(
        self,
        service: Service,
        kind: str,
        body: GenerationBody,
        jobs: list[Job],
        limits: Ready,
        caller: Caller,
    ) -> None:
        self.id = f"{kind}-{uuid.uuid4().hex}"
        self.owner, self.session = caller.owner, caller.session
        self.slot = -1  # the slot for its conversation; -1: any
        self.created = int(time.time())
        self.jobs = jobs
        self.num_each = body.n or 1
        self.mailbox = Mailbox()
        self._service = service
        self._body = body
        self._limits = limits
        self._adapter = service.adapters.number_of(body.model)
        salt = join_salts(caller.cache_salt, body.cache_salt)
        self.cache_salt = join_salts(salt, service.adapters.digest_of(self._adapter) or None)
        num_choices = len(jobs) * self.num_each
        stops = body.stop_strings()
        keeps_stop, min_tokens = bool(body.include_stop_str_in_output), body.min_tokens or 0
        self.choices = [
            Choice(service.tokenizer, stops, min_tokens, keeps_stop, job.read(), job.skip_special_tokens)
            for job in jobs
            for _ in range(self.num_each)
        ]
        is_alone = num_choices == 1 and jobs[0].prompt.conversation != ""
        self._record = AnswerRecord() if is_alone else None
        self._index = {f"{self.id}-{i}": i for i in range(num_choices)}
        self._open = set(self._index)
        self._arrival_s = time.monotonic()
        self._limit_seconds = caller.limit_seconds
        self._timer: asyncio.TimerHandle | None = None
        self._last_token_s: list[float | None] = [None] * num_choices
        self._first_token_s: float | None = None
        self._prefill_s = 0.0  # of the first choice with a token, as the engine measured it
        self._error = ""  # the code of its failure
        self._trace: CallTrace | None = None
        if service.traces is not None:
            facts = CallFacts(kind, body, service.model_name, profile_of(body, limits))
            self._trace = CallTrace(service.traces, facts, self._arrival_s, num_choices)

    @property
    def done(self) -> bool:
        return not self._open

    async def submit(self, num_logprobs: int | None, num_prompt_logprobs: int | None, param: str) -> None:
        """Send the requests, and return once the engine has accepted them. Raises ApiError, and then leaves nothing."""
        requests = self._requests(num_logprobs, num_prompt_logprobs, param)
        if self._limit_seconds is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._limit_seconds, self.mailbox.put, TimeUp())
        try:
            grammar_param = form_param(self._body.response_format, self._body.structured_outputs) or "tools"
            await self._service.supervisor.submit(requests, self.mailbox, param, grammar_param)
        except BaseException as error:
            self._service.supervisor.forget(list(self._open), cancel=True)
            self._open.clear()
            self._stop_timer()
            self._error = (isinstance(error, ApiError) and error.code) or type(error).__name__
            self._end_trace()
            raise
        if self._trace is not None:
            self._trace.is_accepted = True
        self._service.metrics.prompt_tokens.inc(self.num_prompt_tokens)

    async def updates(self) -> list[Update | Progress | Tick]:
        """Wait for events, and return those since the last call.

        Raises Disconnected, and ApiError if the engine fails or the time is up before anything was generated.
        """
        found: list[Update | Progress | Tick] = []
        mail = await self.mailbox.take()
        now = time.monotonic()
        for item in mail:
            if isinstance(item, Delta):
                index = self._index[item.request_id]
                if self.choices[index].finish_reason is None:
                    found.append(self._advance(index, item, now))
            elif isinstance(item, EngineLost):
                self._drop("lost")
                self._error = item.code
                raise unavailable(item.message, item.code, self._service.settings.retry_after_seconds)
            elif isinstance(item, ClientGone):
                raise Disconnected
            elif isinstance(item, TimeUp):
                found += self._end_in_time(now)
            else:
                if self._trace is not None and isinstance(item, Progress):
                    self._trace.observe_progress(self._index[item.request_id], now)
                found.append(item)
        return found

    def close(self) -> None:
        """Cancel the requests that the engine still works on. May be called more than once."""
        self._stop_timer()
        self._drop("cancelled")
        self._end_trace()

    # --- usage --------------------------------------------------------------------------------------------------------

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(job.prompt.token_ids) for job in self.jobs)

    @property
    def num_generated_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        """Return the cached tokens of the prompts, each prompt counted once."""
        return sum(choice.num_cached_tokens for choice in self.choices[:: self.num_each])

    def cached_from(self) -> dict[str, int]:
        """Count the prompts' cached tokens by the place where they were found."""
        choices = self.choices[:: self.num_each]
        return {place: sum(choice.figures.get(cached_figure(place), 0) for choice in choices) for place in CACHED_FROM}

    def passed_over(self) -> dict[str, int]:
        """Count the prompts' tokens that are on disk but were computed, by reason."""
        choices = self.choices[:: self.num_each]
        return {why: sum(choice.figures.get(passed_figure(why), 0) for choice in choices) for why in PASSED_OVER}

    def computed_again(self) -> dict[str, int]:
        """Count the prompts' tokens that were computed although their keys and values are cached; {} if there
        are none.
        """
        again = sum(choice.figures.get(COMPUTED_AGAIN, 0) for choice in self.choices[:: self.num_each])
        return {COMPUTED_AGAIN: again} if again else {}

    def cache_usage(self) -> dict[str, dict[str, int] | int]:
        """Return the fields of `usage` about caching: where cached tokens were, and any that were not used."""
        passed = self.passed_over()
        told = {"passed_over_on_disk": passed} if any(passed.values()) else {}
        return {"cached_tokens_from": self.cached_from(), **told, **self.computed_again()}

    def figures(self, of_prompt: bool) -> dict[str, int]:
        """Return the figures of methods that ran: of the prompts, each counted once, or of all answers."""
        choices = self.choices[:: self.num_each] if of_prompt else self.choices
        return {
            name: sum(choice.figures.get(name, 0) for choice in choices)
            for name, is_told in figure_names(of_prompt).items()
            if is_told or any(name in choice.figures for choice in choices)
        }

    def _cached_figures(self) -> dict[str, int]:
        passed = {passed_figure(why): number for why, number in self.passed_over().items() if number}
        places = {cached_figure(place): number for place, number in self.cached_from().items()}
        return places | passed | self.computed_again()

    def seconds_taken(self) -> SecondsTaken:
        now = time.monotonic()
        answer = now - self._first_token_s if self._first_token_s is not None else 0.0
        return SecondsTaken(now - self._arrival_s, self._prefill_s, answer)

    def job_of(self, index: int) -> Job:
        return self.jobs[index // self.num_each]

    def progress_index(self, progress: Progress) -> int:
        return self._index[progress.request_id]

    # --- inside -------------------------------------------------------------------------------------------------------

    def _sampling(self, num_logprobs: int | None, num_prompt_logprobs: int | None) -> SamplingParams:
        """Return the sampling parameters; choices of one prompt add their numbers to the seed."""
        body, defaults = self._body, self._service.sampling_defaults
        bias = {int(key): value for key, value in (body.logit_bias or {}).items()}
        check_token_ids("logit_bias", list(bias), self._limits.vocab_size)
        return SamplingParams(
            temperature=_given(body.temperature, defaults.temperature),
            top_p=_given(body.top_p, defaults.top_p),
            top_k=max(0, defaults.top_k if body.top_k is None else body.top_k),
            min_p=_given(body.min_p, defaults.min_p),
            repetition_penalty=_given(body.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=_given(body.presence_penalty, 0.0),
            frequency_penalty=_given(body.frequency_penalty, 0.0),
            logit_bias=bias,
            seed=secrets.randbits(62) if body.seed in (None, ANY_SEED) else body.seed,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
        )

    def _requests(self, num_logprobs: int | None, num_prompt_logprobs: int | None, param: str) -> list[EngineRequest]:
        body, vocab_size = self._body, self._limits.vocab_size
        sampling = self._sampling(num_logprobs, num_prompt_logprobs)
        own_stops = body.stop_token_ids or []
        check_token_ids("stop_token_ids", own_stops, vocab_size)
        stop_ids = tuple(sorted({*own_stops, *(() if body.ignore_eos else self._service.tokenizer.eos_ids)}))
        allowed = body.allowed_token_ids or []
        check_token_ids("allowed_token_ids", allowed, vocab_size)
        spelled = spell_words(self._service.tokenizer, body.bad_words or [])
        bad_words = tuple(token_ids for token_ids in spelled if max(token_ids) < vocab_size)  # no other is ever drawn
        profile, epsilon = profile_of(body, self._limits), epsilon_of(body, self._limits)
        for job in self.jobs:
            check_text_tokens(param, job.prompt.token_ids, vocab_size)
        prompts = [pack_tokens(job.prompt.token_ids) for job in self.jobs]
        requests = []
        for request_id, index in self._index.items():
            job = self.job_of(index)
            if (body.min_tokens or 0) > job.max_tokens:
                raise invalid("min_tokens", f"got {body.min_tokens}, more than the {job.max_tokens} of max_tokens")
            requests.append(
                EngineRequest(
                    request_id=request_id,
                    prompt=prompts[index // self.num_each],
                    sampling=structs.replace(sampling, seed=(sampling.seed + index % self.num_each) & _SEED_MASK),
                    max_tokens=job.max_tokens,
                    stop_token_ids=stop_ids,
                    min_tokens=body.min_tokens or 0,
                    attention_profile=profile,
                    epsilon=epsilon,
                    arrival_s=self._arrival_s,
                    cache_salt=self.cache_salt,
                    priority=body.priority or 0,
                    chunks=tuple(ChunkSpan(*span, self.cache_salt) for span in job.prompt.chunks) if job.fusion else (),
                    fusion=job.fusion,
                    grammar=job.grammar,
                    allowed_token_ids=tuple(allowed),
                    bad_token_ids=bad_words,
                    pooling=job.pooling,
                    prediction=pack_tokens(job.prediction),
                    owner=self.owner,
                    session=self.session,
                    slot=self.slot,
                    front_tokens=job.prompt.num_front,
                    adapter=self._adapter,
                )
            )
        return requests

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _end_in_time(self, now: float) -> list[Update]:
        """End the open choices because the time is up. Raises ApiError if nothing was generated."""
        if not self.num_generated_tokens:
            self._drop(TIME_LIMIT)
            assert self._limit_seconds is not None
            raise time_up(self._limit_seconds)
        last = [
            Delta(request_id=name, token_ids=[], finish_reason=TIME_LIMIT) for name in self._index if name in self._open
        ]
        return [self._advance(self._index[delta.request_id], delta, now) for delta in last]

    def _drop(self, reason: str) -> None:
        if self._open:
            self._service.metrics.finished.labels(reason).inc(len(self._open))
            self._service.supervisor.forget(list(self._open), cancel=True)
            self._open.clear()
            self._error = self._error or reason
            logs.info(reason, id=self.id, generated_tokens=self.num_generated_tokens)

    def _advance(self, index: int, delta: Delta, now: float) -> Update:
        choice = self.choices[index]
        if delta.finish_reason == "error":
            self._end(delta.request_id, "error", forget=True)
            self._error = "engine_error"
            if delta.may_retry:
                retry_s = self._service.settings.retry_after_seconds
                raise unavailable(delta.error or "engine: out of memory", "out_of_memory", retry_s)
            if (delta.error or "").startswith("grammar: "):  # a retry would fail again
                raise ApiError(400, delta.error or "", code=UNSUPPORTED_GRAMMAR)
            raise internal(delta.error or "the engine could not go on with this request")
        before = choice.num_tokens
        piece = choice.feed(delta)
        if self._record is not None:
            self._record.take(piece.token_ids, piece.parts)
        self._observe(index, choice.num_tokens - before, delta, now)
        if piece.finish_reason is not None:
            is_over = delta.finish_reason not in (None, TIME_LIMIT)  # in the engine
            self._end(delta.request_id, piece.finish_reason, forget=not is_over)
            if self._record is not None:
                prompt = self.jobs[0].prompt
                self._service.tails.keep(prompt.conversation, prompt.token_ids, prompt.num_front, self._record)
            self._service.metrics.request_s.observe(now - self._arrival_s)
            if self.done:
                self._service.metrics.take_figures(self.figures(True) | self.figures(False) | self._cached_figures())
                self._log(now)
        return Update(index, delta, piece)

    def _end_trace(self) -> None:
        """Record the call's spans; only the first call does."""
        trace, self._trace = self._trace, None
        if trace is None:
            return
        try:
            trace.record(self, time.monotonic(), self._error)
        except Exception:  # a fault in the tracing library must not cost the client its answer
            logs.exception("trace_failed", id=self.id)

    def _end(self, request_id: str, reason: str, forget: bool) -> None:
        self._open.discard(request_id)
        self._service.supervisor.forget([request_id], cancel=forget)
        if reason == "tool_calls":
            self._service.supervisor.expect([request_id])
        self._service.metrics.finished.labels(reason).inc()

    def _observe(self, index: int, num_tokens: int, delta: Delta, now: float) -> None:
        metrics = self._service.metrics
        if self._trace is not None:
            self._trace.observe(index, delta, now)
        if delta.queue_seconds is not None:
            metrics.queue_s.observe(delta.queue_seconds)
        if delta.prefill_seconds is not None:
            metrics.prefill_s.observe(delta.prefill_seconds)
            self._prefill_s = self._prefill_s or delta.prefill_seconds
        if num_tokens:
            last_s = self._last_token_s[index]
            metrics.generated_tokens.inc(num_tokens)
            metrics.rates.count(num_tokens)
            if last_s is None:
                metrics.first_token_s.observe(now - self._arrival_s)
                self._first_token_s = self._first_token_s or now
            else:
                metrics.inter_token_s.observe((now - last_s) / num_tokens)
            self._last_token_s[index] = now

    def _log(self, now: float) -> None:
        turn = self.jobs[0].prompt.turn
        logs.info(
            "generated",
            id=self.id,
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=self.num_cached_tokens,
            **self._cached_figures(),
            **{logged_name(name): number for name, number in self.figures(True).items()},
            **{PREEMPTED_AGAIN: sum(choice.figures.get(PREEMPTED_AGAIN, 0) for choice in self.choices)},
            **self.figures(False),
            generated_tokens=self.num_generated_tokens,
            finish=",".join(sorted({choice.finish_reason or "" for choice in self.choices})),
            **({} if turn is None else {"parted": turn.parted, "same_tokens": turn.num_same}),
            prefill_ms=1e3 * self._prefill_s,
            ttft_ms=1e3 * ((self._first_token_s or now) - self._arrival_s),
            ms=1e3 * (now - self._arrival_s),
        )


async def collect(generation: Generation) -> Sequence[list[Update]]:
    """Wait until all choices are finished, and return the updates of each. Raises as `updates` does."""
    gathered: list[list[Update]] = [[] for _ in generation.choices]
    while not generation.done:
        for update in await generation.updates():
            if isinstance(update, Update):
                gathered[update.index].append(update)
    return gathered


def _given(value: float | None, default: float) -> float:
    return default if value is None else value
