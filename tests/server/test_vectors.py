"""Embeddings and ranking over HTTP: the official client's calls, what is refused, and where an answer comes from."""

import base64
import json

import httpx
import numpy as np
import openai
import pytest

from gpu.config import ModelConfig
from server.deployment import ConfigError
from server.service.vector_settings import load_vectors
from tests.server.live_server import REFERENCE, Running, fake_command, make_deployment, running_server

TEXTS = ["one two three", "four", "one two three four five six seven eight nine"]


def deployment_of(**model):
    deployment = make_deployment(api_keys=["k"])
    return deployment.model_copy(update={"model": deployment.model.model_copy(update=model)})


@pytest.fixture
async def mean():
    """Serve a model of nested mean embeddings that ranks by them."""
    deployment = deployment_of(pooling="mean", nested_embeddings=True, ranking="cosine")
    async with running_server(deployment, fake_command()) as running:
        yield running


def expected(tokenizer, text: str, kind: str) -> np.ndarray:
    """Return what the fake engine counts, of length 1."""
    ids = tokenizer.encode(text, True)
    counts = np.bincount([i % 8 for i in (ids if kind == "mean" else ids[-3:])], minlength=8)
    return counts / np.linalg.norm(counts)


def posted(live: Running, path: str, **body) -> httpx.Response:
    return live.http.post(path, json=body, headers={"authorization": "Bearer k"})


@pytest.mark.parametrize("kind", ["last", "mean"])
async def test_the_official_client_gets_vectors_in_order_in_either_encoding(tokenizer, kind):
    async with running_server(deployment_of(pooling=kind), fake_command()) as live:
        for encoding in ("base64", "float", openai.NOT_GIVEN):
            given = await live.openai.embeddings.create(model="reference", input=TEXTS, encoding_format=encoding)
            assert [entry.index for entry in given.data] == [0, 1, 2]
            for entry, text in zip(given.data, TEXTS, strict=True):
                vector = entry.embedding  # as it came, where its encoding is named
                vector = np.frombuffer(base64.b64decode(vector), "<f4") if isinstance(vector, str) else vector
                assert isinstance(entry.embedding, str) == (encoding == "base64")
                np.testing.assert_allclose(vector, expected(tokenizer, text, kind), rtol=1e-6)
            num = sum(len(tokenizer.encode(text, True)) for text in TEXTS)
            assert (given.usage.prompt_tokens, given.usage.total_tokens) == (num, num)
        ids = [tokenizer.encode(text, True) for text in TEXTS]
        for one in (TEXTS[0], ids[0], [ids[0]]):
            given = await live.openai.embeddings.create(model="reference", input=one)
            np.testing.assert_allclose(given.data[0].embedding, expected(tokenizer, TEXTS[0], kind), rtol=1e-6)


async def test_more_inputs_than_run_at_once_go_in_turns_and_2048_are_the_most(mean):
    raw = (await posted(mean, "/v1/embeddings", input=["a", "b"] * 75, encoding_format="base64")).json()["data"]
    assert [entry["index"] for entry in raw] == list(range(150))
    vectors = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4").tolist() for entry in raw]
    assert vectors == [vectors[0], vectors[1]] * 75
    assert vectors[0] != vectors[1]
    assert await mean.metric("tandem_requests_finished_total") == 150
    refused = (await posted(mean, "/v1/embeddings", input=["a"] * 2049)).json()["error"]
    assert refused["message"] == "input: 2049 inputs, at most 2048 are allowed"


async def test_dimensions_are_the_first_entries_of_nested_embeddings_and_refused_for_others(mean, live, tokenizer):
    given = (await posted(mean, "/v1/embeddings", input=TEXTS[2], dimensions=3)).json()["data"][0]["embedding"]
    first = expected(tokenizer, TEXTS[2], "mean")[:3]
    np.testing.assert_allclose(given, first / np.linalg.norm(first), rtol=1e-6)
    many = (await posted(mean, "/v1/embeddings", input="a", dimensions=9)).json()["error"]
    assert many["message"] == "dimensions: got 9, an embedding of this model has 8"
    none = (await live.http.post("/v1/embeddings", json={"input": "a", "dimensions": 8})).json()["error"]
    assert none["param"] == "dimensions"


