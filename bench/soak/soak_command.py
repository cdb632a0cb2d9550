"""Run `tandem bench soak`: options to a plan, a server if none is named, and the result to a table."""

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.soak.soak_run import SoakPlan, SoakResult

_DEFAULT_CONFIG = Path("deploy/soak.yaml")
_LOAD_S = 600.0


def soak(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="a deployment to serve; default: deploy/soak.yaml")
    ] = None,
    url: Annotated[str | None, typer.Option(help="or the address of a server; kills need it on this machine")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="bearer key")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="of load, after each prompt was asked once alone")] = 600.0,
    kill_every: Annotated[float, typer.Option(min=0, help="seconds between kills of the engine; 0: none")] = 60.0,
    clients: Annotated[int, typer.Option(min=1, help="requests open at once; a quarter as many leave theirs")] = 8,
    prompts: Annotated[int, typer.Option(min=1, help="of each kind of request")] = 6,
    longest: Annotated[int, typer.Option(min=20, help="tokens of the longest prompt")] = 4000,
    answer: Annotated[int, typer.Option(min=1, help="tokens of an answer")] = 32,
    profiles: Annotated[str | None, typer.Option(help="attention profiles, with commas; default: all")] = None,
    level: Annotated[
        float,
        typer.Option(
            help="a greedy text may part where two log probabilities are this near; bf16: 0.5. Rows in host memory are "
            "rounded also where the model is not"
        ),
    ] = 2e-2,
    seed: Annotated[int, typer.Option(help="of what is asked when")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result there, too")] = None,
) -> None:
    """Serve mixed load while the engine is killed each minute, and check that every promise is kept.

    The promises: requests are lost only if they were in flight at a kill, and with a clear error; a greedy text is
    always the same; memory does not grow; at rest only the prefix cache holds memory. Exit status: 1 if a promise is
    broken.
    """
    import asyncio

    from rich.console import Console

    from bench.gate_error import GateError
    from bench.soak.requests import EXACT_PROFILES, Mix
    from bench.soak.soak_report import judge_memory, print_result, write_result
    from bench.soak.soak_run import SoakPlan, run_soak
    from server.deployment import ConfigError
    from server.server_url import find_root

    if url is not None and config is not None:
        raise typer.BadParameter("give a CONFIG or --url, not both", param_hint="--url")
    names = tuple(profiles.split(",")) if profiles else None

    def plan_for(address: str, judged: tuple[str, ...] = EXACT_PROFILES) -> SoakPlan:
        mix = Mix(prompts, longest, answer, names, judged)
        return SoakPlan(address, api_key, seconds, kill_every, clients, mix, level, seed)

    console = Console()
    try:
        if url is not None:
            result = asyncio.run(run_soak(plan_for(find_root(url))))
        else:
            result = _soak_own_server(config or _DEFAULT_CONFIG, plan_for)
    except (ConfigError, GateError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    trends = judge_memory(result)
    print_result(result, trends, console)
    if json_file is not None:
        write_result(result, trends, json_file)
    if result.faults:
        raise typer.Exit(1)


def _soak_own_server(config: Path, plan_for: "Callable[[str, tuple[str, ...]], SoakPlan]") -> "SoakResult":
    """Serve a deployment with documents and contexts in a folder of this run, and soak it."""
    import asyncio

    import yaml

    from bench.server_process import serving
    from bench.soak.requests import EXACT_PROFILES
    from bench.soak.soak_run import run_soak
    from gpu.profiles import resolve_profiles
    from server.deployment import load_deployment

    deployment = load_deployment(config)
    profiles = resolve_profiles(deployment.all_profiles, deployment.host)
    judged = tuple(
        name for name, one in profiles.items() if all(part.method.name in EXACT_PROFILES for part in one.parts)
    )
    tree = deployment.model_dump(mode="json", exclude_unset=True)
    tree.setdefault("server", {})["max_engine_failures"] = 10**6  # those that are killed within a minute count
    with tempfile.TemporaryDirectory(prefix="tandem-soak-") as name:
        folder = Path(name)
        for section in ("documents", "disk"):
            if tree.get(section) is not None:
                tree[section]["folder"] = str(folder / section)
        served, log = folder / "deployment.yaml", folder / "server.log"
        served.write_text(yaml.safe_dump(tree))
        program = [sys.executable, "-m", "server.commands", "serve", str(served), "--host", "127.0.0.1", "--port"]
        with serving(lambda port: [*program, str(port)], _LOAD_S, log) as url:
            result = asyncio.run(run_soak(plan_for(url, judged)))
        if "Traceback" in (text := log.read_text(errors="replace")):
            result.blame(f"the server logged a traceback: {text[text.index('Traceback') :][:2000]}")
    return result
