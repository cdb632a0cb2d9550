"""Reports show every row, every failure and its noise; the page needs nothing but itself."""

import json
import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from evals.report.document import make_document, write_document
from evals.report.figures import depth_means
from evals.report.page import render_page
from evals.report.table import most_lost, print_table


def make_row(method: str, task: str, length: int, score: float, read: float | None, failures: int) -> dict[str, Any]:
    full = method == "full"
    return {
        "method": method, "settings": {}, "task": task, "length": length, "metric": "exact_match", "samples": 50,
        "failures": failures, "score": score, "low": score - 2, "high": score + 2,
        "difference": None if full else score - 90, "difference_low": None if full else score - 93,
        "difference_high": None if full else score - 87, "head_fraction": read, "bytes_fraction": read,
    }  # fmt: skip


ROWS = [
    make_row(method, task, length, score, read, failures)
    for task in ("needle", "list<b>")
    for length in (4096, 8192)
    for method, score, read, failures in (
        ("full", 90.0, 1.0, 0), ("topk:budget=0.05", 89.0, 0.05, 0), ("topk:budget=0.1", 90.0, 0.1, 0),
        ("quest:budget=0.05", 70.0, 0.06, 3), ("remote", 88.0, None, 0),
    )
]  # fmt: skip
RECORDS = [
    {"method": method, "task": "needle", "length": length, "depth": depth / 10, "score": float(depth % 2)}
    for method in ("full", "quest:budget=0.05")
    for length in (4096, 8192)
    for depth in range(11)
]
LAYERS = [{"method": "quest:budget=0.05", "layer": layer, "error": 0.01 * (layer + 1)} for layer in range(4)]


@pytest.fixture(scope="module")
def page() -> str:
    return render_page("A <run>", ROWS, RECORDS, LAYERS, {"model": "ref & co"}, {"prompts": 3})


def test_page_holds_every_row_and_failure(page: str) -> None:
    body = page[page.index("<tbody>") : page.index("</tbody>")]
    assert body.count("<tr") == len(ROWS)
    assert body.count("quest:budget=0.05") == 4
    assert '<td class="worse">3</td>' in body
    assert ">12</b>failed, scored 0" in page


def test_page_refers_to_nothing_outside_itself(page: str) -> None:
    assert not re.findall(r"<(?:script|link|img|iframe)", page)
    assert not re.findall(r"(?:src|href)=[\"'](?!#|data:image/png;base64,)", page)
    assert not re.findall(r"url\((?!#)|@import", page)


def test_page_escapes_what_it_shows(page: str) -> None:
    assert "A &lt;run&gt;" in page
    assert "<b>" not in page[page.index("<tbody>") :]
    assert "ref &amp; co" in page


def test_figures_are_well_formed_and_their_ids_do_not_collide(page: str) -> None:
    figures = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(figures) == 4
    seen: set[str] = set()
    for figure in figures:
        tree = ElementTree.fromstring(figure)
        own = {element.attrib["id"] for element in tree.iter() if "id" in element.attrib}
        used = set(re.findall(r"(?:href=\"#|url\(#)([^\")]+)", figure))
        assert used <= own
        assert not own & seen
        seen |= own


def test_page_is_the_same_for_the_same_rows(page: str) -> None:
    assert page == render_page("A <run>", ROWS, RECORDS, LAYERS, {"model": "ref & co"}, {"prompts": 3})


def test_page_of_a_run_without_fractions_depths_and_layers_still_has_its_table() -> None:
    rows = [make_row("remote", "needle", 4096, 88.0, None, 0) | {"difference": None, "difference_low": None}]
    page = render_page("Remote", rows, [], [], {}, {})
    assert "88.0 [86.0, 90.0]" in page
    assert "<svg" not in page
    with pytest.raises(ValueError, match="no rows"):
        render_page("Nothing", [], [], [], {}, {})


def test_heat_map_cells_are_means_and_empty_ones_are_not_zero() -> None:
    records = [
        {"depth": 0.0, "length": 10, "score": 1.0}, {"depth": 0.05, "length": 10, "score": 0.0},
        {"depth": 1.0, "length": 20, "score": 1.0},
    ]  # fmt: skip
    means = depth_means(records, [10, 20])
    assert means[0, 0] == 50
    assert means[9, 1] == 100
    assert math.isnan(means[5, 0])


def test_table_shows_failures_noise_and_reads() -> None:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_table(ROWS, console)
    text = console.export_text()
    assert "70.0 [68.0, 72.0]" in text
    assert "-20.0 [-23.0, -17.0]" in text
    assert "6.0 %" in text
    assert text.count("│ 4,096") + text.count("4,096 │") >= 2


def test_a_table_has_a_column_of_what_is_read_and_fetched_where_a_row_says_it() -> None:
    heads = []
    for more in ({}, {"read_fraction": 0.0123, "index_fetched": 0.4}):
        console = Console(width=190, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        print_table([ROWS[0], ROWS[1] | more], console)
        text = console.export_text()
        heads.append(("┃ read " in text.replace("  ", " "), "fetched" in text, "1.2 %" in text, "40.0 %" in text))
    assert heads == [(False,) * 4, (True,) * 4]


def test_what_is_lost_at_most_is_the_lower_end() -> None:
    row = make_row("topk", "needle", 4096, 89.0, 0.05, 0)
    assert most_lost(row) == 4.0
    assert most_lost(row | {"difference_low": 0.5}) == 0.0
    assert most_lost(make_row("full", "needle", 4096, 90.0, 1.0, 0)) is None


def test_document_says_what_made_it_and_is_plain_json(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    rows = [row | {"head_fraction": math.nan} for row in ROWS]
    write_document(path, make_document(rows, {"model": Path("m"), "lengths": (1, 2)}, {"prompts": 3}, machine="cpu"))
    document = json.loads(path.read_text())
    assert document["configuration"] == {"model": "m", "lengths": [1, 2]}
    assert document["seeds"] == {"prompts": 3}
    assert document["machine"] == "cpu"
    assert len(document["rows"]) == len(ROWS)
    assert document["rows"][0]["head_fraction"] is None
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]
    with pytest.raises(ValueError, match="no settings"):
        make_document([{"method": "full"}], {}, {})
