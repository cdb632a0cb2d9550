"""Predicted blocks against the paper's algorithm in numpy, and what the network that is shipped follows."""

import inspect
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from evals.methods.attention_method import MethodError
from evals.methods.full import Full
from gpu.methods.predicted.settings import PredictedSettings
from gpu.predictor.network import PredictorNetwork, load_network, save_network
from lab.methods import parse_method
from lab.methods.predicted import Predicted
from tests.evals.test_methods import GROUP, HEADS, LENGTHS, STEPS, Case, best, check, run
from tests.gpu import predictor_oracle
from tests.tolerances import METHOD_FLOAT32, SAMPLED_MEAN_SIGMAS
from training.cli import predictor

ROOT = Path(__file__).parents[2]
BLOCK, HISTORY, SINK, WINDOW, BUDGET = 4, 6, 3, 5, 18


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a network that ranks blocks by what it has seen of them, roughly: random, but of activations
    above zero.
    """
    network = PredictorNetwork()
    parameters = predictor_oracle.random_parameters(4)
    network.load_state_dict({name: torch.from_numpy(value).float() for name, value in parameters.items()})
    path = tmp_path_factory.mktemp("predictor") / "random.safetensors"
    save_network(network, path, {})
    return path


def label(weights: Path, **settings: object) -> str:
    given = {"budget": BUDGET, "block": BLOCK, "history": HISTORY, "sink": SINK, "window": WINDOW,
             "stored": "float32", "dense_layers": "", **settings}  # fmt: skip
    return f"predicted:weights={weights}," + ",".join(f"{name}={value}" for name, value in given.items())


def maxima(weights: np.ndarray) -> np.ndarray:
    """Return block maxima in rows long enough for any context of the case."""
    padded = np.zeros(BLOCK * (max(LENGTHS) // BLOCK + 2))
    padded[: len(weights)] = weights
    return padded.reshape(-1, BLOCK).max(1)


def simulate(
    case: Case, group: str, calibrate: int, every: int = 1, unread: str = "zero"
) -> dict[tuple[int, int, int], list[int]]:
    """Return keys that each (row, head, step) reads, by Algorithm 1 of the paper on a history of what was read, and of
    the other blocks nothing or what it had.
    """
    parameters, chosen = predictor_oracle.random_parameters(4), {}
    sink_blocks = math.ceil(SINK / BLOCK)
    for row, start in enumerate(LENGTHS):
        past = range(start - HISTORY, start)
        history = [[maxima(case.weights(row, head, place)) for place in past] for head in range(HEADS)]
        for step in range(STEPS):
            length = start + step + 1
            cut = (length - WINDOW) // BLOCK
            count = (BUDGET - sink_blocks * BLOCK - (length - cut * BLOCK)) // BLOCK
            rows = np.array([of_head[-HISTORY:] for of_head in history])[:, :, sink_blocks:cut]
            if group == "before":
                rows = rows.reshape(-1, GROUP, *rows.shape[1:]).max(1)
            if step % every == 0:
                scores = np.array([predictor_oracle.predict(one, parameters) for one in rows])
                if group == "after":
                    scores = scores.reshape(-1, GROUP, scores.shape[1]).max(1)
                scores = np.repeat(scores, HEADS // len(scores), 0)
            for head in range(HEADS):
                blocks = [sink_blocks + number for number in best(scores[head], count)]
                middle = [key for one in blocks for key in range(one * BLOCK, (one + 1) * BLOCK)]
                keys = [*range(sink_blocks * BLOCK), *middle, *range(cut * BLOCK, length)]
                chosen[row, head, step] = keys
                mass = case.weights(row, head, length - 1)
                is_whole = (step + 1) % calibrate == 0
                if not is_whole:
                    kept = np.zeros_like(mass)
                    kept[keys] = mass[keys] / mass[keys].sum()
                    mass = kept
                noted = maxima(mass)
                if unread == "last" and not is_whole:
                    others = np.setdiff1d(np.arange(len(noted)), np.array(keys) // BLOCK)
                    noted[others] = history[head][-1][others]
                history[head].append(noted)
    return chosen


@pytest.mark.parametrize("group", ["after", "before", "apart"])
@pytest.mark.parametrize(("calibrate", "every"), [(1, 1), (2, 1), (9, 1), (1, 2)])
def test_what_is_read_is_what_the_papers_algorithm_chooses(group, calibrate, every, weights):
    case = Case(21)
    chosen = simulate(case, group, calibrate, every)
    method = parse_method(label(weights, group=group, calibrate=calibrate, every=every))
    check(case, method, lambda row, head, step, length: chosen[row, head, step])
    first = run(case, method)[0]
    together = first.keys_scored.view(len(LENGTHS), -1, GROUP)
    assert (first.rows_read == (together.sum(-1) if group == "apart" else together[..., 0])).all()
    assert (first.keys_scored <= BUDGET).all()


@pytest.mark.parametrize("seed", [20, 24, 30])
def test_blocks_that_are_not_read_may_keep_what_a_history_had(seed, weights):
    case = Case(seed)
    chosen = simulate(case, "apart", 3, unread="last")
    method = parse_method(label(weights, group="apart", calibrate=3, unread="last"))
    check(case, method, lambda row, head, step, length: chosen[row, head, step])
    assert chosen != simulate(case, "apart", 3)


def test_a_choice_by_other_heads_or_another_history_is_seen(weights):
    case = Case(21)
    chosen = simulate(case, "after", 2)
    for settings in ({"group": "apart"}, {"group": "after", "history": HISTORY + 1}, {"group": "after", "every": 2}):
        with pytest.raises(AssertionError):
            check(case, parse_method(label(weights, **settings, calibrate=2)), lambda *place: chosen[place[:3]])


@pytest.mark.parametrize("group", ["after", "before", "apart"])
def test_with_the_whole_context_as_budget_it_equals_dense(group, weights):
    case = Case(22)
    method = parse_method(label(weights, budget=400, group=group, stored="uint8", rotate=3))
    for mine, dense in zip(run(case, method), run(case, Full()), strict=True):
        torch.testing.assert_close(mine.out, dense.out, atol=METHOD_FLOAT32, rtol=0)
        torch.testing.assert_close(mine.lse, dense.lse, atol=METHOD_FLOAT32, rtol=0)


def test_what_is_not_read_is_sampled_by_tables_of_the_others_and_never_comes_into_a_history(weights):
    case, prompt = Case(23), Case(23).prompt()
    every = "group=before,calibrate=2,rest=sampled,bits_per_table=1,num_tables=400"
    for mine, dense in zip(run(case, parse_method(label(weights) + "," + every)), run(case, Full()), strict=True):
        torch.testing.assert_close(mine.out, dense.out, atol=METHOD_FLOAT32, rtol=0)
        torch.testing.assert_close(mine.lse, dense.lse, atol=METHOD_FLOAT32, rtol=0)
        assert (mine.keys_scored == dense.keys_scored).all()
    few = ",rest=sampled,bits_per_table=3,num_tables=8"
    methods = [parse_method(label(weights, group="before") + more) for more in ("", few)]
    states = [method.begin(prompt) for method in methods]
    for step in case.steps(prompt):
        dropped, sampled = (method.step(step, state) for method, state in zip(methods, states, strict=True))
        assert torch.equal(states[0].history.ring, states[1].history.ring)
        assert (sampled.lse >= dropped.lse).all()
        assert (sampled.keys_scored >= dropped.keys_scored).all()
        assert (sampled.keys_scored > dropped.keys_scored).any()
        assert (sampled.rows_read > dropped.rows_read).all(), "tables are read whatever is found"


def test_over_projections_the_mass_of_predicted_blocks_and_a_sample_of_the_rest_is_the_whole(weights):
    case, draws = Case(24), 24
    exact = [result.lse for result in run(case, Full())]
    found = np.empty((draws, STEPS, len(LENGTHS), HEADS))
    for seed in range(draws):
        text = f"group=before,rest=sampled,bits_per_table=2,num_tables=6,seed={seed}"
        results = run(case, parse_method(label(weights) + "," + text))
        found[seed] = [(one.lse - whole).exp() for one, whole in zip(results, exact, strict=True)]
    of_draws = found.mean((1, 2, 3))
    assert abs(of_draws.mean() - 1) < SAMPLED_MEAN_SIGMAS * of_draws.std(ddof=1) / draws**0.5
    assert of_draws.std() > 0
    without = run(case, parse_method(label(weights, group="before")))
    assert np.mean([(one.lse - whole).exp() for one, whole in zip(without, exact, strict=True)]) < 0.95


def test_a_predictor_without_weights_says_what_it_needs():
    with pytest.raises(MethodError, match=r"no weights; give weights=FILE, made by `tandem train predictor`"):
        run(Case(0), parse_method("predicted:budget=20"))


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


def test_training_begins_with_what_serves_and_the_method_with_the_papers_settings():
    served, trained = PredictedSettings(weights=Path("unread")), inspect.signature(predictor).parameters
    assert (trained["history"].default, trained["sink"].default) == (served.history, served.sink_tokens)
    paper = Predicted(weights="unread")
    own = ("history", "every", "rotate", "sink", "window", "calibrate", "unread")
    assert [getattr(paper, name) for name in own] == [64, 1, 0, 64, 64, 5, "zero"]


def test_the_reference_models_predictor_is_there_and_follows_what_was_attended_to():
    network = load_network(ROOT / "deploy" / "predictors" / "reference.safetensors")
    report = json.loads((ROOT / "deploy" / "predictors" / "reference.json").read_text())
    assert report["best"]["recovery"] == max(epoch["recovery"] for epoch in report["epochs"])
    history = torch.zeros(1, 64, 40)
    history[0, :, 5], history[0, -1, 20] = 0.3, 0.3
    scores = network(history, None)[0]
    assert scores.argsort(descending=True)[0] == 5, "what was attended to in every step"
    assert scores[20] > scores[[10, 12, 30, 35]].max(), "and what was in the last"
