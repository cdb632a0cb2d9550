"""A person at the page's chat, in a real browser: ask, stop, edit, go back, drop files, see an engine die."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.page.conftest import PHONE, OpenPage, Served, page_server, say, until_done

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = " ".join(f"word{number}" for number in range(400))


def note_chats(page: Any) -> list[dict[str, Any]]:
    """Return a list that fills with the bodies of chats that the page sends."""
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda one: one.url.endswith("/chat/completions") and bodies.append(one.post_data_json))
    return bodies


async def choose_profile(page: Any, name: str) -> None:
    await page.get_by_label("Profile").select_option(name)


async def test_a_first_chat_comes_as_markdown_with_its_figures_and_is_there_after_a_reload(
    served: Served, open_page: OpenPage
) -> None:
    live, script = served
    page = await open_page(live.url)
    sent = note_chats(page)
    await page.get_by_text("Ask scripted").wait_for()
    script.add("A **bold** answer with `code`.")
    await say(page, "Say something bold.")
    await until_done(page)
    answer = page.get_by_role("article", name="Answer")
    assert await answer.locator("strong").first.inner_text() == "bold"
    figures = await answer.locator(".figures").inner_text()
    for words in ("first token", "tokens/s", "cached", "of 16,384"):
        assert words in figures
    assert sent[0]["messages"] == [{"role": "user", "content": "Say something bold."}]
    assert sent[0]["stream"]
    assert await page.get_by_role("status").first.inner_text() != ""
    await page.reload()
    await page.get_by_text("Say something bold.", exact=True).last.wait_for()
    assert await page.get_by_role("article").count() == 2
    assert await page.locator("#conversations .open").first.inner_text() != ""
    script.add("And more.")
    await say(page, "Go on.")
    await until_done(page)
    assert [message["role"] for message in sent[1]["messages"]] == ["user", "assistant", "user"]
    assert sent[1]["messages"][1]["content"] == "A **bold** answer with `code`."
    assert sent[1]["session_id"] == sent[0]["session_id"]


async def test_text_comes_while_it_is_written_and_a_stop_ends_it_on_the_server_too(
    served: Served, open_page: OpenPage
) -> None:
    live, script = served
    page = await open_page(live.url)
    await choose_profile(page, "slow")
    script.add(LONG)
    await say(page, "Go on for long.")
    await page.get_by_text("word1 ").first.wait_for()
    assert await live.metric("tandem_requests_running") == 1
    assert await page.get_by_role("button", name="Send", exact=True).count() == 0
    await page.get_by_role("button", name="Stop", exact=True).click()
    await page.get_by_text("Stopped.", exact=True).first.wait_for()
    text = await page.locator(".message.assistant .prose").last.inner_text()
    assert text.startswith("word0 word1")
    assert "word399" not in text
    context = await page.locator("#context-words").inner_text()
    assert context == "16,384 tokens of context", "no count came, and none is made up"

    async def is_idle() -> bool:
        return await live.metric("tandem_requests_running") == 0

    await live.until(is_idle, 3)
    script.add(LONG)
    await say(page, "Again, for long.")
    await page.get_by_text("word1 ").nth(1).wait_for()
    await page.keyboard.press("Escape")
    await page.get_by_text("Stopped.", exact=True).nth(1).wait_for()


async def test_to_edit_and_to_ask_again_make_branches_that_one_can_go_back_to(
    served: Served, open_page: OpenPage
) -> None:
    live, script = served
    page = await open_page(live.url)
    sent = note_chats(page)
    script.add("First answer.")
    await say(page, "First question")
    await until_done(page)
    script.add("Second answer.")
    await page.get_by_role("button", name="Again").click()
    await page.get_by_text("Second answer.").wait_for()
    assert await page.get_by_text("First answer.").count() == 0
    await page.get_by_role("button", name="Branch before").click()
    await page.get_by_text("First answer.").wait_for()
    await page.get_by_role("button", name="Edit").click()
    await page.get_by_label("Edit your message").fill("Changed question")
    script.add("Third answer.")
    await page.get_by_role("article", name="You").get_by_role("button", name="Send").click()
    await page.get_by_text("Third answer.").wait_for()
    await until_done(page)
    assert sent[-1]["messages"] == [{"role": "user", "content": "Changed question"}]
    await page.get_by_role("button", name="Branch before").first.click()
    await page.get_by_role("article", name="You").get_by_text("First question", exact=True).wait_for()
    await page.wait_for_timeout(100)  # until it is kept
    await page.reload()
    await page.get_by_text("1 / 2").first.wait_for()


async def test_enter_sends_an_edited_question_and_what_is_typed_anywhere_is_written_below(
    served: Served, open_page: OpenPage
) -> None:
    live, script = served
    page = await open_page(live.url)
    await page.get_by_text("Ask scripted").wait_for()
    script.add("The first.")
    await page.keyboard.type("A question")
    await page.keyboard.press("Enter")
    await page.get_by_text("The first.").wait_for()
    await until_done(page)
    await page.get_by_role("button", name="Edit").click()
    script.add("The second.")
    await page.keyboard.type(", and more")
    await page.keyboard.press("Enter")
    await page.get_by_text("The second.").wait_for()
    await until_done(page)
    assert await page.get_by_role("article", name="You").inner_text() != ""
    await page.get_by_text("A question, and more").first.wait_for()


async def test_a_menu_closes_behind_a_click_elsewhere_and_with_escape(served: Served, open_page: OpenPage) -> None:
    live, _ = served
    page = await open_page(live.url)
    item = page.get_by_role("button", name="As Markdown")
    for close in (lambda: page.keyboard.press("Escape"), lambda: page.locator("#messages").click()):
        await page.get_by_text("Export", exact=True).click()
        await item.wait_for()
        await close()
        await item.wait_for(state="hidden")


async def test_two_tabs_show_the_same_conversation_and_neither_overwrites_the_other(
    served: Served, open_page: OpenPage
) -> None:
    live, script = served
    one = await open_page(live.url)
    script.add("The first answer.")
    await say(one, "A first question")
    await until_done(one)
    other = await one.context.new_page()
    await other.goto(live.url)
    await other.get_by_text("The first answer.").wait_for()
    script.add("The second answer.")
    await say(other, "A second question")
    await until_done(other)
    await one.get_by_text("The second answer.").wait_for()
    script.add("The third answer.")
    await say(one, "A third question")
    await until_done(one)
    await other.get_by_text("The third answer.").wait_for()
    assert await other.get_by_role("article", name="You").count() == 3


async def test_a_file_comes_as_text_in_a_fence_or_as_a_document_and_what_is_no_text_is_refused(
    served: Served, open_page: OpenPage, tmp_path: Path
) -> None:
    live, script = served
    page = await open_page(live.url)
    sent = note_chats(page)
    notes, picture = tmp_path / "notes.md", tmp_path / "picture.png"
    notes.write_text("A note with ``` a fence.\n")
    picture.write_bytes(b"\x89PNG\x00\xff")
    await page.locator("#as").select_option("text")
    await page.locator("#file-input").set_input_files([notes, picture])
    await page.get_by_text("not a text in UTF-8").first.wait_for()
    script.add("Read.", "Read again.", "And again.")
    await say(page, "What is in it?")
    await until_done(page)
    assert sent[0]["messages"][0]["content"] == ("notes.md:\n````\nA note with ``` a fence.\n\n````\n\nWhat is in it?")
    await page.locator("#as").select_option("document")
    drop = """name => {
      const transfer = new DataTransfer();
      transfer.items.add(new File(["The bakery opens at seven."], name));
      const drop = new DragEvent("drop", { dataTransfer: transfer, bubbles: true });
      document.getElementById("chat-view").dispatchEvent(drop);
    }"""
    await page.evaluate(drop, "bakery.txt")
    await page.get_by_text("document, ").wait_for()
    await say(page, "When does it open?")
    await until_done(page)
    listed = (await live.http.get("/v1/documents")).json()["data"]
    assert [one["title"] for one in listed] == ["bakery.txt"]
    assert sent[1]["documents"] == [listed[0]["id"]]
    assert "bakery" not in json.dumps(sent[1]["messages"])
    await say(page, "And on Sundays?")
    await until_done(page)
    assert sent[2]["documents"] == [listed[0]["id"]], "what was given once stays with the conversation"


async def test_reasoning_is_folded_away_and_calls_are_shown_and_answered(served: Served, open_page: OpenPage) -> None:
    live, script = served
    page = await open_page(live.url)
    sent = note_chats(page)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    await page.get_by_role("button", name="Settings").click()
    await page.get_by_label("Tools, a list in JSON").fill("[")
    await page.get_by_label("System message").fill("Be brief.")
    await page.get_by_role("button", name="Save").click()
    await page.get_by_text("Not JSON").wait_for()
    await page.get_by_label("Tools, a list in JSON").fill(json.dumps(tools))
    await page.get_by_role("button", name="Save").click()
    script.add(
        "<think>\nThey want the weather.\n</think>\n<tool_call>\n"
        '{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
    )
    script.add("It is **sunny**.")
    await say(page, "How is the weather?")
    await until_done(page)
    assert await page.get_by_text("Reasoning, 4 words").is_visible()
    assert not await page.get_by_text("They want the weather.").is_visible()
    await page.get_by_text("Reasoning, 4 words").click()
    assert await page.get_by_text("They want the weather.").is_visible()
    assert '"city": "Bonn"' in await page.locator(".call pre").inner_text()
    await page.get_by_label("Result of weather").fill("sunny, 21 degrees")
    await page.get_by_role("button", name="Send the result").click()
    await page.get_by_text("It is sunny").wait_for()
    await until_done(page)
    roles = [message["role"] for message in sent[1]["messages"]]
    assert roles == ["system", "user", "assistant", "tool"]
    assert sent[1]["messages"][3]["content"] == "sunny, 21 degrees"
    assert sent[1]["messages"][2]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Bonn"}'}


async def test_a_long_prompt_shows_how_far_it_is_read(served: Served, open_page: OpenPage) -> None:
    live, script = served
    page = await open_page(live.url)
    await choose_profile(page, "long_prefill")
    script.add("Done.")
    await say(page, LONG)
    await page.get_by_text("Reading the prompt: ").wait_for()
    assert await page.get_by_role("progressbar").count() == 1
    await until_done(page)
    assert await page.get_by_text("Reading the prompt: ").count() == 0


async def test_an_engine_that_dies_in_the_middle_is_told_and_the_question_can_be_asked_again(
    served: Served, open_page: OpenPage
) -> None:
    live, script = served
    page = await open_page(live.url)
    await choose_profile(page, "dies")
    script.add("One two three four five six.")
    await say(page, "Will you live?")
    alert = page.get_by_role("alert").filter(has_text="The answer broke off")
    await alert.wait_for()
    assert "the engine process died" in await alert.inner_text()
    assert (await page.locator(".message.assistant .prose").last.inner_text()).startswith("One")
    await page.get_by_text("ready", exact=True).wait_for()
    await choose_profile(page, "")
    script.add("I live.")
    await page.get_by_role("button", name="Try again").click()
    await page.get_by_text("I live.").wait_for()
    assert await page.get_by_text("2 / 2").is_visible()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"body": 'data: {"choices":[{"index":0,"delta":{"content":"Half"}}]}\n\n'}, "the connection ended before"),
        ({"body": "<html>", "status": 502}, "the server answered 502"),
        (None, "the server cannot be reached"),
    ],
)
async def test_whatever_breaks_on_the_way_is_told(
    served: Served, open_page: OpenPage, answer: dict[str, Any] | None, words: str
) -> None:
    live, _ = served
    page = await open_page(live.url)

    async def break_it(route: Any) -> None:
        await (route.abort() if answer is None else route.fulfill(content_type="text/event-stream", **answer))

    await page.route("**/v1/chat/completions", break_it)
    await say(page, "Are you there?")
    await page.get_by_role("alert").filter(has_text=words).wait_for()


async def test_a_key_is_asked_for_and_kept_no_longer_than_one_wants(open_page: OpenPage, tmp_path: Path) -> None:
    async with page_server(tmp_path, api_keys=["secret"]) as (live, script):
        page = await open_page(live.url)
        await page.get_by_text("The server answers those alone").wait_for()
        await page.get_by_label("Key", exact=True).fill("wrong")
        await page.get_by_role("button", name="Use it").click()
        await page.get_by_text("does not know this key").wait_for()
        await page.get_by_label("Key", exact=True).fill("secret")
        await page.get_by_role("button", name="Use it").click()
        await page.get_by_text("ready", exact=True).wait_for()
        script.add("Welcome.")
        await say(page, "Hello")
        await page.get_by_text("Welcome.").wait_for()
        assert "secret" not in await page.evaluate("JSON.stringify({ ...localStorage })")
        assert "secret" in await page.evaluate("JSON.stringify({ ...sessionStorage })")
        await page.get_by_role("button", name="Key").click()
        await page.get_by_role("button", name="Forget the key").click()
        await page.get_by_text("needs a key", exact=True).wait_for()
        assert "secret" not in await page.evaluate("JSON.stringify({ ...sessionStorage })")


async def test_conversations_are_exported_imported_and_deleted_here_and_on_the_server(
    served: Served, open_page: OpenPage, tmp_path: Path
) -> None:
    live, script = served
    page = await open_page(live.url)
    script.add("An answer to keep.")
    await say(page, "A question to keep")
    await until_done(page)
    async with page.expect_download() as found:
        await page.get_by_role("button", name="Export all").click()
    path = tmp_path / "all.json"
    await (await found.value).save_as(path)
    kept = json.loads(path.read_text())
    assert [one["title"] for one in kept["conversations"]] == ["A question to keep"]
    await page.get_by_text("Export", exact=True).click()
    async with page.expect_download() as found:
        await page.get_by_role("button", name="As Markdown").click()
    markdown = Path(await (await found.value).path()).read_text()
    assert "## You\n\nA question to keep\n\n## Answer\n\nAn answer to keep." in markdown
    sessions = {one["id"] for one in (await live.http.get("/v1/sessions")).json()["data"]}
    page.once("dialog", lambda dialog: dialog.accept())
    await page.get_by_role("button", name="Delete A question to keep").click()
    await page.get_by_text("Conversations stay in this browser.").wait_for()
    assert kept["conversations"][0]["id"] in sessions
    after = {one["id"] for one in (await live.http.get("/v1/sessions")).json()["data"]}
    assert kept["conversations"][0]["id"] not in after
    await page.locator("#import-input").set_input_files(path)
    await page.get_by_text("An answer to keep.").wait_for()


HOSTILE_FILES = [
    "no json",
    "[]",
    '{"kind": "tandem-conversations", "conversations": [{"id": "a", "nodes": {"m": {"id": "m", "role": "system"}}}]}',
    '{"kind": "tandem-conversations", "conversations": [{"id": "a"}]}',
]


async def test_a_file_that_is_no_export_is_refused_and_one_with_odd_fields_is_cleaned(
    served: Served, open_page: OpenPage, tmp_path: Path
) -> None:
    live, _ = served
    page = await open_page(live.url)
    told: list[str] = []

    async def note(dialog: Any) -> None:
        told.append(dialog.message)
        await dialog.dismiss()

    page.on("dialog", note)
    path = tmp_path / "hostile.json"
    for number, text in enumerate(HOSTILE_FILES, 1):
        path.write_text(text)
        await page.locator("#import-input").set_input_files(path)
        for _ in range(200):
            if len(told) == number:
                break
            await page.wait_for_timeout(10)
        assert len(told) == number, text
    odd = {"id": "m", "parent": "gone", "role": "assistant", "text": 3, "files": 7, "calls": [None], "figures": "x",
           "__proto__": {"polluted": True}}  # fmt: skip
    user = {
        "id": "u",
        "parent": None,
        "role": "user",
        "text": "<b>hi</b>",
        "files": [{"name": "<i>f</i>", "text": "t"}],
    }
    tree = {"id": "a", "title": "<u>t</u>", "nodes": {"m": odd, "u": user}, "leaf": "u", "settings": {"system": 4}}
    path.write_text(json.dumps({"kind": "tandem-conversations", "conversations": [tree]}))
    await page.locator("#import-input").set_input_files(path)
    await page.get_by_text("<b>hi</b>").wait_for()
    assert await page.locator(".message b, .message i, #conversations u").count() == 0
    assert await page.evaluate("({}).polluted") is None


async def test_a_phone_has_a_drawer_and_everything_in_reach(served: Served, open_page: OpenPage) -> None:
    live, script = served
    page = await open_page(live.url, PHONE, has_touch=True, is_mobile=True)
    script.add(
        "A long word: "
        + "x" * 300
        + "\n\n```\n"
        + "y" * 300
        + "\n```\n\n| a | b |\n|---|---|\n| "
        + "z" * 200
        + " | b |"
    )
    await say(page, "Wide things, please.")
    await until_done(page)
    for name in ("Send", "Attach files", "Settings"):
        box = await page.get_by_role("button", name=name, exact=True).bounding_box()
        assert 0 <= box["x"] <= PHONE["width"] - box["width"]
        assert box["y"] + box["height"] <= PHONE["height"]
    assert await page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    drawer = page.get_by_role("complementary", name="Conversations")
    assert not await drawer.is_visible()
    await page.get_by_role("button", name="Conversations").tap()
    await drawer.wait_for()
    await page.keyboard.press("Escape")
    await drawer.wait_for(state="hidden")
    await page.get_by_role("button", name="Conversations").tap()
    await page.get_by_role("button", name="New chat").tap()
    await page.get_by_text("Ask scripted").wait_for()


async def test_the_keyboard_is_enough_and_everything_has_a_name(served: Served, open_page: OpenPage) -> None:
    live, script = served
    page = await open_page(live.url)
    await page.get_by_text("Ask scripted").wait_for()
    await page.keyboard.press("Tab")
    assert await page.evaluate("document.activeElement.textContent") == "Skip to the content"
    await page.keyboard.press("Enter")
    assert await page.evaluate("document.activeElement.id") == "question"
    script.add("By keyboard.")
    await page.keyboard.type("Two lines")
    await page.keyboard.press("Shift+Enter")
    await page.keyboard.type("in one")
    await page.keyboard.press("Enter")
    await page.get_by_text("By keyboard.").wait_for()
    await until_done(page)
    assert await page.evaluate("document.activeElement.id") == "question"
    await page.get_by_text("The answer is complete").wait_for(state="attached")
    reached = set()
    for _ in range(40):
        await page.keyboard.press("Tab")
        reached.add(await page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    assert reached >= {
        "to-activity",
        "new-chat",
        "title",
        "model",
        "profile",
        "open-settings",
        "Copy",
        "Again",
        "attach",
    }
    nameless = await page.evaluate("""[...document.querySelectorAll("button, input, select, textarea, summary")]
      .filter((one) => one.checkVisibility())
      .filter((one) => !(one.getAttribute("aria-label") || one.textContent.trim() || one.labels?.length))
      .map((one) => one.outerHTML)""")
    assert nameless == []


async def test_a_server_that_loads_says_how_far_it_is(open_page: OpenPage, tmp_path: Path) -> None:
    from tests.server.live_server import fake_command, make_deployment, running_server

    async with running_server(make_deployment(), fake_command(load_s=2.0), wait=False) as live:
        page = await open_page(live.url)
        await page.get_by_text("loading: weights, 50 %").wait_for()
        await page.get_by_text("ready", exact=True).wait_for()
        await page.get_by_text("Ask reference").wait_for()
