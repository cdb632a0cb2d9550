"""Files of lab/published say commands that exist, with values that these take; nothing is measured here."""

import os
import shlex
import stat
import subprocess
from pathlib import Path

import pytest
import typer

from lab.cli import app as lab
from lab.speed.lengths import lengths
from lab.speed.peer_rows import choose_rows
from lab.speed.vllm_rows import parser as vllm_arguments
from server.deployment import load_deployment
from tests.command_line import parse as parse_tandem
from tests.command_line import resolve

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "lab" / "published").glob("*.sh"))
STUB = """#!/usr/bin/env bash
printf -v asked '%q ' "$@"
echo "$asked" >> "$ASKED" # at once: some run beside others
"""


def parse(words: list[str]) -> None:
    """Parse a line of `python -m lab` or of `tandem`; what asks a package index is not ours."""
    if words[:2] == ["-m", "pip"]:
        return
    if words[:2] == ["-m", "lab"]:
        command = typer.main.get_command(lab)
        resolve(command, words[2:])
    elif words[:2] == ["-m", "lab.speed.lengths"]:
        alone = typer.Typer()
        alone.command()(lengths)
        typer.main.get_command(alone).make_context("lengths", words[2:])
    elif words[:2] == ["-m", "lab.speed.vllm_rows"]:
        asked = vllm_arguments().parse_args(words[2:])
        choose_rows(asked.rows, small=False, rate=asked.rate)
    else:
        parse_tandem(words)


def run(file: Path, folder: Path, *parts: str) -> list[list[str]]:
    """Return what the file asks of `tandem`, in turn, where all of it succeeds."""
    asked = folder / "asked"
    for name in ("tandem", "python"):  # the scripts run `tandem ..` and `python -m lab ..`
        stub = folder / name
        stub.write_text(STUB)
        stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "ASKED": str(asked)}
    command = ["bash", str(file), str(folder / "out"), *parts]
    subprocess.run(command, check=True, env=environment, cwd=ROOT, capture_output=True)
    return [shlex.split(line) for line in asked.read_text().splitlines()]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_a_file_asks_is_there(file: Path, tmp_path: Path) -> None:
    asked = run(file, tmp_path)
    assert asked
    for words in asked:
        parse(words)
    for config in (tmp_path / "out").glob("*.yaml"):
        load_deployment(config)


def test_an_option_that_is_not_there_is_seen() -> None:
    with pytest.raises(Exception, match="No such option: --rate"):
        parse(["-m", "lab", "kernel", "host-experts", "--rate", "1"])


def test_every_file_stands_in_the_table() -> None:
    told = (ROOT / "lab" / "published" / "README.md").read_text(encoding="utf-8")
    assert FILES
    assert [file.name for file in FILES if f"`{file.name}`" not in told] == []


def test_products_by_the_library_are_made_by_it_alone_with_an_empty_folder_first(tmp_path: Path) -> None:
    asked = run(ROOT / "lab" / "published" / "few-bits.sh", tmp_path, "library")
    for words in asked:
        parse(words)
    by_library = [words for words in asked if "engine" in words]
    assert [words[words.index("--weights") + 1] for words in by_library] == ["int4", "fp8", "int4"]
    assert all(words[words.index("--products") + 1] == "humming" for words in by_library)
    for kind in ("int4", "fp8"):
        model = load_deployment(tmp_path / "out" / f"prompt-{kind}-humming.yaml").model
        assert (model.weights, model.products) == (kind, "humming")


@pytest.mark.parametrize("kv", ["fp8", "int8"])
def test_a_cache_of_eight_bits_is_that_of_both_sides_and_ours_names_their_rows(
    kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KV", kv)
    asked = run(ROOT / "lab" / "published" / "vllm.sh", tmp_path, "ours", "theirs", "int4")
    (ours,) = [words for words in asked if "peers-serve" in words]
    (theirs,) = [words for words in asked if "lab.speed.vllm_rows" in words]
    assert ours[ours.index("--weights") + 1] == theirs[theirs.index("--weights") + 1] == f"int4, kv {kv}"
    assert theirs[theirs.index("--kv") + 1] == "fp8"
    assert load_deployment(tmp_path / "out" / "tandem-int4.yaml").gpu.kv == kv


def test_a_rate_that_is_given_is_that_of_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATE", "11.85")
    asked = run(ROOT / "lab" / "published" / "vllm.sh", tmp_path, "ours", "theirs")
    sides = [words for words in asked if "peers-serve" in words or "lab.speed.vllm_rows" in words]
    assert [words[words.index("--rate") + 1] for words in sides] == ["11.85"] * 2
    for words in sides:
        parse(words)
