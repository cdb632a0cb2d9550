"""Load a serving engine in this process, and answer prompts through an attention profile, as a server would.

Reads come from the engine's own counts. Invariant: each prompt comes back exactly once, answered or as a failure with
its reason.
"""

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch

from evals.meter import Fractions, layer_shares, served_fractions
from gpu.config import GpuConfig, ModelConfig
from gpu.host.footprint import OFFLOAD_BLOCK_TOKENS
from gpu.memory.host_shares import resolve_host
from gpu.memory.machine_limits import SMALLEST_CONTEXT_TOKENS
from gpu.model.architecture import Architecture, load_architecture, read_architecture
from gpu.profiles import Profile, find_kept, resolve_profiles
from gpu.sampling_params import SamplingParams
from scheduler.engine.decode_reads import DecodeReads
from scheduler.engine.engine import Engine
from scheduler.engine.load_engine import load_engine
from scheduler.engine_config import EngineConfig, PrefillConfig, SchedulerConfig
from scheduler.messages import Delta, EngineRequest, Logprob, pack_tokens
from scheduler.planning.engine_memory import plan_engine
from scheduler.sequences.capacity import QueueFullError, TooLargeError
from server.deployment import Deployment
from server.planning.default_profile import with_layers_of_default
from transfer.host_config import HostConfig
from transfer.host_memory import bytes_of_run
from transfer.machine import GIB, probe_machine
from transfer.reading import Reading

CUDA_PROMPTS, CPU_PROMPTS = 32, 4
"""Prompts under way at once in an engine that is made for a run."""
CUDA_CHUNK_TOKENS = 16_384
"""Tokens of a prefill unit there. Each is launched from Python, which for 2,048 takes longer than a small model's work.
"""
HOST_SHARE = 0.5
"""Largest share of the machine's memory for contexts of prompts under way."""
FLOAT32_BYTES, BFLOAT16_BYTES = 4, 2


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """One prompt to decode greedily. num_top: alternatives with logprobs for every token of prompt and answer; None: no
    logprobs.
    """

    key: str
    token_ids: list[int]
    max_new_tokens: int
    stop_token_ids: list[int]
    num_top: int | None


@dataclass(slots=True)
class Answer:
    """The answer to one DecodeRequest, without its stop token. prompt_logprobs[i] belongs to prompt token i + 1.
    failure: why there is no answer, or None.
    """

    key: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    failure: str | None = None


class ServingEngine:
    """A loaded engine, and the number of prompts it is given at once. Leaving its context ends the engine's threads."""

    def __init__(
        self, engine: Engine, shape: Architecture, profiles: Mapping[str, Profile], max_waiting: int,
        told: Mapping[str, str],
    ) -> None:  # fmt: skip
        """Take a loaded engine.

        told: settings that change answers and are not the defaults, as text by name; each record has them.
        """
        self._engine, self._shape, self._profiles, self._max_waiting = engine, shape, profiles, max_waiting
        self._told = told

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Shut the engine down and free the device's memory for the next engine of this process."""
        self._engine.shutdown()
        del self._engine
        gc.collect()
        torch.cuda.empty_cache()

    def settings_of(self, profile: str) -> dict[str, str]:
        """Return all that determines a profile's answers beside its name: its methods with their settings, and how
        weights and rows are rounded.
        """
        found = self._profiles[profile]
        return {"composition": found.composition, "kv_key": found.kv_key, **self._told}

    def reads(self) -> DecodeReads:
        """Return the reads of all profiles so far."""
        return self._engine.decode_reads()

    def fractions(self, before: DecodeReads, profile: str) -> Fractions | None:
        """Return the reads since `before`, all of them under this profile; None if nothing was decoded."""
        found = self._profiles[profile]
        is_hosts = all(part.method.reading is not Reading.NONE for part in found.ring_parts)
        layers = len(self._engine.host_layers) if found.offloads and is_hosts else 0
        return served_fractions(self.reads() - before, self._shape, layers, found.parts)

    def did_apply(self, before: DecodeReads, profile: str, longest_tokens: int) -> bool | None:
        """Return whether any method of the profile had an effect since `before`; None: it has only full attention.

        A sampling method has an effect if it left out a key, an offloading one if it offloaded KV, one that reuses or
        predicts if it took over or dropped a row, and a prefill method if it applies to prompts of `longest_tokens`.
        """
        found, reads = self._profiles[profile], self.reads() - before
        did: list[bool] = []
        if found.offloads:
            did.append(reads.host_tokens > (reads.host_keys if found.reading.is_estimate else 0))
        for part in found.parts:
            if part.method.counters:
                saved = part.method.saved_reads(part.settings, reads.methods, self._shape)
                did.append(saved.keys > 0)
        if (first := self._engine.first_own_token(found.prefill_method)) is not None:
            did.append(longest_tokens > first + found.align_tokens)  # a prompt's last block is dense
        return any(did) if did else None

    def layers(self, before: DecodeReads, profile: str) -> dict[str, list[float]]:
        """Return the profile's methods' shares since `before`, by layer; empty if they had no effect."""
        counts = (self.reads() - before).methods
        found = [layer_shares(part.method, counts, self._shape.group) for part in self._profiles[profile].parts]
        return {name: numbers for one in found for name, numbers in one.items()}

    def answer(self, asks: Sequence[DecodeRequest], profile: str) -> Iterator[Answer]:
        """Yield answers as they finish, in any order."""
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


