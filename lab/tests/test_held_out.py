"""The written file is the part of the text that training does not get."""

import json
import random
from pathlib import Path

import pytest

from lab.reference.corpus import split_novels
from lab.reference.held_out import main
from lab.reference.train import HELD_OUT_SHARE


def novel(names: list[str], num_paragraphs: int, seed: int) -> str:
    draw = random.Random(seed)
    pairs = [(draw.choice(names), draw.choice(names)) for _ in range(num_paragraphs)]
    told = [f"There went {one} and with them {other}, {draw.random():.6f} of the way." for one, other in pairs]
    return "\n".join(told) + "\n"


def test_held_out_novels_are_written_once_and_whole(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "new" / "heldout.txt"
    text.write_text(novel(["Anna", "Boris"], 4_800, 1) + novel(["Clemens", "Dora"], 120, 2))
    given = ["--text", str(text), "--out", str(out)]
    main(given)
    training, held_out = split_novels(text.read_text(), HELD_OUT_SHARE)
    assert out.read_text() == held_out
    assert training + held_out == text.read_text()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["words"] == len(held_out.split())
    assert 0 < len(held_out) < 0.1 * len(training)
    with pytest.raises(FileExistsError):
        main(given)
