"""Several models at the page: which are loaded is shown, one is chosen, waited for, and looked at."""

import json
from itertools import product
from pathlib import Path

import pytest

from server.planning.side_by_side import Room
from tests.page.conftest import DESKTOP, PHONE, OpenPage, say, take_picture, until_done
from tests.server.live_server import running_server, with_documents
from tests.server.test_several_models import command_of, make_models

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_model_is_chosen_waited_for_and_its_state_is_shown(open_page: OpenPage) -> None:
    first, *others = make_models("a", "b", "c", keepalive_seconds=0.1)
    slow = {"b": {"load_s": 3.0}, "c": {"fails": 1}}
    async with running_server(first, command_of(slow), others=others) as live:
        page = await open_page(live.url)
        model = page.locator("#model")
        await page.get_by_role("option", name="b (unloaded)").wait_for(state="attached")
        words = await model.locator("option").all_inner_texts()
        assert words[:3] == ["a (loaded)", "a-too (loaded)", "b (unloaded)"]
        await model.select_option("b")
        await say(page, "Hello there.")
        await page.get_by_role("option", name="b (loading)").wait_for(state="attached")
        await page.get_by_text("b is loading: weights, 50 %").wait_for()
        await until_done(page)
        assert await page.get_by_role("article", name="Answer").locator(".figures").inner_text()
        await page.get_by_role("option", name="b (loaded)").wait_for(state="attached")
        assert await page.get_by_role("option", name="a (unloaded)").count() == 1
        await page.get_by_text("of 16,384 tokens of context").wait_for()
        await model.select_option("c")
        await say(page, "And you?")
        await page.get_by_text("No answer: model: 'c' could not be loaded: checkpoint").first.wait_for()
        await model.select_option("b")
        await page.get_by_role("link", name="Activity").click()
        await page.get_by_text("failed: checkpoint: model.safetensors is cut short").wait_for()
        await page.get_by_text("What follows is of b.").wait_for()


async def test_files_and_deletions_go_to_the_models_that_they_are_of(open_page: OpenPage, tmp_path: Path) -> None:
    first, second = (with_documents(one, tmp_path) for one in make_models("a", "b"))
    async with running_server(first, command_of(), others=[second], room=Room({}, is_shared=True)) as live:
        page = await open_page(live.url)
        asked: list[tuple[str, str, str | None]] = []
        page.on("request", lambda one: asked.append((one.method, one.url, one.post_data)))
        await page.locator("#model").select_option("b")
        file = {"name": "trip.txt", "mimeType": "text/plain", "buffer": b"Two days in Bonn."}
        await page.locator("#file-input").set_input_files([file])
        await page.get_by_text("document, ").wait_for()
        [stored] = [json.loads(body or "") for method, url, body in asked if url.endswith("/v1/documents")]
        assert stored["model"] == "b"
        await say(page, "Where is it?")
        await until_done(page)
        page.once("dialog", lambda dialog: dialog.accept())
        await page.get_by_role("button", name="Delete Where is it?").click()
        await page.get_by_text("Conversations stay in this browser.").wait_for()
        deleted = [url.rpartition("?")[2] for method, url, _ in asked if method == "DELETE"]
        assert sorted(deleted) == ["model=a", "model=b"]


@pytest.mark.parametrize(("size", "scheme"), list(product(["desktop", "phone"], ["light", "dark"])))
async def test_pictures_of_several_models(open_page: OpenPage, size: str, scheme: str) -> None:
    first, *others = make_models("a", "b", "c")
    async with running_server(first, command_of(), others=others) as live:
        page = await open_page(live.url, DESKTOP if size == "desktop" else PHONE, scheme)
        await page.locator("#model").select_option("a")
        await say(page, json.dumps({"question": "Which models are loaded?"}))
        await until_done(page)
        assert (await take_picture(page, f"models-chat-{size}-{scheme}")).stat().st_size > 10_000
        await page.get_by_role("link", name="Activity").click()
        await page.get_by_text("What follows is of a.").wait_for()
        assert (await take_picture(page, f"models-activity-{size}-{scheme}")).stat().st_size > 10_000
