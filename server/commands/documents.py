"""`tandem documents`: files as documents of a running server, from the terminal.

Knows HTTP and the terminal, nothing of the engine. A file that was added before is the same document, so an addition
that was interrupted is simply run again. One file's fault does not keep the others out; a server that is gone does.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from server.commands.chat import CONNECT_SECONDS, check_key, describe_refusal
from server.commands.work_bar import WorkBar
from server.server_url import find_root

app = typer.Typer(no_args_is_help=True, help="Documents of a running server.")


class AddError(Exception):
    """A server that cannot be talked to, or files that were not added; the message is one line."""


@dataclass(frozen=True, slots=True)
class Added:
    """What became of a file: the server's document, or why there is none."""

    path: Path
    document: dict[str, Any] | None
    fault: str


@app.callback()
def take_no_options() -> None:
    """Makes a group of what would be one command."""


@app.command()
def add(
    files: Annotated[list[Path], typer.Argument(help="text files, UTF-8; each becomes a document, its name the title")],
    url: Annotated[str, typer.Option(help="the server, with or without http:// and /v1")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="bearer key, whose they are")] = None,
    at_once: Annotated[int, typer.Option(min=1, max=64, help="files on their way at a time")] = 4,
) -> None:
    """Store files as documents, and their keys and values ahead of the chats that name them; prints their ids."""
    check_key(api_key)
    try:
        root = find_root(url)
    except ValueError as error:
        raise AddError(f"--url: {error}") from None
    notes = Console(stderr=True)
    total = len(files)
    faults, reasons, num_stored, num_known = 0, set(), 0, 0
    with WorkBar("files", notes) as bar:
        bar.show("storing", 0, total)
        for done, one in enumerate(add_files(root, api_key, files, at_once), 1):
            if one.document is None:
                faults += 1
                notes.print(f"{one.path}: {one.fault}", style="red", markup=False, highlight=False)
            else:
                typer.echo(f"{one.document['id']}  {one.path}")
                num_stored += one.document["num_stored"]
                num_known += one.document["num_known"]
                reasons.add(one.document["reason"])
            bar.show("storing", done, total)
    notes.print(
        f"{total - faults} documents; {num_stored:,} chunks stored, {num_known:,} known before",
        style="dim", highlight=False,
    )  # fmt: skip
    for reason in sorted(filter(None, reasons)):
        notes.print(f"not all chunks were stored: {reason}", style="yellow", markup=False, highlight=False)
    if faults:
        raise AddError(f"documents: {faults} of {total} files were not added")


def add_files(root: str, api_key: str | None, files: Sequence[Path], at_once: int) -> Iterator[Added]:
    """Each file as it is done with. Raises AddError if there is no server any more."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)  # chunks are computed behind all requests
    with httpx.Client(base_url=root, headers=headers, timeout=timeout) as client:
        threads = ThreadPoolExecutor(at_once, "add")
        try:
            for future in as_completed([threads.submit(add_file, client, path) for path in files]):
                yield future.result()
        except httpx.HTTPError as error:
            raise AddError(f"documents: {root} does not answer ({error or type(error).__name__})") from None
        finally:
            threads.shutdown(cancel_futures=True)


def add_file(client: httpx.Client, path: Path) -> Added:
    """Raises httpx.HTTPError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return Added(path, None, f"cannot be read as text: {error}")
    response = client.post("/v1/documents", json={"title": path.name, "text": text})
    if response.status_code != 200:
        return Added(path, None, describe_refusal(response.status_code, response.text))
    return Added(path, response.json(), "")
