"""`lm_eval` runs against the server and agrees with ours: likelihoods with transformers, answers and scores with evals.

The raw requests below are those that the harness sends, field by field, so that a change which breaks it shows here
with its cause and not as a harness that retries.
"""

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from lm_eval.utils import RemoteTokenizer, check_remote_tokenizer_support
from transformers import AutoModelForCausalLM, AutoTokenizer

from evals.clients import Endpoint, Reply, ask_all
from evals.metrics import score
from evals.samples import Sample
from tests.end_to_end.harness import (
    MAX_LENGTH,
    MODEL_FOLDER,
    Evaluation,
    HarnessRun,
    asked_samples,
    choice_documents,
    run_harness,
    text_documents,
    write_tasks,
)
from tests.end_to_end.real_server import ServerProcess, running_server
from tests.tolerances import FLIP_LOGIT_GAP, HARNESS_METRIC_RTOL, PROMPT_LOGPROB_ATOL

pytestmark = pytest.mark.timeout(300)
END_ID = 5  # <|end|>


@dataclass(frozen=True)
class Scored:
    """transformers' word on a continuation. logprobs: a token each. is_greedy: None where a tie is too close to say."""

    logprobs: list[float]
    is_greedy: bool | None

    @property
    def total(self) -> float:
        return math.fsum(self.logprobs)

    @property
    def tolerance(self) -> float:
        """Of the total: each token's rounding is its own, so that a sum's grows with the square root."""
        return PROMPT_LOGPROB_ATOL * math.sqrt(len(self.logprobs))


class Oracle:
    """The reference model in transformers, float32; logits are normalised in float64: float32 log_softmax drifts."""

    def __init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER)
        self.model = AutoModelForCausalLM.from_pretrained(MODEL_FOLDER, dtype=torch.float32).eval()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int], num_context: int) -> Scored:
        """The tokens from num_context on, each given all before it."""
        logits = self.model(torch.tensor([token_ids])).logits[0, num_context - 1 : -1].double()  # [tokens, vocabulary]
        wanted = torch.tensor(token_ids[num_context:])
        logprobs = logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0]
        best = logits.topk(2).values
        is_close = bool(((best[:, 0] - best[:, 1]) <= FLIP_LOGIT_GAP).any())
        return Scored(logprobs.tolist(), None if is_close else bool((logits.argmax(-1) == wanted).all()))

    def cut_choice(self, prompt: str, choice: str) -> tuple[list[int], int]:
        """Ids and how many are context, as the harness cuts: white space at a prompt's end goes with the choice."""
        return self.encode(prompt + choice), len(self.encode(prompt.rstrip()))

    def score_text(self, text: str) -> Scored:
        """As the harness rolls: windows of MAX_LENGTH - 2 tokens, each token scored once, the last window full."""
        token_ids = [self.tokenizer.bos_token_id, *self.encode(text)]
        width = MAX_LENGTH - 2
        logprobs: list[float] = []
        for begin in range(1, len(token_ids), width):
            end = min(begin + width, len(token_ids))
            first = max(0, end - width - 1)
            logprobs += self.score(token_ids[first:end], begin - first).logprobs
        return Scored(logprobs, None)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="module")
def samples(oracle: Oracle) -> list[Sample]:
    return asked_samples(oracle.tokenizer)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("server"), {}) as started:
        yield started


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory: pytest.TempPathFactory, samples: list[Sample]) -> Path:
    folder = tmp_path_factory.mktemp("harness")
    write_tasks(folder, samples)
    return folder


@pytest.fixture(scope="module")
def runs(server: ServerProcess, task_folder: Path) -> list[HarnessRun]:
    return run_harness(task_folder, [over_completions(server), over_chat(server)])


def over_completions(server: ServerProcess) -> Evaluation:
    """Token ids, four prompts in a request, one request after another."""
    arguments = {
        "model": "reference",
        "base_url": f"{server.url}/v1/completions",
        "tokenizer": MODEL_FOLDER,
        "tokenizer_backend": "huggingface",
        "max_length": MAX_LENGTH,
        "max_retries": 1,
    }
    tasks = ("tandem_completion", "tandem_choice", "tandem_text")
    return Evaluation("local-completions", arguments, tasks, ("--batch_size", "4"))


def over_chat(server: ServerProcess) -> Evaluation:
    """Messages, four requests at once; the server applies the chat template."""
    arguments = {
        "model": "reference",
        "base_url": f"{server.url}/v1/chat/completions",
        "num_concurrent": 4,
        "max_retries": 1,
    }
    return Evaluation("local-chat-completions", arguments, ("tandem_chat",), ("--apply_chat_template",))


