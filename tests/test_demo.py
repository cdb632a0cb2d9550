"""What `make run` does: a server starts, answers right about a long document, and ends when asked to."""

import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import httpx

DEMO = Path(__file__).parents[1] / "deploy" / "demo.py"
START_SECONDS = 240


def start_demo(*arguments: str) -> subprocess.Popen[str]:
    """As from a terminal: what a background job starts would ignore interrupts."""
    return subprocess.Popen(
        [sys.executable, str(DEMO), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def test_the_demo_answers_right_on_another_port_and_serves_until_interrupted() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind(("127.0.0.1", 8000))
            other.listen()
        except OSError:
            pass  # taken by someone else, which serves as well
        demo = start_demo()
        lines = read_until(demo, "Serving until Ctrl-C")
    text = "".join(lines)
    assert "port 8000 is taken" in text
    assert "right, in" in text
    url = next(word for word in text.split() if word.startswith("http://127.0.0.1:")).removesuffix(
        "/v1/chat/completions"
    )
    assert httpx.get(f"{url}/health").status_code == 200
    demo.send_signal(signal.SIGINT)
    rest, _ = demo.communicate(timeout=30)
    assert demo.returncode == 0, rest
    assert "Traceback" not in rest
    assert not is_listening(url)


def test_a_demo_whose_server_cannot_start_says_why(tmp_path: Path) -> None:
    config = tmp_path / "broken.yaml"
    config.write_text("model: {path: nowhere}\nserver: {port: 0}\n")
    done = subprocess.run(
        [sys.executable, str(DEMO), "--config", str(config)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "nowhere" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def read_until(demo: subprocess.Popen[str], words: str) -> list[str]:
    """Its lines up to the one with `words`; a demo that ends or takes too long is a failure."""
    assert demo.stdout is not None
    lines: list[str] = []
    deadline = time.monotonic() + START_SECONDS
    for line in demo.stdout:
        lines.append(line)
        if words in line:
            return lines
        if time.monotonic() > deadline:
            break
    os.kill(demo.pid, signal.SIGTERM)
    raise AssertionError(f"no line with {words!r} in:\n{''.join(lines)}")


def is_listening(url: str) -> bool:
    try:
        httpx.get(f"{url}/version", timeout=2)
    except httpx.HTTPError:
        return False
    return True
