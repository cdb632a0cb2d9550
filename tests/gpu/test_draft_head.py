"""Heads that come with a checkpoint: what they guess is what their published description says, in float64.

The head's matrix, norms and order are written out here; its one layer is transformers' own layer of attention, with
other weights.
"""

import json
from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.engine_patches import replace_guesses
from bench.op.frame import relative_error
from gpu.config import GpuConfig, ModelConfig
from gpu.load import load_runner
from gpu.model.architecture import ModelError, load_architecture, read_architecture
from gpu.model.draft_head_shape import with_draft_head, without_draft_head
from gpu.runner import Runner
from gpu.runner_settings import LoadSettings
from gpu.sampling_params import SamplingParams
from gpu.step import TO_DRAFT, DecodeGroup, PageWrite, PrefillJob, PrefillPrompt, PrefillUnit, StepPlan, WindowWrite
from gpu.weights.matrix import as_matrix
from tests.gpu.family_checkpoints import PAGE_TOKENS, Checkpoint, checkpoint, draw_prompt
from tests.gpu.gguf_files import write
from tests.gpu.poison import poison_pool

HEADS = ["qwen3_5", "qwen3_5_moe", "qwen3_next"]
GREEDY = SamplingParams(temperature=0.0)
LAYER = 3  # of those that attend, whose weights the head has otherwise
MOST = 4  # tokens of a draft


def other(name: str, tensor: Tensor) -> Tensor:
    return tensor * (0.8 if "norm" in name else 1.2)


