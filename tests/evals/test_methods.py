"""Each attention method against a float64 numpy oracle of its paper's rule: one prompt and one head at a time."""

import math

import numpy as np
import pytest
import torch

from evals.methods.attending import column_mass
from evals.methods.baselines import parse_method
from evals.methods.full import Full
from evals.methods.method import DecodeMethod, MethodError, PromptLayer, Step, StepResult
from tests.tolerances import METHOD_FLOAT32, SAMPLED_MEAN_SIGMAS

HEADS, KV_HEADS, DIM, STEPS = 4, 2, 8, 3
LENGTHS = (37, 23, 30)
GROUP = HEADS // KV_HEADS
DECODE = ("streaming", "h2o", "snapkv", "quest", "topk", "oracle", "vattention")


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


@pytest.mark.parametrize(("pool", "kernel"), [("mean", 3), ("max", 1)])
def test_snapkv_keeps_what_the_end_of_the_prompt_looked_at_and_all_that_follows(pool, kernel):
    """A maximum over neighbours ties between them, and ties may fall either way: hence a kernel of one there."""
    case, observe = Case(7), 4

    def rule(row, head, step, length):
        prompt = LENGTHS[row]
        votes = np.zeros(prompt - observe)
        for position in range(prompt - observe, prompt):
            votes += case.weights(row, head, position)[: prompt - observe]
        padded = np.pad(votes, kernel // 2)
        pooled = np.array([padded[i : i + kernel].mean() for i in range(len(votes))])
        kept = best(pooled, budget_tokens(0.4, prompt) - observe)
        return kept + list(range(prompt - observe, length))

    check(case, parse_method(f"snapkv:budget=0.4,observe=4,kernel={kernel},pool={pool}"), rule)


@pytest.mark.parametrize("observe", [0, 6])
def test_h2o_evicts_the_key_that_received_least_attention_for_good(observe):
    case = Case(8)
    kept: dict[tuple[int, int], list[int]] = {}
    mass: dict[tuple[int, int], np.ndarray] = {}

    def rule(row, head, step, length):
        place, prompt = (row, head), LENGTHS[row]
        if step == 0:
            kept[place], mass[place] = list(range(prompt)), np.zeros(prompt + STEPS)
            for position in range(max(0, prompt - observe) if observe else 0, prompt):
                mass[place][: position + 1] += case.weights(row, head, position)
        count = budget_tokens(0.4, length)
        recent = math.ceil(count / 2)
        newest = [key for key in [*kept[place], length - 1] if key >= length - recent]
        older = [key for key in [*kept[place], length - 1] if key < length - recent]
        heavy = sorted(older, key=lambda key: -mass[place][key])[: count - len(newest)]
        kept[place] = sorted(heavy + newest)
        logits = case.logits(row, head, length - 1, length)[kept[place]]
        weights = np.exp(logits - logits.max())
        mass[place][kept[place]] += weights / weights.sum()
        return kept[place]

    check(case, parse_method(f"h2o:budget=0.4,observe={observe}"), rule)


def group_of(head: int) -> range:
    return range(head // GROUP * GROUP, head // GROUP * GROUP + GROUP)


def shared_topk(case, row, head, step, length):
    return best(sum(case.weights(row, one, length - 1) for one in group_of(head)), budget_tokens(0.3, length))


def shared_snapkv(case, row, head, step, length):
    prompt, observe = LENGTHS[row], 4
    votes = sum(case.weights(row, one, position)[: prompt - observe]
                for position in range(prompt - observe, prompt) for one in group_of(head))  # fmt: skip
    return best(votes, budget_tokens(0.3, prompt) - observe) + list(range(prompt - observe, length))


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


def shared_h2o(case, row, head, step, length):
    """The first step: nothing has been evicted before it."""
    mass = np.zeros(length)
    for position in range(LENGTHS[row] - 6, LENGTHS[row]):
        mass[: position + 1] += sum(case.weights(row, one, position) for one in group_of(head))
    count = budget_tokens(0.3, length)
    recent = math.ceil(count / 2)
    return best(mass[: length - recent], count - recent) + list(range(length - recent, length))


@pytest.mark.parametrize(
    ("text", "rule", "steps", "index_rows"),
    [
        ("topk:budget=0.3", shared_topk, STEPS, lambda length: 0),
        ("snapkv:budget=0.3,observe=4,kernel=1", shared_snapkv, STEPS, lambda length: 0),
        ("quest:budget=0.3,page=4", shared_quest, STEPS, lambda length: math.ceil(length / 4)),
        ("h2o:budget=0.3,observe=6", shared_h2o, 1, lambda length: 0),
    ],
)
def test_heads_that_choose_together_read_what_has_most_of_the_groups_attention_once(text, rule, steps, index_rows):
    case = Case(31)
    for number, result in enumerate(run(case, parse_method(f"{text},heads=together"))[:steps]):
        for row, start in enumerate(LENGTHS):
            length = start + number + 1
            for head in range(HEADS):
                out, lse = case.attend(row, head, length - 1, rule(case, row, head, number, length))
                np.testing.assert_allclose(result.out[row, head], out, atol=METHOD_FLOAT32)
                assert abs(result.lse[row, head].item() - lse) < METHOD_FLOAT32
            rows = result.keys_scored[row, ::GROUP] + index_rows(length)
            assert torch.equal(result.rows_read[row], rows)
    apart = run(case, parse_method(text))[0]
    assert (apart.lse - run(case, parse_method(f"{text},heads=together"))[0].lse).abs().max() > METHOD_FLOAT32


@pytest.mark.parametrize("heads", ["apart", "together"])
def test_vattention_reads_the_best_keys_and_weighs_a_uniform_sample_of_the_rest(heads):
    """Over draws the numerator and the mass are those of everything; without the weights they are not."""
    case, runs, budget, heavy, row = Case(32), 250, 12, 6, 1
    prompt = case.prompt()
    step = case.steps(prompt)[0]
    length = LENGTHS[row] + 1
    masses, numerators = np.zeros((runs, HEADS)), np.zeros((runs, HEADS, DIM))
    for seed in range(runs):
        method = parse_method(f"vattention:budget={budget},heavy=0.5,seed={seed},heads={heads}")
        result = method.step(step, method.begin(prompt))
        assert result.keys_scored[row].tolist() == [budget] * HEADS
        assert result.rows_read[row].tolist() == [budget if heads == "together" else budget * GROUP] * 2
        masses[seed] = np.exp(result.lse[row].double().numpy())
        numerators[seed] = masses[seed][:, None] * result.out[row].double().numpy()
    for head in range(HEADS):
        out, lse = case.attend(row, head, length - 1, list(range(length)))
        shared = sum(case.weights(row, one, length - 1) for one in (group_of(head) if heads == "together" else [head]))
        _, least = case.attend(row, head, length - 1, best(shared, heavy))
        assert (masses[:, head] > np.exp(least)).all(), "the best are always read"
        wanted = np.append(np.exp(lse) * out, np.exp(lse))
        got = np.concatenate([numerators[:, head], masses[:, head, None]], 1)
        errors = got.std(0) / math.sqrt(runs)
        assert (np.abs(got.mean(0) - wanted) < SAMPLED_MEAN_SIGMAS * errors).all()
        unweighted = np.exp(least) + (masses[:, head].mean() - np.exp(least)) * (budget - heavy) / (length - heavy)
        assert abs(unweighted - wanted[-1]) > SAMPLED_MEAN_SIGMAS * errors[-1]


def test_vattention_reads_best_keys_beside_its_sink_and_window():
    """Of a budget of 12 sink and window take 6, the best of the other keys 3, and the sample 3."""
    case, row, sink, window = Case(32), 0, 2, 4
    prompt = case.prompt()
    step = case.steps(prompt)[0]
    length = LENGTHS[row] + 1
    ends = [*range(sink), *range(length - window, length)]
    for seed in range(20):
        method = parse_method(f"vattention:budget=12,heavy=0.5,sink={sink},window={window},seed={seed}")
        result = method.step(step, method.begin(prompt))
        assert result.keys_scored[row].tolist() == [12] * HEADS
        for head in range(HEADS):
            others = case.weights(row, head, length - 1)
            others[ends] = -1
            _, least = case.attend(row, head, length - 1, [*ends, *best(others, 3)])
            assert result.lse[row, head] > least, "ends and the best of the others are always read"
    whole = parse_method(f"vattention:budget=6,heavy=1,sink={sink},window={window}")
    result = whole.step(step, whole.begin(prompt))
    for head in range(HEADS):
        _, lse = case.attend(row, head, length - 1, ends)
        assert abs(result.lse[row, head] - lse) < METHOD_FLOAT32, "nothing is left for others"


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
    case = Case(11)
    settings = ",observe=4" if name == "snapkv" else ""
    method = parse_method(f"{name}:budget=1.0{settings}")
    for mine, dense in zip(run(case, method), run(case, Full()), strict=True):
        torch.testing.assert_close(mine.out, dense.out, atol=METHOD_FLOAT32, rtol=0)
        torch.testing.assert_close(mine.lse, dense.lse, atol=METHOD_FLOAT32, rtol=0)


@pytest.mark.parametrize("name", DECODE)
def test_padding_and_neighbours_do_not_change_a_row(name):
    """Row 1 alone gives what it gives in a padded batch, except for the oracle's other draws, which stay finite."""
    settings = ",observe=4" if name == "snapkv" else ""
    method = parse_method(f"{name}:budget=0.3{settings}")
    assert all(result.out.isfinite().all() and result.lse.isfinite().all() for result in run(Case(12), method))


def test_column_masses_of_all_queries_do_not_depend_on_blocks(monkeypatch):
    case = Case(13)
    whole = column_mass(case.prompt(), 0)
    monkeypatch.setattr("evals.methods.attending.MAX_BLOCK_LOGITS", 5 * len(LENGTHS) * HEADS * max(LENGTHS))
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
