"""Time one model at several context lengths: prompt, decode steps by batch, the next turn, and the most memory.

`python -m lab.speed.lengths CONFIG --contexts 4096,131072 --batch 1,4 --question 500` loads the deployment once, and
holds this process to the plan's memory limit. For each length it sends one prompt and times steps of its answer. More
requests with the same prompt join up to each batch size, and begin from its cached prefix. Then it sends three more
turns, of which it times the third. Nothing is compared with full attention here: `tandem bench long` and the tests do
that.
"""

import logging
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from bench.as_served import interpreter_as_served, layers_as_served
from bench.benchmark_rows import Row, report, require, summarise
from bench.context_commands import failures_told
from bench.long_client import GREEDY, Client
from bench.long_floors import Floor, LongFloors, measure_floors
from bench.machine_commands import JsonFile, parse_batches, warn_if_busy
from bench.memory_cap import cap_memory
from bench.rates import device_name
from gpu.profiles import Profile, get_profile, resolve_profiles
from lab.speed.prefill_trace import count_launches
from scheduler.engine.load_engine import load_engine
from server.deployment import Deployment, load_deployment
from transfer.machine import GIB

_TURN_ANSWER = 16  # tokens of a turn
_MOST_STEPS = 64  # steps that warm up, in addition to the timed ones
_STEP_SECONDS = 4.0  # or as many steps of a batch as begin in so many seconds
_MOST_ANSWER = 1024  # tokens of an answer: more than the steps of any batch


def lengths(
    config: Annotated[Path, typer.Argument()],
    contexts: Annotated[str, typer.Option(help="tokens of prompts, with commas")] = "4096,131072",
    batch: Annotated[str, typer.Option(help="batch sizes, with commas")] = "1",
    profiles: Annotated[str, typer.Option(help="with commas; the first one's prompts are computed")] = "exact",
    question: Annotated[int, typer.Option(min=0, help="new tokens of a next turn; 0: none")] = 500,
    steps: Annotated[int, typer.Option(min=8, help="decode steps of each batch")] = 24,
    traces: Annotated[bool, typer.Option("--traces", help="count kernels of one more prompt and of steps")] = False,
    json_file: JsonFile = None,
) -> None:
    """Time a deployment at each context length."""
    console = Console(width=160)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("gpu.prefill.layer_graphs").setLevel(logging.INFO)
    warn_if_busy(console)
    deployment = layers_as_served(load_deployment(config))
    served = resolve_profiles(deployment.all_profiles, deployment.host)
    floors = measure_floors(deployment)
    if floors.plan.device == "cuda":
        cap_memory(floors.plan.limit_bytes["gpu"], torch.device("cuda"))
    engine, ready = load_engine(deployment, floors.plan, lambda *_: None)
    rows: list[Row] = []
    try:
        with failures_told(), interpreter_as_served():
            client = Client(engine, ready.vocab_size, ready.profiles)
            for name in profiles.split(","):
                longest = max(parse_batches(contexts)) + max(_MOST_STEPS + steps, 3 * (question + _TURN_ANSWER))
                require(longest <= ready.profiles[name], f"--contexts: {longest:,} tokens with answers fit {name}")
            for length in sorted(parse_batches(contexts)):
                for name in profiles.split(","):
                    profile = get_profile(name, served, "--profiles")
                    bench = _Length(deployment, client, profile, floors, length, console)
                    rows += bench.rows(sorted(parse_batches(batch)), question, steps)
                    report(rows, json_file, console)
                    if traces and floors.plan.device == "cuda":
                        bench.trace()
    finally:
        engine.shutdown()


