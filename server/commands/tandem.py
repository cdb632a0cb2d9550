"""Run the command `tandem`: read arguments, run the command, and turn expected errors into one line.

Command groups of other packages (`bench`, `eval`) are found through entry points, so that nothing here imports a
package above it. Each command imports its modules when it runs, so that `--version` and `--help` are quick. Exit
status: 0; 1 with `error: ...` on stderr; 2 for wrong arguments.
"""

import json
import sys
import time
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from server.release import release

if TYPE_CHECKING:
    from server.engine.head_start import HeadStart

SUMMARY = "Serve long-context language models from one GPU and the memory of its host."
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigPath = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG", help="the deployment's YAML file, a model's folder or GGUF file, or hf:OWNER/NAME"
    ),
]
OfflineFlag = Annotated[bool, typer.Option("--offline", help="of hf:OWNER/NAME, take what was fetched before")]
MachineOption = Annotated[Path | None, typer.Option(help="a machine profile (JSON) instead of this machine")]
JsonFlag = Annotated[bool, typer.Option("--json", help="print JSON instead of tables")]


def main() -> None:
    """Run the command line; an expected error ends it with one line and status 1."""
    load_groups(sys.argv[1] if len(sys.argv) > 1 else "--help")
    try:
        app(prog_name="tandem")
    except SystemExit:  # before the errors below are imported
        raise
    except world_errors() as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(1) from None


def world_errors() -> tuple[type[Exception], ...]:
    """Return the expected error types, whose message is all that the user needs."""
    from gpu.memory.plan import PlanError
    from gpu.model.architecture import ModelError
    from gpu.profiles import ProfileError
    from server.commands.chat import ChatError
    from server.commands.doctor import DoctorError
    from server.commands.document_commands import DocumentsError
    from server.commands.launch import LaunchError
    from server.deployment import ConfigError
    from server.hub.hub_name import HubError
    from transfer.machine import MachineError

    return (
        ChatError, ConfigError, DocumentsError, DoctorError, HubError, LaunchError, MachineError, ModelError, OSError,
        PlanError, ProfileError,
    )  # fmt: skip


def print_version(wanted: bool) -> None:
    if wanted:
        print(f"tandem {release()}")
        raise typer.Exit


@app.callback(help=SUMMARY)
def take_options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="print the version and end")
    ] = False,
) -> None:
    """Declare the program's own options; each acts when it is parsed."""


def load_groups(first: str) -> None:
    """Add the command groups that the first argument may mean, each once.

    That is the group with this name, or none for a command of this file and `--version`, else all groups (`--help` and
    unknown names list them). Groups of other packages are the entry points in `tandem.commands`.
    """
    documents = EntryPoint("documents", "server.commands.document_commands:app", "tandem.commands")
    groups = [documents, *entry_points(group="tandem.commands")]
    alone = {"--version", *(command.callback.__name__ for command in app.registered_commands if command.callback)}
    wanted = [group for group in groups if group.name == first] or ([] if first in alone else groups)
    known = {group.name for group in app.registered_groups}
    for group in wanted:
        if group.name not in known:
            app.add_typer(group.load(), name=group.name)


@app.command()
def serve(
    config: ConfigPath,
    host: Annotated[str | None, typer.Option(help="address to listen on, instead of the file's")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="port; 0: any free one")] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="print the whole configuration as a file that can be served, and end")
    ] = False,
    offline: OfflineFlag = False,
) -> None:
    """Serve the model over the OpenAI API until Ctrl-C or SIGTERM.

    What the file leaves out, or all but the model where only that is given, is derived from the machine. A model that
    is named hf:OWNER/NAME[@REVISION][:FILE or QUANT] is fetched from huggingface.co first, unless it is there.
    """
    if print_config:
        print_configuration(config, host, port, offline)
        return
    began_s = time.monotonic()
    print(f"tandem {release()}: {config}", flush=True)  # before the imports, which take a second
    from server.engine.head_start import HeadStart

    with HeadStart() as ahead:
        failure = _serve(config, host, port, offline, began_s, ahead)
    if failure is not None:
        print(f"error: {failure}", file=sys.stderr)
        raise typer.Exit(1)


