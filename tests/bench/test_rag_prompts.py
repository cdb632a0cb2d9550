"""Loads of the kind `rag`: a corpus of its own, drawn by popularity, and the same whatever way it is sent."""

import io
import math
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.load.client import StreamFault
from bench.load.console import list_facts, list_latencies
from bench.load.load_plan import Corpus, LoadPlan, PlanError, parse_lengths
from bench.load.measure import LoadResult, measure
from bench.load.prose import write_prose
from bench.load.rag_prompts import CorpusReader
from bench.load.row import make_row
from bench.load.tokenised_text import load_tokenizer, pool_by_tokenizer
from server.commands.tandem import main
from tests.bench.load_plans import make_plan
from tests.bench.scripted_server import Behaviour, scripted_server
from tests.server.live_server import fake_command, make_deployment, running_server, with_documents

MODEL = Path(__file__).parents[2] / "deploy" / "models" / "reference"
TOKENIZER = load_tokenizer(MODEL)
CORPUS = Corpus(12, parse_lengths("", "60-120"), 3, 1.0, "inline", 1)


def make_rag(corpus: Corpus = CORPUS, **changes: Any) -> LoadPlan:
    lengths = {"input_tokens": parse_lengths("", "20"), "output_tokens": parse_lengths("", "4")}
    return make_plan(**{"endpoint": "chat", "corpus": corpus, "tokenizer": MODEL, **lengths, **changes})


def read_corpus(corpus: Corpus = CORPUS, **changes: Any) -> CorpusReader:
    pool = pool_by_tokenizer(write_prose(5, 20_000), TOKENIZER, "reference")
    return CorpusReader(make_rag(corpus, **changes), corpus, pool, "this run")


def titles(reader: CorpusReader, index: int) -> list[str]:
    return [document["title"] for document in reader.make(index).documents]


def test_a_corpus_has_so_many_documents_of_such_lengths_and_no_two_are_alike() -> None:
    documents = read_corpus().documents
    assert len(documents) == 12
    sizes = [len(TOKENIZER.encode(document["text"]).ids) for document in documents]
    assert all(50 <= size <= 140 for size in sizes), "characters of a token differ from text to text"
    assert len({document["text"] for document in documents}) == len({one["title"] for one in documents}) == 12
    assert read_corpus().documents == documents
    assert read_corpus(seed=1).documents != documents


def test_prompts_have_different_documents_in_orders_of_their_own_and_can_be_made_again() -> None:
    reader = read_corpus()
    drawn = [titles(reader, index) for index in range(200)]
    assert all(len(set(one)) == 3 for one in drawn)
    again = read_corpus()
    assert drawn == [titles(again, index) for index in range(200)]
    assert len({tuple(one) for one in drawn}) > 100
    by_rank = sum(one == sorted(one, key=lambda title: int(title.split()[1])) for one in drawn)
    assert 10 < by_rank < 70, "one in six of all orders"


def test_popularity_falls_as_zipf_says() -> None:
    one = Corpus(12, parse_lengths("", "60"), 1, 1.0, "inline", 1)
    reader = read_corpus(one)
    num = 3000
    counts = Counter(titles(reader, index)[0] for index in range(num))
    total = sum(1 / rank for rank in range(1, 13))
    for rank in (1, 2, 6):
        share = 1 / rank / total
        deviation = math.sqrt(share * (1 - share) / num)
        assert abs(counts[f"Report {rank} of this run"] / num - share) < 5 * deviation
    alike = read_corpus(Corpus(12, one.tokens, 1, 0.0, "inline", 1))
    even = Counter(titles(alike, index)[0] for index in range(num))
    assert max(even.values()) < 1.4 * min(even.values())


def test_the_same_is_asked_however_documents_are_sent() -> None:
    ways = {way: read_corpus(Corpus(12, CORPUS.tokens, 3, 1.0, way, 1)) for way in ("ids", "inline", "text")}
    ways["ids"].ids = [f"doc-{i}" for i in range(12)]
    for index in range(5):
        ids, inline, text = (ways[way].make(index) for way in ("ids", "inline", "text"))
        assert [f"doc-{int(one['title'].split()[1]) - 1}" for one in inline.documents] == list(ids.documents)
        blocks = [f"Document {i}: {one['title']}\n{one['text']}\n\n" for i, one in enumerate(inline.documents, 1)]
        question = inline.turns[0][0]["content"]
        assert ids.turns == inline.turns
        assert text.turns[0][0]["content"] == "".join(blocks) + question
        assert text.documents == ()
        assert ids.asked_tokens == inline.asked_tokens == text.asked_tokens
        assert abs(len(TOKENIZER.encode(question).ids) - 20) <= 2


def test_later_turns_ask_about_the_same_documents() -> None:
    for way in ("inline", "text"):
        corpus = Corpus(12, CORPUS.tokens, 3, 1.0, way, 3)
        job = read_corpus(corpus).make(4)
        contents = [turn[0]["content"] for turn in job.turns]
        assert len(set(contents)) == 3
        assert [content.startswith("Document 1") for content in contents] == [way == "text", False, False]
        assert len(job.documents) == (3 if way == "inline" else 0)