class Head:
    """The oracle. own: `mix`, `embedding`, `hidden` and `norm`, as a checkpoint has them."""

    def __init__(self, known: Checkpoint, own: dict[str, Tensor]) -> None:
        self.model = known.model
        self.own = {name: tensor.double() for name, tensor in own.items()}
        self.eps = self.model.config.rms_norm_eps
        self.layer = deepcopy(self.model.model.layers[LAYER]).double()
        for module in self.layer.modules():
            if hasattr(module, "config"):
                module.config._experts_implementation = "eager"  # others want float32
        for name, parameter in self.layer.named_parameters():
            parameter.data.copy_(other(name, parameter.data))

    def norm(self, rows: Tensor, name: str) -> Tensor:
        return rows * (rows.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (1 + self.own[name])

    @torch.inference_mode()
    def logits(self, token_ids: list[int], drafted: list[int]) -> Tensor:
        """What it says behind the last token, float64 `[1 + drafted, vocab]`: and behind each that is drafted."""
        base = self.model.model
        hidden = base(torch.tensor([token_ids])).last_hidden_state[0].double()  # normed already
        table, output = base.embed_tokens.weight.double(), self.model.lm_head.weight.double()
        before, said = hidden[:-1], []
        for count in range(len(drafted) + 1):
            behind = torch.tensor([*token_ids[1:], *drafted[:count]])
            joined = torch.cat([self.norm(table[behind], "embedding"), self.norm(before, "hidden")], -1)
            rows = (joined @ self.own["mix"].T)[None]
            positions = torch.arange(rows.shape[1])[None]
            rotated = positions.expand(3, 1, -1) if hasattr(base.rotary_emb, "mrope_section") else positions
            mask = torch.full((rows.shape[1],) * 2, -torch.inf, dtype=torch.float64).triu(1)[None, None]
            made: Any = self.layer(
                rows, position_embeddings=base.rotary_emb(rows, rotated), attention_mask=mask, position_ids=positions
            )
            normed = self.norm((made[0] if isinstance(made, tuple) else made)[0], "norm")
            said.append(normed[-1] @ output.T)
            before = torch.cat([before, normed[-1:]])
        return torch.stack(said)


@cache
def with_head(name: str, **changes: Any) -> tuple[Path, Head, TemporaryDirectory]:
    """A checkpoint of a family with a head in its file, as published, and the oracle."""
    known = checkpoint(name, vocab_size=256, **changes)
    owner = TemporaryDirectory(prefix="tandem-head-")
    folder = Path(owner.name)
    hidden = known.model.config.hidden_size
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * (0.3 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5)

    own = {"mix": draw(hidden, 2 * hidden), **{one: draw(hidden) for one in ("embedding", "hidden", "norm")}}
    names = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    tensors = load_file(known.folder / "model.safetensors")
    begin = f"model.layers.{LAYER}."
    of_layer = {key.removeprefix(begin): tensor for key, tensor in tensors.items() if key.startswith(begin)}
    tensors |= {f"mtp.layers.0.{key}": other(key, tensor) for key, tensor in of_layer.items()}
    tensors |= {f"{key}.weight": tensor for key, tensor in zip(names, own.values(), strict=True)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((known.folder / "config.json").read_text())
    return folder, Head(known, own), owner


def load(folder: Path, drafts: bool = True, device: str = "cpu") -> Runner:
    runner = load_runner(
        ModelConfig(path=folder),
        GpuConfig(device=device, dtype="float32", page_tokens=PAGE_TOKENS, check_coverage=device == "cpu"),
        LoadSettings(max_running=12, max_context_tokens=512, chunk_tokens=64, max_hidden_tokens=512, num_pages=40,
                     num_windows=2, drafts=drafts),
        on_progress=lambda stage, fraction: None,
    )  # fmt: skip
    poison_pool(runner.pool)
    return runner


class Decoding:
    """One prompt in slot 0, in units of 64 tokens, and steps behind it. said: logits of the head in the last step."""

    def __init__(self, runner: Runner, prompt: np.ndarray, cached: int = 0) -> None:
        self.runner = runner
        self.said: list[Tensor] = []
        guess = runner._followers._guess

        def listening(batch: Any) -> Tensor:
            logits = guess(batch)
            self.said.append(logits.clone().cpu())
            return logits

        runner._followers._guess = listening
        units = [
            PrefillUnit(0, layer, begin, min(begin + 64, len(prompt) - cached))
            for layer in range(runner.architecture.main_layers)
            for begin in range(0, len(prompt) - cached, 64)
        ]
        job = PrefillJob(0, [PrefillPrompt(0, prompt, cached, len(prompt), GREEDY, "exact")])
        plan = StepPlan(
            page_writes=[PageWrite(0, 0, range(20))], window_writes=[WindowWrite(1, None, 0)], new_jobs=[job],
            units=units,
        )  # fmt: skip
        self.num_prompt = len(prompt)
        self.text = [token.token_id for token in runner.launch(plan).collect().tokens]

    def step(self, drafts: list[int] | int = 0) -> list[int]:
        """Tokens that a step draws: with so many drafted ones by the head, or with these in their place."""
        count = drafts if isinstance(drafts, int) else len(drafts)
        given = iter([] if isinstance(drafts, int) else drafts)
        replace_guesses(
            self.runner, None if isinstance(drafts, int) else lambda tokens: torch.full_like(tokens, next(given))
        )
        self.said.clear()
        position = self.num_prompt + len(self.text) - 1
        group = DecodeGroup([0], [position], [len(self.text)], drafts=[(TO_DRAFT,) * count] if count else None)
        told = [token.token_id for token in self.runner.launch(StepPlan(decode=[group])).collect().tokens]
        self.text += told
        return told


def off(said: list[Tensor], wanted: Tensor) -> float:
    return float((torch.cat(said).double() - wanted).abs().max() / wanted.std())


def miss(token_id: int) -> int:
    return (token_id + 1) % 256


@cache
def greedy(name: str, length: int, **changes: Any) -> list[int]:
    decoding = Decoding(load(with_head(name, **changes)[0], drafts=False), draw_prompt(length, 256))
    for _ in range(30):
        decoding.step()
    return decoding.text


def follow(decoding: Decoding, head: Head, prompt: np.ndarray, text: list[int]) -> float:
    """How far the head is off, at most, over steps of which every number of drafted tokens is drawn, and steps without
    drafts between them.
    """
    most = 0.0
    for number_right in (0, 2, None, 4, 1, None, None, 3, 0):
        begin = len(decoding.text)
        if number_right is None:
            assert decoding.step() == text[begin : begin + 1]
            continue
        follow = text[begin : begin + MOST]
        given = [*follow[:number_right], *map(miss, follow[number_right:])]
        assert decoding.step(given) == text[begin : begin + number_right + 1]
        wanted = head.logits([*prompt.tolist(), *text[:begin]], given[:-1])
        most = max(most, off(decoding.said, wanted))
    return most


@pytest.mark.parametrize(("name", "length"), [*((name, 70) for name in HEADS), ("qwen3_5", 1), ("qwen3_5", 2)])
def test_what_a_head_guesses_is_what_its_description_says_and_no_token_changes(name: str, length: int) -> None:
    folder, head, _ = with_head(name)
    prompt, text = draw_prompt(length, 256), greedy(name, length)
    assert follow(Decoding(load(folder), prompt), head, prompt, text) < 2e-4


@pytest.mark.parametrize("fault", ["order", "stale", "neighbour", "first"])
def test_a_head_that_is_wrong_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Power: hidden state and embedding change places; hidden states, and rows, that are not followed; the first cell
    is attended to.
    """
    folder, head, _ = with_head("qwen3_5")
    length = 2 if fault == "first" else 70
    prompt, text = draw_prompt(length, 256), greedy("qwen3_5", length)
    runner = load(folder)
    own, draft = runner.decode_steps.loop.head, runner.weights.draft
    assert own is not None
    assert draft is not None
    if fault == "order":
        draft.mix.copy_(torch.cat(draft.mix.chunk(2, 1)[::-1], 1))
    elif fault == "stale":
        monkeypatch.setattr(own, "follow", lambda rows, token_ids, normed: None)
        runner.pool.key_pages[own.layer].zero_()
        runner.pool.value_pages[own.layer].zero_()
    elif fault == "neighbour":
        monkeypatch.setattr(own, "_before", lambda rows: own.recent.index_select(0, own._places(rows, 2)))
    else:
        monkeypatch.setattr(own, "bounds", lambda rows, heads: None)
    assert follow(Decoding(runner, prompt), head, prompt, text) > 0.02


def test_behind_a_prefix_that_was_there_the_head_has_one_row_without_a_hidden_state() -> None:
    """Pages of the first 64 tokens are another slot's in all layers, the head's too: rows are finite, and near."""
    folder, head, _ = with_head("qwen3_5")
    prompt, text = draw_prompt(80, 256), greedy("qwen3_5", 80)
    whole = Decoding(load(folder), prompt)
    begun = Decoding(load(folder), prompt)
    layer = begun.runner.architecture.main_layers
    cells = [64]
    for runner, zeros in ((whole.runner, False), (begun.runner, True)):
        own = runner.decode_steps.loop.head
        assert own is not None
        if zeros:
            at = torch.tensor(cells)
            own.write(torch.from_numpy(prompt[cells].astype(np.int64)), torch.zeros(1, own.recent.shape[1]), at, at,
                      torch.zeros(1, dtype=torch.int32))  # fmt: skip
    given = [text[1], text[2], miss(text[3])]
    assert whole.step(given) == begun.step(given) == text[1:4]
    wanted = head.logits([*prompt.tolist(), text[0]], given[:-1])
    assert off(whole.said, wanted) < 2e-4
    assert torch.isfinite(torch.cat(begun.said)).all()
    assert 1e-3 < off(begun.said, wanted) < 1.0
    assert not whole.runner.pool.key_pages[layer][0].isnan().any()


def test_a_head_is_read_where_a_profile_drafts_by_it_and_is_passed_over_elsewhere() -> None:
    folder = with_head("qwen3_5_moe")[0]
    plain = load_architecture(ModelConfig(path=folder))
    assert (plain.draft_heads, plain.draft_layers) == (1, 0)
    whole = load_architecture(ModelConfig(path=folder), drafts=True)
    assert (whole.num_layers, whole.main_layers) == (plain.num_layers + 1, plain.num_layers)
    assert without_draft_head(whole).layers == plain.layers
    assert with_draft_head(plain) == whole
    assert whole.num_weights > plain.num_weights


@cache
def file_with_head(name: str, kind: str = "F32") -> tuple[Path, Head, TemporaryDirectory]:
    """Return the same as one file, as llama.cpp writes it, with the head as one more layer."""
    folder, head, _ = with_head(name, **({"mlp_only_layers": ()} if name == "qwen3_next" else {}))
    owner = TemporaryDirectory(prefix="tandem-head-")
    path = write(folder, Path(owner.name) / "model.gguf", lambda theirs: kind, is_alone=True)
    return path, head, owner


@pytest.mark.parametrize("name", HEADS)
def test_the_head_of_a_gguf_file_guesses_what_its_description_says(name: str) -> None:
    """And the file is served without it, by the layers that are the model's."""
    path, head, _ = file_with_head(name)
    plain = load_architecture(ModelConfig(path=path))
    assert (plain.num_layers, plain.draft_heads, plain.draft_layers) == (4, 1, 0)
    prompt, text = draw_prompt(70, 256), Decoding(load(path, drafts=False), draw_prompt(70, 256))
    for _ in range(30):
        text.step()
    assert follow(Decoding(load(path), prompt), head, prompt, text.text) < 2e-4


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_a_head_in_blocks_is_what_its_file_was_rounded_from(name: str) -> None:
    """Q8_0, matrix by matrix, of the layer and of the head; norms are the checkpoint's."""
    (ours, _, _), (theirs, _, _) = file_with_head(name, "Q8_0"), file_with_head(name)
    packed, plain = load(ours).weights, load(theirs).weights
    assert packed.draft is not None
    assert plain.draft is not None
    pairs = [(packed.draft.mix, plain.draft.mix)]
    for matrix, stored in packed.layers[-1].matrices.items():
        pairs.append((as_matrix(stored).unpack(), as_matrix(plain.layers[-1].matrices[matrix]).unpack()))
    assert all(1e-3 < relative_error(got, wanted) < 1e-2 for got, wanted in pairs)
    folder = load(with_head(name)[0]).weights.draft
    assert folder is not None
    for norm in ("embedding_norm", "hidden_norm", "norm"):
        assert torch.allclose(getattr(packed.draft, norm), getattr(folder, norm), atol=1e-6)


def test_a_gguf_file_of_heads_alone_and_one_without_are_refused_by_name(tmp_path: Path) -> None:
    folder = with_head("qwen3_5")[0]
    own = {"qwen35.nextn_predict_layers": 5}
    with pytest.raises(ModelError, match=r"nextn_predict_layers is 5; wanted less than 5, all layers that the file"):
        read_architecture(write(folder, tmp_path / "many.gguf", lambda theirs: "F32", own, is_alone=True))
    without = write(checkpoint("qwen3_5").folder, tmp_path / "none.gguf", lambda theirs: "F32", is_alone=True)
    with pytest.raises(ModelError, match=r"draft: mtp: .* has no head that guess tokens"):
        load_architecture(ModelConfig(path=without), drafts=True)


def test_a_checkpoint_without_a_head_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"draft: mtp: .* has no head that guess tokens; want a checkpoint with one"):
        with_draft_head(read_architecture(checkpoint("qwen3_5").folder))
    with pytest.raises(ModelError, match=r"draft: mtp: tiny has no head"):
        load_architecture(ModelConfig(random_weights="tiny"), drafts=True)
    folder = with_head("qwen3_5")[0]
    tensors = load_file(folder / "model.safetensors")
    del tensors["mtp.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text())))
    load(tmp_path, drafts=False)
    with pytest.raises(ModelError, match=r"tensor mtp\.norm\.weight is missing"):
        load(tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("name", HEADS)
def test_captured_drafts_on_a_card_are_those_of_the_description(name: str) -> None:
    """In float32, by graphs; kernels serve no heads of 32."""
    folder, head, _ = with_head(name, head_dim=64)
    prompt, text = draw_prompt(70, 256), greedy(name, 70, head_dim=64)
    runner = load(folder, device="cuda")
    assert runner.decode_steps._drafts
    assert follow(Decoding(runner, prompt), head, prompt, text) < 1e-2
