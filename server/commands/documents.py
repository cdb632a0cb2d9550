"""`tandem documents`: files as documents of a running server, from the terminal.

Knows HTTP and the terminal, nothing of the engine. A file that was added before is the same document, so an addition
that was interrupted is simply run again. One file's fault does not keep the others out; a server that is gone does.
"""

import asyncio
from collections.abc import Callable, Sequence
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
    added: list[Added] = []
    with WorkBar("files", notes) as bar:
        bar.show("storing", 0, len(files))

        def tell(one: Added) -> None:
            added.append(one)
            if one.document is None:
                notes.print(f"{one.path}: {one.fault}", style="red", markup=False, highlight=False)
            else:
                typer.echo(f"{one.document['id']}  {one.path}")
            bar.show("storing", len(added), len(files))

        asyncio.run(add_files(root, api_key, files, at_once, tell))
    made = [one.document for one in added if one.document is not None]
    num_stored, num_known = (sum(document[count] for document in made) for count in ("num_stored", "num_known"))
    notes.print(
        f"{len(made)} documents; {num_stored:,} chunks stored, {num_known:,} known before", style="dim", highlight=False
    )
    reasons = {document["reason"] for document in made}
    for reason in sorted(filter(None, reasons)):
        notes.print(f"not all chunks were stored: {reason}", style="yellow", markup=False, highlight=False)
    if len(made) < len(files):
        raise AddError(f"documents: {len(files) - len(made)} of {len(files)} files were not added")


async def add_files(
    root: str, api_key: str | None, files: Sequence[Path], at_once: int, tell: Callable[[Added], None]
) -> None:
    """`tell` is called as each file is done with. Raises AddError if there is no server any more."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)  # chunks are computed behind all requests
    room = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=root, headers=headers, timeout=timeout) as client:

        async def add_in_room(path: Path) -> Added:
            async with room:
                return await add_file(client, path)

        tasks = [asyncio.create_task(add_in_room(path)) for path in files]
        try:
            for task in asyncio.as_completed(tasks):
                tell(await task)
        except httpx.HTTPError as error:
            raise AddError(f"documents: {root} does not answer ({error or type(error).__name__})") from None
        finally:
            for unfinished in tasks:
                unfinished.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def add_file(client: httpx.AsyncClient, path: Path) -> Added:
    """Raises httpx.HTTPError."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark that is no text
    except (OSError, UnicodeDecodeError) as error:
        return Added(path, None, f"cannot be read as text: {error}")
    response = await client.post("/v1/documents", json={"title": path.name, "text": text})
    if response.status_code != 200:
        return Added(path, None, describe_refusal(response.status_code, response.text))
    return Added(path, response.json(), "")
