"""A browser, a server whose answers a test writes, and pages that complain of whatever the browser complains of."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from server.deployment import Deployment
from server.text.model_tokenizer import Tokenizer
from tests.page.browser import find_browser, why_none
from tests.server.live_server import REFERENCE, Running, fake_command, make_deployment, running_server, with_documents
from tests.server.scripted_model import HERMES, Script, make_model

PICTURES = Path(__file__).parents[2] / "build" / "page"
DESKTOP, PHONE = {"width": 1280, "height": 860}, {"width": 390, "height": 844}
LOAD_NOISE = "Failed to load resource"  # what Chromium writes of any answer that is an error

Served = tuple[Running, Script]
OpenPage = Callable[..., Awaitable[Any]]


@asynccontextmanager
async def page_server(folder: Path, **server: object) -> AsyncIterator[Served]:
    """Serve a model that calls tools and says what the script says, with documents and a host tier's numbers."""
    tokenizer = make_model(folder / "model", HERMES)
    script = Script(folder / "script", Tokenizer(tokenizer, REFERENCE))
    tree = {"model": {"path": REFERENCE, "name": "scripted", "tokenizer": tokenizer}, "server": {"port": 0, **server}}
    deployment = with_documents(Deployment.model_validate(tree), folder / "documents")
    command = fake_command(
        script=str(script.path), token_s=0.002, prefixes=1, host=1, prefill_s=1.5, places=[0.4, 0.9, 0.7]
    )
    async with running_server(deployment, command) as running:
        yield running, script


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    if why := why_none():
        pytest.skip(why)
    async with page_server(tmp_path_factory.mktemp("page")) as one:
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_live() -> AsyncIterator[Running]:
    async with running_server(make_deployment(), fake_command()) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Any]:
    if why := why_none():
        pytest.skip(why)
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        one = await playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        yield one
        await one.close()


@pytest_asyncio.fixture(loop_scope="module")
async def open_page(browser: Any) -> AsyncIterator[OpenPage]:
    """Open pages in contexts of their own. None may ask another host, break its policy, or raise."""
    contexts, complaints = [], []

    async def open_one(url: str, size: dict[str, int] = DESKTOP, scheme: str = "light", **settings: Any) -> Any:
        context = await browser.new_context(viewport=size, color_scheme=scheme, **settings)
        context.set_default_timeout(10_000)
        contexts.append(context)
        page = await context.new_page()
        host = urlsplit(url).netloc

        def note(what: str, text: str) -> None:
            complaints.append(f"{what}: {text}")

        page.on("pageerror", lambda error: note("error", str(error)))
        page.on("console", lambda line: line.type == "error" and LOAD_NOISE not in line.text and note("log", line.text))
        page.on("request", lambda one: urlsplit(one.url).netloc not in (host, "") and note("request", one.url))
        page.complaints = complaints
        await page.goto(url)
        return page

    yield open_one
    for context in contexts:
        await context.close()
    await asyncio.sleep(0)
    assert complaints == []


async def say(page: Any, words: str) -> None:
    """Write a message and send it."""
    await page.get_by_label("Your message", exact=True).last.fill(words)
    await page.get_by_role("button", name="Send", exact=True).click()


async def until_done(page: Any) -> None:
    """Wait for the answer under way to end."""
    await page.get_by_role("button", name="Send", exact=True).wait_for()


async def take_picture(page: Any, name: str) -> Path:
    PICTURES.mkdir(parents=True, exist_ok=True)
    path = PICTURES / f"{name}.png"
    await page.screenshot(path=path)
    return path
