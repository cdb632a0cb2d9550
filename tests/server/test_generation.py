"""What a body asks for is what the engine is told, choice by choice; what comes back is counted once."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from gpu.sampling_params import SamplingParams
from scheduler.messages import Delta, EngineRequest, Ready
from server import logs
from server.api_error import ApiError, internal
from server.bodies.answer_form import ResponseFormat, StructuredOutputs
from server.bodies.generation_bodies import CompletionBody
from server.engine import request_figures
from server.engine.mailbox import Mailbox
from server.engine.prometheus import Metrics
from server.generation import generation as generation_module
from server.generation.generation import Caller, Generation, Job, Update
from server.generation.prompt_tokens import Prompt, completion_max_tokens
from server.routes.responses.response_bodies import ResponsesBody
from server.routes.responses.response_shape import ResponseShape
from server.service.adapter_names import AdapterNames
from server.service.sampling_defaults import SamplingDefaults
from server.text.model_tokenizer import Tokenizer
from tests.server.live_server import make_deployment

CONTEXT = 100
LIMITS = Ready(
    vocab_size=8192, num_layers=12, max_context_tokens=CONTEXT, profiles={"exact": CONTEXT, "narrow": 50},
    default_profile="exact", num_pages=10, page_tokens=16, device="fake", load_seconds=0.0,
)  # fmt: skip


class Engine:
    """Take requests, and remember what it was told."""

    def __init__(self) -> None:
        self.requests: list[EngineRequest] = []
        self.forgotten: list[tuple[list[str], bool]] = []
        self.grammar_param = ""

    async def submit(self, requests: list[EngineRequest], mailbox: Mailbox, param: str, grammar_param: str) -> None:
        self.requests += requests
        self.grammar_param = grammar_param

    def forget(self, request_ids: list[str], cancel: bool) -> None:
        self.forgotten.append((sorted(request_ids), cancel))


class Call:
    """Run one API call on that engine, its body given as it comes over the wire."""

    def __init__(self, tokenizer: Tokenizer, prompts: list[list[int]], max_tokens: int = 16, **body: Any) -> None:
        self.engine, self.metrics = Engine(), Metrics()
        deployment = make_deployment()
        service: Any = SimpleNamespace(
            supervisor=self.engine, metrics=self.metrics, tokenizer=tokenizer, deployment=deployment, traces=None,
            settings=deployment.server, sampling_defaults=SamplingDefaults(), adapters=AdapterNames((), ()),
        )  # fmt: skip
        jobs = [Job(Prompt(prompt, "", 0), max_tokens) for prompt in prompts]
        self.generation = Generation(
            service, "cmpl", CompletionBody(prompt="", **body), jobs, LIMITS, Caller("salt", None)
        )

    async def submit(self) -> list[EngineRequest]:
        await self.generation.submit(None, None, "prompt")
        return self.engine.requests

    async def feed(self, index: int, token_ids: list[int], finish_reason: str | None = None, **more: Any) -> None:
        request_id = f"{self.generation.id}-{index}"
        delta = Delta(request_id=request_id, token_ids=token_ids, finish_reason=finish_reason, **more)
        self.generation.mailbox.put(delta)
        assert all(isinstance(update, Update) for update in await self.generation.updates())

    def metric(self, name: str) -> float:
        lines = self.metrics.text().decode().splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"tandem_{name} "))


async def test_every_option_of_a_body_reaches_the_engine_under_its_own_name(tokenizer: Tokenizer) -> None:
    given = {
        "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "repetition_penalty": 1.5,
        "presence_penalty": 0.75, "frequency_penalty": -0.75, "seed": 11,
    }  # fmt: skip
    call = Call(tokenizer, [[1, 2, 3]], **given, logit_bias={"5": -2.0}, min_tokens=4, attention_profile="narrow",
                attention_epsilon=0.5)  # fmt: skip
    await call.generation.submit(3, 2, "prompt")
    (request,) = call.engine.requests
    assert request.sampling == SamplingParams(**given, logit_bias={5: -2.0}, num_logprobs=3, num_prompt_logprobs=2)
    assert (request.prompt_token_ids, request.max_tokens, request.min_tokens) == ([1, 2, 3], 16, 4)
    assert (request.attention_profile, request.epsilon, request.cache_salt) == ("narrow", 0.5, "salt")


async def test_what_a_body_leaves_out_is_openais_default_and_a_seed_nobody_knows(tokenizer: Tokenizer) -> None:
    seeds = set()
    for _ in range(2):
        (request,) = await Call(tokenizer, [[1]], top_k=-1).submit()
        wanted = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=request.sampling.seed)
        assert request.sampling == wanted
        assert (request.min_tokens, request.attention_profile) == (0, "exact")
        seeds.add(request.sampling.seed)
    assert len(seeds) == 2


async def test_what_is_given_as_zero_is_given(tokenizer: Tokenizer) -> None:
    (request,) = await Call(tokenizer, [[1]], temperature=0, seed=0, top_k=0).submit()
    assert request.sampling == SamplingParams(temperature=0.0, seed=0, top_k=0)


async def test_choices_follow_their_prompts_and_count_seeds_up_from_the_same_one(tokenizer: Tokenizer) -> None:
    call = Call(tokenizer, [[1, 2], [3]], n=3, seed=5)
    requests = await call.submit()
    assert [request.prompt_token_ids for request in requests] == [[1, 2]] * 3 + [[3]] * 3
    assert [call.generation.job_of(index).prompt.token_ids for index in range(6)] == [[1, 2]] * 3 + [[3]] * 3
    assert [request.sampling.seed for request in requests] == [5, 6, 7, 5, 6, 7]
    assert len({request.request_id for request in requests}) == 6


@pytest.mark.parametrize(("ignores", "ends"), [(False, (1, 5, 77)), (True, (77,))])
async def test_a_text_ends_at_its_own_stop_tokens_and_the_models_unless_told_not_to(
    tokenizer: Tokenizer, ignores: bool, ends: tuple[int, ...]
) -> None:
    assert tokenizer.eos_ids == [1, 5]
    (request,) = await Call(tokenizer, [[1]], stop_token_ids=[77], ignore_eos=ignores).submit()
    assert request.stop_token_ids == ends


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"structured_outputs": StructuredOutputs(regex="a")}, "structured_outputs.regex"),
        ({"structured_outputs": StructuredOutputs(json_object=True)}, "structured_outputs.json_object"),
        ({"response_format": ResponseFormat(type="json_schema")}, "response_format.json_schema.schema"),
        ({"response_format": ResponseFormat(type="json_object")}, "response_format"),
        ({"response_format": ResponseFormat(type="text")}, "tools"),
        ({}, "tools"),
    ],
)
async def test_the_engine_is_told_the_field_that_asks_for_a_grammar(
    tokenizer: Tokenizer, form: dict[str, Any], param: str
) -> None:
    call = Call(tokenizer, [[1]], **form)
    await call.submit()
    assert call.engine.grammar_param == param


async def test_as_many_tokens_as_the_most_may_be_the_fewest_and_not_one_more(tokenizer: Tokenizer) -> None:
    assert len(await Call(tokenizer, [[1]], max_tokens=16, min_tokens=16).submit()) == 1
    with pytest.raises(ApiError, match="more than the 16 of max_tokens"):
        await Call(tokenizer, [[1]], max_tokens=16, min_tokens=17).submit()


async def test_cached_and_prompt_tokens_are_counted_once_a_prompt_and_generated_ones_once_a_choice(
    tokenizer: Tokenizer,
) -> None:
    call = Call(tokenizer, [[1] * 10, [2] * 20], n=3)
    await call.submit()
    for index in range(6):
        await call.feed(index, [100, 101], "length", num_cached_tokens=8 if index < 3 else 16)
    generation = call.generation
    assert generation.num_cached_tokens == 8 + 16
    assert generation.num_prompt_tokens == 10 + 20
    assert generation.num_generated_tokens == 6 * 2
    assert call.metric("prompt_tokens_total") == 30
    assert call.metric("generated_tokens_total") == 12
    assert generation.done


async def test_times_are_of_the_arrival_of_the_first_token_and_of_each_further_one(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: now, time=lambda: 0.0)
    monkeypatch.setattr(generation_module, "time", clock)
    now = 100.0
    call = Call(tokenizer, [[1]])
    await call.submit()
    now = 103.0
    await call.feed(0, [100], queue_seconds=1.0, prefill_seconds=1.5)
    now = 104.0
    await call.feed(0, [101, 102], queue_seconds=None)  # two tokens at once are two halves of the time
    now = 106.0
    await call.feed(0, [103], "length")
    assert call.metric("time_to_first_token_seconds_sum") == 3.0
    assert call.metric("inter_token_seconds_sum") == 0.5 + 2.0
    assert call.metric("inter_token_seconds_count") == 2
    assert call.metric("queue_seconds_sum") == 1.0
    assert call.metric("prefill_seconds_sum") == 1.5
    assert call.metric("prefill_seconds_count") == 1
    assert call.metric("request_seconds_sum") == 6.0


async def test_the_engine_is_told_of_an_end_that_it_does_not_know(tokenizer: Tokenizer) -> None:
    call = Call(tokenizer, [[1]], n=3, stop="d")
    ids = [request.request_id for request in await call.submit()]
    (d,) = tokenizer.encode("d", False)
    await call.feed(0, [100], "length")
    await call.feed(1, [d])
    call.generation.close()
    call.generation.close()
    assert call.engine.forgotten == [([ids[0]], False), ([ids[1]], True), ([ids[2]], True)]
    text = call.metrics.text().decode()
    for reason in ("length", "stop", "cancelled"):
        assert f'tandem_requests_finished_total{{reason="{reason}"}} 1.0' in text


async def test_what_comes_after_a_choices_end_is_not_told(tokenizer: Tokenizer) -> None:
    call = Call(tokenizer, [[1]], n=2, stop="d")
    await call.submit()
    (d,) = tokenizer.encode("d", False)
    await call.feed(0, [d])
    request_id = f"{call.generation.id}-0"
    call.generation.mailbox.put(Delta(request_id=request_id, token_ids=[100]))
    assert await call.generation.updates() == []


ROOM = [  # prompt, max_tokens asked, what it gets (None: refused)
    (60, None, 16),
    (90, None, 10),
    (60, 40, 40),
    (60, 41, None),
    (99, 1, 1),
    (100, 1, None),
    (100, 0, 0),
    (100, None, None),
    (101, 0, None),
]


@pytest.mark.parametrize(("prompt", "asked", "gets"), ROOM)
def test_a_prompt_and_its_answer_fill_the_context_and_no_more(prompt: int, asked: int | None, gets: int | None) -> None:
    body = CompletionBody(prompt="", max_tokens=asked)
    service: Any = SimpleNamespace(settings=make_deployment().server)
    if gets is None:
        with pytest.raises(ApiError) as refused:
            completion_max_tokens(service, body, Prompt([7] * prompt, "", 0), LIMITS)
        assert refused.value.code == "context_length_exceeded"
    else:
        assert completion_max_tokens(service, body, Prompt([7] * prompt, "", 0), LIMITS) == gets


@pytest.mark.parametrize(
    ("may_retry", "status", "code"), [(False, 500, "internal_error"), (True, 503, "out_of_memory")]
)
async def test_a_request_that_memory_is_refused_is_told_to_come_again(
    tokenizer: Tokenizer, may_retry: bool, status: int, code: str
) -> None:
    call = Call(tokenizer, [[1, 2, 3]])
    await call.submit()
    with pytest.raises(ApiError) as raised:
        await call.feed(0, [], "error", error="KV pages: no memory", may_retry=may_retry)
    assert (raised.value.status, raised.value.code, raised.value.message) == (status, code, "KV pages: no memory")
    assert ("retry-after" in raised.value.headers) == may_retry
    assert call.engine.forgotten == [([f"{call.generation.id}-0"], True)]


async def test_an_answer_that_outgrows_its_grammar_is_its_requests_error(tokenizer: Tokenizer) -> None:
    call = Call(tokenizer, [[1, 2, 3]])
    await call.submit()
    why = "grammar: the answer cannot go on (too complex)"
    with pytest.raises(ApiError) as raised:
        await call.feed(0, [], "error", error=why)
    assert (raised.value.status, raised.value.code, raised.value.message) == (400, "unsupported_grammar", why)
    shape = ResponseShape(call.generation, ResponsesBody(input="a"), "m", lambda *_: None)
    for error, code in ((raised.value, "unsupported_grammar"), (internal("x"), "server_error")):
        told = json.loads(shape.error(error).partition(b"data: ")[2])
        assert (told["type"], told["response"]["error"]) == (
            "response.failed",
            {"code": code, "message": error.message},
        )


async def test_preemptions_stand_in_usage_and_in_the_line_that_joins_the_ids(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    call = Call(tokenizer, [[1, 2, 3]], n=2)
    await call.submit()
    caplog.set_level("INFO", logger="tandem")
    token = logs.request_id.set("of-the-http-request")
    try:
        await call.feed(0, [100], figures={"preemptions": 1})
        await call.feed(0, [100], "length", figures={"preemptions": 2, "preempted_tokens_recomputed": 40})
        await call.feed(1, [100], "length", figures={"preemptions": 1, "preempted_tokens_recomputed": 2})
    finally:
        logs.request_id.reset(token)
    figures = call.generation.figures(of_prompt=False)
    assert {name: count for name, count in figures.items() if count} == {"preemptions": 3}
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("generated ")]
    fields = dict(field.partition("=")[::2] for field in line.split()[1:])
    assert (fields["preemptions"], fields["preempted_tokens_recomputed"]) == ("3", "42")
    assert (fields["document_reused_tokens"], fields["document_recomputed_tokens"]) == ("0", "0")
    assert "recomputed_tokens" not in fields, "it would be mistaken for the tokens of preemptions"
    assert (fields["id"], fields["request_id"]) == (call.generation.id, "of-the-http-request")
    assert [request.request_id for request in call.engine.requests] == [f"{call.generation.id}-{i}" for i in range(2)]


def test_an_answers_figures_are_named_without_a_look_at_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods are found by reading a folder, some 0.2 ms; answers that end together would each wait for that."""
    names = [request_figures.figure_names(of_prompt) for of_prompt in (True, False)]
    monkeypatch.setattr(request_figures, "list_figures", lambda: pytest.fail("it looked"))
    assert [request_figures.figure_names(of_prompt) for of_prompt in (True, False)] == names


async def test_a_text_with_a_token_that_the_model_does_not_have_is_refused(tokenizer: Tokenizer) -> None:
    """A tokenizer may have more tokens than the model: its embedding has no row for them, and the engine would end."""
    call = Call(tokenizer, [[1, 8191], [1, 8192]])
    with pytest.raises(ApiError, match="its text has token 8192, the model has 8,192; correct") as told:
        await call.generation.submit(None, None, "messages")
    assert (told.value.status, told.value.param, call.engine.requests) == (400, "messages", [])


async def test_a_bad_word_that_the_model_has_no_tokens_for_is_left_out(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_module, "spell_words", lambda *_: ((5, 8192), (5, 8191)))
    call = Call(tokenizer, [[1, 2]], bad_words=["mill"])
    (request,) = await call.submit()
    assert request.bad_token_ids == ((5, 8191),)
