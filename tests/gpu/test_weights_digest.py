"""Weights are named by what they hold: another byte is another name, another place is not, and reading is done once."""

import os
from pathlib import Path

import pytest

from gpu.model.architecture import ModelError
from gpu.weights import weights_digest
from gpu.weights.weights_digest import digest_random, digest_weights


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read."""
    names, real = [], weights_digest._digest_file

    def read(path: Path) -> str:
        names.append(path.name)
        return real(path)

    monkeypatch.setattr(weights_digest, "_digest_file", read)
    return names


def make_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for number in range(2):
        (folder / f"model-{number}.safetensors").write_bytes(bytes([number]) * 100_000)
    return folder


def test_a_digest_is_of_bytes_and_not_of_names_and_places(tmp_path: Path) -> None:
    first, kept = make_model(tmp_path / "a"), tmp_path / "kept.json"
    digest = digest_weights(first, kept)
    assert len(digest) == 32
    second = make_model(tmp_path / "b")
    assert digest_weights(second, kept) == digest
    (second / "model-0.safetensors").rename(second / "other.safetensors")
    assert digest_weights(second, kept) == digest
    (second / "config.json").write_text('{"rope_theta": 2}')
    assert digest_weights(second, kept) != digest


def test_files_are_read_once_and_again_when_they_change(tmp_path: Path, reads: list[str]) -> None:
    folder, kept = make_model(tmp_path / "a"), tmp_path / "of" / "kept.json"
    digest = digest_weights(folder, kept)
    assert sorted(reads) == ["model-0.safetensors", "model-1.safetensors"]
    assert digest_weights(folder, kept) == digest
    assert len(reads) == 2
    path = folder / "model-1.safetensors"
    before = path.stat()
    path.write_bytes(b"\1" * 99_999 + b"\2")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert digest_weights(folder, kept) != digest, "same size and time of change, other bytes"
    assert reads[2:] == ["model-1.safetensors"]


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1}'])
def test_what_is_kept_may_be_lost(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, kept = make_model(tmp_path / "a"), tmp_path / "kept.json"
    digest = digest_weights(folder, kept)
    kept.write_text(text)
    assert digest_weights(folder, kept) == digest
    (tmp_path / "file").write_text("")
    assert digest_weights(folder, tmp_path / "file" / "kept.json") == digest
    assert "weights_digest_not_kept" in caplog.text


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no \*.safetensors; wanted a Hugging Face folder"):
        digest_weights(tmp_path, tmp_path / "kept.json")
    folder = make_model(tmp_path / "a")
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"cannot be read .*; wanted config\.json"):
        digest_weights(folder, tmp_path / "kept.json")


def test_drawn_weights_are_named_by_what_draws_them() -> None:
    drawn = [("tiny", 1, "bfloat16", "cuda"), ("tiny", 2, "bfloat16", "cuda"), ("tiny", 1, "float32", "cuda"),
             ("tiny", 1, "bfloat16", "cpu"), ("llama-3.1-8b", 1, "bfloat16", "cuda")]  # fmt: skip
    assert len({digest_random(*one) for one in drawn}) == len(drawn)
