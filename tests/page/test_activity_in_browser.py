"""The page's view of what the server is doing, in a real browser."""

import pytest

from tests.page.conftest import OpenPage, Served, say, until_done

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_activity_shows_streams_contexts_memory_and_rates_live(served: Served, open_page: OpenPage) -> None:
    live, script = served
    page = await open_page(live.url)
    script.add("Counted.")
    await say(page, "A conversation that is kept")
    await until_done(page)
    await page.get_by_role("link", name="Activity").click()
    row = page.get_by_role("row").filter(has_text="A conversation that is kept")
    await row.first.wait_for()
    tokens = [int(await row.first.locator("td").nth(i).inner_text()) for i in range(4)]
    assert tokens[1:] == [int(share * tokens[0]) for share in (0.4, 0.9, 0.7)]
    widths = [await one.evaluate("(node) => node.style.width") for one in await row.first.locator(".part").all()]
    assert all(width.endswith("%") and width != "0%" for width in widths)
    body = page.locator("#activity-body")
    for item in live.service.memory.items:
        assert await body.get_by_role("rowheader", name=item.name.replace("_", " "), exact=True).count() == 1
    for words in ("Host memory", "40 % of 100", "No profile that reads less than everything has run"):
        assert await body.get_by_text(words).count() >= 1
    assert await page.get_by_role("img").get_attribute("aria-label") != ""
    before = await live.metric("tandem_generated_tokens_total")
    answer = await live.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 40, "ignore_eos": True})
    assert answer.status_code == 200
    assert await live.metric("tandem_generated_tokens_total") == before + 40
    await page.get_by_text(f"{int(before) + 40:,} tokens in all").wait_for()


async def test_activity_links_to_metrics_and_the_api_and_stops_asking_when_it_is_left(
    served: Served, open_page: OpenPage
) -> None:
    live, _ = served
    page = await open_page(f"{live.url}/#activity")
    await page.get_by_role("heading", name="Now").wait_for()
    more = page.get_by_role("navigation", name="More")
    targets = [await one.get_attribute("href") for one in await more.get_by_role("link").all()]
    assert targets == ["metrics", "docs"]
    for target in targets:
        assert (await live.http.get(f"/{target}")).status_code == 200
    asked: list[str] = []
    page.on("request", lambda one: asked.append(one.url))
    await page.get_by_role("link", name="Chat").click()
    await page.wait_for_timeout(2500)
    assert not [url for url in asked if url.endswith("/v1/activity")]


async def test_activity_says_when_there_is_nothing_new(served: Served, open_page: OpenPage) -> None:
    live, _ = served
    page = await open_page(f"{live.url}/#activity")
    await page.get_by_role("heading", name="Now").wait_for()
    await page.route("**/v1/activity", lambda route: route.abort())
    await page.get_by_text("Nothing new: the server cannot be reached.").wait_for()
    assert await page.get_by_role("heading", name="Now").is_visible(), "what was known stays"
