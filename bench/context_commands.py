"""Read the arguments of `tandem bench long`, `prefill`, `documents`, `disk` and `agents`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from bench.machine_commands import JsonFile, parse_batches, warn_if_busy

if TYPE_CHECKING:
    from server.deployment import Deployment

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="a deployment with a `host` section")]


def long(
    config: Config,
    context: Annotated[int, typer.Option(min=64, help="tokens of a prompt")] = 98_304,
    batch: Annotated[str, typer.Option(help="batch sizes, ascending, with commas")] = "1,2,4",
    prompts: Annotated[int | None, typer.Option(min=1, help="which requests repeat; default: one each")] = None,
    steps: Annotated[int, typer.Option(min=8, help="decode steps measured at each batch")] = 32,
    seconds: Annotated[float, typer.Option(help="or as many as begin in so many seconds, 4 at least")] = 6.0,
    profiles: Annotated[str, typer.Option(help="ours, then its peer, with commas")] = "sampled,offloaded",
    turn: Annotated[int, typer.Option(help="tokens of a first turn, to time the second; 0: none")] = 32_768,
    one_in_flight: Annotated[
        bool, typer.Option("--one-in-flight", help="time steps also with each collected before the next is launched")
    ] = False,
    own_prompts: Annotated[
        bool, typer.Option("--own-prompts", help="the peer's requests share no prompt, though it reads all")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Time contexts that outgrow the card: prefill, decode by batch, and the next turn of a conversation."""
    from bench.benchmark_rows import report
    from bench.long_context import LongContextBenchmark, run_long_context_benchmark

    console = Console()
    deployment = load_with_host(config, console)
    batches, most = tuple(sorted(set(parse_batches(batch)))), deployment.scheduler.max_running
    if batches[-1] > most:
        raise typer.BadParameter(f"got {batches[-1]}; {config} has scheduler.max_running {most}", param_hint="--batch")
    names = tuple(profiles.split(","))
    benchmark = LongContextBenchmark(
        context, prompts or batches[-1], batches, steps, seconds, names, turn, one_in_flight, own_prompts
    )  # fmt: skip
    with failures_told():
        for rows in run_long_context_benchmark(benchmark, deployment, console):
            report(rows, json_file, console)  # after each profile, so that a run that is cut keeps the earlier ones


def prefill(
    config: Config,
    lengths: Annotated[str, typer.Option(help="tokens of prompts, with commas")] = "16384,98304",
    profiles: Annotated[str, typer.Option(help="with commas")] = "exact,sampled",
    turn: Annotated[int, typer.Option(help="tokens of a first turn, to time the next one; 0: none")] = 32_768,
    question: Annotated[int, typer.Option(min=1, help="new tokens of the next turn")] = 256,
    peer: Annotated[bool, typer.Option(help="time FlashAttention alone, too")] = True,
    json_file: JsonFile = None,
) -> None:
    """Time the first token of long prompts against their floor, and say where the rest of the time goes."""
    from bench.benchmark_rows import report
    from bench.prefill import PrefillBenchmark, run_prefill_benchmark

    console = Console()
    deployment = load_with_host(config, console)
    asked = tuple(sorted(set(parse_batches(lengths))))
    benchmark = PrefillBenchmark(asked, tuple(profiles.split(",")), turn, question, peer)
    with failures_told():
        for rows in run_prefill_benchmark(benchmark, deployment, console):
            report(rows, json_file, console)  # after each profile, so that a run that is cut keeps the earlier ones


