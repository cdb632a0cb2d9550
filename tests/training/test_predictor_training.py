"""A predictor's training: captured is the attention that follows, the fit learns, and the best epoch is kept."""

import inspect
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from evals.forward import load_decoder
from evals.methods.attention_method import PromptLayer
from gpu.methods.predicted.settings import PredictedSettings
from gpu.predictor.network import PredictorNetwork, load_network
from tests.gpu.gguf_files import vocabulary, write
from tests.gpu.reference_model import FOLDER
from tests.tolerances import HISTORY_FLOAT32
from training.cli import app, predictor
from training.predictor.fit import LOGITS, Loss, Recipe, draw_pairs, fit, loss_of, recover
from training.predictor.histories import Cut, Track, capture
from training.predictor.train_predictor import TextPlan, narrated, read_prompts, split

ROOT = Path(__file__).parents[2]
CUT = Cut(block=4, sink=3, window=6, steps=5, dense=2)
CPU = torch.device("cpu")


def exact_rows(layer: PromptLayer, head: int, places: range) -> list[np.ndarray]:
    keys, queries = layer.keys[0, head // (layer.queries.shape[1] // layer.keys.shape[1])], layer.queries[0, head]
    rows = []
    for place in places:
        logits = keys[: place + 1].double().numpy() @ queries[place].double().numpy() / np.sqrt(queries.shape[1])
        weights = np.exp(logits - logits.max())
        rows.append(weights / weights.sum())
    return rows


def test_a_track_is_exact_attention_and_what_followed_it() -> None:
    decoder, targets, length = load_decoder(FOLDER, CPU, torch.float32), 4, 50
    prompt = list(range(100, 100 + length))
    tracks = capture(decoder, prompt, CUT, targets, "head", lambda: None)
    heads, layers = decoder.architecture.num_heads, decoder.architecture.num_layers
    assert len(tracks) == heads * (layers - CUT.dense)
    seen: list[PromptLayer] = []
    tokens = torch.tensor([prompt])
    decoder.prefill(tokens, torch.tensor([length]), length, length, seen.append)
    head, layer = 3, 4
    track = tracks[(layer - CUT.dense) * heads + head]
    rows = exact_rows(seen[layer], head, range(length - targets - CUT.steps, length))
    assert track.widths.tolist() == [(length - targets + 1 + number - 6) // 4 - 1 for number in range(targets)]
    for number, row in enumerate(rows):
        padded = np.zeros(52)
        padded[: len(row)] = row
        blocks = padded.reshape(-1, 4)[1 : 1 + int(track.widths.max())]
        np.testing.assert_allclose(track.maxima[number], blocks.max(1), atol=HISTORY_FLOAT32)
        if number >= CUT.steps:
            np.testing.assert_allclose(track.mass[number - CUT.steps], blocks.sum(1), atol=HISTORY_FLOAT32)
    assert np.abs(track.maxima[1:].numpy() - track.maxima[:-1].numpy()).max() > 10 * HISTORY_FLOAT32
    with pytest.raises(ValueError, match=r"a text of 50 tokens for 5 steps of history, 46 targets"):
        capture(decoder, prompt, CUT, 46, "head", lambda: None)


def test_a_groups_track_is_what_serving_gives_the_network() -> None:
    """The most of its heads in a history; a read serves all of them, so its worth is their mean."""
    decoder, targets, prompt = load_decoder(FOLDER, CPU, torch.float32), 4, list(range(100, 150))
    apart = capture(decoder, prompt, CUT, targets, "head", lambda: None)
    together = capture(decoder, prompt, CUT, targets, "group", lambda: None)
    group = decoder.architecture.group
    assert group > 1
    assert len(together) * group == len(apart)
    for number, track in enumerate(together):
        heads = apart[number * group : (number + 1) * group]
        maxima = np.stack([head.maxima.numpy() for head in heads])
        mass = np.stack([head.mass.double().numpy() for head in heads])
        np.testing.assert_array_equal(track.maxima.numpy(), maxima.max(0))
        np.testing.assert_allclose(track.mass, mass.mean(0), atol=HISTORY_FLOAT32)
        assert torch.equal(track.widths, heads[0].widths)
    assert any(not torch.equal(track.maxima, apart[0].maxima) for track in together)


def moving(seed: int, targets: int, blocks: int) -> Track:
    """A heavy block that moves on by one in each step: what the last row's maximum does not say, its trend does."""
    draw = random.Random(seed)
    maxima = torch.zeros(CUT.steps + targets, blocks)
    begin, way = draw.randrange(blocks), 1
    for step in range(CUT.steps + targets):
        maxima[step, (begin + way * step) % blocks] = 0.5
    return Track(maxima, torch.full((targets,), blocks), maxima[CUT.steps :])


@pytest.mark.parametrize("loss", ["maxima", "mass"])
def test_the_fit_learns_where_attention_moves_and_keeps_its_best_epoch(loss: Loss) -> None:
    tracks = [moving(seed, 8, 12) for seed in range(20)]
    recipe = Recipe(loss=loss, epochs=12, batch=16, per_epoch=12, learning_rate=0.02, budget_blocks=1, seed=0)
    network, epochs = fit(PredictorNetwork, tracks[:15], tracks[15:], CUT, recipe, CPU, lambda _: None, lambda: None)
    best = max(epoch.recovery for epoch in epochs)
    assert recover(network, tracks[15:], CUT, 1, CPU) == pytest.approx(best)
    still = [float(track.mass[number, heavy] > 0) for track in tracks for number in range(len(track.widths))
             for heavy in [int(track.maxima[number + CUT.steps - 1].argmax())]]  # fmt: skip
    assert best > 0.8 > sum(still) == 0, "what stood still would recover nothing"
    assert len(epochs) == 12


def test_pairs_are_histories_and_the_step_behind_them() -> None:
    tracks = [moving(1, 3, 12), moving(2, 4, 7)]
    history, follows, widths = draw_pairs(tracks, CUT, "maxima", 20, random.Random(0), CPU)
    assert set(widths.tolist()) == {7, 12}
    for row, width in enumerate(widths.tolist()):
        heavy, then = int(history[row, -1].argmax()), int(follows[row].argmax())
        assert then == (heavy + 1) % width
        assert history[row, :, width:].abs().sum() == 0


def test_losses_are_over_a_rows_own_blocks() -> None:
    """What stands behind them has no part, and a row counts by the mass that there is to recover."""
    scores, follows = (
        torch.tensor([[0.01, 0.02, 9.0], [0.03, 0.0, 0.01]]),
        torch.tensor([[0.1, 0.3, 0.0], [0.0, 0.2, 0.1]]),
    )
    widths = torch.tensor([2, 3])
    own = [(scores[0, :2].double(), follows[0, :2].double()), (scores[1].double(), follows[1].double())]
    squares = sum(float(((score - then) ** 2).sum()) for score, then in own) / 5
    assert float(loss_of("maxima", scores, follows, widths)) == pytest.approx(squares, rel=1e-5)
    crosses = [-float((then * (score * LOGITS - (score * LOGITS).exp().sum().log())).sum()) for score, then in own]
    assert float(loss_of("mass", scores, follows, widths)) == pytest.approx(sum(crosses) / 2, rel=1e-5)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_the_command_writes_a_predictor_and_its_report(kind: str, tmp_path) -> None:
    out, model = tmp_path / "made" / "predictor.safetensors", FOLDER
    if kind == "gguf":
        model = write(FOLDER, tmp_path / "model.gguf", lambda _: "F32", vocabulary(FOLDER), is_alone=True)
    settings = {"lengths": 180, "texts": 2, "targets": 4, "history": 8, "epochs": 2, "per-epoch": 2, "batch": 4}
    command = ["predictor", "--model", str(model), "--out", str(out), "--device", "cpu"]
    command += [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    load_network(out)
    with safe_open(out, "pt") as file:
        assert file.metadata()["tracks"] == "group"
    report = json.loads(out.with_suffix(".json").read_text())
    assert report["best"]["recovery"] == max(epoch["recovery"] for epoch in report["epochs"])
    assert (report["tracks"], report["held_out_tracks"]) == (20, 20)
    assert json.loads(done.stdout.splitlines()[-1])["out"] == str(out)
    for place, wrong in ((4, "x.pth"), (2, "none"), (8, "many"), (8, "180,99999")):
        refused = CliRunner().invoke(app, [*command[:place], wrong, *command[place + 1 :]])
        assert refused.exit_code == 1
        assert refused.stderr.startswith("error: ")


def test_prompts_of_tasks_end_with_their_answers_and_are_held_out_by_task() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    prompts = read_prompts(FOLDER, TextPlan((), ("needle", "variables"), (400,), 2, 4, "group", 0))
    assert [(key, len(own)) for key, own in prompts.items()] == [
        ((400, name), 2) for name in ("text", "needle", "variables")
    ]
    for tokens in prompts[400, "needle"]:
        told = tokenizer.decode(tokens)
        asked = re.search(r"What is the special magic number for ([^?]+)\?", told)
        found = re.search(r"special magic number for " + re.escape(asked[1]) + r" is (\d+)\.", told)
        assert told.split("<|assistant|>")[1].strip() == found[1]
        assert 350 < len(tokens) < 420
    fitted, held = split({key: [[(key, number)] for number in range(4)] for key in prompts})
    assert held == [(key, 3) for key in prompts]
    assert len(fitted) == 9
    with pytest.raises(ValueError, match=r"--tasks: unknown 'poem'; known: needle, "):
        read_prompts(FOLDER, TextPlan((), ("poem",), (400,), 2, 4, "group", 0))


def test_its_text_is_the_same_for_the_same_seed() -> None:
    first, again, other = narrated(1), narrated(1), narrated(2)
    sentences = [next(first) for _ in range(3)]
    assert sentences == [next(again) for _ in range(3)]
    assert sentences != [next(other) for _ in range(3)]


# --- the paper's Table 4 ----------------------------------------------------------------------------------------------


def test_training_begins_with_the_settings_that_serve() -> None:
    served, trained = PredictedSettings(weights=Path("unread")), inspect.signature(predictor).parameters
    assert (trained["history"].default, trained["sink"].default) == (served.history, served.sink_tokens)


def test_the_reference_models_predictor_is_there_and_follows_what_was_attended_to() -> None:
    network = load_network(ROOT / "deploy" / "predictors" / "reference.safetensors")
    report = json.loads((ROOT / "deploy" / "predictors" / "reference.json").read_text())
    assert report["best"]["recovery"] == max(epoch["recovery"] for epoch in report["epochs"])
    history = torch.zeros(1, 64, 40)
    history[0, :, 5], history[0, -1, 20] = 0.3, 0.3
    scores = network(history, None)[0]
    assert scores.argsort(descending=True)[0] == 5, "what was attended to in every step"
    assert scores[20] > scores[[10, 12, 30, 35]].max(), "and what was in the last"