def request_of(ask: DecodeRequest, profile: str) -> EngineRequest:
    sampling = SamplingParams(temperature=0.0, num_logprobs=ask.num_top, num_prompt_logprobs=ask.num_top)
    return EngineRequest(
        request_id=ask.key,
        prompt=pack_tokens(ask.token_ids),
        sampling=sampling,
        max_tokens=ask.max_new_tokens,
        stop_token_ids=ask.stop_token_ids,
        attention_profile=profile,
        arrival_s=time.monotonic(),
    )


def extend(answer: Answer, delta: Delta, stop_token_ids: list[int]) -> None:
    """Add the tokens and logprobs of a step to the answer."""
    if delta.finish_reason == "error":
        answer.failure = delta.error or "the engine gave no reason"
        return
    answer.token_ids += delta.token_ids
    answer.logprobs += delta.logprobs or []
    answer.prompt_logprobs += delta.prompt_logprobs or []
    if delta.finish_reason == "stop" and answer.token_ids and answer.token_ids[-1] in stop_token_ids:
        answer.token_ids.pop()


def load_serving_engine(model: Path, device: str, longest_tokens: int, deployment: Deployment | None) -> ServingEngine:
    """Load the engine of a deployment, but for this model and device, and without a prefix cache.

    Each prompt comes only once, and a kept context would only make the next one wait for memory. deployment: None: one
    is made for prompts of `longest_tokens`, answers included. Raises ModelError, PlanError or HostMemoryError.
    """
    settings = deployment or make_deployment(model, device, longest_tokens, None)
    served = settings.model.model_copy(update={"path": model, "random_weights": None, "shape": None})
    architecture = load_architecture(served)
    settings = with_layers_of_default(settings, architecture)
    config = EngineConfig(
        model=served,
        gpu=settings.gpu.model_copy(update={"device": "cuda" if device.startswith("cuda") else "cpu"}),
        host=settings.host,
        profiles=settings.profiles,
        scheduler=settings.scheduler.model_copy(update={"prefix_cache": False}),
    )
    engine, _ = load_engine(config, plan_engine(config, architecture, probe_machine()), lambda *_: None)
    max_waiting = settings.scheduler.max_running + settings.scheduler.max_queue // 2
    return ServingEngine(
        engine, architecture, resolve_profiles(settings.all_profiles, settings.host), max_waiting, _told(config)
    )


def _told(config: EngineConfig) -> dict[str, str]:
    """Return the configured settings of weights and rows that change answers."""
    said = {"weights": config.model.weights, "kv": config.gpu.kv, "rope": config.model.rope}
    plain = {"weights": (None, "bfloat16"), "kv": ("auto", "float32"), "rope": (None,)}
    return {name: str(value) for name, value in said.items() if value not in plain[name]}


def make_deployment(model: Path, device: str, longest_tokens: int, host: HostConfig | None) -> Deployment:
    """Return a deployment for a run, in which no single answer is urgent: many prompts at once, long prefill chunks,
    few decode steps between them, and memory for all of that.

    host: the settings that change answers; its memory limit is derived. Raises ModelError or PlanError.
    """
    shape = read_architecture(model)
    if device.startswith("cuda"):
        prompts = CUDA_PROMPTS if host is None else _prompts_that_fit(host, shape, longest_tokens)
        gib = 2 * prompts * longest_tokens * shape.kv_bytes_per_token(BFLOAT16_BYTES) / GIB
        sizes = (*(size for size in (1, 8, 16, 24) if size < prompts), prompts)
        gpu = GpuConfig(kv_cache_gib=max(1.0, gib), graph_batch_sizes=sizes)
        scheduler = SchedulerConfig(
            max_running=prompts, max_queue=2 * prompts, token_gap_target_ms=1000.0,
            prefill=PrefillConfig(chunk_tokens=CUDA_CHUNK_TOKENS, share=0.9),
        )  # fmt: skip
    else:
        prompts, scheduler = CPU_PROMPTS, SchedulerConfig(max_running=CPU_PROMPTS)
        gib = prompts * longest_tokens * shape.kv_bytes_per_token(FLOAT32_BYTES) / GIB
        gpu = GpuConfig(kv_cache_gib=max(0.25, gib), kv="float32")  # so that differences come from the method alone
    if host is not None:
        limit = prompts * context_bytes(host, shape, longest_tokens) / GIB
        host = host.model_copy(update={"memory_limit_gib": limit})
    return Deployment(model=ModelConfig(path=model), gpu=gpu, host=host, scheduler=scheduler)


def _prompts_that_fit(host: HostConfig, shape: Architecture, longest_tokens: int) -> int:
    room = HOST_SHARE * probe_machine().memory_bytes / context_bytes(host, shape, longest_tokens)
    return max(1, min(CUDA_PROMPTS, int(room)))


def context_bytes(host: HostConfig, shape: Architecture, longest_tokens: int) -> int:
    """Return the bytes that admission charges for a context of this length, hash tables included."""
    kept = find_kept(resolve_profiles({}, host).values(), host, shape)
    demand = resolve_host(host, kept, shape, GpuConfig().page_tokens, BFLOAT16_BYTES, 1)
    return bytes_of_run(
        demand.tier_shape, max(longest_tokens, SMALLEST_CONTEXT_TOKENS), OFFLOAD_BLOCK_TOKENS, Reading.SAMPLE, False
    )