def documents(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="a deployment with a `documents` section")],
    lengths: Annotated[str, typer.Option(help="tokens of prompts, with commas")] = "6144,16384,32768",
    policies: Annotated[str, typer.Option(help="names with spaces between; settings as a3:select_layer=5")] =
        "a3:select_layer=5,seam_tokens=1 a3 pie",
    places: Annotated[str, typer.Option(help="where chunks are: memory, memory again (once a prompt has read them "
                                        "from files), page cache, disk")] = "memory,page cache,disk",
    ratio: Annotated[float, typer.Option(min=0, max=1, help="of all tokens, computed again")] = 0.15,
    repeats: Annotated[int, typer.Option(min=1, help="prompts of each kind")] = 3,
    profile: Annotated[str | None, typer.Option(help="whose prefill of what is computed in full is timed")] = None,
    seconds: Annotated[float | None, typer.Option(min=1, help="nothing new is measured after so long")] = None,
    json_file: JsonFile = None,
) -> None:  # fmt: skip
    """Time the first token of prompts whose documents are stored, by policy and by where their chunks are.

    The first policy is also timed for a conversation's next turn.
    """
    from bench.benchmark_rows import report
    from bench.documents import SHORTEST_TOKENS, DocumentsBenchmark, run_documents_benchmark
    from scheduler.fusion_labels import UnknownLabelError
    from server.deployment import load_deployment

    console = Console()
    warn_if_busy(console)
    deployment = load_deployment(config)
    if deployment.documents is None:
        raise typer.BadParameter(f"{config} has no `documents` section", param_hint="CONFIG")
    asked, known = tuple(places.split(",")), ("memory", "memory again", "page cache", "disk")
    if not set(asked) <= set(known):
        raise typer.BadParameter(f"got {places!r}; wanted some of {', '.join(known)}", param_hint="--places")
    sizes = tuple(sorted(set(parse_batches(lengths))))
    if sizes[0] < SHORTEST_TOKENS:
        raise typer.BadParameter(f"got {sizes[0]}; wanted at least {SHORTEST_TOKENS}", param_hint="--lengths")
    benchmark = DocumentsBenchmark(
        sizes, tuple(policies.split()), asked, ratio, repeats, profile, seconds,  # type: ignore[arg-type]
    )  # fmt: skip
    try:
        with failures_told():
            for rows in run_documents_benchmark(benchmark, deployment, console):
                report(rows, json_file, console)  # after each kind, so that a run that is cut keeps the earlier ones
    except UnknownLabelError as error:
        raise typer.BadParameter(str(error), param_hint="--policies") from None


def disk(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="a deployment with a `disk` section")],
    lengths: Annotated[str, typer.Option(help="tokens of prompts, with commas")] = "8192,32768,98304",
    profiles: Annotated[str, typer.Option(help="with commas")] = "exact",
    question: Annotated[int, typer.Option(min=1, help="new tokens behind what comes from the disk")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="how often each comes from the disk")] = 3,
    json_file: JsonFile = None,
) -> None:
    """Time the first token of prompts whose prefixes are on disk, against computing them."""
    from bench.benchmark_rows import report
    from bench.disk import DiskBenchmark, run_disk_benchmark
    from server.deployment import load_deployment

    console = Console()
    warn_if_busy(console)
    deployment = load_deployment(config)
    if deployment.disk is None:
        raise typer.BadParameter(f"{config} has no `disk` section", param_hint="CONFIG")
    sizes = tuple(sorted(set(parse_batches(lengths))))
    with failures_told():
        for rows in run_disk_benchmark(
            DiskBenchmark(sizes, tuple(profiles.split(",")), question, repeats), deployment, console
        ):
            report(rows, json_file, console)  # after each length, so that a run that is cut keeps the earlier ones


def agents(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="a deployment")],
    agents: Annotated[int, typer.Option(min=1, help="conversations that take turns")] = 10,
    context: Annotated[int, typer.Option(min=64, help="tokens of each one's first prompt")] = 40_960,
    shared: Annotated[int, typer.Option(min=1, help="of these, that all begin with")] = 4_096,
    question: Annotated[int, typer.Option(min=1, help="new tokens of each later turn")] = 500,
    answer: Annotated[int, typer.Option(min=1, help="tokens drawn in each turn")] = 64,
    turns: Annotated[int, typer.Option(min=1)] = 3,
    profile: Annotated[str | None, typer.Option(help="default: the deployment's")] = None,
    json_file: JsonFile = None,
) -> None:
    """Time the first tokens of agents whose conversations take turns on one device."""
    from bench.agents import AgentsBenchmark, run_agents_benchmark
    from bench.benchmark_rows import report
    from server.deployment import load_deployment

    console = Console()
    if shared >= context:
        raise typer.BadParameter(f"got {shared}; wanted less than --context, {context}", param_hint="--shared")
    warn_if_busy(console)
    benchmark = AgentsBenchmark(agents, context, shared, question, answer, turns, profile)
    with failures_told():
        for rows in run_agents_benchmark(benchmark, load_deployment(config), console):
            report(rows, json_file, console)  # after each turn, so that a run that is cut keeps the earlier ones


def load_with_host(config: Path, console: Console) -> "Deployment":
    """Load a deployment that has a `host` section. Raises BadParameter where it has none."""
    from server.deployment import load_deployment

    warn_if_busy(console)
    deployment = load_deployment(config)
    if deployment.host is None:
        raise typer.BadParameter(f"{config} has no `host` section", param_hint="CONFIG")
    return deployment


@contextmanager
def failures_told() -> Iterator[None]:
    """Print an error and exit with status 1 if a result is wrong or a profile does not exist or does not fit."""
    from bench.benchmark_rows import GateError
    from gpu.profiles import ProfileError
    from scheduler.sequences.capacity import TooLargeError

    try:
        yield
    except (GateError, ProfileError, TooLargeError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
