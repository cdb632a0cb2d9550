"""Hold the options that the `tandem eval` commands share, without loading torch."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from server.deployment import Deployment

ModelFolder = Annotated[Path, typer.Option("--model", help="Hugging Face folder or GGUF file of the model")]
Methods = Annotated[list[str], typer.Option("--method", help="NAME[:key=value,...], or profile:NAME for a serving "
                                            "profile end to end; repeat to compare")]  # fmt: skip
Lengths = Annotated[str, typer.Option("--lengths", help="tokens of prompt and answer, commas between")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N")]
Json = Annotated[Path | None, typer.Option("--json", help="write rows, configuration and seeds here")]
Html = Annotated[Path | None, typer.Option("--html", help="write one self-contained page here")]
Seed = Annotated[int, typer.Option("--seed", help="of prompts")]
Text = Annotated[
    list[Path],
    typer.Option("--text", help="UTF-8 text around the needles; rows name the file, no more; default: generated text"),
]
SentAs = Annotated[str, typer.Option("--as", help="chat, completion or auto")]
Questions = Annotated[list[str], typer.Option("--questions", help="qa_1=FILE (SQuAD's format) or qa_2=FILE "
                                              "(HotpotQA's)")]  # fmt: skip
Batch = Annotated[int | None, typer.Option("--batch", help="prompts of the longest length that go together")]
Resume = Annotated[Path | None, typer.Option("--resume", help="folder that keeps finished samples")]
Seconds = Annotated[float | None, typer.Option("--seconds", min=0, help="end after so long, between two samples or "
                                               "batches, with what is finished (exit status 3)")]  # fmt: skip
Url = Annotated[str | None, typer.Option("--url", help="ask this OpenAI-compatible server for profile:NAME, "
                                         "or for `default`, which names no profile")]  # fmt: skip
Config = Annotated[Path | None, typer.Option("--config", help="deployment (YAML) whose settings of gpu, host and "
                                               "scheduler profile:NAME has in this process")]  # fmt: skip
ServedModel = Annotated[str | None, typer.Option("--served-model", help="the server's model id")]
ApiKey = Annotated[str | None, typer.Option("--api-key", help="bearer key of the server")]
Concurrency = Annotated[int, typer.Option("--concurrency", min=1, help="requests under way at once")]


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print expected errors as one line on stderr, and end with status 1."""
    from evals.methods.attention_method import MethodError
    from gpu.memory.plan import PlanError
    from gpu.model.architecture import ModelError
    from scheduler.sequences.capacity import TooLargeError
    from server.deployment import ConfigError
    from transfer.host_tier import HostMemoryError

    world = (
        ConfigError, HostMemoryError, MethodError, ModelError, PlanError, TooLargeError, OSError, ValueError, KeyError,
    )  # fmt: skip
    try:
        yield
    except world as error:
        text = str(error.args[0]) if isinstance(error, KeyError) else str(error)
        print(f"error: {' '.join(text.split())}", file=sys.stderr)
        raise typer.Exit(1) from None


def parse_lengths(text: str) -> list[int]:
    """Parse `4096,16384` to [4096, 16384]. Raises ValueError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"--lengths: got {text!r}; wanted token counts with commas between, such as 4096,16384")
    return [int(part) for part in parts]


def parse_tasks(text: str, more: tuple[str, ...] = ()) -> list[str]:
    """Parse `needle,list` to ["needle", "list"]; [] for an empty text. more: further valid names. Raises ValueError for
    an unknown one.
    """
    from evals.tasks import TASK_NAMES

    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in (*TASK_NAMES, *more):
            raise ValueError(f"--tasks: unknown {name!r}; known: {', '.join((*TASK_NAMES, *more))}")
    return names


def parse_numbers(option: str, text: str) -> list[int]:
    """Parse `7,8` to [7, 8]. Raises ValueError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"{option}: got {text!r}; wanted positive numbers with commas between")
    return sorted({int(part) for part in parts})


def parse_shares(option: str, text: str) -> list[float]:
    """Parse `0.05,0.15` to [0.05, 0.15]. Raises ValueError for anything but numbers from 0 to 1."""
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 <= share <= 1 for share in shares):
        raise ValueError(f"{option}: got {text!r}; wanted numbers from 0 to 1 with commas between")
    return shares


def parse_files(option: str, texts: Sequence[str], known: Sequence[str]) -> dict[str, Path]:
    """Return the files of `NAME=FILE` texts by name.

    Raises ValueError for another form, KeyError for an unknown name, FileNotFoundError for a missing file.
    """
    files: dict[str, Path] = {}
    for text in texts:
        name, equals, file = text.partition("=")
        if not equals or not file:
            raise ValueError(f"{option}: got {text!r}; wanted NAME=FILE")
        if name not in known:
            raise KeyError(f"{option}: unknown {name!r}; known: {', '.join(known)}")
        if not Path(file).is_file():
            raise FileNotFoundError(f"{option} {name}: no file {file}")
        files[name] = Path(file)
    return files


def read_deployment(config: Path | None, url: str | None) -> "Deployment | None":
    """Return the deployment of the engine in this process. Raises ConfigError, or ValueError if a URL is given
    as well.
    """
    from server.deployment import load_deployment

    if config is not None and url is not None:
        raise ValueError("--config: configures this process, but --url names a server; leave out --url or --config")
    return load_deployment(config) if config is not None else None


def check_methods(labels: list[str], deployment: "Deployment | None") -> None:
    """Raise MethodError or ProfileError for a method that is neither one of the evals' nor a serving profile."""
    from evals.methods.baselines import parse_method
    from evals.served_method import served_method

    for label in labels:
        if served_method(label, deployment) is None:
            parse_method(label)
