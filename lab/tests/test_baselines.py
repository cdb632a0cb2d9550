"""H2O, SnapKV and vAttention against a float64 numpy oracle of their papers' rules."""

import math
import subprocess
import sys

import numpy as np
import pytest

from lab.methods import parse_method
from tests.evals.test_methods import (
    DIM,
    GROUP,
    HEADS,
    LENGTHS,
    STEPS,
    Case,
    best,
    budget_tokens,
    check,
    check_dense,
    check_padded,
    check_together,
    group_of,
)
from tests.tolerances import METHOD_FLOAT32, SAMPLED_MEAN_SIGMAS


@pytest.mark.parametrize(("pool", "kernel"), [("mean", 3), ("max", 1)])
def test_snapkv_keeps_what_the_end_of_the_prompt_looked_at_and_all_that_follows(pool, kernel):
    """Take a kernel of one for maxima: over neighbours these tie, and ties may fall either way."""
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


def shared_snapkv(case, row, head, step, length):
    prompt, observe = LENGTHS[row], 4
    votes = sum(case.weights(row, one, position)[: prompt - observe]
                for position in range(prompt - observe, prompt) for one in group_of(head))  # fmt: skip
    return best(votes, budget_tokens(0.3, prompt) - observe) + list(range(prompt - observe, length))


def shared_h2o(case, row, head, step, length):
    """Choose for the first step: nothing has been evicted before it."""
    mass = np.zeros(length)
    for position in range(LENGTHS[row] - 6, LENGTHS[row]):
        mass[: position + 1] += sum(case.weights(row, one, position) for one in group_of(head))
    count = budget_tokens(0.3, length)
    recent = math.ceil(count / 2)
    return best(mass[: length - recent], count - recent) + list(range(length - recent, length))


@pytest.mark.parametrize(
    ("text", "rule", "steps"),
    [
        ("snapkv:budget=0.3,observe=4,kernel=1", shared_snapkv, STEPS),
        ("h2o:budget=0.3,observe=6", shared_h2o, 1),
    ],
)
def test_heads_that_choose_together_read_what_has_most_of_the_groups_attention_once(text, rule, steps):
    check_together(text, parse_method, rule, steps, lambda length: 0)


@pytest.mark.parametrize("heads", ["apart", "together"])
def test_vattention_reads_the_best_keys_and_weighs_a_uniform_sample_of_the_rest(heads):
    """Compare means over draws: numerator and mass are those of everything; without the weights they are not."""
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
    """Share a budget of 12: sink and window take 6, the best of the other keys 3, and the sample 3."""
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


@pytest.mark.parametrize("name", ["h2o", "snapkv", "vattention"])
def test_a_method_with_the_whole_context_as_budget_equals_dense_and_padding_does_not_change_a_row(name):
    settings = ",observe=4" if name == "snapkv" else ""
    check_dense(parse_method(f"{name}:budget=1.0{settings}"))
    check_padded(parse_method(f"{name}:budget=0.3{settings}"))


def test_the_laboratorys_command_knows_its_methods() -> None:
    """Ask a process of its own: here they are registered."""
    asked = [sys.executable, "-m", "lab", "eval", "fidelity", "--model", "none", "--method", "nonsense"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "h2o, snapkv, vattention" in done.stderr
