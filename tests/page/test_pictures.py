"""Pictures of the page as a person sees it, in `build/page`: to be looked at, and one of them stands in README.md."""

from itertools import product
from typing import Any

import pytest

from tests.page.conftest import DESKTOP, PHONE, OpenPage, Served, say, take_picture, until_done

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUESTION = "How does a merge of two partial attentions work? A short answer, with code."
REASONING = "The user wants the formula of merging two softmax parts. I should name log-sum-exp and give code.\n"
ANSWER = """Each part comes with its **log-sum-exp**, so two parts over *disjoint* tokens merge exactly:

1. add the masses: `lse = logaddexp(lse_a, lse_b)`
2. weigh each output by its share of the mass

```python
def merge(a, lse_a, b, lse_b):
    lse = np.logaddexp(lse_a, lse_b)
    return np.exp(lse_a - lse) * a + np.exp(lse_b - lse) * b, lse
```

| tokens | read by | exact |
|---|---|---:|
| on the card | GPU | yes |
| in host memory | CPU | yes |

Nothing is lost: the result is the same as over [all tokens](https://example.org/attention) at once."""

TOOLS = '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'


async def hold_conversation(page: Any, script: Any) -> None:
    script.add(f"<think>\n{REASONING}</think>\n\n{ANSWER}")
    await say(page, QUESTION)
    await until_done(page)


@pytest.mark.parametrize(("size", "scheme"), list(product(["desktop", "phone"], ["light", "dark"])))
async def test_pictures_of_a_chat_and_of_activity(served: Served, open_page: OpenPage, size: str, scheme: str) -> None:
    live, script = served
    page = await open_page(live.url, DESKTOP if size == "desktop" else PHONE, scheme)
    await hold_conversation(page, script)
    chat = await take_picture(page, f"chat-{size}-{scheme}")
    await page.get_by_role("link", name="Activity").click()
    await page.get_by_role("heading", name="Where contexts are").wait_for()
    await page.set_viewport_size({"width": page.viewport_size["width"], "height": 1750 if size == "desktop" else 2700})
    activity = await take_picture(page, f"activity-{size}-{scheme}")
    assert min(chat.stat().st_size, activity.stat().st_size) > 10_000
    assert max(chat.stat().st_size, activity.stat().st_size) < 200_000
    for view in ("#chat", "#activity"):
        await page.goto(f"{live.url}/{view}")
        width = await page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert width[0] <= width[1], "nothing is wider than the window"


async def test_pictures_of_what_else_there_is_to_see(served: Served, open_page: OpenPage) -> None:
    live, script = served
    page = await open_page(live.url, PHONE, "dark")
    await page.get_by_text("Ask scripted").wait_for()
    await take_picture(page, "begin-phone-dark")
    await page.get_by_role("button", name="Settings").click()
    await page.get_by_label("System message").fill("Answer briefly, in plain words.")
    await take_picture(page, "settings-phone-dark")
    await page.get_by_label("Tools, a list in JSON").fill(TOOLS)
    await page.get_by_role("button", name="Save").click()
    await page.set_viewport_size(DESKTOP)
    call = '{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}'
    script.add(f"I look it up.\n<tool_call>\n{call}\n</tool_call>")
    await page.locator("#file-input").set_input_files(
        [{"name": "trip.txt", "mimeType": "text/plain", "buffer": b"Two days in Bonn."}]
    )
    await page.get_by_text("document, ").wait_for()
    await say(page, "Shall I take a coat on this trip?")
    await until_done(page)
    await page.get_by_label("Result of weather").fill("Rain on both days, 12 degrees.")
    await take_picture(page, "call-desktop-dark")
    await page.get_by_label("Profile").select_option("dies")
    script.add("Take a coat and an umbrella.")
    await page.get_by_role("button", name="Send the result").click()
    await page.get_by_role("alert").filter(has_text="broke off").wait_for()
    await until_done(page)
    await take_picture(page, "failed-desktop-dark")
    await page.set_viewport_size(PHONE)
    await page.get_by_role("button", name="Conversations").click()
    await page.get_by_role("button", name="New chat").wait_for()
    await page.wait_for_timeout(300)  # for the drawer to stand still
    await take_picture(page, "drawer-phone-dark")