@pytest.fixture(scope="module")
def completions_run(runs: list[HarnessRun]) -> HarnessRun:
    return runs[0]


@pytest.fixture(scope="module")
def chat_run(runs: list[HarnessRun]) -> HarnessRun:
    return runs[1]


def ask_ours(server: ServerProcess, mode: str, samples: Sequence[Sample]) -> dict[str, Reply]:
    """Our own client's replies by sample."""
    endpoint = Endpoint(f"{server.url}/v1", "reference", mode, None, 4, 0, 60.0, {})

    async def collect() -> dict[str, Reply]:
        return {key(reply.sample): reply async for reply in ask_all(endpoint, samples, None)}

    return asyncio.run(collect())


def key(sample: Sample) -> str:
    return f"{sample.task}/{sample.sample_id}"


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


# --- the harness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run_name", "task", "mode"),
    [("completions_run", "tandem_completion", "completions"), ("chat_run", "tandem_chat", "chat")],
)
def test_the_harness_gets_our_answers_and_gives_our_scores(
    run_name: str, task: str, mode: str, request: pytest.FixtureRequest, server: ServerProcess, samples: list[Sample]
) -> None:
    run: HarnessRun = request.getfixturevalue(run_name)
    ours = ask_ours(server, mode, samples)
    scores = []
    for sample, theirs in zip(samples, run.samples[task], strict=True):
        reply = ours[key(sample)]
        assert reply.failure is None
        assert theirs["resps"] == [[reply.text]]
        scores.append(score(sample.metric, reply.text, sample.answers, sample.meta))
        assert theirs["exact_match"] == scores[-1]
    assert run.results[task]["exact_match,none"] == pytest.approx(mean(scores), rel=HARNESS_METRIC_RTOL)
    assert 0 < mean(scores) < 1, "equal scores say something only where some answers are right and some wrong"


def test_chat_and_raw_completions_get_the_same_answers(completions_run: HarnessRun, chat_run: HarnessRun) -> None:
    raw, chat = completions_run.samples["tandem_completion"], chat_run.samples["tandem_chat"]
    assert [sample["resps"] for sample in raw] == [sample["resps"] for sample in chat]


def test_likelihoods_of_choices_and_their_accuracy_are_those_of_transformers(
    completions_run: HarnessRun, oracle: Oracle, samples: list[Sample]
) -> None:
    is_right = []
    for document, theirs in zip(choice_documents(samples), completions_run.samples["tandem_choice"], strict=True):
        scored = [oracle.score(*oracle.cut_choice(document["prompt"], choice)) for choice in document["choices"]]
        for wanted, (loglikelihood, is_greedy) in zip(scored, theirs["filtered_resps"], strict=True):
            assert float(loglikelihood) == pytest.approx(wanted.total, abs=wanted.tolerance)
            assert wanted.is_greedy is None or is_greedy == str(wanted.is_greedy)
        best = max(range(len(scored)), key=lambda index: scored[index].total)
        is_right.append(float(best == document["gold"]))
        assert theirs["acc"] == is_right[-1]
    assert completions_run.results["tandem_choice"]["acc,none"] == pytest.approx(
        mean(is_right), rel=HARNESS_METRIC_RTOL
    )
    assert 0 < mean(is_right) < 1


def test_rolling_likelihoods_and_perplexity_are_those_of_transformers(
    completions_run: HarnessRun, oracle: Oracle
) -> None:
    documents = text_documents()
    scored = [oracle.score_text(document["text"]) for document in documents]
    assert len(scored[-1].logprobs) > MAX_LENGTH, "the last text rolls over windows"
    for wanted, theirs in zip(scored, completions_run.samples["tandem_text"], strict=True):
        assert float(theirs["filtered_resps"][0]) == pytest.approx(wanted.total, abs=wanted.tolerance)
    total, tolerance = sum(each.total for each in scored), sum(each.tolerance for each in scored)
    num_words = sum(len(document["text"].split()) for document in documents)
    num_bytes = sum(len(document["text"].encode()) for document in documents)
    results = completions_run.results["tandem_text"]
    assert math.log(results["word_perplexity,none"]) == pytest.approx(-total / num_words, abs=tolerance / num_words)
    bits = tolerance / num_bytes / math.log(2)
    assert results["bits_per_byte,none"] == pytest.approx(-total / num_bytes / math.log(2), abs=bits)


