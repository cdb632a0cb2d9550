"""Short lines of evaluations' rows: what a log of 12,000 characters must hold."""

import json
from pathlib import Path

from typer.testing import CliRunner

from lab.cli import app

FED = {"text": "a.txt", "length": 8000, "method": "profile:indexed:budget_share=0.005", "prompts": 24, "failures": 0,
       "kl": 0.0, "kl_generated": 0.00123, "head_fraction": 0.012, "bytes_fraction": 0.24,
       "read_fraction": 0.00512, "index_read": 0.0051, "index_fetched": 0.4}  # fmt: skip
ASKED = {"task": "vt", "text": "novel.txt", "length": 4000, "method": "profile:exact", "samples": 8, "failures": 1,
         "score": 87.5, "difference": -12.5, "difference_low": -40.0, "difference_high": 0.0, "kl": None,
         "index_beyond": 0.05, "read_fraction": None, "index_read": 0.02}  # fmt: skip


def test_each_row_is_a_line_once_with_its_whole_method_and_files_that_are_not_there_are_told(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("kl.json", "again.json", "tasks.json", "gone.json")]
    for path, row in zip(paths, (FED, FED, ASKED), strict=False):
        path.write_text(json.dumps({"rows": [row]}))
    result = CliRunner().invoke(app, ["quality-lines", *map(str, paths)])
    assert result.exit_code == 0, result.output
    gone, _, *lines = result.output.splitlines()
    assert gone == f"{paths[3]}: is not there"
    assert [" ".join(line.split()) for line in lines] == [
        "a.txt 8000 indexed:budget_share=0.005 24 0 - - 0.0000 0.0012 1.2 24.0 0.51 40.0 -",
        "vt 4000 exact 8 1 87.5 -12.5 [-40.0,+0.0] - - - - 2.00 - 5.0",
    ]


def test_all_lines_of_the_largest_part_fit_a_log_of_12_000_characters(tmp_path: Path) -> None:
    path = tmp_path / "kl.json"
    longest = "profile:sampled:bits_per_table=10,num_tables=300"
    rows = [FED | {"method": longest, "length": length} for length in range(48)]
    path.write_text(json.dumps({"rows": rows}))
    assert len(CliRunner().invoke(app, ["quality-lines", str(path)]).output) < 8_000
