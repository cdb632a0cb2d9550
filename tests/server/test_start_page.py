"""What a person sees while a server starts: each stage, how far it is, what it took, and in the end what to type."""

import io
import json
import re
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from scheduler.messages import Ready
from server.commands import start_page
from server.commands.start_page import STAGES, StartPage
from server.engine.start_events import Listening, Stage
from tests.server.live_server import Running, fake_command, make_deployment, running_server

ROOT = Path(__file__).parents[2]
READY = Ready(
    vocab_size=9, num_layers=1, max_context_tokens=8192, profiles={"exact": 8192}, default_profile="exact",
    num_pages=9, page_tokens=16, device="cpu", load_seconds=1.0,
)  # fmt: skip
ADDRESS = Listening("http://127.0.0.1:8000", "/v1/chat/completions", "small", needs_key=False, has_page=False)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(start_page, "time", made)
    return made


def make_page(**console: bool) -> tuple[StartPage, io.StringIO]:
    paper = io.StringIO()
    return StartPage(Console(file=paper, width=100, **console), 100.0), paper


def test_each_stage_is_one_line_with_its_seconds_and_a_slow_one_says_how_far_it_is(clock: Clock) -> None:
    page, paper = make_page()
    with page, page.stage("planning"):
        clock.now += 1.5
    page.show(ADDRESS)
    for seconds, name, fraction in ((3, "starting", 0), (1, "weights", 0), (6, "weights", 0.25), (2, "weights", 1.0),
                                    (0, "kernels", 0), (1, "kernels", 1)):  # fmt: skip
        clock.now += seconds
        page.show(Stage(name, fraction))
    assert [" ".join(line.split()) for line in paper.getvalue().splitlines()] == [
        "planning 1.5 s",
        "the API listens at http://127.0.0.1:8000 (503 until the model is ready)",
        "starting the engine 1.0 s",
        "loading the weights: 25 %, 6 s so far",
        "loading the weights 8.0 s",
        "preparing kernels 1.0 s",
    ]


def test_a_stage_whose_block_fails_has_no_line_and_leaves_the_terminal_as_it_was(clock: Clock) -> None:
    page, paper = make_page(force_terminal=True)
    with pytest.raises(OSError, match="gone"), page, page.stage("planning"):
        raise OSError("gone")
    assert " s\n" not in paper.getvalue()
    assert paper.getvalue().rfind("\x1b[?25h") > paper.getvalue().rfind("\x1b[?25l") >= 0, "the cursor is shown again"


def test_on_a_terminal_the_stage_under_way_has_a_line_that_goes_when_it_ends(clock: Clock) -> None:
    page, paper = make_page(force_terminal=True)
    page.show(Stage("kernels", 0.0))
    page.show(Stage("kernels", 0.4))
    page._progress.refresh()
    assert "preparing kernels: 40 % (compiled once, later starts find them)" in paper.getvalue()
    page.show(Stage("kernels", 1.0))
    last = paper.getvalue().rsplit("\x1b[2K", 1)[1]
    assert " ".join(last.split()) == "preparing kernels 0.0 s"


@pytest.mark.parametrize("address", [
    ADDRESS,
    Listening("http://0.0.0.0:9", "/v1/chat/completions", "a'b", needs_key=True, has_page=True),
    Listening("https://[::]:9", "/v1/completions", "[bold]", needs_key=False, has_page=False),
])  # fmt: skip
def test_the_last_line_is_ready_with_a_request_that_a_shell_can_run(clock: Clock, address: Listening) -> None:
    page, paper = make_page()
    page.show(address)
    clock.now += 12
    page.show(READY)
    *_, chat, last = paper.getvalue().splitlines()
    url = address.url.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")
    page = f", or {url} in a browser" if address.has_page else ""
    assert chat.strip() == f"talk to it: tandem chat --url {url}{page}"
    assert last.startswith(f"ready in 12.0 s: {address.model}, contexts of 8,192 tokens, at {url}; try: curl ")
    words = shlex.split(last.split("try: ")[1])
    assert words[1] == url + address.path
    assert ("authorization: Bearer KEY" in words) == address.needs_key
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == address.model
    assert ("messages" in body) == address.path.endswith("/chat/completions")


async def test_the_request_of_the_last_line_is_answered(live: Running, clock: Clock) -> None:
    page, paper = make_page()
    page.show(Listening(live.url, "/v1/chat/completions", "reference", needs_key=False, has_page=False))
    page.show(READY)
    words = shlex.split(paper.getvalue().splitlines()[-1].split("try: ")[1])
    answer = await live.http.post(words[1], content=words[-1], headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text


def test_every_stage_that_loading_tells_of_has_a_name_for_people() -> None:
    sources = [path.read_text() for package in ("scheduler", "gpu") for path in (ROOT / package).rglob("load*.py")]
    told = set(re.findall(r'on_progress[(,] ?"(\w+)"', "\n".join(sources)))
    assert {"weights", "kernels", "graphs", "host_attention"} <= told
    assert told | {"starting"} == set(STAGES)


async def test_a_start_that_is_shown_is_not_logged_and_a_later_one_is_logged_and_not_shown(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.logs._logger.propagate", True)
    caplog.set_level("INFO", "tandem")
    shown: list[object] = []
    async with running_server(make_deployment(), fake_command(), on_start=shown.append) as live:
        first = [record.message.split()[0] for record in caplog.records]
        assert [type(event).__name__ for event in shown] == ["Stage", "Stage", "Ready"]
        assert not {"loading", "ready"} & set(first)
        live.service.supervisor.kill_engine()

        async def is_second_life() -> bool:
            return live.service.supervisor.state == "ready" and live.service.supervisor._num_runs == 2

        await live.until(is_second_life)
    assert len(shown) == 3
    later = [record.message.split()[0] for record in caplog.records]
    assert {"engine_ended", "loading", "ready"} <= set(later)
