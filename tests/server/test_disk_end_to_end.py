"""`tandem serve` with contexts on disk on the reference model: killed, and started again, it goes on from there."""

import signal
from pathlib import Path
from subprocess import Popen

from openai import OpenAI

from tests.server.event_subscriber import Subscriber
from tests.server.test_end_to_end import FILLER, NEEDLE, QUESTION, serve
from tests.server.test_host_end_to_end import gauge

DISK = {"block_tokens": 64, "choose": "always"}
PAGE = 16
CHAT = [{"role": "user", "content": f"{FILLER * 40}{NEEDLE} {FILLER * 40}\n\n{QUESTION}"}]


def ask(url: str, messages: list[dict[str, str]], **extra: str):
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=240)
    return client.chat.completions.create(
        model="reference", messages=messages, temperature=0, max_tokens=24, extra_body=extra
    )


def await_written(url: str, process: Popen[str]) -> None:
    """The writer is behind the answers: wait until what was left is on the disk."""
    before, now = -1.0, 0.0
    while process.poll() is None and (not now or now != before):
        before, now = now, gauge(url, "tandem_disk_written_total")
        signal.sigtimedwait([], 0.6)  # the engine reports its counters four times a second


def test_a_server_that_is_killed_goes_on_from_the_disk_and_says_so(tmp_path: Path) -> None:
    events = {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay", "pod": "here"}
    settings = {"disk": DISK | {"folder": str(tmp_path / "contexts")}, "server": {"port": 0, "events": events}}
    process, url = serve(tmp_path, settings)
    first = ask(url, CHAT)
    said = first.choices[0].message.content
    assert "4815162" in said
    assert first.usage.prompt_tokens_details.cached_tokens_from == {"card": 0, "host": 0, "disk": 0}
    await_written(url, process)
    assert gauge(url, "tandem_disk_bytes_written_total") == gauge(url, "tandem_disk_bytes_held") > 0
    router = Subscriber(events["endpoint"], events["replay_endpoint"], "kv@here@reference")
    router.replay()
    on_disk, blocks = router.index["DISK"], DISK["block_tokens"] // PAGE
    assert len(on_disk) == blocks * len(list((tmp_path / "contexts").rglob("*.kv"))) > 0
    assert on_disk <= router.index["GPU"], "nothing had to leave the card"
    process.kill()
    process.wait(timeout=60)
    more = [*CHAT, {"role": "assistant", "content": said}, {"role": "user", "content": QUESTION}]
    process, url = serve(tmp_path, settings)
    router.next = 0
    signal.sigtimedwait([], 0.6)  # the engine tells what changed as often
    router.replay()
    assert not router.index["GPU"]
    assert len(router.index["DISK"] & on_disk) == len(on_disk) // blocks, "each record by its last block"
    warm = ask(url, more)
    details = warm.usage.prompt_tokens_details
    assert details.cached_tokens > 0.9 * first.usage.prompt_tokens
    assert details.cached_tokens_from == {"card": 0, "host": 0, "disk": details.cached_tokens}
    assert gauge(url, "tandem_cached_tokens_from_disk_total") == details.cached_tokens
    again = ask(url, more).usage.prompt_tokens_details
    assert again.cached_tokens_from == {"card": again.cached_tokens, "host": 0, "disk": 0}
    cold = ask(url, more, cache_salt="another, which finds nothing of ours")
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert cold.choices[0].message.content == warm.choices[0].message.content
    process.send_signal(signal.SIGTERM)
    router.close()
    assert process.wait(timeout=60) == 0