async def test_a_text_that_is_too_long_is_refused_by_its_place_or_cut_behind_what_fits(mean, tokenizer):
    long = "word " * 300
    body = {"attention_profile": "narrow", "input": ["short", long]}
    refused = (await posted(mean, "/v1/embeddings", **body)).json()["error"]
    assert (refused["param"], refused["code"]) == ("input[1]", "context_length_exceeded")
    cut = (await posted(mean, "/v1/embeddings", **body, truncate_prompt_tokens=-1)).json()
    assert cut["usage"]["prompt_tokens"] == 100 + len(tokenizer.encode("short", True))
    three = (await posted(mean, "/v1/embeddings", input=TEXTS[2], truncate_prompt_tokens=3)).json()
    ids = tokenizer.encode(TEXTS[2], True)[:3]
    counts = np.bincount([i % 8 for i in ids], minlength=8)
    np.testing.assert_allclose(three["data"][0]["embedding"], counts / np.linalg.norm(counts), rtol=1e-6)


async def test_what_is_wrong_with_a_body_is_named(mean, subtests):
    for body, param in [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": [99999]}, "input"),
        ({"input": None}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "model": "gpt"}, "model"),
        ({"input": "a", "normalize": False}, "normalize"),
        ({"input": "a", "temperature": 1}, "temperature"),
        ({"input": "a", "max_seconds": 0}, "max_seconds"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "attention_profile": "none"}, "attention_profile"),
    ]:
        with subtests.test(body=body, param=param):
            answer = await posted(mean, "/v1/embeddings", **body)
            assert 400 <= answer.status_code < 500
            assert answer.json()["error"]["param"] == param


async def test_keys_time_and_a_client_that_leaves_are_those_of_all_requests(mean):
    assert (await mean.http.post("/v1/embeddings", json={"input": "a"})).status_code == 401
    slow = {"input": ["a", "b"], "attention_profile": "long_prefill"}
    late = await posted(mean, "/v1/embeddings", **slow, max_seconds=0.05)
    assert (late.status_code, late.json()["error"]["code"]) == (408, "time_limit")
    with pytest.raises(httpx.ReadTimeout):
        await mean.http.post("/v1/embeddings", json=slow, headers={"authorization": "Bearer k"}, timeout=0.2)

    async def idle() -> bool:
        return await mean.metric("tandem_requests_running") == 0

    await mean.until(idle, 3)


# --- ranking ----------------------------------------------------------------------------------------------------------


async def test_documents_are_ranked_by_the_cosine_of_their_embeddings(mean, tokenizer, subtests):
    for path in ["/rerank", "/v1/rerank", "/v2/rerank"]:
        with subtests.test(path=path):
            documents = [TEXTS[1], {"text": TEXTS[0]}, TEXTS[2]]
            answer = (await posted(mean, path, query=TEXTS[0], documents=documents)).json()
            vectors = [expected(tokenizer, text, "mean") for text in (TEXTS[0], TEXTS[1], TEXTS[0], TEXTS[2])]
            scores = [float(vector @ vectors[0]) for vector in vectors[1:]]
            order = sorted(range(3), key=lambda i: -scores[i])
            assert [result["index"] for result in answer["results"]] == order
            assert [result["relevance_score"] for result in answer["results"]] == pytest.approx(
                [scores[i] for i in order]
            )
            assert answer["results"][0]["document"] == {"text": TEXTS[0]}
            first = (await posted(mean, path, query="one", documents=documents, top_n=1, return_documents=False)).json()
            assert len(first["results"]) == 1
            assert "document" not in first["results"][0]