def _serve(
    config: Path, host: str | None, port: int | None, offline: bool, began_s: float, ahead: "HeadStart"
) -> str | None:
    """Serve, with an engine process that imports its libraries meanwhile. Returns the reason of a failure, or None."""
    from rich.console import Console

    from server.commands.named_models import open_deployments
    from server.commands.start_page import StartPage

    given = open_deployments(config, offline)  # with a progress bar of its own, where it fetches
    with StartPage(Console(highlight=False), began_s) as page:
        with page.stage("reading the program and its configuration"):
            from server.commands.address import override_address, require_free_port
            from server.commands.servable import require_servable
            from server.http.app import OtherModels
            from server.http.app import serve as serve_deployment
            from server.planning.deployment_plan import resolve_plan
            from server.planning.side_by_side import find_room
            from transfer.machine import probe_machine

            deployments = [override_address(one, host, port) for one in given]
            server = deployments[0].server
            require_free_port(server.host, server.port)
        with page.stage("planning the memory"):
            first, *others = [resolve_plan(one, probe_machine()) for one in deployments]
        with page.stage("checking the model's files"):
            for one in (first, *others):
                require_servable(one.deployment)
        room = find_room(probe_machine(), server.models_at_once == "fitting")
        beside = OtherModels(tuple((one.deployment, one.memory) for one in others), room)
        return serve_deployment(first.deployment, first.memory, page.show, ahead=ahead, others=beside)


def print_configuration(config: Path, host: str | None, port: int | None, offline: bool) -> None:
    """Print what would be served as YAML, with what is derived from this machine."""
    import yaml

    from server.commands.address import override_address
    from server.commands.named_models import open_deployments
    from server.commands.plan_page import dump_deployments
    from server.planning.deployment_plan import resolve_plan
    from transfer.machine import probe_machine

    given = [override_address(one, host, port) for one in open_deployments(config, offline)]
    resolved = [resolve_plan(one, probe_machine()).deployment for one in given]
    print(f"# {config}, with what is derived from this machine")
    print(yaml.safe_dump(dump_deployments(resolved), sort_keys=False), end="")


@app.command()
def plan(
    config: ConfigPath,
    machine: MachineOption = None,
    as_json: JsonFlag = False,
    offline: OfflineFlag = False,
) -> None:
    """Show the resolved configuration, where each byte of memory goes, and what a token takes where contexts could lie;
    refuse what `serve` refuses.

    Files are not asked for with `--machine`, nor while `model.shape` stands for a folder that is not there yet.
    """
    from rich.console import Console

    from server.commands.models_page import describe_models, print_together
    from server.commands.named_models import open_deployments
    from server.commands.placements_page import describe_comparison, print_comparison
    from server.commands.plan_page import describe_plan, print_plan
    from server.commands.servable import require_servable, require_settings, require_tensors
    from server.planning.deployment_plan import resolve_plan
    from server.planning.placements import compare_placements
    from transfer.machine import load_machine, probe_machine
    from transfer.machine_rates import find_rates
    from transfer.measured import measured_path

    console, plans, trees = Console(), [], []
    for deployment in open_deployments(config, offline):
        resolved = resolve_plan(deployment, probe_machine() if machine is None else load_machine(machine))
        planned_ahead = deployment.model.path is not None and not deployment.model.path.exists()
        if machine is not None or planned_ahead:
            require_settings(resolved.deployment)
        else:
            require_servable(resolved.deployment)
            require_tensors(deployment.model, deployment.drafts_by_head)
        comparison = compare_placements(deployment, resolved, find_rates(resolved.machine, measured_path()))
        plans.append(resolved)
        trees.append(describe_plan(resolved) | {"placements": describe_comparison(comparison)})
        if not as_json:
            print_plan(resolved, console)
            print_comparison(comparison, console)
    if as_json:
        print(json.dumps(trees[0] if len(plans) == 1 else describe_models(plans, trees), indent=2))
    elif len(plans) > 1:
        print_together(plans, console)


