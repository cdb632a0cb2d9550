"""The model and its run: the folder gives the same logits elsewhere, steps lower the loss, a run resumes."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from evals.forward import load_decoder
from gpu.model.architecture import read_architecture
from gpu.weights.checkpoint import load_weights
from lab.reference.card import table_of_runs
from lab.reference.conversation_rows import ROW_KINDS, Library, make_library
from lab.reference.corpus import narrate
from lab.reference.evaluation import accuracy, exact, perplexity, place
from lab.reference.feed import Batch, draw_batch
from lab.reference.lineage import read_lineage
from lab.reference.model import REFERENCE, TINY, Llama, Shape, attend_by
from lab.reference.model_folder import read_shape, read_weights, write_folder
from lab.reference.muon import Muon, orthogonal
from lab.reference.objective import lr_at, weigh, weigh_hints
from lab.reference.reference_tokenizer import write_tokenizer
from lab.reference.score import main as score
from lab.reference.spelling import Spelling
from lab.reference.train import main
from tests.tolerances import MUON_SINGULAR_VALUES, TRAINING_LOGITS_ATOL
from training.narrative import Narrator

REFERENCE_FOLDER = Path(__file__).resolve().parents[2] / "deploy/models/reference"


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(REFERENCE_FOLDER, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def library(tokenizer_folder: Path) -> Library:
    spelling = Spelling(tokenizer_folder / "tokenizer.json")
    text = narrate(2000, 0, spelling)
    return make_library(spelling, (text,), (1.0,), 1, 0.0)


@pytest.fixture(scope="module")
def batch(library: Library) -> Batch:
    kinds = len(ROW_KINDS)
    return draw_batch(library, 256, 8, 0.25, np.ones(kinds), np.zeros(kinds), random.Random(0))


def make_model() -> Llama:
    torch.manual_seed(0)
    return Llama(TINY, torch.float32)


def logits_of(model: Llama, tokens: torch.Tensor) -> torch.Tensor:
    return functional.linear(model(tokens), model.embedding).view(*tokens.shape, -1)


def test_the_reference_shape_keeps_to_its_limits() -> None:
    assert REFERENCE.count() <= 20_000_000
    assert REFERENCE.positions >= 16_384
    assert sum(weights.numel() for weights in make_model().parameters()) == TINY.count()


@torch.no_grad()
def test_the_folder_gives_the_same_logits_in_transformers_and_in_our_decoders(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    write_folder(make_model(), tokenizer_folder, tmp_path, "# card")
    model = Llama(read_shape(tmp_path), torch.float32)
    read_weights(model, tmp_path)
    tokens = torch.randint(0, TINY.vocab_size, (2, 100), generator=torch.Generator().manual_seed(1))
    wanted = logits_of(model, tokens)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(tokens).logits
    torch.testing.assert_close(theirs, wanted, atol=TRAINING_LOGITS_ATOL, rtol=0)
    decoder = load_decoder(tmp_path, torch.device("cpu"), torch.float32)
    _, last = decoder.prefill(tokens, torch.tensor([100, 100]), 100, 101, lambda _: None)
    torch.testing.assert_close(decoder.logits(last), wanted[:, -1], atol=TRAINING_LOGITS_ATOL, rtol=0)
    architecture = read_architecture(tmp_path)
    load_weights(tmp_path, architecture, torch.float32, torch.device("cpu"), lambda _: None)
    assert architecture.max_context_tokens == TINY.positions
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template


@torch.no_grad()
def test_a_changed_layer_is_seen(tmp_path: Path, tokenizer_folder: Path) -> None:
    model = make_model()
    model.output[1].add_(0.1)
    write_folder(model, tokenizer_folder, tmp_path, "# card")
    tokens = torch.arange(50)[None]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(tokens).logits
    assert (theirs - logits_of(make_model(), tokens)).abs().max() > TRAINING_LOGITS_ATOL


def test_weights_of_another_shape_are_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    write_folder(make_model(), tokenizer_folder, tmp_path, "# card")
    other = Llama(Shape(8192, 64, 128, 3, 4, 2, 16, 16_384), torch.float32)
    with pytest.raises(ValueError, match="resume with the same --shape"):
        read_weights(other, tmp_path)


@torch.no_grad()
def test_a_layer_can_stand_twice_in_a_stack() -> None:
    tokens, model = torch.arange(40)[None], make_model()
    model.restack([1, 1])
    for weights in [*model.matrices(), model.attention_norm, model.mlp_norm]:
        assert torch.equal(weights[0], weights[1])
    again = make_model()
    again.restack([0, 1])
    torch.testing.assert_close(again(tokens), make_model()(tokens))
    assert not torch.allclose(model(tokens), again(tokens))
    with pytest.raises(ValueError, match="name one for each place"):
        model.restack([0, 2])


def test_steps_lower_the_loss_of_a_batch(batch: Batch) -> None:
    model = make_model()
    optimizers = [
        Muon(model.matrices(), 0.02, 0.95, 0.1),
        torch.optim.AdamW(model.rest(), 3e-3, (0.9, 0.95), 1e-10, 0.0),
    ]
    target = place(batch, torch.device("cpu"))
    losses = []
    for _ in range(12):
        nll, _ = model.losses(model(target.tokens[:, :-1]), target.tokens[:, 1:].flatten())
        loss = (nll * weigh(target, 1.0, 0.2)).sum()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert losses == sorted(losses, reverse=True)


def test_weights_of_the_loss_sum_to_one_each_for_text_and_answers(batch: Batch) -> None:
    target = place(batch, torch.device("cpu"))
    assert weigh(target, 2.0, 0.2).sum().item() == pytest.approx(3.0)
    only_answers = weigh(target, 2.0, 0.2) - weigh(target, 0.0, 0.2)
    assert only_answers.sum().item() == pytest.approx(2.0)
    sizes = [(end - begin, only_answers[begin].item()) for _, begin, end in target.spans.tolist()]
    (short, light), (long, heavy) = min(sizes), max(sizes)
    assert light / heavy == pytest.approx((long / short) ** 0.5, rel=1e-4)


def test_weights_of_hints_sum_to_one_and_unused_ones_weigh_nothing() -> None:
    weights = weigh_hints(torch.tensor([[0, 5, 7], [1, 6, 7], [2, 6, 7], [-1, 0, 0]]))
    assert weights.sum().item() == pytest.approx(1.0)
    assert weights[:3].min() > 0
    assert weights[3] == 0
    assert weigh_hints(torch.tensor([[-1, 0, 0]])).sum() == 0


def test_hints_are_read_from_the_middle_layer(batch: Batch) -> None:
    model = make_model()
    target = place(batch, torch.device("cpu"))
    final, middle = model.states(target.tokens[:, :-1])
    torch.testing.assert_close(final, model(target.tokens[:, :-1]))
    nll, _ = model.hint_losses(middle, target.hints[:, 1], target.hints[:, 2])
    (nll * weigh_hints(target.hints)).sum().backward()
    moved = model.query.grad.abs().amax(dim=(1, 2))
    assert moved[: TINY.middle].min() > 0
    assert moved[TINY.middle :].max() == 0
    assert REFERENCE.layers // 2 < REFERENCE.middle < REFERENCE.layers - 2


def test_an_answer_counts_only_whole() -> None:
    right = torch.tensor([True, True, False, True])
    spans = torch.tensor([[0, 0, 2], [0, 1, 3], [0, 3, 4]])
    assert exact(right, spans).tolist() == [1.0, 0.0, 1.0]


def singular_values(matrix: torch.Tensor) -> tuple[float, float]:
    values = torch.linalg.svdvals(matrix)
    return values.min().item(), values.max().item()


@pytest.mark.parametrize("shape", [(3, 48, 96), (3, 96, 48), (1, 64, 64)])
def test_muons_update_is_nearly_orthogonal(shape: tuple[int, int, int]) -> None:
    stack = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    least, most = MUON_SINGULAR_VALUES
    for matrix, made in zip(stack, orthogonal(stack), strict=True):
        if shape[1] != shape[2]:
            assert singular_values(made)[0] > least
        assert singular_values(made)[1] < most
        assert singular_values(matrix)[1] > most


def test_the_learning_rate_rises_stays_and_falls() -> None:
    assert lr_at(0.0, 0, 0.35, 0.1) < 0.05
    assert lr_at(0.5, 1000, 0.35, 0.1) == 1.0
    assert lr_at(1.0, 1000, 0.35, 0.1) == pytest.approx(0.1)
    assert lr_at(1.2, 1000, 0.35, 0.1) == pytest.approx(0.1)


def test_attention_with_shared_and_with_repeated_heads_agrees() -> None:
    query, key, value = (torch.randn(2, heads, 40, 16) for heads in (4, 2, 2))
    torch.testing.assert_close(attend_by(None, False)(query, key, value), attend_by(None, True)(query, key, value))


def test_an_untrained_model_knows_nothing(library: Library) -> None:
    model = make_model()
    assert perplexity(model, library, 512, 1024, 1) > TINY.vocab_size / 2
    scores = accuracy(model, library, 1024, 2, 4096)
    assert {"needle", "facts_two_hops", "variables", "common_words", "list", "continue"} <= set(scores)
    assert max(scores.values()) == 0.0


def test_a_run_writes_a_folder_that_another_resumes_and_that_is_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    narrator = Narrator(7)
    text = "\n".join(" ".join(narrator.sentence() for _ in range(5)) for _ in range(2000))
    (tmp_path / "novels.txt").write_text(text, encoding="utf-8")
    small = ["--text", str(tmp_path / "novels.txt"), "--stage", "tiny", "--shape", "tiny", "--workers", "1"]
    small += ["--micro-tokens", "1024", "--batch-tokens", "1024", "--minutes", "0.05", "--reserve-s", "0"]
    small += ["--eval-prompts", "1", "--eval-lengths", "512", "--tokenizer", str(REFERENCE_FOLDER)]
    main([*small, "--out", str(tmp_path / "first")])
    main([*small, "--out", str(tmp_path / "second"), "--resume", str(tmp_path / "first"), "--layers", "1", "1"])
    asked = ["--folder", str(tmp_path / "second"), "--text", str(tmp_path / "novels.txt")]
    score([*asked, "--prompts", "1", "--lengths", "512", "--batch-tokens", "1024"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["scores"]["512"]["needle"] == 0.0
    for name in ("first", "second"):
        lines = [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        assert lines[-1]["event"] == "done"
        assert AutoModelForCausalLM.from_pretrained(tmp_path / name).config.num_hidden_layers == TINY.layers
        assert "## The prompts it knows" in (tmp_path / name / "README.md").read_text()
    first, second = read_lineage(tmp_path / "second")
    assert [first] == read_lineage(tmp_path / "first")
    assert (first.layers, second.layers) == (None, (1, 1))
    card = (tmp_path / "second/README.md").read_text()
    assert f"| all | | | 0 of one GPU | {first.steps + second.steps:,} | {first.tokens + second.tokens:,} |" in card
    assert "layers 1 1 of run 1" in card
    with pytest.raises(ValueError, match="resume from a folder that training wrote"):
        read_lineage(tmp_path)


def test_the_model_that_ships_tells_the_runs_that_its_card_tells() -> None:
    runs, card = read_lineage(REFERENCE_FOLDER), (REFERENCE_FOLDER / "README.md").read_text()
    assert "\n".join(table_of_runs(runs)) in card
    assert read_shape(REFERENCE_FOLDER) == REFERENCE
