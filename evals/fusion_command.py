"""Run `tandem eval fusion`: judge policies that reuse documents beside computing all of them.

Invariant: a run that is stopped or killed leaves JSON of its finished batches, with all policies in each.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evals.options import (
    Device,
    Json,
    Lengths,
    Questions,
    Seconds,
    Seed,
    SentAs,
    Text,
    one_line_errors,
    parse_files,
    parse_lengths,
    parse_shares,
    parse_tasks,
)
from transfer.host_config import DocumentsConfig

if TYPE_CHECKING:
    from rich.console import Console

    from evals.fusion_prompts import PromptPlan

_DEFAULTS = {name: field.default for name, field in DocumentsConfig.model_fields.items()}
SERVED_POLICY = "{policy}:select_layer={select_layer},seam_tokens={seam_tokens}".format(**_DEFAULTS)
"""What a deployment does by default. A policy's name alone stands for that of its paper."""


def fusion(
    model: Annotated[Path, typer.Option("--model", help="Hugging Face folder or GGUF file of the model")],
    policies: Annotated[str, typer.Option("--policies", help="names with spaces between; settings as "
                                          "a3:select_layer=3,seam_tokens=1,ratio=0.15")] =
        f"{SERVED_POLICY} a3 random pie",
    ratios: Annotated[str, typer.Option("--ratios", help="of all tokens, computed again; commas between")] =
        "0.05,0.15,0.3,0.5",
    lengths: Lengths = "4096",
    names: Annotated[str, typer.Option("--tasks", help="names with commas; default: several of the form, or the "
                                       "datasets where some are given")] = "",
    form: Annotated[str, typer.Option("--form", help="reference (the reference model's own) or ruler")] = "reference",
    sent_as: SentAs = "auto",
    dataset: Annotated[list[str], typer.Option("--dataset", help="NAME=FILE, such as longbench/qasper=qasper.jsonl; "
                                               "repeatable")] = [],  # noqa: B006
    questions: Questions = [],  # noqa: B006
    text: Text = [],  # noqa: B006
    answer: Annotated[int | None, typer.Option("--answer", min=1, help="tokens of an answer at most; default: the "
                                               "task's own")] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="prompts a length, of all tasks together")] = 40,
    maps: Annotated[int, typer.Option("--maps", min=0, help="prompts whose attention maps are compared")] = 4,
    chunk: Annotated[int, typer.Option("--chunk", min=16, help="tokens of a document's chunk")] = 512,
    rows: Annotated[str, typer.Option("--rows", help="bfloat16, float32 or int8")] = "bfloat16",
    seconds: Seconds = None,
    seed: Seed = 0,
    device: Device = "auto",
    json_path: Json = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="write the picture of KL against the ratio here")] = None,
) -> None:  # fmt: skip
    """Compare policies that reuse documents' keys and values, in the engine that serves, with computing all of them.

    Prompts are written by the model's chat template, if it has one. Documents are cut into chunks, which generated
    tasks shuffle. KL is of the next token from vanilla's, and along vanilla's answer up to the first token that
    differs. Distance is that of the question's attention maps from vanilla's: L2 over vanilla's norm, mean over all
    layers but the first. Lengths take turns, and all policies answer the same prompts.
    """
    with one_line_errors():
        _run(
            FusionOptions(
                model=model,
                labels=tuple(policies.split()),
                ratios=ratios,
                lengths=lengths,
                names=names,
                form=form,
                sent_as=sent_as,
                datasets=tuple(dataset),
                questions=tuple(questions),
                texts=tuple(text),
                answer=answer,
                num_samples=samples,
                num_maps=maps,
                chunk_tokens=chunk,
                rows=rows,
                seconds=seconds,
                seed=seed,
                device=device,
                json_path=json_path,
                svg=svg,
            )
        )


@dataclass(frozen=True, slots=True)
class FusionOptions:
    """The options of `tandem eval fusion`, as they were written. labels: of policies. names: of tasks."""

    model: Path
    labels: tuple[str, ...]
    ratios: str
    lengths: str
    names: str
    form: str
    sent_as: str
    datasets: tuple[str, ...]
    questions: tuple[str, ...]
    texts: tuple[Path, ...]
    answer: int | None
    num_samples: int
    num_maps: int
    chunk_tokens: int
    rows: str
    seconds: float | None
    seed: int
    device: str
    json_path: Path | None
    svg: Path | None

    def command(self, tasks: Sequence[str]) -> str:
        """Return the command line that runs the same again."""
        asked = f"--lengths {self.lengths} --samples {self.num_samples} --ratios {self.ratios}"
        asked += f" --policies '{' '.join(self.labels)}'"
        if self.form != "reference" or self.names:
            asked = f"--form {self.form} --tasks {','.join(tasks)} --chunk {self.chunk_tokens} {asked}"
        return f"tandem eval fusion --model {self.model} {asked}"

    def described(self, tasks: Sequence[str]) -> dict[str, Any]:
        """Return the options that a document of the run records."""
        return {
            "model": str(self.model), "tasks": tasks, "chunk": self.chunk_tokens, "kept_as": self.rows,
            "form": self.form, "answer": self.answer, "text": [path.name for path in self.texts],
        }  # fmt: skip


