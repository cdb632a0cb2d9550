"""Prompts have the lengths, the shared parts and the salts that were asked for, in tokens."""

import asyncio
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench.load.load_plan import LoadPlan, PlanError, parse_lengths, parse_slo
from bench.load.prompts import ConversationReader, PromptMaker, read_conversations
from bench.load.prose import write_prose
from bench.load.tokenised_text import (
    TextPool,
    load_tokenizer,
    pool_by_ratio,
    pool_by_server,
    pool_by_tokenizer,
    split_text,
)
from tests.bench.load_plans import make_plan
from tests.tolerances import LOAD_CUT_TOKENS, LOAD_PIECE_SHARE, LOAD_SEAM_TOKENS

MODEL = Path(__file__).parents[2] / "deploy" / "models" / "reference"
TEXT = write_prose(0, 120_000)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(MODEL)


@pytest.fixture(scope="module")
def pool(tokenizer: Tokenizer) -> TextPool:
    return pool_by_tokenizer(TEXT, tokenizer, "reference")


def write_prompts(plan: LoadPlan, pool: TextPool, count: int) -> list[str]:
    maker = PromptMaker(plan, pool)
    return [maker.make(index).turns[0][0]["content"] for index in range(count)]


def count_common(tokenizer: Tokenizer, one: str, other: str) -> int:
    first, second = tokenizer.encode(one).ids, tokenizer.encode(other).ids
    same = [a == b for a, b in zip(first, second, strict=False)]
    return same.index(False) if False in same else len(same)


@pytest.mark.parametrize("length", [1, 20, 333, 2000])
def test_a_prompt_has_the_asked_number_of_tokens(pool: TextPool, tokenizer: Tokenizer, length: int) -> None:
    plan = make_plan(input_tokens=parse_lengths("", str(length)))
    for text in write_prompts(plan, pool, 10):
        assert abs(len(tokenizer.encode(text).ids) - length) <= LOAD_CUT_TOKENS


def test_a_prompt_longer_than_the_text_goes_round(tokenizer: Tokenizer) -> None:
    small = pool_by_tokenizer(write_prose(1, 2000), tokenizer, "reference")
    plan = make_plan(input_tokens=parse_lengths("", "3000"))
    assert abs(len(tokenizer.encode(write_prompts(plan, small, 1)[0]).ids) - 3000) <= LOAD_CUT_TOKENS


@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
def test_prompts_share_the_asked_share_of_their_tokens(pool: TextPool, tokenizer: Tokenizer, share: float) -> None:
    plan = make_plan(input_tokens=parse_lengths("", "800"), shared_prefix_share=share)
    prompts = write_prompts(plan, pool, 6)
    for other in prompts[1:]:
        assert abs(count_common(tokenizer, prompts[0], other) - 800 * share) <= LOAD_SEAM_TOKENS
        assert abs(len(tokenizer.encode(other).ids) - 800) <= LOAD_CUT_TOKENS


def test_a_share_wrong_by_a_hundredth_would_be_seen(pool: TextPool, tokenizer: Tokenizer) -> None:
    plan = make_plan(input_tokens=parse_lengths("", "800"), shared_prefix_share=0.51)
    one, other = write_prompts(plan, pool, 2)
    assert abs(count_common(tokenizer, one, other) - 400) > LOAD_SEAM_TOKENS


def test_a_share_of_one_makes_equal_prompts_and_none_makes_different_ones(pool: TextPool, tokenizer: Tokenizer) -> None:
    lengths = parse_lengths("", "300")
    assert len(set(write_prompts(make_plan(input_tokens=lengths, shared_prefix_share=1.0), pool, 5))) == 1
    apart = write_prompts(make_plan(input_tokens=lengths), pool, 200)
    assert len(set(apart)) == 200


def test_the_warming_prompt_begins_as_every_prompt_does(pool: TextPool, tokenizer: Tokenizer) -> None:
    plan = make_plan(input_tokens=parse_lengths("", "200-900"), shared_prefix_share=0.5, cache="warm")
    maker = PromptMaker(plan, pool)
    warm = maker.make_shared().turns[0][0]["content"]
    for index in range(10):
        job = maker.make(index)
        assert job.asked_tokens is not None
        common = count_common(tokenizer, warm, job.turns[0][0]["content"])
        assert common >= job.asked_tokens // 2 - LOAD_SEAM_TOKENS


def test_cold_prompts_differ_at_their_front_and_between_runs(pool: TextPool, tokenizer: Tokenizer) -> None:
    plan = make_plan(input_tokens=parse_lengths("", "400"), shared_prefix_share=0.5, cache="cold")
    prompts = write_prompts(plan, pool, 20) + write_prompts(plan, pool, 20)
    assert len({text[:16] for text in prompts}) == 40
    for text in prompts:
        assert abs(len(tokenizer.encode(text).ids) - 400) <= LOAD_CUT_TOKENS