async def run_load(url: str, corpus: Corpus, **changes: Any) -> LoadResult:
    return await measure(make_rag(corpus, url=url, requests=6, **changes), Console(file=io.StringIO()))


@pytest.mark.parametrize("way", ["ids", "inline", "text"])
async def test_a_run_measures_first_tokens_and_what_was_reused(tmp_path: Path, way: str) -> None:
    corpus = Corpus(5, parse_lengths("", "100"), 3, 1.0, way, 2)
    async with running_server(with_documents(make_deployment(), tmp_path, chunk_tokens=64), fake_command()) as live:
        added: list[str] = []
        store = live.service.supervisor.store_chunks
        live.service.supervisor.store_chunks = lambda chunks, salt: added.append(salt) or store(chunks, salt)
        result = await run_load(live.url, corpus, concurrency=1)
        left = [entry["id"] for entry in (await live.http.get("/v1/documents")).json()["data"]]
    summary = result.summary
    assert (summary.completed, summary.ttft.num, summary.later_ttft.num) == (12, 12, 6)
    assert "... of later turns" in dict(list_latencies(summary))
    assert len(added) == (5 if way == "ids" else 0)
    assert bool(left) is (way == "inline"), "documents go with the run, but those that the server keeps of itself"
    assert {"ids": 0.6, "inline": 0.3, "text": 0.0}[way] <= summary.reused_share < 0.9
    assert (summary.recomputed_share > 0) is (way != "text")
    facts = dict(list_facts(summary))
    assert facts["prompt tokens from documents' store"].startswith(f"{summary.reused_share:.1%}, and ")
    row = make_row(result)
    assert row["shape"].startswith(
        f"rag 3 of 5 documents of 100, Zipf 1, as {way}, 2 turns, question 20 out 4, concurrency 1"
    )
    assert row["config"]["documents"] == f"{corpus.shape}, written by the client"
    assert row["extras"]["load"]["reused_share"] == summary.reused_share


async def test_a_server_without_documents_is_one_line_and_one_that_tells_nothing_is_no_share() -> None:
    with scripted_server(Behaviour()) as server:
        with pytest.raises(StreamFault, match="/v1/documents: HTTP 404"):
            await run_load(server.url, Corpus(5, parse_lengths("", "50"), 2, 1.0, "ids", 1))
        result = await run_load(server.url, Corpus(5, parse_lengths("", "50"), 2, 1.0, "inline", 1))
    assert result.summary.reused_share is None
    assert "... of later turns" not in dict(list_latencies(result.summary))
    assert not [label for label, _ in list_facts(result.summary) if "documents" in label]
    assert {len(body["documents"]) for body in server.bodies} == {2}


@pytest.mark.parametrize(
    ("corpus", "changes", "words"),
    [
        (CORPUS, {"endpoint": "completions"}, "documents come with --endpoint chat"),
        (CORPUS, {"conversations": Path("x")}, "it writes its own texts"),
        (CORPUS, {"shared_prefix_share": 0.5}, "it writes its own texts"),
        (CORPUS, {"cache": "cold"}, "got --cold; documents are what is shared"),
        (Corpus(2, CORPUS.tokens, 3, 1.0, "ids", 1), {}, "got 3; wanted 1 to the 2 of --documents"),
        (Corpus(5, CORPUS.tokens, 3, -1.0, "ids", 1), {}, "--zipf: got -1.0; wanted 0"),
    ],
)
def test_options_that_contradict_are_refused(corpus: Corpus, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        make_rag(corpus, **changes).check()
    make_rag().check()


def test_the_command_line_makes_such_a_plan(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    plans: list[LoadPlan] = []

    def note(plan: LoadPlan, _: bool) -> None:
        plans.append(plan)
        raise PlanError("noted")

    monkeypatch.setattr("bench.load.serve_command._measure", note)
    rag = [
        "--kind",
        "rag",
        "--documents",
        "9",
        "--document-tokens",
        "70",
        "--documents-per-prompt",
        "2",
        "--zipf",
        "0.5",
    ]
    for words in (["--documents-as", "text"], ["--input-tokens", "50"]):
        monkeypatch.setattr(sys, "argv", ["tandem", "bench", "serve", *rag, *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
    monkeypatch.setattr(sys, "argv", ["tandem", "bench", "serve"])
    with pytest.raises(SystemExit):
        main()
    text, ids, plain = plans
    assert text.corpus == Corpus(9, parse_lengths("", "70"), 2, 0.5, "text", 1)
    assert (ids.corpus.sent_as, ids.endpoint) == ("ids", "chat")
    assert [plan.input_tokens.largest for plan in plans] == [32, 50, 1000]
    assert (plain.corpus, plain.endpoint) == (None, "completions")


def test_ranks_are_a_falling_order() -> None:
    shares = read_corpus()._shares
    assert all(one > other for one, other in pairwise(shares))
    assert abs(shares.sum() - 1) < 1e-12
