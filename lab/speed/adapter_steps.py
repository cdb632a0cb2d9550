"""Time captured steps of a model with LoRA adapters, in total and by kernel: with none loaded, none used, one for all
rows, and one for each row.

`python -m lab.speed.adapter_steps [--shape NAME] [--rows N] [--rank N] [--context N]`, on a GPU: weights and adapters
are random. A step is its graph's replay, without sampling.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch.profiler import ProfilerActivity, profile

from bench.benchmark_rows import measure
from bench.decode_loop import build_runner, decode
from gpu.batching.captured_steps import StepKind
from gpu.decode.steps import Batch
from gpu.model.adapter_file import CONFIG, TENSORS, AdapterFile, read_adapter
from gpu.model.architecture import Architecture
from gpu.model.matrix_formats import matrix_parts, matrix_shapes
from gpu.model.named_shapes import named_shape
from gpu.runner import Runner
from gpu.weights.drawing import random_weights

_MODULES = {
    "query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj", "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
_WARMUPS, _REPEATS, _TRACED = 20, 200, 5


def write_adapter(folder: Path, architecture: Architecture, rank: int) -> AdapterFile:
    """Write a PEFT folder with an adapter of all modules, in bf16, and read it back."""
    tensors = {}
    for layer, spec in enumerate(architecture.layers):
        for matrix, (_, inner) in matrix_shapes(architecture, spec).items():
            for what, rows in matrix_parts(architecture, spec, matrix):
                name = f"base_model.model.model.layers.{layer}.{_MODULES[what]}"
                tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inner, dtype=torch.bfloat16) * inner**-0.5
                tensors[f"{name}.lora_B.weight"] = torch.randn(rows, rank, dtype=torch.bfloat16) * 0.1 * rank**-0.5
    save_file(tensors, folder / TENSORS)
    (folder / CONFIG).write_text(f'{{"peft_type": "LORA", "r": {rank}, "lora_alpha": {rank}}}')
    return read_adapter(folder, architecture)


@torch.inference_mode()
def time_steps(runner: Runner, numbers: list[int], context: int) -> tuple[float, Callable[[], object]]:
    """Return the milliseconds of a step whose rows have these adapters, and a function that runs it again."""
    steps, adapters, rows = runner.decode_steps, runner.decode_steps.loop.decoder.adapters, len(numbers)
    slots, places = list(range(rows)), [context] * rows
    if adapters is not None:
        for slot, number in enumerate(numbers):
            adapters.assign(slot, number)
    batch = Batch(slots, places, [None] * rows)
    steps.run(batch)
    captured = steps._find_captured(StepKind(0, False, adapts=any(numbers)), rows)
    run = (lambda: steps.run(batch)) if captured is None else captured.graph.replay
    return measure(run, runner.device, _WARMUPS, _REPEATS).ms, run


def print_kernels(run: Callable[[], object]) -> None:
    """Print the kernels that take most of a step, with their launches and microseconds."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(_TRACED):
            run()
        torch.cuda.synchronize()
    events = sorted(trace.key_averages(), key=lambda event: -event.self_device_time_total)
    for event in events[:16]:
        us, count = event.self_device_time_total / _TRACED, event.count / _TRACED
        if us:
            print(f"  {us:8.1f} us  {count:5.0f} launches  {us / count:6.2f} us each  {event.key[:80]}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b")
    for name, value in (("rows", 8), ("rank", 16), ("context", 1024)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    architecture, dtype = named_shape(given.shape), torch.bfloat16
    weights = random_weights(architecture, 1, dtype, device, lambda fraction: None)
    rows = given.rows
    with tempfile.TemporaryDirectory() as folder:
        files = [write_adapter(Path(folder), architecture, given.rank)] * rows
        without: float | None = None
        for loaded in ([], files):
            runner = build_runner(architecture, weights, rows, given.context + 16, dtype, device, loaded)
            runner.capture((rows,), lambda fraction: None)
            prompts = np.random.default_rng(0).integers(0, architecture.vocab_size, (rows, given.context))
            decode(runner, prompts.astype(np.int32), 2)  # so that slots have pages, with something in them
            cases = {"none used": [0] * rows, "one for all": [1] * rows, "one each": list(range(1, rows + 1))}
            for what, numbers in cases.items() if loaded else (("without", [0] * rows),):
                ms, run = time_steps(runner, numbers, given.context)
                without = ms if without is None else without
                print(f"{what:12} {ms:.3f} ms, {ms / without:.3f} of the step without")
                if device.type == "cuda" and what in ("without", "one each"):
                    print_kernels(run)
            runner.shutdown()


if __name__ == "__main__":
    main()