def test_a_prompt_too_short_for_its_salt_is_refused(pool: TextPool) -> None:
    with pytest.raises(PlanError, match="no room for the salt"):
        write_prompts(make_plan(input_tokens=parse_lengths("", "4"), cache="cold"), pool, 1)


def test_the_same_seed_writes_the_same_prompts(pool: TextPool) -> None:
    plan = make_plan(input_tokens=parse_lengths("", "100-500"))
    assert write_prompts(plan, pool, 10) == write_prompts(plan, pool, 10)
    assert write_prompts(plan, pool, 10) != write_prompts(make_plan(input_tokens=plan.input_tokens, seed=1), pool, 10)


async def test_a_servers_counts_of_pieces_give_prompts_of_nearly_the_length(tokenizer: Tokenizer) -> None:
    async def count_piece(piece: str) -> int:
        await asyncio.sleep(0)
        return len(tokenizer.encode(piece, add_special_tokens=False).ids)

    pool = await pool_by_server(TEXT, 1, count_piece)
    plan = make_plan(input_tokens=parse_lengths("", "1000"))
    for text in write_prompts(plan, pool, 5):
        assert abs(len(tokenizer.encode(text).ids) - 1000) <= 1000 * LOAD_PIECE_SHARE


def test_a_ratio_is_said_to_be_an_estimate() -> None:
    pool = pool_by_ratio(TEXT, 4.0, "assumed")
    assert "ESTIMATED at 4.00" in pool.method
    assert len(pool.cut(0, 100)) == pytest.approx(400, abs=2)


def test_pieces_of_a_text_join_to_it() -> None:
    text = "x" * 1000 + " " + TEXT[:5000]
    assert "".join(split_text(text, 300)) == text
    assert max(map(len, split_text(text, 300))) <= 300


def test_text_beyond_ascii_is_cut_on_characters(tokenizer: Tokenizer) -> None:
    pool = pool_by_tokenizer("Größe — 漢字 🙂 naïve. " * 300, tokenizer, "reference")
    for text in write_prompts(make_plan(input_tokens=parse_lengths("", "60")), pool, 20):
        assert "�" not in text


@pytest.mark.parametrize("text", ["", "0", "-5", "a", "10-5", "5:0", "5:1:2", "1,,2", "5:-1,6:2"])
def test_lengths_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="--input-tokens: got"):
        parse_lengths("--input-tokens", text)


def test_lengths_are_drawn_with_their_shares(pool: TextPool) -> None:
    plan = make_plan(input_tokens=parse_lengths("", "20:0.8,40:0.2"))
    lengths = [PromptMaker(plan, pool).make(index).asked_tokens for index in range(300)]
    assert set(lengths) == {20, 40}
    assert 200 < lengths.count(20) < 275


def test_limits_that_make_no_sense_are_refused() -> None:
    assert parse_slo("ttft:2000,tpot:1e2") == {"ttft": 2000, "tpot": 100}
    for text in ("latency:5", "ttft", "ttft:-1", "ttft:x"):
        with pytest.raises(PlanError, match="--slo: got"):
            parse_slo(text)


def test_conversations_are_read_in_both_forms_without_their_answers(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    openai = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "theirs"},
        {"role": "user", "content": "two"},
    ]
    share = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}]
    lines = [{"messages": openai}, openai, {"conversations": share}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    first, second, third = read_conversations(path)
    assert first == second
    assert [[message["content"] for message in turn] for turn in first] == [["s", "one"], ["two"]]
    assert [[message["content"] for message in turn] for turn in third] == [["a"], ["c"]]
    warm = ConversationReader(make_plan(conversations=path, endpoint="chat", cache="warm")).make_shared()
    assert [job.turns[0][0]["content"] for job in warm] == ["s"]


@pytest.mark.parametrize("line", ["{", "5", "{}", '{"messages": [{"role": "robot", "content": "x"}]}', "[]"])
def test_a_broken_conversation_names_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "x"}]}\n' + line)
    with pytest.raises(PlanError, match="line 2"):
        read_conversations(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"url": "ftp://localhost"}, "--url"),
        ({"rate": 0.0}, "--rate"),
        ({"concurrency": None}, "neither --rate nor --concurrency"),
        ({"burstiness": 0.0}, "--burstiness"),
        ({"requests": None}, "neither --requests nor --duration"),
        ({"duration_s": 1.0}, "both --requests and --duration"),
        ({"shared_prefix_share": 1.5}, "--shared-prefix-share"),
        ({"cache": "warm"}, "--warm"),
        ({"conversations": Path("x")}, "--endpoint chat"),
        ({"conversations": Path("x"), "endpoint": "chat", "shared_prefix_share": 0.5}, "--conversations"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_plan(**changes).check()