def test_a_token_too_many_or_too_few_would_be_noticed(oracle: Oracle, samples: list[Sample]) -> None:
    """The tolerances' power: a choice less its first token or half its context, a text without BOS, one more hit."""
    documents = choice_documents(samples)
    for document in (documents[0], documents[-1]):
        wrong = document["choices"][document["gold"] - 1]
        token_ids, num_context = oracle.cut_choice(document["prompt"], wrong)
        wanted = oracle.score(token_ids, num_context)
        half = num_context // 2
        for other in (oracle.score(token_ids, num_context + 1), oracle.score(token_ids[half:], num_context - half)):
            assert abs(other.total - wanted.total) > wanted.tolerance
    text = text_documents()[0]["text"]
    wanted = oracle.score_text(text)
    assert abs(oracle.score(oracle.encode(text), 1).total - wanted.total) > wanted.tolerance
    assert mean([1.0] * 4 + [0.0] * 3) != pytest.approx(mean([1.0] * 5 + [0.0] * 2), rel=HARNESS_METRIC_RTOL)


# --- its requests -----------------------------------------------------------------------------------------------------


def echo(server: ServerProcess, prompt: Any, max_tokens: int) -> list[dict[str, Any]]:
    """The harness's request for likelihoods; choices in the order of their index."""
    body = {
        "model": "reference",
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": max_tokens,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert sorted(choice["index"] for choice in choices) == list(range(len(choices)))
    return sorted(choices, key=lambda choice: choice["index"])


def check_echo(oracle: Oracle, choice: dict[str, Any], token_ids: Sequence[int], num_generated: int) -> None:
    """An entry a token, none for the first one, the likelihoods transformers', the best alternative named."""
    logprobs = choice["logprobs"]
    lists = [logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")]
    assert {len(values) for values in lists} == {len(token_ids) + num_generated}
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    for place in range(1, len(token_ids)):
        assert logprobs["token_logprobs"][place] <= max(logprobs["top_logprobs"][place].values())
    wanted = oracle.score(token_ids, 1)
    got = logprobs["token_logprobs"][1 : len(token_ids)]
    assert got == pytest.approx(wanted.logprobs, rel=0, abs=PROMPT_LOGPROB_ATOL)


def requested_ids(oracle: Oracle, samples: list[Sample]) -> list[list[int]]:
    """Lists of ids of quite different lengths: a question with its answer, a short text, a context of BOS alone."""
    answered = oracle.encode(samples[0].prompt + samples[0].answers[0])
    text = oracle.encode(text_documents()[0]["text"])
    return [answered, text, [oracle.tokenizer.bos_token_id, *text[:1]], answered[:-3]]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_batch_of_token_ids_is_echoed_with_likelihoods(
    max_tokens: int, server: ServerProcess, oracle: Oracle, samples: list[Sample]
) -> None:
    batch = requested_ids(oracle, samples)
    choices = echo(server, batch, max_tokens)
    assert len(choices) == len(batch)
    for choice, token_ids in zip(choices, batch, strict=True):
        check_echo(oracle, choice, token_ids, max_tokens)
        assert choice["text"].startswith(oracle.tokenizer.decode(token_ids))


def test_a_token_that_ends_the_text_still_has_its_entry(
    server: ServerProcess, oracle: Oracle, samples: list[Sample]
) -> None:
    """The harness drops the last entry as the generated one: without it, it would drop a token of the choice."""
    token_ids = requested_ids(oracle, samples)[0]
    (choice,) = echo(server, [token_ids], 1)
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["tokens"][-1] == oracle.tokenizer.decode([END_ID])
    check_echo(oracle, choice, token_ids, 1)


def test_text_is_echoed_as_its_token_ids_are(server: ServerProcess, oracle: Oracle, samples: list[Sample]) -> None:
    """As with tokenized_requests=False, one text and a list of them."""
    texts = [samples[0].prompt + samples[0].answers[0], text_documents()[0]["text"]]
    for given in (texts, texts[0]):
        for choice, text in zip(echo(server, given, 1), texts, strict=False):
            check_echo(oracle, choice, oracle.encode(text), 1)


def test_the_harnesss_remote_tokenizer_reads_writes_and_chats_as_the_models_own(server: ServerProcess) -> None:
    url = f"{server.url}/v1/completions"
    assert check_remote_tokenizer_support(url)
    remote, own = RemoteTokenizer(url), AutoTokenizer.from_pretrained(MODEL_FOLDER)
    text = "The harbour's third lamp — 41 steps above the quay."
    assert remote.encode(text) == own.encode(text, add_special_tokens=False)
    assert remote.decode(remote.encode(text)) == text
    assert (remote.eos_token, remote.eos_token_id) == (own.eos_token, own.eos_token_id)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    assert remote.apply_chat_template(chat) == own.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
