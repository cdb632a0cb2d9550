"""The serving engine in this process: prompts through an attention profile, end to end, as a server would run them.

It drives the engine's own loop and knows no task. What a profile reads is the engine's own business, so nothing is said
of it here. Invariant: each prompt comes back exactly once, finished or as a failure with its reason.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from gpu.architecture import read_architecture
from gpu.config import GpuConfig, ModelConfig
from gpu.profiles import ProfileError, get_profile
from gpu.sampling_params import SamplingParams
from scheduler.capacity import QueueFullError, TooLargeError
from scheduler.config import EngineConfig, SchedulerConfig
from scheduler.engine import Engine, load_engine
from scheduler.messages import Delta, EngineRequest, Logprob
from server.config import Deployment
from transfer.config import HOST_PROFILES, HostConfig

PREFIX = "profile:"
"""Of a method that is a serving profile: `profile:exact`."""
PROMPTS_AT_ONCE = 4
FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt to decode greedily. num_top: logprobs of so many alternatives for every token of prompt and answer;
    None for no logprobs."""

    key: str
    token_ids: list[int]
    max_new_tokens: int
    stop_token_ids: list[int]
    num_top: int | None


@dataclass(slots=True)
class Answer:
    """prompt_logprobs[i] is of prompt token i + 1. failure: why there is no answer. A stop token is left out."""

    key: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    failure: str | None = None


def profile_of(method: str, deployment: Deployment | None) -> str | None:
    """The profile that a method names, or None if it is no serving profile.

    Raises ProfileError for one that the deployment does not have; None: a deployment without a `host` section.
    """
    if not method.startswith(PREFIX):
        return None
    name = method.removeprefix(PREFIX)
    if deployment is None and name in HOST_PROFILES:
        raise ProfileError(
            f"--method {method}: keeps KV in host memory; give --config a deployment with a `host` section"
        )
    return get_profile(name, deployment.host if deployment is not None else None).name


class ServingEngine:
    """A loaded engine and how many prompts it is given at once. Leaving it as a context ends its threads."""

    def __init__(self, engine: Engine, host: HostConfig | None, max_waiting: int) -> None:
        self._engine, self._host, self._max_waiting = engine, host, max_waiting

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.shutdown()

    def settings_of(self, profile: str) -> dict[str, str]:
        """What decides a profile's answers beside its name: empty for one that keeps its KV on the device."""
        found = get_profile(profile, self._host)
        return {"host": found.kv_key} if found.uses_host else {}

    def answer(self, asks: Sequence[Ask], profile: str) -> Iterator[Answer]:
        """Answers as they finish, in any order."""
        waiting, open_answers = list(reversed(asks)), dict[str, Answer]()
        stops = {ask.key: ask.stop_token_ids for ask in asks}
        while waiting or self._engine.has_work:
            while waiting and len(open_answers) < self._max_waiting:
                ask = waiting.pop()
                try:
                    self._engine.submit([request_of(ask, profile)])
                except QueueFullError:
                    waiting.append(ask)
                    break
                except TooLargeError as error:
                    yield Answer(ask.key, failure=str(error))
                else:
                    open_answers[ask.key] = Answer(ask.key)
            for delta in self._engine.step():
                answer = open_answers[delta.request_id]
                extend(answer, delta, stops[answer.key])
                if delta.finish_reason is not None:
                    yield open_answers.pop(answer.key)


def request_of(ask: Ask, profile: str) -> EngineRequest:
    sampling = SamplingParams(temperature=0.0, num_logprobs=ask.num_top, num_prompt_logprobs=ask.num_top)
    return EngineRequest(
        request_id=ask.key,
        prompt_token_ids=ask.token_ids,
        sampling=sampling,
        max_tokens=ask.max_new_tokens,
        stop_token_ids=ask.stop_token_ids,
        attention_profile=profile,
        arrival_s=time.monotonic(),
    )


def extend(answer: Answer, delta: Delta, stop_token_ids: list[int]) -> None:
    """Put what a step added into the answer."""
    if delta.finish_reason == "error":
        answer.failure = delta.error or "the engine gave no reason"
        return
    answer.token_ids += delta.token_ids
    answer.logprobs += delta.logprobs or []
    answer.prompt_logprobs += delta.prompt_logprobs or []
    if delta.finish_reason == "stop" and answer.token_ids and answer.token_ids[-1] in stop_token_ids:
        answer.token_ids.pop()


def load_serving_engine(model: Path, device: str, longest_tokens: int, deployment: Deployment | None) -> ServingEngine:
    """The engine of a deployment, but of this model and on this device.

    None: with what the machine gives, and on the CPU with room for a few prompts of `longest_tokens`. Raises
    ModelError, PlanError, or HostMemoryError.
    """
    on_cuda = device.startswith("cuda")
    gpu, host, scheduler = GpuConfig(), None, SchedulerConfig()
    if deployment is not None:
        gpu, host, scheduler = deployment.gpu, deployment.host, deployment.scheduler
    elif not on_cuda:
        token_bytes = read_architecture(model).kv_bytes_per_token(FLOAT32_BYTES)
        gpu = GpuConfig(kv_cache_gib=max(0.25, PROMPTS_AT_ONCE * longest_tokens * token_bytes / 2**30))
    config = EngineConfig(
        model=ModelConfig(path=model),
        gpu=gpu.model_copy(update={"device": "cuda" if on_cuda else "cpu"}),
        host=host,
        scheduler=scheduler,
    )
    engine, _ = load_engine(config, lambda *_: None)
    return ServingEngine(engine, host, scheduler.max_running + scheduler.max_queue // 2)
