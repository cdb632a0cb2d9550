"""Run `tandem bench long`: time prompts, decode steps and next turns over contexts beyond the device's memory.

It drives a deployment's engine in this process with prompts of random tokens, one profile after the other. The first
profile is ours, the second its peer at the same batch. If the peer reads all tokens, its requests share one prompt,
because a prefill beside a slow peer's stream may take minutes. `bench.long_floors` explains the floor of each number.
Random weights spread keys evenly, so the fraction read is printed beside every time and, for a profile that reuses
attention, how many heads do. A peer that reads everything may be a hundred times slower, so no batch is stepped for
longer than a limit. On CUDA this process is held to the plan's memory limit, so a large device shows what a smaller one
can do. Nothing is timed before `bench.long_gate` has compared the answers with full attention.

Tables are built after a prefill. Steps leave out a row whose tables are not built yet, so nothing is timed before all
are. `tables_ready_ms`, from a batch's last first token until then, is the part of this that was not hidden. The peer
has no tables and waits only for copies.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch
from rich.console import Console

from bench.as_served import interpreter_as_served, layers_as_served
from bench.benchmark_rows import Row, announce, summarise
from bench.engine_patches import one_in_flight
from bench.long_client import GREEDY, Batch, Client
from bench.long_floors import Floor, LongFloors, measure_floors
from bench.long_gate import Agreement, check_host_path
from bench.memory_cap import cap_memory
from bench.rates import device_name
from gpu.profiles import Profile, get_profile, resolve_profiles
from scheduler.engine.load_engine import load_engine
from server.deployment import Deployment
from transfer.machine import GIB

_ANSWER_TOKENS = 16  # of the first turn
_QUESTION_TOKENS = 256  # of the second turn


@dataclass(frozen=True, slots=True)
class LongContextBenchmark:
    """The settings of `tandem bench long`.

    context, prompts: tokens of a prompt, and the number of prompts; further requests repeat them and share offloaded
        tokens. batches: ascending.
    steps, seconds: at each batch, `steps` are measured, or as many as fit in `seconds`, and at least MIN_STEPS.
    turn: tokens of a first turn, or 0.
    one_in_flight: time steps again, with each collected before the next is launched.
    own_prompts: the requests of a peer that reads everything have prompts of their own as well.
    """

    context: int
    prompts: int
    batches: tuple[int, ...]
    steps: int
    seconds: float
    profiles: tuple[str, ...]
    turn: int
    one_in_flight: bool
    own_prompts: bool


@dataclass(frozen=True, slots=True)
class Served:
    """What was measured of one profile.

    parts: of a traced step of the largest batch, only of the first profile. one_in_flight: by batch, milliseconds of a
    step with one step in flight, and with two again after that. lanes: by batch, which rows stepped together since the
    last prompt.
    """

    first_token_s: list[float]  # of prompts that were computed whole
    batches: dict[int, Batch]
    one_in_flight: dict[int, tuple[float, float]]
    device_gib: float
    host_gib: float
    process_gib: float
    turns_s: tuple[float, float] | None  # first token of a second turn: with its prefix offloaded, and computed whole


def run_long_context_benchmark(
    benchmark: LongContextBenchmark, deployment: Deployment, console: Console
) -> Iterator[list[Row]]:
    """Yield the rows so far after each profile: prefill, batches, and the first profile's second turn.

    Raises GateError, before anything is timed, if the host path computes wrong results.
    """
    deployment = layers_as_served(deployment)
    served_profiles = resolve_profiles(deployment.all_profiles, deployment.host)
    profiles = [get_profile(name, served_profiles, "--profiles") for name in benchmark.profiles]
    floors = measure_floors(deployment)
    _announce(console, benchmark, profiles, floors)
    is_cuda = floors.plan.device == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
        cap_memory(floors.plan.limit_bytes["gpu"], torch.device("cuda"))
    engine, ready = load_engine(deployment, floors.plan, lambda *_: None)
    try:
        with interpreter_as_served():
            client = Client(engine, ready.vocab_size, ready.profiles)
            assert deployment.host is not None, "long contexts: a deployment with a host section"
            rows = deployment.host.rows
            with client.fixed_residence():
                gate = check_host_path(
                    client, floors.capacity, floors.plan.kv, rows, profiles, benchmark.batches[-1], console
                )
            prompts = [client.prompt(benchmark.context) for _ in range(benchmark.prompts)]
            served: dict[str, Served] = {}
            for profile in profiles:
                console.print(f"profile {profile.name}", highlight=False)
                own = prompts if not served or profile.reading.is_estimate or benchmark.own_prompts else prompts[:1]
                served[profile.name] = _serve(client, own, benchmark, profile, floors, not served, console)
                _compare(served, console)
                yield _rows(benchmark, deployment, served, floors, gate)
    finally:
        engine.shutdown()


def _announce(
    console: Console, benchmark: LongContextBenchmark, profiles: Sequence[Profile], floors: LongFloors
) -> None:
    """Print the floors before anything runs."""
    first = profiles[0]
    for profile in profiles:
        announce(console, f"prefill, {profile.name}", *floors.prefill(profile, benchmark.context))
        for batch in benchmark.batches:
            floor = floors.decode(profile, benchmark.context, batch, None)
            announce(console, f"decode step, {profile.name}, batch {batch}", *floor)
    if benchmark.turn:
        announce(console, f"second turn, {first.name}", *_turn_floor(benchmark, first, floors))


def _turn_floor(benchmark: LongContextBenchmark, profile: Profile, floors: LongFloors) -> Floor:
    begin = benchmark.turn + _ANSWER_TOKENS
    return floors.next_turn(profile, benchmark.turn, begin, begin + _QUESTION_TOKENS)


def _serve(
    client: Client, prompts: Sequence[list[int]], benchmark: LongContextBenchmark, profile: Profile,
    floors: LongFloors, is_first: bool, console: Console,
) -> Served:  # fmt: skip
    first_token_s, batches, one_in_flight = [], {}, {}
    running: list[str] = []
    peak_host = 0.0
    max_tokens = max(1, min(4096, client.longest_tokens[profile.name] - benchmark.context))
    for batch in benchmark.batches:
        while len(running) < batch:
            is_new = len(running) < len(prompts)
            running.append(client.submit(prompts[len(running) % len(prompts)], max_tokens, profile.name, GREEDY))
            seconds = client.until_first_token(running[-1])
            console.print(f"  {'prefill' if is_new else 'again'} {len(running)}: {seconds:.2f} s", highlight=False)
            if is_new:
                first_token_s.append(seconds)
        batches[batch] = client.steps(batch, benchmark.steps, benchmark.seconds)
        peak_host = max(peak_host, client.host_stats().bytes_used / GIB)
        counted = benchmark.context, batch, batches[batch].rows_read, batches[batch].kept_tokens
        attended = floors.decode_as_attended(profile, *counted)
        _print_batch(console, batch, batches[batch], floors.decode(profile, *counted), attended)
        if benchmark.one_in_flight:
            one_in_flight[batch] = _time_one_in_flight(client, batch, benchmark, console)
    client.drain(running)
    turns = _take_turns(client, benchmark, profile.name, console) if benchmark.turn and is_first else None
    device_gib = torch.cuda.max_memory_reserved() / GIB if floors.plan.device == "cuda" else 0.0
    process_gib = psutil.Process().memory_info().rss / GIB
    return Served(first_token_s, batches, one_in_flight, device_gib, peak_host, process_gib, turns)


def _time_one_in_flight(
    client: Client, batch: int, benchmark: LongContextBenchmark, console: Console
) -> tuple[float, float]:
    """Return two medians of milliseconds a step: with each step collected before the next is launched, so that the
    device waits for Python in between, and for as many steps after these, launched ahead again.
    """
    timed = benchmark.steps, benchmark.seconds
    with one_in_flight():
        one = summarise(client.steps(batch, *timed).step_ms).ms
    again = summarise(client.steps(batch, *timed).step_ms).ms
    console.print(f"  batch {batch}, one step in flight: {one:.2f} ms; two again: {again:.2f} ms", highlight=False)
    return one, again


def _compare(served: dict[str, Served], console: Console) -> None:
    """Print the last profile's steps beside the first one's at the same batch."""
    (first, ours), (last, theirs) = next(iter(served.items())), list(served.items())[-1]
    for batch in ours.batches if first != last else ():
        ms, peer_ms = (summarise(one.batches[batch].step_ms).ms for one in (ours, theirs))
        console.print(
            f"  batch {batch}: {first} {ms:.2f} ms, {ms / peer_ms:.3f} of {last}'s {peer_ms:.2f}", highlight=False
        )


def _print_batch(console: Console, batch: int, measured: Batch, floor: Floor, attended: Floor) -> None:
    timing = summarise(measured.step_ms)
    console.print(
        f"  batch {batch}: {timing.ms:.2f} ms a step ({timing.p10:.2f}-{timing.p90:.2f} in {len(measured.step_ms)}, "
        f"mean {measured.mean_ms:.2f}), {measured.fraction_read:.2%} of offloaded keys read by each head, "
        f"{measured.kept_tokens:,} tokens kept on the device, host waits {measured.wait_ms:.2f} ms and attends "
        f"{measured.attend_ms:.2f}, tables stood {measured.ready_ms:.0f} ms behind the last prompt; floor "
        f"{floor.ms:.2f} ({floor.text}), at the attend kernel's own rate {attended.ms:.2f}"
        + ("" if measured.hits is None else f"; {measured.hits:.1%} of heads reuse attention"),
        highlight=False,
        soft_wrap=True,
    )


def _take_turns(client: Client, benchmark: LongContextBenchmark, profile: str, console: Console) -> tuple[float, float]:
    """Return the seconds to the first token of a second turn that reuses the first turn's offloaded prefix, and of a
    new prompt of the same length.
    """
    prompt = client.prompt(benchmark.turn)
    answer = client.finish(client.submit(prompt, _ANSWER_TOKENS, profile, GREEDY))
    times = []
    for begun in (prompt + answer, client.prompt(len(prompt) + len(answer))):
        request_id = client.submit(begun + client.prompt(_QUESTION_TOKENS), _ANSWER_TOKENS, profile, GREEDY)
        times.append(client.until_first_token(request_id))
        client.drain([request_id])
    console.print(f"  second turn: {times[0]:.2f} s, its whole prompt computed: {times[1]:.2f} s", highlight=False)
    return times[0], times[1]


def _rows(
    benchmark: LongContextBenchmark, deployment: Deployment, served: dict[str, Served], floors: LongFloors,
    gate: dict[str, Agreement],
) -> list[Row]:  # fmt: skip
    """Return the rows of all profiles so far. The peer of the first one's rows is the second."""
    model = deployment.model
    shape = model.random_weights or (model.path.name if model.path else "")
    common: dict[str, Any] = {
        "device": device_name(torch.device(floors.plan.device)),
        "rates": floors.rates,
        "config": {"benchmark": asdict(benchmark),
                   "engine": deployment.model_dump(mode="json", exclude={"server"}),
                   "gate": {name: asdict(agreement) for name, agreement in gate.items()}},
    }  # fmt: skip
    profiles = resolve_profiles(deployment.all_profiles, deployment.host)
    names, rows = list(served), []
    for name, ours in served.items():
        peer = names[1] if name == names[0] and len(names) > 1 else None
        theirs = served[peer] if peer else None
        profile = profiles[name]
        for batch, measured in ours.batches.items():
            counted = benchmark.context, batch, measured.rows_read, measured.kept_tokens
            floor, attended = floors.decode(profile, *counted), floors.decode_as_attended(profile, *counted)
            timing = summarise(measured.step_ms)
            row = Row(
                name=f"decode step, {name}", shape=f"{shape}, batch {batch}, context {benchmark.context:,}",
                **asdict(timing), floor=floor.text, floor_ms=floor.ms, peer=peer,
                peer_ms=None if theirs is None else summarise(theirs.batches[batch].step_ms).ms,
                extras=_extras(ours, measured, batch, attended.ms), **common,
            )  # fmt: skip
            rows.append(row)
        first, *others = ours.first_token_s
        extras = {"beside_streams_s": others}
        floor = floors.prefill(profile, benchmark.context)
        against = peer, None if theirs is None else theirs.first_token_s[0]
        of_prompt = f"{shape}, {benchmark.context:,} tokens"
        rows.append(_first_token_row(f"prefill, {name}", of_prompt, first, floor, *against, extras, common))
        if ours.turns_s is not None:
            floor = _turn_floor(benchmark, profile, floors)
            of_turn = f"{shape}, {_QUESTION_TOKENS} tokens over {benchmark.turn + _ANSWER_TOKENS:,}"
            second, whole = ours.turns_s
            against = "the whole prompt computed", whole
            rows.append(_first_token_row(f"second turn, {name}", of_turn, second, floor, *against, {}, common))
    return rows


