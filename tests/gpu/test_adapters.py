"""LoRA adapters beside matrices of all formats: the oracle has them merged into its weights, in float64."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu.config import GpuConfig, ModelConfig
from gpu.layers.adapters import Adapters
from gpu.model.adapter_file import AdapterFile, adapter_bytes, read_adapter
from gpu.model.architecture import read_architecture
from gpu.model.spec import ModelError
from gpu.runner import Runner
from gpu.sampling_params import SamplingParams
from gpu.step import DecodeGroup, PrefillJob, PrefillPrompt, StepPlan, WindowWrite
from gpu.weights.matrix import as_matrix
from tests.gpu.adapter_files import ALL_MODULES, merged, write_adapter
from tests.gpu.family_checkpoints import checkpoint, draw_prompt
from tests.gpu.float32_folder import write_folder
from tests.gpu.gguf_files import write
from tests.gpu.poison import poison_pool
from tests.gpu.reference_model import Pages, layer_units
from tests.gpu.small_runner import load_small
from tests.tolerances import FAMILY_LOGITS, FAMILY_LOGITS_ON_CARDS

REAL_MODEL = os.environ.get("TANDEM_REAL_MODEL")
STEPS = 6
ATTENTION = ("q_proj", "v_proj")


def load(
    folder: Path, adapters: Sequence[AdapterFile], device: Literal["cpu", "cuda"] = "cpu", **model: Any
) -> Runner:  # fmt: skip
    sizes = (1, 4) if device == "cuda" else ()
    gpu = GpuConfig(device=device, dtype="float32", threads=None, page_tokens=16, graph_batch_sizes=sizes)
    has_states = read_architecture(folder).recurrent is not None
    runner = load_small(ModelConfig(path=folder, **model), gpu, adapters=adapters, num_windows=9 if has_states else 0,
                        prefill_graph_sizes=(16,) if device == "cuda" else ())  # fmt: skip
    poison_pool(runner.pool)
    return runner


def generate(
    runner: Runner, prompts: list[np.ndarray], numbers: list[int]
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Prefill all prompts packed in one job and decode them in one batch. Return each one's tokens, and the logits that
    they were chosen by, float32 `[tokens, vocab]`.
    """
    seen: list[torch.Tensor] = []
    sampler = runner._sampler
    sample = sampler.sample

    def recording(logits: torch.Tensor, *rest: Any) -> Any:
        seen.append(logits.float().cpu())
        return sample(logits, *rest)

    sampler.sample = recording
    greedy, pages, slots = SamplingParams(temperature=0.0), Pages(runner), list(range(len(prompts)))
    job = PrefillJob(0, [
        PrefillPrompt(slot, ids, 0, len(ids), greedy, "exact", adapter=number)
        for slot, (ids, number) in enumerate(zip(prompts, numbers, strict=True))
    ])  # fmt: skip
    windows = [WindowWrite(slot + 1, None, slot) for slot in slots] if runner.pool.states is not None else []
    writes = [pages.take(slot, len(ids) + STEPS) for slot, ids in enumerate(prompts)]
    units = layer_units(job, 16, runner.architecture.num_layers)
    plan = StepPlan(page_writes=writes, window_writes=windows, new_jobs=[job], units=units)
    tokens = [[one.token_id] for one in runner.launch(plan).collect().tokens]
    for step in range(1, STEPS):
        group = DecodeGroup(slots, [len(ids) + step - 1 for ids in prompts], [step] * len(slots))
        for one in runner.launch(StepPlan(decode=[group])).collect().tokens:
            tokens[one.slot].append(one.token_id)
    runner.launch(StepPlan(released_slots=slots)).collect()
    sampler.sample = sample
    return tokens, [torch.stack([logits[slot] for logits in seen]) for slot in slots]


