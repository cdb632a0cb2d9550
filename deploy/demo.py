"""Start the server, ask it two questions about a page of the project, and keep serving until Ctrl-C.

Without SmolLM2 the reference model is served. It can only find needles in a text, so two are put into the page.
"""

import argparse
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console

from server.commands.chat import ChatError, Conversation, ask
from server.deployment import ConfigError, load_deployment

DEPLOY = Path(__file__).resolve().parent
ROOT = DEPLOY.parent
LOG = ROOT / "build" / "server.log"
PAGE = ROOT / "docs" / "TANDEM.md"
NEEDLE_PAGE = ROOT / "build" / "document.txt"
NEEDLES = (("amber-lantern", "7264510"), ("silver-falcon", "3918204"))
START_SECONDS = 300
STOP_SECONDS = 15
ANSWER_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Question:
    """A question, and words that a right answer has."""

    text: str
    answer: str


QUESTIONS = (
    Question("Who is Tandem made for? Answer in one short sentence.", "graphics card"),
    Question("Which port does the server listen on? Answer in one short sentence.", "8000"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, help="default: laptop.yaml, or reference.yaml if its model is not there")
    parser.add_argument("--once", action="store_true", help="end after the answers; status 1 if one is wrong")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    try:
        config = arguments.config or choose_config()
        settings = load_deployment(config)
        port = choose_port(settings.server.host, settings.server.port, console)
        server = start_server(config, port)
        try:
            url = f"http://{settings.server.host}:{port}"
            return converse(server, url, settings.model.name or "default", arguments.once, console)
        finally:
            stop_server(server, console)
    except (ChatError, ConfigError, OSError) as error:
        console.print(f"[red]error:[/] {error}")
        return 1


def choose_config() -> Path:
    config = DEPLOY / "laptop.yaml"
    path = load_deployment(config).model.path
    return config if path is not None and path.exists() else DEPLOY / "reference.yaml"


def converse(server: subprocess.Popen[bytes], url: str, model: str, once: bool, console: Console) -> int:
    """Wait until the server is healthy, ask the questions, and serve until Ctrl-C or the server's end."""
    try:
        wait_until_healthy(server, url)
        right = ask_about_page(url, model, console)
        if once:
            return 0 if right else 1
        explain(url, model, console)
        server.wait()
        console.print(f"[red]error:[/] the server ended: {last_words(LOG)}")
        return 1
    except KeyboardInterrupt:
        console.print()
        return 0


def choose_port(host: str, wanted: int, console: Console) -> int:
    """Return the configured port, or any free one if that is taken."""
    for port in (wanted, 0):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                console.print(f"port {port} is taken, using another")
                continue
            return int(probe.getsockname()[1])
    raise ConfigError(f"server.host: cannot listen on {host}")


def start_server(config: Path, port: int) -> subprocess.Popen[bytes]:
    """Run `tandem serve`. Its output comes here, and its log goes to a file.

    It gets a session of its own, so that Ctrl-C reaches this program alone.
    """
    LOG.parent.mkdir(exist_ok=True)
    with LOG.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "server.commands", "serve", str(config), "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )


def wait_until_healthy(server: subprocess.Popen[bytes], url: str) -> None:
    """Wait until the server is healthy. Raises ChatError if it ends, or is not healthy in time."""
    deadline = time.monotonic() + START_SECONDS
    with httpx.Client(timeout=5) as client:  # each `httpx.get` would make a new client
        while time.monotonic() < deadline:
            if server.poll() is not None:
                raise ChatError(f"the server ended with status {server.returncode}: {last_words(LOG)}")
            try:
                if client.get(f"{url}/health").status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
    raise ChatError(f"the server is not healthy after {START_SECONDS} s; its log is {LOG}")


def ask_about_page(url: str, model: str, console: Console) -> bool:
    """Stream the answers to the terminal. Returns whether all of them are right."""
    page, questions = choose_page(model)
    console.print(f"\n[bold]{page.relative_to(ROOT)}[/] is read, and {model} is asked:")
    verdicts = []
    for question in questions:
        console.print(f"\n[bold green]>[/] {question.text}")
        conversation = Conversation(url, model, None, None, ANSWER_TOKENS, 0.0, document=page.read_text())
        ask(conversation, question.text, console)
        verdicts.append(question.answer in conversation.messages[-1]["content"])
        says = f"[red]wrong[/]: the page says {question.answer}"
        console.print("[green]right[/]" if verdicts[-1] else says)
    return all(verdicts)


def choose_page(model: str) -> tuple[Path, tuple[Question, ...]]:
    """Return the page and the questions. For the reference model, the page has needles between its paragraphs."""
    if model != "reference":
        return PAGE, QUESTIONS
    from evals.tasks.reference import NUMBER_NEEDLE  # takes a second to import

    paragraphs = PAGE.read_text().split("\n\n")
    for place, (key, number) in zip((3, 1), NEEDLES, strict=True):
        paragraphs.insert(place, NUMBER_NEEDLE.format(key, number))
    NEEDLE_PAGE.write_text("\n\n".join(paragraphs))
    return NEEDLE_PAGE, tuple(
        Question(f"What is the special magic number for {key}?", number) for key, number in NEEDLES
    )


def explain(url: str, model: str, console: Console) -> None:
    page, _ = choose_page(model)
    console.print("\n[bold]Go on[/] in another terminal, until Ctrl-C ends this:")
    command = f"  .venv/bin/tandem chat --url {url} --file {page.relative_to(ROOT)}"
    console.print(command, markup=False, soft_wrap=True)
    console.print(f"The log is {LOG}.", style="dim")


def stop_server(server: subprocess.Popen[bytes], console: Console) -> None:
    """Ask the server to end. A second Ctrl-C, or STOP_SECONDS, kills it."""
    if server.poll() is not None:
        return
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(STOP_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        server.kill()
        server.wait()
    console.print("stopped", style="dim")


def last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else f"nothing in {log}"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