@app.command()
def models(machine: MachineOption = None, as_json: JsonFlag = False) -> None:
    """List the models that were fetched by name, their sizes, and whether they fit the machine."""
    from rich.console import Console

    from server.commands.named_models import describe_models, plan_models, print_models
    from server.hub.hub_models import cache_folder, list_cached
    from transfer.machine import load_machine, probe_machine

    where = probe_machine() if machine is None else load_machine(machine)
    found = plan_models(list_cached(), where)
    if as_json:
        print(json.dumps(describe_models(found, where), indent=2))
    else:
        print_models(found, where, cache_folder(), Console())


@app.command()
def doctor(
    measure: Annotated[bool, typer.Option("--measure", help="measure memory and arithmetic rates (a minute)")] = False,
    profile: Annotated[Path | None, typer.Option(help="write a profile there, for `plan --machine`")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show what this machine has and whether the libraries fit it and each other."""
    from rich.console import Console

    from server.commands.doctor import as_rows, examine, measure_rates, print_findings, print_rates
    from transfer.machine import probe_machine
    from transfer.machine_rates import keep_rates, with_rates
    from transfer.measured import measured_path

    console = Console()
    machine = probe_machine()
    findings = examine(machine)
    if not as_json:
        print_findings(findings, console)
    rates = None
    if measure:
        with Console(stderr=True).status("measuring"):
            rates = measure_rates()
        keep_rates(machine, rates, measured_path())
        machine = with_rates(machine, rates)
    if profile is not None:
        profile.write_text(machine.model_dump_json(indent=2) + "\n")
    if as_json:
        tree = {"machine": machine.model_dump(mode="json"), "findings": as_rows(findings), "rates": rates}
        print(json.dumps(tree, indent=2))
    elif rates is not None:
        print_rates(rates, console)
    if any(finding.verdict == "bad" for finding in findings):
        raise typer.Exit(1)


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="the server, with or without http:// and /v1")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="model id; default: the first that the server lists")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="bearer key")] = None,
    system: Annotated[str | None, typer.Option(help="system message")] = None,
    file: Annotated[Path | None, typer.Option(help="a document that goes with the first question")] = None,
    attention_profile: Annotated[str | None, typer.Option(help="attention profile; default: the server's")] = None,
    once: Annotated[str | None, typer.Option(metavar="QUESTION", help="ask this, print the answer and end")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="longest answer, in tokens")] = 1024,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0: the most likely token")] = 0.0,
) -> None:
    """Talk to a running server. /help lists commands, Ctrl-C stops an answer, Ctrl-D ends."""
    from rich.console import Console

    from server.commands.chat import (
        ChatError,
        Conversation,
        ask,
        check_key,
        find_model,
        read_document,
    )
    from server.commands.chat_prompt import hold_conversation
    from server.server_url import find_root

    check_key(api_key)
    try:
        root = find_root(url)
    except ValueError as error:
        raise ChatError(f"--url: {error}") from None
    conversation = Conversation(
        url=root,
        model=model or find_model(root, api_key),
        api_key=api_key,
        attention_profile=attention_profile,
        max_tokens=max_tokens,
        temperature=temperature,
        messages=[] if system is None else [{"role": "system", "content": system}],
        document=None if file is None else read_document(file),
    )
    console = Console()
    if once is not None:
        ask(conversation, once, console)
    else:
        hold_conversation(conversation, console)


@app.command()
def launch(
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="claude, codex, opencode or aider")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="the agent's own, behind `--`")
    ] = None,
    url: Annotated[str, typer.Option(help="the server, with or without http:// and /v1")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="model id; default: the first that the server lists")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="bearer key")] = None,
    shows: Annotated[bool, typer.Option("--print", help="print variables and command for a shell, and end")] = False,
) -> None:
    """Start a coding agent against a running server; docs/AGENTS.md has what it is told, and other agents."""
    from server.commands.chat import ChatError, check_key
    from server.commands.launch import find_target, plan_launch, start
    from server.server_url import find_root

    check_key(api_key)
    try:
        root = find_root(url)
    except ValueError as error:
        raise ChatError(f"--url: {error}") from None
    found = plan_launch(agent, find_target(root, model, api_key), arguments or [])
    if shows:
        print(found.as_text())
    else:
        start(agent, found)
