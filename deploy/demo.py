"""Starts the server, asks it one question about a document of 4,000 tokens, and keeps serving until Ctrl-C.

Knows the server by its command and its HTTP interface alone. The document is generated text with twelve needles in it;
the question asks for one of them, so whether the answer is right can be seen at once.
"""

import argparse
import json
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
from rich.console import Console

from evals.tasks.haystack import Haystack
from evals.tasks.reference import NUMBER_NEEDLE
from evals.tasks.text import generated_text
from evals.tasks.vocabulary import KEY_WORDS
from server.commands.chat import ChatError, Conversation, ask, describe_refusal
from server.config import ConfigError, load_deployment

DEPLOY = Path(__file__).resolve().parent
LOG = DEPLOY.parent / "build" / "server.log"
DOCUMENT = DEPLOY.parent / "build" / "document.txt"
SEED = 5
DOCUMENT_TOKENS = 4000
NUM_NEEDLES = 12
LEAST_WORDS, MOST_WORDS = 100, 8000
START_SECONDS = 300
STOP_SECONDS = 15


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=DEPLOY / "laptop.yaml")
    parser.add_argument("--once", action="store_true", help="end after the answer; status 1 if it is wrong")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    try:
        settings = load_deployment(arguments.config)
        port = choose_port(settings.server.host, settings.server.port, console)
        server = start_server(arguments.config, port)
        try:
            return converse(
                server, f"http://{settings.server.host}:{port}", settings.model.name, arguments.once, console
            )
        finally:
            stop_server(server, console)
    except (ChatError, ConfigError, OSError) as error:
        console.print(f"[red]error:[/] {error}")
        return 1


def converse(server: subprocess.Popen[bytes], url: str, model: str | None, once: bool, console: Console) -> int:
    """Wait, ask, say how to go on, and wait for Ctrl-C or the server's end."""
    try:
        wait_until_healthy(server, url, console)
        right = ask_about_document(url, model or "default", console)
        if once:
            return 0 if right else 1
        explain(url, model or "default", console)
        server.wait()
        console.print(f"[red]error:[/] the server ended: {last_words(LOG)}")
        return 1
    except KeyboardInterrupt:
        console.print()
        return 0


def choose_port(host: str, wanted: int, console: Console) -> int:
    """The configured port, or any free one if that is taken."""
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
    """`tandem serve`, in a session of its own so that Ctrl-C reaches this program alone; its log goes to a file."""
    LOG.parent.mkdir(exist_ok=True)
    with LOG.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "server.commands", "serve", str(config), "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait_until_healthy(server: subprocess.Popen[bytes], url: str, console: Console) -> None:
    """Raises ChatError if the server ends, or is not healthy in time."""
    deadline = time.monotonic() + START_SECONDS
    with console.status("loading the model"), httpx.Client(timeout=5) as client:  # each `httpx.get` makes one anew
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


def ask_about_document(url: str, model: str, console: Console) -> bool:
    """Stream one answer to the terminal. Returns whether it is the number that the document says."""
    needles = draw_needles(random.Random(SEED))
    key, number = needles[NUM_NEEDLES // 2]
    document, num_tokens = fit_document(url, needles)
    DOCUMENT.write_text(document)
    question = f"What is the special magic number for {key}?"
    sentence = NUMBER_NEEDLE.format(key, number)
    begin = document.index(sentence)
    console.print(f"\nA document of {num_tokens:,} tokens and {NUM_NEEDLES} needles; somewhere in the middle it says:")
    excerpt = document[max(0, begin - 160) : begin + len(sentence) + 160].replace("\n", " ")
    console.print(f"  ... {excerpt} ...", style="dim", markup=False)
    console.print(f"\n[bold]{question}[/]")
    conversation = Conversation(url, model, None, None, 16, 0.0)
    began = time.monotonic()
    ask(conversation, question, document, console)
    answer = conversation.messages[-1]["content"].strip()
    right = answer == number
    verdict = "[green]right[/]" if right else f"[red]wrong[/]: the document says {number}"
    console.print(f"{verdict}, in {time.monotonic() - began:.1f} s")
    return right


def draw_needles(draw: random.Random) -> list[tuple[str, str]]:
    """Keys of two words, and numbers of seven digits; none twice."""
    words = draw.sample(KEY_WORDS, 2 * NUM_NEEDLES)
    numbers = draw.sample(range(1_000_000, 10_000_000), NUM_NEEDLES)
    keys = [f"{first}-{second}" for first, second in zip(words[::2], words[1::2], strict=True)]
    return [(key, str(number)) for key, number in zip(keys, numbers, strict=True)]


def fit_document(url: str, needles: list[tuple[str, str]]) -> tuple[str, int]:
    """The longest document of no more than DOCUMENT_TOKENS, as the server counts them, and its number of tokens."""
    haystack = Haystack(generated_text().sentences(SEED, MOST_WORDS))
    depths = [(index + 0.5) / len(needles) for index in range(len(needles))]
    inserts = [(depth, NUMBER_NEEDLE.format(*needle)) for depth, needle in zip(depths, needles, strict=True)]
    low, high = LEAST_WORDS, MOST_WORDS
    with httpx.Client(base_url=url, timeout=30) as client:
        while high - low > 1:
            middle = (low + high) // 2
            fits = count_tokens(client, haystack.document(middle, inserts)) <= DOCUMENT_TOKENS
            low, high = (middle, high) if fits else (low, middle)
        document = haystack.document(low, inserts)
        return document, count_tokens(client, document)


def count_tokens(client: httpx.Client, text: str) -> int:
    response = client.post("/tokenize", json={"prompt": text})
    if response.status_code != 200:
        raise ChatError(f"/tokenize: {describe_refusal(response.status_code, response.text)}")
    return int(response.json()["count"])


def explain(url: str, model: str, console: Console) -> None:
    key, number = draw_needles(random.Random(SEED))[0]
    content = f"{NUMBER_NEEDLE.format(key, number)} What is the special magic number for {key}?"
    messages = [{"role": "user", "content": content}]
    body = json.dumps({"model": model, "messages": messages, "max_tokens": 16, "stream": True})
    console.print("\n[bold]Ask more[/]")
    for line in (
        f"  .venv/bin/tandem chat --url {url} --file {DOCUMENT.relative_to(DEPLOY.parent)}",
        f"  curl {url}/v1/chat/completions -H 'content-type: application/json' \\\n    -d '{body}'",
    ):
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"The log is {LOG}. Serving until Ctrl-C.", style="dim")


def stop_server(server: subprocess.Popen[bytes], console: Console) -> None:
    """Ask it to end; a second Ctrl-C, or STOP_SECONDS, ends it at once."""
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
