"""The command and its files: rows with every key, a page that loads nothing, one record for each request."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench.benchmark_rows import Row
from bench.cli import app
from tests.bench.scripted_server import Behaviour, scripted_server

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "deploy" / "models" / "reference"
ROW_KEYS = {"name", "shape", "device", "ms", "p10", "p90", "floor", "floor_ms", "peer", "peer_ms", "rates"}
LOADS = re.compile(r"""(?:src|href|action|data|poster)\s*=\s*["'](?!\#)|url\(\s*["']?(?!\#)|@import|<script|<link""")


def serve(*options: str) -> tuple[int, str]:
    group = typer.Typer()
    group.add_typer(app, name="bench")
    result = CliRunner().invoke(group, ["bench", "serve", "--input-tokens", "50", "--output-tokens", "4", *options])
    return result.exit_code, result.output


def test_a_run_writes_rows_records_and_a_page(tmp_path: Path) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("json", "raw", "html")}
    script = [Behaviour(first_s=0.01, gap_s=0.002)] * 5 + [Behaviour(kind="disconnect"), Behaviour(cached_tokens=50)]
    with scripted_server(*script) as server:
        options = [option for name, path in files.items() for option in (f"--{name}", str(path))]
        code, output = serve(
            "--url", server.url, "--requests", "12", "--tokenizer", str(MODEL), "--slo", "ttft:500", *options
        )
    assert code == 0
    (row,) = json.loads(files["json"].read_text())
    assert set(row) >= ROW_KEYS
    assert Row.model_validate(row).ms == row["extras"]["load"]["e2el"]["p50"]
    assert row["p10"] <= row["ms"] <= row["p90"]
    assert (row["extras"]["load"]["completed"], row["extras"]["load"]["failed"]) == (11, 1)
    assert "requests completed" in output
    assert not re.search(r"^[\[{]", output, re.MULTILINE)  # JSON is printed where it is asked for alone
    records = [json.loads(line) for line in files["raw"].read_text().splitlines()]
    assert [record["outcome"] for record in records].count("failed") == 1
    assert len(records) == 12
    html = files["html"].read_text()
    assert not LOADS.search(html)
    assert set(re.findall(r"https?://[^\s<\"']+", html)) == {server.url}
    assert html.count("<svg") == 4
    assert "disconnected mid-stream" in html


def test_json_on_standard_output_is_all_that_stands_there() -> None:
    with scripted_server(*[Behaviour(first_s=0.01, gap_s=0.002)] * 3) as server:
        address = server.url.removeprefix("http://") + "/v1"
        arguments = ["--url", address, "--requests", "3", "--tokenizer", str(MODEL), "--json", "-"]
        command = "import sys; from bench.cli import app; app(['serve', *sys.argv[1:]])"
        run = [sys.executable, "-c", command, *arguments, "--input-tokens", "50", "--output-tokens", "4"]
        done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["extras"]["load"]["completed"] == 3
    assert row["device"].endswith(server.url)
    assert "requests completed" in done.stderr
    assert not Path("-").exists()


def test_the_page_reads_on_a_phone(tmp_path: Path) -> None:
    """390 pixels: nothing is wider than that but what scrolls in its own box (looked at in Chromium, once)."""
    path = tmp_path / "page.html"
    with scripted_server(*[Behaviour(first_s=0.01, gap_s=0.002)] * 3) as server:
        serve("--url", server.url, "--requests", "3", "--tokenizer", str(MODEL), "--html", str(path))
    html = path.read_text()
    style = html[html.index("<style>") : html.index("</style>")]
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in html
    assert ".wide { overflow-x: auto; }" in style
    columns = [int(width) for width in re.findall(r"minmax\((\d+)px", style)]
    assert max(columns) <= 160, "columns of fixed width stand beside one another on a phone"
    assert len(re.findall(r'<div class="wide">\s*(?:<\?xml[^>]*>\s*)?(?:<!DOCTYPE[^>]*>\s*)?<svg', html)) == 4
    assert re.search(r'<div class="wide">\s*<table>', html)


def test_a_page_that_loads_something_would_be_seen() -> None:
    for bad in ('<img src="a.png">', "<style>@import 'x'</style>", "<script>", "x{background:url(http://a)}"):
        assert LOADS.search(bad)
    assert not LOADS.search('<use xlink:href="#m1" clip-path="url(#p1)"/>')


def test_a_run_without_a_completed_request_still_reports_and_ends_with_one(tmp_path: Path) -> None:
    with scripted_server(Behaviour(kind="error", status=503)) as server:
        code, output = serve(
            "--url", server.url, "--requests", "3", "--tokenizer", str(MODEL), "--html", str(tmp_path / "p.html"),
            "--json", str(tmp_path / "p.json"),
        )  # fmt: skip
    assert code == 1
    assert "HTTP 503" in output
    (row,) = json.loads((tmp_path / "p.json").read_text())
    assert row["ms"] is None
    assert row["extras"]["load"]["failed"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--warm", "--cold"], "--warm and --cold"),
        (["--extra-body", "[1]"], "--extra-body: got"),
        (["--slo", "x:1"], "--slo: got"),
        (["--input-tokens", "none"], "--input-tokens: got"),
        (["--tokenizer", "/nowhere", "--model", "m"], "--tokenizer: /nowhere is missing"),
        (["--model", "m", "--text", "/nowhere", "--tokenizer", str(MODEL)], "--text: /nowhere cannot be read"),
    ],
)
def test_options_that_cannot_be_run_are_one_line_and_end_with_two(options: list[str], message: str) -> None:
    code, output = serve(*options)
    assert code == 2
    assert message in output
    assert "Traceback" not in output


def test_ctrl_c_reports_what_was_measured(tmp_path: Path) -> None:
    script = [Behaviour(first_s=0.01)] * 5 + [Behaviour(kind="hang")]
    path = tmp_path / "row.json"
    with scripted_server(*script) as server:
        options = ["--url", server.url, "--requests", "50", "--tokenizer", str(MODEL), "--json", str(path)]
        options = ["bench", "serve", "--input-tokens", "50", *options]
        client = subprocess.Popen(
            [sys.executable, "-m", "server.commands", *options], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        deadline = time.monotonic() + 30
        while len(server.bodies) < 10 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
        client.send_signal(signal.SIGINT)
        output, _ = client.communicate(timeout=20)
    assert client.returncode == 130
    assert "interrupted" in output
    (row,) = json.loads(path.read_text())
    assert row["extras"]["interrupted"]
    assert (row["extras"]["load"]["completed"], row["extras"]["load"]["unfinished"]) == (5, 8)


def test_the_client_needs_no_torch() -> None:
    code = (
        "import bench.load.serve_command, bench.load.row, bench.load.report_page, sys; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