async def test_documents_are_ranked_by_yes_against_no_after_the_chat_template(tokenizer):
    async with running_server(deployment_of(ranking="yes_no"), fake_command()) as live:
        answer = (await posted(live, "/rerank", query="q", documents=TEXTS, instruction="Fits?")).json()
        assert [result["index"] for result in answer["results"]] == [2, 0, 1], "the fake engine says yes to the longest"
        system = "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
        system += 'Note that the answer can only be "yes" or "no".'
        asked = f"<Instruct>: Fits?\n<Query>: q\n<Document>: {TEXTS[2]}"
        rendered = f"<|begin_of_text|><|system|>\n{system}<|end|><|user|>\n{asked}<|end|><|assistant|>\n"
        logit = len(tokenizer.encode(rendered, False)) / 100
        assert answer["results"][0]["relevance_score"] == pytest.approx(1 / (1 + np.exp(-logit)), rel=1e-6)
        long = await posted(live, "/rerank", query="q", documents=["a", "word " * 9000], attention_profile="narrow")
        assert long.status_code == 400
        assert long.json()["error"]["code"] == "context_length_exceeded"


async def test_what_is_wrong_with_a_ranking_is_named(mean, subtests):
    for body, param in [
        ({"documents": ["a"]}, "query"),
        ({"query": "q"}, "documents"),
        ({"query": "q", "documents": []}, "documents"),
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "q", "documents": ["a", ""]}, "documents[1]"),
        ({"query": "q", "documents": [{"txt": "a"}]}, "documents[0].text"),
        ({"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
        ({"query": "q", "documents": ["a"], "instruction": "x"}, "instruction"),
        ({"query": "q", "documents": ["a"], "max_tokens_per_doc": 5}, "max_tokens_per_doc"),
    ]:
        with subtests.test(body=body, param=param):
            answer = await posted(mean, "/v1/rerank", **body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_model_that_is_not_said_to_rank_does_not(live):
    answer = await live.http.post("/v1/rerank", json={"query": "q", "documents": ["a"]})
    assert answer.status_code == 400
    assert "set model.ranking to cosine" in answer.json()["error"]["message"]


# --- what the folder says ---------------------------------------------------------------------------------------------


def vectors_of(folder, tokenizer, **settings):
    return load_vectors(ModelConfig(path=folder, **settings), tokenizer)


@pytest.mark.parametrize(
    ("modes", "kind"),
    [(["lasttoken"], "last"), (["mean_tokens"], "mean"), (["cls_token"], None), (["mean_tokens", "lasttoken"], None)],
)
def test_pooling_is_as_the_folder_says_unless_the_deployment_does(tmp_path, tokenizer, modes, kind):
    (tmp_path / "1_Pooling").mkdir()
    every = ("lasttoken", "mean_tokens", "cls_token")
    tree = {f"pooling_mode_{mode}": mode in modes for mode in every} | {"word_embedding_dimension": 1}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(tree))
    found = vectors_of(tmp_path, tokenizer)
    assert (found.embedding and found.embedding.kind) == kind
    assert (kind is None) == ("set model.pooling" in found.why_not)
    assert vectors_of(tmp_path, tokenizer, pooling="mean").embedding.kind == "mean"
    (tmp_path / "1_Pooling" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        vectors_of(tmp_path, tokenizer)


def test_the_words_to_rank_by_are_tokens_of_the_vocabulary(tokenizer, monkeypatch):
    assert vectors_of(REFERENCE, tokenizer).embedding.kind == "last"
    ranking = vectors_of(REFERENCE, tokenizer, ranking="yes_no").ranking
    assert [tokenizer.token_bytes(i) for i in ranking.yes_no.token_ids] == [b"yes", b"no"]
    monkeypatch.setattr("server.text.model_tokenizer.Tokenizer.encode", lambda *_, **__: [1, 2])
    with pytest.raises(ConfigError, match="'yes' is 2 tokens"):
        vectors_of(REFERENCE, tokenizer, ranking="yes_no")
