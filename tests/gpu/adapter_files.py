"""LoRA adapters for tests: drawn, written as PEFT saves them, and merged into transformers' model in float64."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ALL_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")


def write_adapter(
    folder: Path, model: Any, modules: Sequence[str] = ALL_MODULES, rank: int = 4, seed: int = 0, **config: Any
) -> Path:
    """Draw an adapter of these modules, as large as the weights beside them, and write its folder."""
    folder.mkdir(parents=True)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, module in _modules(model, modules).items():
        rows, inner = module.weight.shape
        down = torch.randn(rank, inner, generator=generator) * inner**-0.5
        up = torch.randn(rows, rank, generator=generator) * rank**-0.5
        tensors |= {f"base_model.model.{name}.lora_{side}.weight": one for side, one in (("A", down), ("B", up))}
    save_file(tensors, folder / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(modules), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(told | config))
    return folder


def merged(model: Any, folder: Path | None) -> Any:
    """Return transformers' model in float64, with the adapter of a folder added to its weights."""
    made = copy.deepcopy(model).double()
    if folder is None:
        return made
    from safetensors.torch import load_file

    config, tensors = (
        json.loads((folder / "adapter_config.json").read_text()),
        load_file(folder / "adapter_model.safetensors"),
    )
    for name, module in _modules(made, ALL_MODULES).items():
        down = tensors.get(f"base_model.model.{name}.lora_A.weight")
        if down is not None:
            up = tensors[f"base_model.model.{name}.lora_B.weight"]
            rank = len(down)
            gain = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
            module.weight.data += gain * up.double() @ down.double()
    return made


def _modules(model: Any, names: Sequence[str]) -> dict[str, Any]:
    found = {name: module for name, module in model.named_modules() if name.rpartition(".")[2] in names}
    return {name: module for name, module in found.items() if isinstance(module, torch.nn.Linear)}
