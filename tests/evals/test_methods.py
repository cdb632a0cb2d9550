"""Each attention method against a float64 numpy oracle of its paper's rule: one prompt and one head at a time."""

import math

import numpy as np
import pytest
import torch

from evals.methods.attention_method import DecodeMethod, MethodError, PromptLayer, Step, StepResult
from evals.methods.baselines import parse_method
from evals.methods.full import Full
from evals.methods.key_attention import column_mass
from tests.tolerances import METHOD_FLOAT32, SAMPLED_MEAN_SIGMAS

HEADS, KV_HEADS, DIM, STEPS = 4, 2, 8, 3
LENGTHS = (37, 23, 30)
GROUP = HEADS // KV_HEADS
DECODE = ("streaming", "quest", "topk", "oracle")


class Case:
    """Random prompts and decode steps of one layer; everything behind a length is NaN until its step."""

    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        longest, requests = max(LENGTHS), len(LENGTHS)
        self.q = draw.normal(size=(requests, HEADS, longest + STEPS, DIM)) * 2
        self.k = draw.normal(size=(requests, KV_HEADS, longest + STEPS, DIM))
        self.v = draw.normal(size=(requests, KV_HEADS, longest + STEPS, DIM))

    def prompt(self) -> PromptLayer:
        longest = max(LENGTHS)
        q, k, v = (torch.tensor(part, dtype=torch.float32) for part in (self.q, self.k, self.v))
        for row, length in enumerate(LENGTHS):
            q[row, :, length:], k[row, :, length:], v[row, :, length:] = (math.nan,) * 3
        return PromptLayer(0, q[:, :, :longest], q[:, :, :longest], k, v, torch.tensor(LENGTHS), longest)

    def steps(self, prompt: PromptLayer) -> list[Step]:
        """Steps in order; taking the next one writes its keys and values into the prompt's tensors."""
        return [self._step(prompt, number) for number in range(STEPS)]

    def _step(self, prompt: PromptLayer, number: int) -> Step:
        keys, values = prompt.keys.clone(), prompt.values.clone()
        lengths = torch.tensor(LENGTHS) + number + 1
        query = torch.empty(len(LENGTHS), HEADS, DIM)
        for row, length in enumerate(lengths.tolist()):
            keys[row, :, :length] = torch.tensor(self.k[row, :, :length], dtype=torch.float32)
            values[row, :, :length] = torch.tensor(self.v[row, :, :length], dtype=torch.float32)
            query[row] = torch.tensor(self.q[row, :, length - 1], dtype=torch.float32)
        longest = max(LENGTHS) + number + 1
        return Step(0, query, query, keys[:, :, :longest], values[:, :, :longest], lengths, longest)

    def logits(self, row: int, head: int, position: int, count: int) -> np.ndarray:
        return self.k[row, head // GROUP, :count] @ self.q[row, head, position] / math.sqrt(DIM)

    def attend(self, row: int, head: int, position: int, chosen: list[int]) -> tuple[np.ndarray, float]:
        """Output and lse of attention over the chosen keys."""
        logits = self.logits(row, head, position, position + 1)[chosen]
        weights = np.exp(logits - logits.max())
        lse = float(np.log(weights.sum()) + logits.max())
        return weights @ self.v[row, head // GROUP, chosen] / weights.sum(), lse

    def weights(self, row: int, head: int, position: int) -> np.ndarray:
        logits = self.logits(row, head, position, position + 1)
        weights = np.exp(logits - logits.max())
        return weights / weights.sum()


def run(case: Case, method: DecodeMethod) -> list[StepResult]:
    prompt = case.prompt()
    state = method.begin(prompt)
    return [method.step(step, state) for step in case.steps(prompt)]


def budget_tokens(fraction: float, length: int) -> int:
    return max(1, math.ceil(fraction * length))


def best(scores: np.ndarray, count: int) -> list[int]:
    return sorted(np.argsort(-scores, kind="stable")[:count].tolist())


def check(case: Case, method: DecodeMethod, rule) -> None:
    """`rule(row, head, step, length)` gives the keys that the paper's rule reads."""
    for number, result in enumerate(run(case, method)):
        for row, start in enumerate(LENGTHS):
            length = start + number + 1
            for head in range(HEADS):
                chosen = rule(row, head, number, length)
                out, lse = case.attend(row, head, length - 1, chosen)
                np.testing.assert_allclose(result.out[row, head], out, atol=METHOD_FLOAT32)
                assert abs(result.lse[row, head].item() - lse) < METHOD_FLOAT32
                assert result.keys_scored[row, head].item() == len(chosen)


def check_together(text, parse, rule, steps, index_rows):
    case = Case(31)
    for number, result in enumerate(run(case, parse(f"{text},heads=together"))[:steps]):
        for row, start in enumerate(LENGTHS):
            length = start + number + 1
            for head in range(HEADS):
                out, lse = case.attend(row, head, length - 1, rule(case, row, head, number, length))
                np.testing.assert_allclose(result.out[row, head], out, atol=METHOD_FLOAT32)
                assert abs(result.lse[row, head].item() - lse) < METHOD_FLOAT32
            rows = result.keys_scored[row, ::GROUP] + index_rows(length)
            assert torch.equal(result.rows_read[row], rows)
    apart = run(case, parse(text))[0]
    assert (apart.lse - run(case, parse(f"{text},heads=together"))[0].lse).abs().max() > METHOD_FLOAT32


def test_full_reads_every_key_once_a_group():
    case = Case(0)
    check(case, Full(), lambda row, head, step, length: list(range(length)))
    assert run(case, Full())[0].rows_read[0].tolist() == [LENGTHS[0] + 1] * KV_HEADS


def test_the_comparison_fails_when_one_key_is_dropped():
    with pytest.raises(AssertionError):
        check(Case(0), Full(), lambda row, head, step, length: list(range(1, length)))


def test_streaming_reads_sink_and_recent_tokens_together():
    case = Case(1)

    def rule(row, head, step, length):
        count = budget_tokens(0.3, length)
        return [0, 1, *range(length - (count - 2), length)]

    method = parse_method("streaming:budget=0.3,sink=2")
    check(case, method, rule)
    assert run(case, method)[0].rows_read[0, 0].item() == budget_tokens(0.3, LENGTHS[0] + 1)


def test_topk_reads_the_largest_logits():
    case = Case(2)
    check(
        case,
        parse_method("topk:budget=0.2"),
        lambda row, head, step, length: best(case.logits(row, head, length - 1, length), budget_tokens(0.2, length)),
    )


def test_topk_keeps_its_sink_and_window_whatever_their_logits():
    case = Case(3)

    def rule(row, head, step, length):
        scores = case.logits(row, head, length - 1, length)
        scores[:2] = scores[-3:] = np.inf
        return best(scores, max(5, min(9, length)))

    check(case, parse_method("topk:budget=9,sink=2,window=3"), rule)


def test_quest_ranks_pages_by_the_bound_of_their_channels():
    case, page = Case(4), 4

    def rule(row, head, step, length):
        query, bounds = case.q[row, head, length - 1], []
        for begin in range(0, length, page):
            keys = case.k[row, head // GROUP, begin : min(begin + page, length)]
            bounds.append(np.maximum(query * keys.min(0), query * keys.max(0)).sum())
        pages = best(np.array(bounds), math.ceil(budget_tokens(0.3, length) / page))
        return [key for number in pages for key in range(number * page, min(number * page + page, length))]

    check(case, parse_method("quest:budget=0.3,page=4"), rule)


def group_of(head: int) -> range:
    return range(head // GROUP * GROUP, head // GROUP * GROUP + GROUP)


def shared_topk(case, row, head, step, length):
    return best(sum(case.weights(row, one, length - 1) for one in group_of(head)), budget_tokens(0.3, length))


def shared_quest(case, row, head, step, length):
    page, masses = 4, 0
    for one in group_of(head):
        query, bounds = case.q[row, one, length - 1], []
        for begin in range(0, length, page):
            keys = case.k[row, head // GROUP, begin : min(begin + page, length)]
            bounds.append(np.maximum(query * keys.min(0), query * keys.max(0)).sum() / math.sqrt(DIM))
        raised = np.exp(np.array(bounds) - max(bounds))
        masses = masses + raised / raised.sum()
    pages = best(masses, math.ceil(budget_tokens(0.3, length) / page))
    return [key for number in pages for key in range(number * page, min(number * page + page, length))]


@pytest.mark.parametrize(
    ("text", "rule", "index_rows"),
    [
        ("topk:budget=0.3", shared_topk, lambda length: 0),
        ("quest:budget=0.3,page=4", shared_quest, lambda length: math.ceil(length / 4)),
    ],
)
def test_heads_that_choose_together_read_what_has_most_of_the_groups_attention_once(text, rule, index_rows):
    check_together(text, parse_method, rule, STEPS, index_rows)


def test_what_is_read_is_without_sink_and_window_and_heads_that_choose_apart_count_each():
    case = Case(5)
    prompt = case.prompt()
    step = case.steps(prompt)[0]

    def read(text: str) -> list[float] | None:
        method = parse_method(text)
        found = method.read_between(step, method.step(step, method.begin(prompt)))
        return None if found is None else found.tolist()

    lengths = [start + 1 for start in LENGTHS]
    apart = read("topk:budget=12,sink=2,window=4")
    assert apart == pytest.approx([GROUP * 6 / (length - 6) for length in lengths])
    assert read("topk:budget=12,sink=2,window=4,heads=together") == pytest.approx([one / GROUP for one in apart])
    assert read("quest:budget=16,page=8") > read("quest:budget=8,page=8") > [0.0] * 3
    assert read("streaming:budget=12") == [0.0] * 3
    assert read("oracle:budget=12") is None


def test_quest_by_moments_ranks_pages_by_mean_and_deviation():
    case, page = Case(4), 4

    def rule(row, head, step, length):
        query, bounds = case.q[row, head, length - 1], []
        for begin in range(0, length, page):
            keys = case.k[row, head // GROUP, begin : min(begin + page, length)]
            mean, deviation = keys.mean(0), keys.std(0)
            bounds.append((query * mean + np.abs(query) * deviation).sum())
        pages = best(np.array(bounds), math.ceil(12 / page))
        return [key for number in pages for key in range(number * page, min(number * page + page, length))]

    check(case, parse_method("quest:budget=12,page=4,bounds=moments"), rule)


def test_the_best_blocks_are_those_with_most_of_a_groups_attention():
    case, block = Case(6), 4

    def rule(row, head, step, length):
        group = range(head // GROUP * GROUP, head // GROUP * GROUP + GROUP)
        weights = np.zeros(-(-length // block) * block)
        weights[:length] = sum(case.weights(row, one, length - 1) for one in group)
        blocks = best(weights.reshape(-1, block).sum(1), 3)
        return [key for one in blocks for key in range(one * block, min(length, one * block + block))]

    check(case, parse_method("topk:budget=12,block=4,heads=together"), rule)
    first = run(case, parse_method("topk:budget=12,block=4,heads=together"))[0]
    assert (first.rows_read == first.keys_scored[:, ::GROUP]).all()


def test_oracle_sampling_is_unbiased_and_counts_distinct_keys():
    case, draws, runs = Case(9), 8, 400
    total, square = np.zeros((HEADS, DIM)), np.zeros((HEADS, DIM))
    distinct = np.zeros(HEADS)
    prompt = case.prompt()
    step = case.steps(prompt)[0]
    for seed in range(runs):
        method = parse_method(f"oracle:budget={draws},seed={seed}")
        result = method.step(step, method.begin(prompt))
        total += result.out[1].double().numpy()
        square += result.out[1].double().numpy() ** 2
        distinct += result.keys_scored[1].numpy()
    length = LENGTHS[1] + 1
    for head in range(HEADS):
        exact, _ = case.attend(1, head, length - 1, list(range(length)))
        error = np.sqrt((square[head] / runs - (total[head] / runs) ** 2) / runs)
        assert (np.abs(total[head] / runs - exact) < SAMPLED_MEAN_SIGMAS * error).all()
        weights = case.weights(1, head, length - 1)
        expected = (1 - (1 - weights) ** draws).sum()  # distinct keys among independent draws
        assert abs(distinct[head] / runs - expected) < SAMPLED_MEAN_SIGMAS * draws / math.sqrt(runs)
        shifted, _ = case.attend(1, head, length - 1, list(range(4, length)))
        assert (np.abs(total[head] / runs - shifted) > SAMPLED_MEAN_SIGMAS * error).any()


def test_oracle_sampling_reads_its_sink_and_window_exactly():
    check_all = parse_method(f"oracle:budget=4,sink=2,window={max(LENGTHS) + STEPS}")
    check(Case(10), check_all, lambda row, head, step, length: list(range(length)))


@pytest.mark.parametrize("name", [name for name in DECODE if name != "oracle"])
def test_a_method_with_the_whole_context_as_budget_equals_dense(name):
    check_dense(parse_method(f"{name}:budget=1.0"))


def check_dense(method):
    case = Case(11)
    for mine, dense in zip(run(case, method), run(case, Full()), strict=True):
        torch.testing.assert_close(mine.out, dense.out, atol=METHOD_FLOAT32, rtol=0)
        torch.testing.assert_close(mine.lse, dense.lse, atol=METHOD_FLOAT32, rtol=0)


@pytest.mark.parametrize("name", DECODE)
def test_padding_and_neighbours_do_not_change_a_row(name):
    """Row 1 alone gives what it gives in a padded batch, except for the oracle's other draws, which stay finite."""
    check_padded(parse_method(f"{name}:budget=0.3"))


def check_padded(method):
    assert all(result.out.isfinite().all() and result.lse.isfinite().all() for result in run(Case(12), method))


def test_column_masses_of_all_queries_do_not_depend_on_blocks(monkeypatch):
    case = Case(13)
    whole = column_mass(case.prompt(), 0)
    monkeypatch.setattr("evals.methods.key_attention.MAX_BLOCK_LOGITS", 5 * len(LENGTHS) * HEADS * max(LENGTHS))
    torch.testing.assert_close(column_mass(case.prompt(), 0), whole, atol=METHOD_FLOAT32, rtol=0)
    assert abs(whole[1].sum().item() - HEADS * LENGTHS[1]) < METHOD_FLOAT32 * LENGTHS[1] * HEADS


def test_oracle_sampling_errs_less_than_topk_on_flat_heads():
    """Long-tailed attention (MagicPIG, section 3): at equal distinct keys, the sample's mean is nearer."""
    draw = torch.Generator().manual_seed(0)
    context, rows = 2048, 16
    keys, values = (torch.randn(rows, 1, context, 32, generator=draw) for _ in range(2))
    values = values + keys  # what is looked up differs from the average
    query = 0.5 * torch.randn(rows, 1, 32, generator=draw)
    lengths = torch.full((rows,), context)
    step = Step(0, query, query, keys, values, lengths, context)
    prompt = PromptLayer(0, query[:, :, None], query[:, :, None], keys, values, lengths, context)
    dense = Full().step(step, None)
    oracle = parse_method("oracle:budget=0.05")
    sampled = oracle.step(step, oracle.begin(prompt))
    reads = int(sampled.keys_scored.mean().item())
    top = parse_method(f"topk:budget={reads + 1}").step(step, None)
    error = [(result.out - dense.out).norm(dim=-1).mean().item() for result in (sampled, top)]
    assert error[0] < error[1]
    peaked = Step(0, 8 * query, 8 * query, keys, values, lengths, context)
    dense, sampled = Full().step(peaked, None), oracle.step(peaked, oracle.begin(prompt))
    top = parse_method("topk:budget=0.05").step(peaked, None)
    assert (top.out - dense.out).norm(dim=-1).mean() < (sampled.out - dense.out).norm(dim=-1).mean()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("fast", ("unknown name", "quest")),
        ("quest:pages=4", ("unknown setting", "'pages'", "page")),
        ("quest:budget", ("'budget'", "key=value")),
        ("quest:budget=1.5", ("budget", "1.5", "0.05")),
        ("quest:budget=0", ("budget", "'0'")),
        ("topk:sink=-1", ("sink", "-1")),
        ("topk:sink=1,sink=2", ("sink", "twice")),
        ("topk:dense_layers=a", ("dense_layers", "0-1+16")),
    ],
)
def test_a_method_that_cannot_be_parsed_says_why(text, names):
    with pytest.raises(MethodError) as error:
        parse_method(text)
    assert all(name in str(error.value) for name in names)


def test_a_method_is_its_text():
    for text in ("full", "quest:budget=0.02,page=32", "topk:budget=64,sink=4", "topk:dense_layers=0-1+5"):
        assert parse_method(parse_method(text).label) == parse_method(text)
    assert parse_method("quest:budget=5%") == parse_method("quest:budget=0.05")
    for layers, dense in (("0-1+5", {0, 1, 5}), ("0+half", {0, 4}), ("", set())):
        method = parse_method(f"topk:dense_layers={layers}")
        assert {layer for layer in range(8) if not method.handles(layer, 8)} == dense
