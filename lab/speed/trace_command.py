"""Run `python -m lab trace`: show where the time of a prompt and of a decode step goes."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.machine_commands import warn_if_busy


def trace(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="a deployment")],
    context: Annotated[int, typer.Option(min=64, help="tokens of each prompt")] = 98_304,
    batch: Annotated[int, typer.Option(min=1, help="requests that decode together")] = 1,
    profile: Annotated[str, typer.Option(help="a serving profile")] = "sampled",
    question: Annotated[
        int, typer.Option(min=0, help="trace a next turn of so many new tokens over the prompt, in place of the prompt")
    ] = 0,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="write a Chrome trace of the steps")] = None,
) -> None:
    """Trace one prompt and a few decode steps of an engine in this process."""
    import torch

    from bench.as_served import interpreter_as_served, layers_as_served
    from bench.long_client import GREEDY, Client
    from bench.long_floors import measure_floors
    from lab.speed.prefill_trace import tabulate_gaps, tabulate_groups, trace_prefill
    from lab.speed.step_trace import tabulate_parts, trace_steps
    from scheduler.engine.load_engine import load_engine
    from server.deployment import load_deployment

    console = Console()
    console = console if console.is_terminal else Console(width=150)  # a file has room for wide tables
    warn_if_busy(console)
    deployment = layers_as_served(load_deployment(config))
    plan = measure_floors(deployment).plan
    engine, ready = load_engine(deployment, plan, lambda *_: None)
    try:
        with interpreter_as_served():
            client = Client(engine, ready.vocab_size, ready.profiles)
            max_tokens = min(4096, client.longest_tokens[profile] - context - 2 * (question + 16))
            prompts = [client.prompt(context) for _ in range(batch)]
            if question:
                for _ in range(2):  # the second one finds the memory that the first allocated
                    answer = client.finish(client.submit(prompts[-1], 16, profile, GREEDY))
                    prompts[-1] = [*prompts[-1], *answer, *client.prompt(question)]
            running = [client.submit(prompt, max_tokens, profile, GREEDY) for prompt in prompts]
            for request_id in running[:-1]:
                client.until_first_token(request_id)
            if plan.device == "cuda":
                groups, kernels, gaps = trace_prefill(lambda: client.until_first_token(running[-1]))
                if groups:
                    console.print(tabulate_groups(groups, kernels))
                    console.print(tabulate_gaps(gaps))
            else:
                client.until_first_token(running[-1])
            client.until_ready()
            parts = trace_steps(lambda: client.step(batch), client.seconds, torch.device(plan.device), out)
            console.print(tabulate_parts(parts))
            client.drain(running)
    finally:
        engine.shutdown()