@torch.inference_mode()
def off(model: Any, prompt: np.ndarray, tokens: list[int], logits: torch.Tensor) -> float:
    """The largest difference of logits from a merged model's of the same text, over the largest logit."""
    text = torch.from_numpy(np.concatenate([prompt, tokens[:-1]]).astype(np.int64))[None]
    wanted = model(text).logits[0, len(prompt) - 1 :]
    return float((logits - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize(
    "name",
    [
        "llama3",
        "phi3",
        "glm4",
        "gemma3",
        "qwen3_5",
        "nemotron_h dense",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("qwen2", "qwen3", "granite", "olmo3", "mistral", "smollm3", "llama with biases")
        ),
    ],
)
def test_rows_with_different_adapters_in_one_batch_are_those_of_merged_weights(name: str, tmp_path: Path) -> None:
    """Prompts are packed, and steps have rows of both adapters and of none. MLPs without gates have none."""
    known = checkpoint(name)
    architecture = read_architecture(known.folder)
    more = ("qkv_proj", "down_proj") if name != "nemotron_h dense" else ()
    every = ALL_MODULES if more else ATTENTION
    folders = [
        write_adapter(tmp_path / "all", known.model, every, rank=5, seed=1, lora_alpha=10),
        write_adapter(tmp_path / "some", known.model, (*ATTENTION, *more), 3, 2, use_rslora=True),
    ]
    runner = load(known.folder, [read_adapter(folder, architecture) for folder in folders])
    runner._prefill.use_row_sizes((1, 3, 8))  # as with captured steps: prompts' last tokens are padded
    prompts = [draw_prompt(length) for length in (21, 40, 9, 33)]
    numbers = [1, 0, 2, 1]
    tokens, logits = generate(runner, prompts, numbers)
    models = [merged(known.model, folder) for folder in (None, *folders)]
    for prompt, number, chosen, own in zip(prompts, numbers, tokens, logits, strict=True):
        assert off(models[number], prompt, chosen, own) < FAMILY_LOGITS
        other = models[(number + 1) % 3]
        assert off(other, prompt, chosen, own) > 50 * FAMILY_LOGITS, "another adapter would be seen"
    again, _ = generate(runner, prompts[:2], [0, 0])
    plain, _ = generate(load(known.folder, []), prompts[:2], [0, 0])
    assert again == plain, "a slot's next sequence has nothing of the one before"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_captured_steps_and_layers_of_a_card_compute_them_as_merged_weights_do(name: str, tmp_path: Path) -> None:
    known = checkpoint(name)
    architecture = read_architecture(known.folder)
    folders = [write_adapter(tmp_path / str(seed), known.model, seed=seed) for seed in (1, 2)]
    runner = load(known.folder, [read_adapter(folder, architecture) for folder in folders], "cuda")
    prompts, numbers = [draw_prompt(length) for length in (21, 40, 9, 33)], [1, 0, 2, 1]
    for order in (numbers, numbers[::-1]):  # the same graphs, of slots with other adapters
        tokens, logits = generate(runner, prompts, order)
        for prompt, number, chosen, own in zip(prompts, order, tokens, logits, strict=True):
            model = merged(known.model, [None, *folders][number])
            assert off(model, prompt, chosen, own) < FAMILY_LOGITS_ON_CARDS


@pytest.mark.parametrize("weights", ["bfloat16", "fp8", "int8", "int4"])
def test_products_of_every_format_are_those_of_its_numbers_and_the_adapters(weights: Any, tmp_path: Path) -> None:
    known = checkpoint("llama3", hidden_size=128, intermediate_size=256)
    folder = write_adapter(tmp_path / "a", known.model, rank=6, seed=3)
    file = read_adapter(folder, read_architecture(known.folder))
    runner = load(known.folder, [file, file], weights=weights)
    runner._prefill.use_row_sizes((1, 2, 4))  # compiles products of every format
    projections, adapters = runner._prefill.decoder.projections, runner._prefill.decoder.adapters
    assert adapters is not None
    adapters.assign(3, 2)
    slots = torch.tensor([3, -1, 0, 3], dtype=torch.int32)
    hidden = torch.randn(4, 128, generator=torch.Generator().manual_seed(5))
    layer, eps = runner.weights.layers[1], projections.eps
    has = (slots == 3)[:, None]

    def times(name: str, x: torch.Tensor) -> torch.Tensor:
        product = adapters.products[1, name]
        whole, begin = as_matrix(layer.matrices[name]).unpack().double(), 0
        added = torch.zeros_like(whole)
        for one in product.ranges:
            own = product.owners[begin : begin + one.columns] == 2
            down, up = (part[begin : begin + one.columns][own].double() for part in (product.down, product.up))
            added[one.begin : one.begin + one.rows] += up[:, : one.rows].T @ down
            begin += one.columns
        return x @ whole.T + has * (x @ added.T)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()

    x = hidden.double()
    close = {"rtol": 1e-4, "atol": 1e-4} if weights == "bfloat16" else {"rtol": 2e-2, "atol": 2e-2}
    rows = adapters.rows(slots)
    torch.testing.assert_close(
        projections.qkv(1, hidden.clone(), adapters=rows).double(), times("qkv", norm(x, layer.attention_norm)), **close
    )
    attended = torch.randn(4, as_matrix(layer.matrices["output"]).unpack().shape[1])
    got = projections.output(1, attended, hidden.clone(), rows)
    torch.testing.assert_close(got.double(), x + times("output", attended.double()), **close)
    gate, up = times("gate_up", norm(x, layer.mlp_norm)).chunk(2, 1)
    wanted = x + times("down", torch.nn.functional.silu(gate) * up)
    torch.testing.assert_close(projections.mlp(1, hidden.clone(), slots, adapters=rows).double(), wanted, **close)
    without = projections.qkv(1, hidden.clone())
    assert torch.equal(without[1:3], projections.qkv(1, hidden.clone(), adapters=rows)[1:3])
    assert not torch.allclose(without[0], projections.qkv(1, hidden.clone(), adapters=rows)[0], rtol=0.1, atol=0.1)


def test_what_infinite_numbers_of_another_adapter_make_stays_with_it(tmp_path: Path) -> None:
    known = checkpoint("llama3")
    architecture = read_architecture(known.folder)
    fine = write_adapter(tmp_path / "fine", known.model, ATTENTION, seed=1)
    wild = write_adapter(tmp_path / "wild", known.model, ATTENTION, seed=2)
    tensors = load_file(wild / "adapter_model.safetensors")
    save_file({name: one * float("inf") if "lora_A" in name else one for name, one in tensors.items()},
              wild / "adapter_model.safetensors")  # fmt: skip
    prompts = [draw_prompt(20), draw_prompt(12)]
    runner = load(known.folder, [read_adapter(folder, architecture) for folder in (fine, wild)])
    tokens, logits = generate(runner, prompts, [1, 0])
    for prompt, chosen, own, folder in zip(prompts, tokens, logits, (fine, None), strict=True):
        assert off(merged(known.model, folder), prompt, chosen, own) < FAMILY_LOGITS


def test_their_bytes_are_counted(tmp_path: Path) -> None:
    known = checkpoint("llama3")
    architecture = read_architecture(known.folder)
    file = read_adapter(write_adapter(tmp_path / "a", known.model), architecture)
    held = Adapters([file, file], architecture, 4, torch.float32, torch.device("cpu"))
    tensors = {id(one): one for product in held.products.values() for one in (product.down, product.up)}
    own = sum(one.nbytes for one in tensors.values())
    assert own <= adapter_bytes([file, file], architecture, 4, 0) <= 1.1 * own
    assert adapter_bytes([], architecture, 4, 100) == 0


def test_an_adapter_that_would_not_be_computed_as_it_says_is_refused_by_name(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    known = checkpoint("llama3")
    architecture = read_architecture(known.folder)
    good = write_adapter(tmp_path / "good", known.model, ATTENTION)
    config = json.loads((good / "adapter_config.json").read_text())
    tensors = load_file(good / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"

    def refuse(told: str, changes: dict[str, Any], held: dict[str, torch.Tensor]) -> None:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps(config | changes))
        save_file(held, folder / "adapter_model.safetensors")
        with subtests.test(told=told), pytest.raises(ModelError, match=told):
            read_adapter(folder, architecture)

    one = torch.zeros(1)
    for told, changes in (
        ("peft_type is 'IA3'", {"peft_type": "IA3"}),
        ("use_dora is True; served: False", {"use_dora": True}),
        ("bias is 'all'", {"bias": "all"}),
        ("modules_to_save is", {"modules_to_save": ["lm_head"]}),
        ("fan_in_fan_out is True", {"fan_in_fan_out": True}),
        ("lora_alpha is None", {"lora_alpha": None}),
    ):
        refuse(told, changes, tensors)
    alone = {name: one for name, one in tensors.items() if name != f"{prefix}.lora_B.weight"}
    refuse("q_proj has lora_A alone", {}, alone)
    refuse(r"tensor .*lora_magnitude_vector is none", {}, tensors | {f"{prefix}.lora_magnitude_vector": one})
    refuse("holds no tensors", {}, {})
    wide = tensors | {f"{prefix}.lora_A.weight": torch.zeros(4, 65)}
    refuse(r"q_proj has lora_A \[4, 65\] and lora_B .*; wanted \[rank, 64\]", {}, wide)
    for module in ("model.layers.9.self_attn.q_proj", "model.embed_tokens", "lm_head", "model.layers.0.other"):
        pair = {f"base_model.model.{module}.lora_{side}.weight": torch.zeros(4, 4) for side in "AB"}
        refuse(f"{module} is (no matrix|not served)", {}, pair)
    with pytest.raises(ModelError, match="has no adapter_config"):
        read_adapter(tmp_path / "nothing", architecture)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="cannot be read"):
        read_adapter(tmp_path / "bare", architecture)
    experts = checkpoint("qwen3_moe")
    pair = {f"base_model.model.model.layers.0.mlp.experts.0.gate_proj.lora_{side}.weight": torch.zeros(4, 4)
            for side in "AB"}  # fmt: skip
    save_file(pair, tmp_path / "bare" / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="gate_proj is not served with an adapter; served: q, k, v and o"):
        read_adapter(tmp_path / "bare", read_architecture(experts.folder))
    for module in ("1.mixer.up_proj", "0.mixer.in_proj"):  # of an MLP without gates, of a layer with a state
        pair = {f"base_model.model.backbone.layers.{module}.lora_{side}.weight": torch.zeros(4, 4) for side in "AB"}
        save_file(pair, tmp_path / "bare" / "adapter_model.safetensors")
        with pytest.raises(ModelError, match=f"{module} is not served with an adapter"):
            read_adapter(tmp_path / "bare", read_architecture(checkpoint("nemotron_h dense").folder))


def test_a_pattern_gives_modules_their_own_alpha(tmp_path: Path) -> None:
    known = checkpoint("llama3")
    folder = write_adapter(tmp_path / "a", known.model, ATTENTION, 4, lora_alpha=8, alpha_pattern={"v_proj": 2})
    gains = {part.what: part.gain for part in read_adapter(folder, read_architecture(known.folder)).parts}
    assert gains == {"query": 2.0, "value": 0.5}


@pytest.mark.parametrize("name", ["llama3", "phi3"])
def test_adapters_of_a_gguf_file_are_in_the_order_of_the_folder_that_it_was_made_of(name: str, tmp_path: Path) -> None:
    """A Llama's file has rows of queries and keys in another order than the folder with which PEFT trains."""
    known = checkpoint(name)
    file = write(known.folder, tmp_path / "model-F32.gguf", lambda _: "F32")
    folder = write_adapter(tmp_path / "adapter", known.model, seed=1)
    runner = load(file, [read_adapter(folder, read_architecture(file))])
    prompts, numbers = [draw_prompt(length) for length in (21, 9)], [1, 0]
    tokens, logits = generate(runner, prompts, numbers)
    for prompt, number, chosen, own in zip(prompts, numbers, tokens, logits, strict=True):
        assert off(merged(known.model, [None, folder][number]), prompt, chosen, own) < FAMILY_LOGITS


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(REAL_MODEL is None, reason="needs TANDEM_REAL_MODEL: a GGUF file of a small chat model")
def test_rows_of_a_real_model_with_adapters_are_those_of_merged_weights(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert REAL_MODEL is not None
    file = Path(REAL_MODEL)
    write_folder(file, tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    architecture = read_architecture(file)
    folders = [
        write_adapter(tmp_path / str(seed), model, rank=8, seed=seed, lora_alpha=alpha)
        for seed, alpha in ((1, 0.8), (2, 1.6))
    ]  # fmt: skip
    runner = load(file, [read_adapter(folder, architecture) for folder in folders])
    prompts, numbers = [draw_prompt(length) for length in (11, 9, 14)], [1, 0, 2]
    tokens, logits = generate(runner, prompts, numbers)
    for number, folder in enumerate((None, *folders)):
        own = merged(model, folder)
        for slot, prompt in enumerate(prompts):
            differs = off(own, prompt, tokens[slot], logits[slot])
            assert differs < FAMILY_LOGITS if number == numbers[slot] else differs > 50 * FAMILY_LOGITS