def _run(asked: FusionOptions) -> None:
    """Judge the policies, print them and write the files. Raises typer.Exit with the status, and ValueError."""
    from evals.report.document import write_text
    from evals.report.fusion_figure import draw_fusion
    from evals.report.table import open_console
    from evals.session import exit_status

    found, reason = _judge_policies(asked)
    print_fusion(found, open_console())
    if asked.svg is not None:
        write_text(asked.svg, draw_fusion(found))
    if status := exit_status(found, reason):
        raise typer.Exit(status)


def _judge_policies(asked: FusionOptions) -> tuple[list, str | None]:
    """Return the rows of all batches that were judged, and why the run was cut."""
    from evals.fusion import TOGETHER, fusion_engine, fusion_rows, judge, parse_policies
    from evals.fusion_prompts import prompts_ahead
    from evals.report.document import describe_run, finite, machine_name, write_document
    from evals.session import count_workers, progress_bar, resolve_device
    from evals.stopping import stopping

    began, device, sizes = time.monotonic(), resolve_device(asked.device), parse_lengths(asked.lengths)
    plan = _plan_prompts(asked)
    runs = parse_policies(asked.labels, parse_shares("--ratios", asked.ratios))
    together = TOGETHER["cuda" if device.startswith("cuda") else "cpu"]
    found: list = []

    def leave(reason: str | None) -> None:
        if asked.json_path is not None:
            seconds, command = time.monotonic() - began, asked.command(plan.tasks)
            document = describe_run("fusion", command, asked.seed, seconds, machine_name(device), found)
            write_document(asked.json_path, document | finite(asked.described(plan.tasks) | {"cut": reason}))

    num_batches = len(sizes) * len(runs) * -(-asked.num_samples // together)
    with (
        stopping(asked.seconds) as stop,
        prompts_ahead(plan, sizes, count_workers(len(sizes) * len(plan.tasks), device)) as prompts_of,
        progress_bar(num_batches, "batches") as advance,
        fusion_engine(asked.model, device, max(sizes), asked.rows, asked.chunk_tokens) as engine,
    ):
        prompts = {length: prompts_of(length) for length in sizes}
        for judged in judge(engine, asked.model, prompts, runs, asked.num_maps, advance, stop, together):
            found[:] = [row for length in sizes for row in fusion_rows(judged[length], length)]
            leave("under way")  # so that a run that is killed leaves its batches
    leave(stop.reason)
    return found, stop.reason


def _plan_prompts(asked: FusionOptions) -> "PromptPlan":
    """Return the plan of prompts. Raises ValueError for a form, task or file that does not exist."""
    from evals.cells import PromptSettings
    from evals.datasets import DATASETS
    from evals.fusion_prompts import DEFAULT_TASKS, PromptPlan
    from evals.tasks import FORMS, RULER_TASKS

    if asked.form not in FORMS:
        raise ValueError(f"--form: unknown {asked.form!r}; known: {', '.join(FORMS)}")
    files = parse_files("--dataset", asked.datasets, list(DATASETS))
    questions = parse_files("--questions", asked.questions, list(RULER_TASKS[-2:]))
    tasks = (*parse_tasks(asked.names), *files) or DEFAULT_TASKS[asked.form]
    settings = PromptSettings(
        asked.model, asked.form, asked.seed, asked.texts, tuple(questions.items()), tuple(files.items()), asked.sent_as
    )
    return PromptPlan(settings, tasks, asked.num_samples, asked.chunk_tokens, asked.answer)


def print_fusion(rows: list, console: "Console") -> None:
    """Print a line for each length, policy and ratio, with columns of tasks."""
    from rich.table import Table

    from evals.fusion_report import render_policies

    for length in dict.fromkeys(row["length"] for row in rows):
        head, _, *lines = render_policies([row for row in rows if row["length"] == length])
        chunks = next(row.get("chunks") for row in rows if row["length"] == length)
        title = f"{length:,} tokens" + (f", {chunks:.0f} chunks" if chunks else "")
        table = Table(*(cell.strip() for cell in head.strip("| ").split(" | ")), title=title)
        for line in lines:
            table.add_row(*(cell.strip("` ") for cell in line[2:-2].split(" | ")))
        console.print(table)