class _Length:
    """Measures one profile at one context length."""

    def __init__(
        self, deployment: Deployment, client: Client, profile: Profile, floors: LongFloors, length: int,
        console: Console,
    ) -> None:  # fmt: skip
        self._deployment, self._client, self._profile = deployment, client, profile
        self._floors, self._length, self._console = floors, length, console
        if floors.plan.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def rows(self, batches: list[int], question: int, steps: int) -> list[Row]:
        """Return the rows of the prompt, of each batch, and of the next turn."""
        client, name, length = self._client, self._profile.name, self._length
        prompt = client.prompt(length)
        running: list[str] = []
        rows = []
        answer_tokens = min(_MOST_ANSWER, client.longest_tokens[name] - length)
        for batch in batches:
            while len(running) < batch:
                running.append(client.submit(prompt, answer_tokens, name, GREEDY))
                first_s = client.until_first_token(running[-1])
                if len(running) == 1:
                    rows.append(self._row("prompt", "", self._floors.prefill(self._profile, length), [1e3 * first_s]))
            timed = client.steps(batch, steps, _STEP_SECONDS)
            floor = self._floors.decode(self._profile, length, batch, timed.rows_read, timed.kept_tokens)
            rows.append(self._row("decode step", f", batch {batch}", floor, timed.step_ms))
        client.drain(running)
        if question:
            turn_s = []
            for _ in range(3):  # the first one may compile kernels for its length
                prompt = [*prompt, *client.prompt(question)]
                first_s, answer = self._ask(prompt)
                prompt += answer
                turn_s.append(first_s)
            floor = self._floors.next_turn(self._profile, length, length, length + question)
            rows.append(self._row(f"next turn of {question}", "", floor, [1e3 * turn_s[-1]], first_ms=1e3 * turn_s[0]))
        return rows

    def trace(self) -> None:
        """Print how many kernels a prompt and eight decode steps run, and how they are launched."""
        client, name = self._client, self._profile.name
        running = client.submit(client.prompt(self._length), 64, name, GREEDY)
        told = {"prompt": count_launches(lambda: client.until_first_token(running))}
        client.until_ready()
        for _ in range(2):
            client.step(1)
        told["8 steps"] = count_launches(lambda: [client.step(1) for _ in range(8)])
        client.drain([running])
        for what, text in told.items():
            self._console.print(f"traced {what}, {self._length:,} tokens: {text}", highlight=False, soft_wrap=True)

    def _ask(self, prompt: list[int]) -> tuple[float, list[int]]:
        """Return the seconds until the first token of a prompt's answer, and the answer."""
        client, answer, first_s = self._client, list[int](), 0.0
        request = client.submit(prompt, _TURN_ANSWER, self._profile.name, GREEDY)
        began = time.perf_counter()
        while True:
            for delta in client.advance():
                if delta.request_id == request:
                    if not answer and delta.token_ids:
                        first_s = time.perf_counter() - began
                    answer += delta.token_ids
                    if delta.finish_reason is not None:
                        return first_s, answer

    def _row(self, name: str, shape: str, floor: Floor, times: list[float], **extras: float) -> Row:
        """Return a row and print it."""
        model, timing = self._deployment.model, summarise(times)
        if self._floors.plan.device == "cuda":
            extras["device_gib"] = torch.cuda.max_memory_reserved() / GIB
        shape = f"{model.random_weights or model.path}, {self._length:,} tokens{shape}"
        self._console.print(
            f"{name}, {self._profile.name}, {shape}: {timing.ms:,.2f} ms, {timing.ms / floor.ms:.2f} of the floor "
            f"{floor.ms:,.2f} ({floor.text})" + "".join(f", {key} {value:.2f}" for key, value in extras.items()),
            highlight=False,
            soft_wrap=True,
        )
        return Row(
            name=f"{name}, {self._profile.name}",
            shape=shape,
            device=device_name(torch.device(self._floors.plan.device)),
            floor=floor.text,
            floor_ms=floor.ms,
            peer=None,
            peer_ms=None,
            rates=self._floors.rates,
            extras=dict(extras),
            config=self._deployment.model_dump(mode="json", exclude={"server"}),
            ms=timing.ms,
            p10=timing.p10,
            p90=timing.p90,
        )


if __name__ == "__main__":
    typer.run(lengths)
