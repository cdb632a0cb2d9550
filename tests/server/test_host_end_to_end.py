"""`tandem serve` with host memory on the reference model: long contexts through every profile, nothing left behind."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from openai import OpenAI

from tests.server.test_end_to_end import FILLER, NEEDLE, QUESTION, serve

HOST = {
    "memory_limit_gib": 0.5,
    "threads": 1,
    "resident_tokens": 256,
    "residency": "fixed",
    "sampled": {"bits_per_table": 8, "num_tables": 75},
}
PROFILES = {"careful": {"host": {"method": "sampled", "num_tables": 75}}, "whole": {"host": "offloaded"}}
DOCUMENT = f"{FILLER * 64}{NEEDLE} {FILLER * 64}"
CHAT = [{"role": "user", "content": f"{DOCUMENT}\n\n{QUESTION}"}]


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    process, url = serve(tmp_path_factory.mktemp("served"), {"host": HOST, "profiles": PROFILES})
    yield url
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0


@pytest.fixture(scope="module")
def client(url) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=240)


def answer(client: OpenAI, messages: list[dict[str, str]], profile: str, max_tokens: int = 24):
    return client.chat.completions.create(
        model="reference",
        messages=messages,
        temperature=0,
        max_tokens=max_tokens,
        extra_body={"attention_profile": profile},
    )


def gauge(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics").text
    return float(next(line for line in text.splitlines() if line.startswith(f"{name} ")).split()[1])


def test_what_is_read_whole_from_host_memory_answers_as_the_device_does(client, url):
    exact = answer(client, CHAT, "exact", max_tokens=100).choices[0].message.content
    offloaded = answer(client, CHAT, "offloaded", max_tokens=100).choices[0].message.content
    assert "4815162" in exact
    assert offloaded == exact
    assert gauge(url, "tandem_host_rows_read_total") > 0
    assert gauge(url, "tandem_host_contexts") > 0


def test_a_sampled_context_finds_its_needle_and_the_next_turn_its_prefix(client, url):
    covered, read = gauge(url, "tandem_host_tokens_covered_total"), gauge(url, "tandem_host_rows_read_total")
    first = answer(client, CHAT, "sampled")
    said = first.choices[0].message.content
    assert "4815162" in said
    more = [*CHAT, {"role": "assistant", "content": said}, {"role": "user", "content": QUESTION}]
    second = answer(client, more, "sampled")
    assert "4815162" in second.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens > 0.9 * first.usage.prompt_tokens
    covered = gauge(url, "tandem_host_tokens_covered_total") - covered
    assert 0 < gauge(url, "tandem_host_rows_read_total") - read < covered / 4, (
        "all of it would be a row for each group of four heads"
    )
    assert gauge(url, "tandem_host_tables_built_total") > 0
    assert gauge(url, "tandem_host_tables_failed_total") == 0


def test_a_server_says_which_profiles_it_has(url):
    model = httpx.get(f"{url}/v1/models").json()["data"][0]
    assert {*model["attention_profiles"]} >= {"exact", "offloaded", "sampled", "careful", "whole"}


def test_short_prompts_of_all_profiles_at_once_answer_as_each_does_alone(client):
    """Nothing of theirs is offloaded: they are one decode group."""
    names = ["exact", "sampled", "offloaded", "whole"]
    chats = [[{"role": "user", "content": f"{FILLER * (1 + place)}{NEEDLE}\n\n{QUESTION}"}] for place in range(4)]

    def ask(place: int) -> str:
        said = answer(client, chats[place], names[place], max_tokens=60)
        assert said.usage.total_tokens <= HOST["resident_tokens"]
        return said.choices[0].message.content

    alone = [ask(place) for place in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == alone
    assert all("4815162" in text for text in alone)


def test_a_profile_of_the_configuration_answers_as_the_built_in_one_and_finds_its_prefix(client):
    for named, built_in in (("whole", "offloaded"), ("careful", "sampled")):
        theirs, ours = answer(client, CHAT, built_in), answer(client, CHAT, named)
        assert ours.choices[0].message.content == theirs.choices[0].message.content
        assert ours.usage.prompt_tokens_details.cached_tokens > 0.9 * theirs.usage.prompt_tokens
