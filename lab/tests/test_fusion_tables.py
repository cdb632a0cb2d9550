"""Hold the tables about reused documents to their rows."""

import json
import math
import re
from pathlib import Path

import numpy as np

from evals.fusion import (
    fusion_rows,
)
from evals.fusion_report import render_policies
from lab.quality.fusion_tables import RATIO, least_diverging, render_distances, render_fusion, shipped
from scheduler.fusion_labels import parse_fusions
from tests.evals.test_fusion import judged_of
from transfer.host_config import DocumentsConfig

LAB = Path(__file__).parents[1]


def test_the_least_divergence_is_told_at_the_ratio_of_what_is_shipped() -> None:
    labels, apart = ["a3", "legolink", "pie"], [[0.2, 0.2], [0.0, 0.0], [0.1, 0.2], [0.3, 0.3], [0.0, 0.0]]
    judged = judged_of(labels, [0.15, 0.3], apart)
    rows = fusion_rows(judged, 512) + fusion_rows(judged, 1024)
    assert [(row["length"], row["policy"]) for row in least_diverging(rows, 0.15)] == [
        (512, "legolink"), (1024, "legolink")
    ]  # fmt: skip


def test_what_is_shipped_computes_least_of_those_that_are_within_the_least_ones_interval() -> None:
    labels = ["a3:select_layer=7", "a3:select_layer=5", "a3:select_layer=5,seam_tokens=8", "a3:select_layer=3", "pie"]
    apart = [[0.1, 0.3], [0.25, 0.25], [0.25, 0.25], [0.0, 1.0], [0.0, 0.0]]
    rows = fusion_rows(judged_of(labels, [0.15], apart), 512)
    assert [row["policy"] for row in least_diverging(rows, 0.15)] == ["a3:select_layer=7"]
    (row,) = shipped(rows, 0.15)
    assert row["policy"] == "a3:select_layer=5", "the mean of layer 3 is beyond, though its own interval is wide"
    apart[1] = apart[2] = [0.5, 0.5]
    (row,) = shipped(fusion_rows(judged_of(labels, [0.15], apart), 512), 0.15)
    assert row["policy"] == "a3:select_layer=7"


def test_the_default_is_what_the_published_rows_say() -> None:
    config = DocumentsConfig()
    assert config.ratio == RATIO
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in (LAB / "results").glob("fusion-*.json")]
    found = [row for run in runs for row in shipped(run["rows"], RATIO)]
    assert sorted(row["length"] for row in found) == [2048, 4096, 16384]
    for row in found:
        (fusion,) = parse_fusions(row["policy"], [RATIO])
        assert (fusion.policy, fusion.select_layer, fusion.keep_tokens) == (
            config.policy, config.select_layer, config.keep_tokens
        )  # fmt: skip


def test_distances_of_maps_are_told_by_layer_at_the_ratio_and_where_there_is_none() -> None:
    judged = judged_of(["a3", "pie"], [0.15, 0.3], [[0.0, 0.0]] * 3)
    for one in judged[1:]:
        one.distances = [np.array([0.0, 0.5, one.run.fusion.ratio]), np.array([0.0, 0.25, one.run.fusion.ratio])]
    lines = render_distances(fusion_rows(judged, 512), 0.15)
    assert lines[3] == "| policy | 1 | 2 |"
    assert lines[5] == "| `a3` | 0.375 | 0.150 |"
    assert [line[:8] for line in lines[6:]] == ["| `pie` "]
    assert render_distances(fusion_rows(judged_of(["pie"], [0.15], [[0.0, 0.0]]), 512), 0.15) == []


def test_the_page_has_the_lines_that_its_rows_make() -> None:
    judged = judged_of(["legolink", "pie"], [0.15], [[0.0, 0.02], [0.0, 0.5]])
    lines = render_policies(fusion_rows(judged, 512))
    assert lines[3].startswith("| `legolink` | 0.15 | 0.0100 ± 0.0196 |  | 0.0050 ± 0.0098 |  | 0.0, -50.0 (-")
    assert lines[4].startswith("| `pie` |  | 0.2500 ±")
    page = (LAB / "RESULTS.md").read_text(encoding="utf-8")
    names = set(re.findall(r"\]\(results/(fusion-[\w-]+\.json)\)", page))
    assert names == {path.name for path in (LAB / "results").glob("fusion-*.json")}
    for name in names:
        published = json.loads((LAB / "results" / name).read_text(encoding="utf-8"))
        assert all(line in page for line in render_fusion(published).splitlines())
        assert any(math.isclose(row["ratio"] or 0, 0.15) for row in published["rows"])
