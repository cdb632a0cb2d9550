"""Run `tandem documents`: add, list and delete the documents of a running server from the terminal.

A file that was added before is the same document, so an interrupted addition can simply be run again. One file's error
does not stop the others; a lost server does.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import typer
from rich.console import Console

from server.commands.chat import CONNECT_SECONDS, check_key, describe_refusal
from server.commands.work_bar import WorkBar
from server.server_url import find_root

Url = Annotated[str, typer.Option(help="the server, with or without http:// and /v1")]
Key = Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="bearer key, whose they are")]
DEFAULT_URL = "http://127.0.0.1:8000"
_ROUTE = "/v1/documents"
_PAGE = 1000
_ANSWER_SECONDS = 60.0
_CONTROLS = dict.fromkeys([*range(32), *range(127, 160)], " ")  # of a title: a terminal would obey them

app = typer.Typer(no_args_is_help=True, help="Documents of a running server.")


class DocumentsError(Exception):
    """The server cannot be reached, or documents were not added or deleted; the message is one line."""


@dataclass(frozen=True, slots=True)
class Added:
    """The result for one file: the server's document, or why there is none."""

    path: Path
    document: dict[str, Any] | None
    fault: str


@app.command()
def add(
    files: Annotated[list[Path], typer.Argument(help="text files, UTF-8; each becomes a document, its name the title")],
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    at_once: Annotated[int, typer.Option(min=1, max=64, help="files on their way at a time")] = 4,
) -> None:
    """Store files as documents, compute their keys and values before chats name them, and print their ids."""
    root = _root_of(url, api_key)
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
        raise DocumentsError(f"documents: {len(files) - len(made)} of {len(files)} files were not added")


@app.command("list")
def list_documents(url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """List the key's documents, oldest first: id, time, bytes of text, title."""
    root = _root_of(url, api_key)
    with _client(root, api_key) as client:
        for entry in find_documents(client):
            made = datetime.fromtimestamp(entry["created"]).isoformat(" ", "seconds")
            title = entry["title"].translate(_CONTROLS)
            typer.echo(f"{entry['id']}  {made}  {entry['num_bytes']:>12,}  {title}".rstrip())


@app.command()
def delete(
    ids: Annotated[list[str] | None, typer.Argument(help="doc-..., as `list` prints them")] = None,
    everything: Annotated[bool, typer.Option("--all", help="all of the key's documents")] = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Delete documents, with stored keys and values that no other has; prints the ids of deleted ones."""
    if bool(ids) == everything:
        raise DocumentsError("documents: name the ids to delete, or --all, and not both")
    root = _root_of(url, api_key)
    notes, num_left = Console(stderr=True), 0
    with _client(root, api_key) as client:
        named = [entry["id"] for entry in find_documents(client)] if everything else list(dict.fromkeys(ids or []))
        for document_id in named:
            response = client.delete(f"{_ROUTE}/{quote(document_id, safe='')}")
            if response.status_code == 200:
                typer.echo(document_id)
            elif not (everything and response.status_code == 404):  # else somebody else has deleted it
                fault = describe_refusal(response.status_code, response.text)
                notes.print(f"{document_id}: {fault}", style="red", markup=False, highlight=False)
                num_left += 1
    if num_left:
        raise DocumentsError(f"documents: {num_left} of {len(named)} were not deleted")


def find_documents(client: httpx.Client) -> list[dict[str, Any]]:
    """Return all of the key's documents. Raises DocumentsError, and httpx.HTTPError."""
    found: list[dict[str, Any]] = []
    while True:
        after = {"after": found[-1]["id"]} if found else {}
        response = client.get(_ROUTE, params={"limit": _PAGE, **after})
        if response.status_code != 200:
            raise DocumentsError(f"documents: {describe_refusal(response.status_code, response.text)}")
        page = response.json()
        found += page["data"]
        if not page["has_more"]:
            return found


def _root_of(url: str, api_key: str | None) -> str:
    check_key(api_key)
    try:
        return find_root(url)
    except ValueError as error:
        raise DocumentsError(f"--url: {error}") from None


def _headers(api_key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


@contextmanager
def _client(root: str, api_key: str | None) -> Iterator[httpx.Client]:
    """Return a client for the server. Raises DocumentsError if it does not answer."""
    timeout = httpx.Timeout(_ANSWER_SECONDS, connect=CONNECT_SECONDS)
    try:
        with httpx.Client(base_url=root, headers=_headers(api_key), timeout=timeout) as client:
            yield client
    except (httpx.HTTPError, ValueError) as error:
        raise DocumentsError(f"documents: {root} does not answer ({error or type(error).__name__})") from None


async def add_files(
    root: str, api_key: str | None, files: Sequence[Path], at_once: int, tell: Callable[[Added], None]
) -> None:
    """Add files, calling `tell` after each. Raises DocumentsError if the server is gone."""
    timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)  # chunks are computed behind all requests
    room = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=root, headers=_headers(api_key), timeout=timeout) as client:

        async def add_in_room(path: Path) -> Added:
            async with room:
                return await add_file(client, path)

        tasks = [asyncio.create_task(add_in_room(path)) for path in files]
        try:
            for task in asyncio.as_completed(tasks):
                tell(await task)
        except httpx.HTTPError as error:
            raise DocumentsError(f"documents: {root} does not answer ({error or type(error).__name__})") from None
        finally:
            for unfinished in tasks:
                unfinished.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def add_file(client: httpx.AsyncClient, path: Path) -> Added:
    """Add one file. Raises httpx.HTTPError."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark that is no text
    except (OSError, UnicodeDecodeError) as error:
        return Added(path, None, f"cannot be read as text: {error}")
    response = await client.post(_ROUTE, json={"title": path.name, "text": text})
    if response.status_code != 200:
        return Added(path, None, describe_refusal(response.status_code, response.text))
    return Added(path, response.json(), "")
