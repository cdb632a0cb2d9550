"""The evals take a GGUF file as they take a folder: profiles that serve it, RULER's wording, KL on any text."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from evals.cli import app
from evals.fidelity import text_prompts
from evals.run import form_of
from evals.tasks.text import text_source
from evals.tokenizer import load_tokenizer
from tests.gpu.family_checkpoints import checkpoint
from tests.gpu.gguf_files import vocabulary, write
from tests.server.live_server import REFERENCE

TOKENS = "tokenizer.ggml.tokens"
CODE = "".join(f"def add_{n}(left, right):\n    return left + right + {n}\n\n\n" for n in range(300))
DIALOGUE = "".join(f'"Did you see it, {name}?"\n"I did, twice."\n' for name in ("Ada", "Ben", "Cora") * 150)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "reference-Q8_0.gguf"
    return write(REFERENCE, path, lambda name: "Q8_0", vocabulary(REFERENCE), is_alone=True)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "code.py").write_text(CODE)
    (folder / "dialogue.txt").write_text(DIALOGUE)
    return sorted(folder.iterdir())


def test_a_profile_that_serves_the_file_is_scored_beside_the_decoder_that_read_it(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "tasks.json"
    arguments = ["tasks", "--model", str(file), "--device", "cpu", "--lengths", "256", "--samples", "2", "--json", out,
                 "--method", "full", "--method", "profile:exact"]  # fmt: skip
    ran = CliRunner().invoke(app, list(map(str, arguments)))
    assert ran.exit_code == 0, ran.output
    document = json.loads(out.read_text())
    assert document["configuration"]["form"] == "reference", "by the vocabulary in the file"
    assert [(row["task"], row["score"]) for row in document["rows"]] == [("needle", 100.0)] * 2


def test_next_token_kl_is_told_for_each_text_by_itself(file: Path, texts: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "fidelity.json"
    arguments = ["fidelity", "--model", str(file), "--device", "cpu", "--lengths", "192", "--samples", "1",
                 "--forced", "8", "--method", "profile:exact", "--method", "streaming:budget=16", "--json", out,
                 *(word for text in texts for word in ("--text", text))]  # fmt: skip
    ran = CliRunner().invoke(app, list(map(str, arguments)))
    assert ran.exit_code == 0, ran.output
    kl = {(row["text"], row["method"]): row["kl"] for row in json.loads(out.read_text())["rows"]}
    for text in texts:
        assert kl[text.name, "profile:exact"] < 1e-3 < kl[text.name, "streaming:budget=16"]


def test_models_without_the_reference_models_tokens_are_asked_in_rulers_words(file: Path, tmp_path: Path) -> None:
    names = ["<|im_start|>" if token == "<|user|>" else token for token in vocabulary(REFERENCE)[TOKENS]]
    other = write(checkpoint("llama2").folder, tmp_path / "other.gguf", lambda name: "F32",
                  vocabulary(REFERENCE) | {TOKENS: names, "llama.vocab_size": 320}, is_alone=True)  # fmt: skip
    assert [form_of(path) for path in (REFERENCE, file, other)] == ["reference", "reference", "ruler"]


def test_code_keeps_its_lines_and_indents(texts: list[Path]) -> None:
    tokenizer = load_tokenizer(REFERENCE)
    for prompt in text_prompts(tokenizer, text_source(texts[:1], {}), 256, 3, 5):
        assert len(prompt) == 256
        text = tokenizer.decode(prompt, skip_special_tokens=True)
        assert text in CODE + CODE
        assert "\n    return " in text


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Too short.\n" * 20)
    with pytest.raises(ValueError, match="give more text"):
        text_prompts(load_tokenizer(REFERENCE), text_source([tmp_path / "short.txt"], {}), 512, 1, 0)