def _extras(ours: Served, measured: Batch, batch: int, attended_ms: float) -> dict[str, Any]:
    extras = {
        "steps": len(measured.step_ms),
        "mean_ms": measured.mean_ms,
        "tokens_per_s": 1e3 * batch / measured.mean_ms,
        "floor_as_attended_ms": attended_ms,
        "fraction_read": measured.fraction_read,
        "rows_read": measured.rows_read,
        "kept_tokens": measured.kept_tokens,
        "host_wait_ms": measured.wait_ms,
        "host_attend_ms": measured.attend_ms,
        "tables_ready_ms": measured.ready_ms,
        "hits": measured.hits,
        "counts": measured.counts,
        "device_gib": ours.device_gib,
        "host_gib": ours.host_gib,
        "process_gib": ours.process_gib,
    }
    if batch in ours.one_in_flight:
        extras["one_in_flight_ms"], extras["two_in_flight_again_ms"] = ours.one_in_flight[batch]
    return extras


def _first_token_row(
    name: str, shape: str, seconds: float, floor: Floor, peer: str | None, peer_s: float | None,
    extras: dict[str, Any], common: dict[str, Any],
) -> Row:  # fmt: skip
    ms = 1e3 * seconds
    return Row(
        name=name, shape=shape, ms=ms, p10=ms, p90=ms, floor=floor.text, floor_ms=floor.ms, peer=peer,
        peer_ms=None if peer_s is None else 1e3 * peer_s, extras=extras, **common,
    )  # fmt: skip
