"""Time vLLM, in this process, at the rows of `peer_rows`: `python -m lab.speed.vllm_rows KIND FILE --rows ROWS`.

It needs vLLM on the Python path, and prints its version. Weights are random, in the shape of Llama-3.1-8B, or of
Qwen3-30B-A3B (`moe`). The engine is stepped by hand, so that requests come when they are due. It reports tokens one by
one only for rows that need their times. The module imports neither torch nor Tandem's engine.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.speed.peer_rows import PeerRow, choose_rows, describe_row, rate_of, read_rows, summarise_row, write_row
from lab.speed.token_turns import TokenLoad, Turn, draw_tokens

KINDS = ("bf16", "fp8", "int4", "awq", "moe")
NOT_INSTALLED = 3
_FIRST_STEPS = 16  # first steps of an answer, in which prompts may still be computed
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}  # fmt: skip
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "bos_token_id": 128000, "eos_token_id": 128001,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
}  # fmt: skip
_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "hidden_act": "silu", "max_position_embeddings": 40960, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
_QUANTIZATION: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "int4": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
            "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": False,
        }}},
    },
}  # fmt: skip


def model_config(kind: str) -> dict[str, Any]:
    """Return the contents of the model's config.json."""
    shape = _MOE if kind == "moe" else _LLAMA
    return shape | ({"quantization_config": _QUANTIZATION[kind]} if kind in _QUANTIZATION else {})


class Stepper:
    """An engine of vLLM that is stepped by hand. engine: its LLMEngine. sampling: makes the parameters of an answer of
    a given length; its tokens are reported one by one, or all at the end, which costs the engine less.
    """

    def __init__(self, engine: Any, sampling: Any) -> None:
        self._engine = engine
        self._sampling = sampling
        self._number = 0
        self._step_ends: list[float] = []

    def step_s(self, tokens: int) -> float:
        """Return the seconds of a step of the last run, if its answers of `tokens` tokens were drawn in step."""
        count = min(max(1, tokens - _FIRST_STEPS), len(self._step_ends) - 1)
        return (self._step_ends[-1] - self._step_ends[-1 - count]) / count

    def run(self, load: TokenLoad, tells_each: bool = True) -> list[Turn]:
        """Run a load to its last token, and return all turns."""
        self._step_ends = []
        arrivals = load.arrivals()
        began_s = time.perf_counter()
        due = [began_s + (0.0 if arrivals is None else arrivals[request]) for request in range(load.requests)]
        room = load.concurrency or load.requests
        waiting = list(range(load.requests))
        open_turns: dict[str, tuple[int, int, list[int], Turn]] = {}
        finished: list[Turn] = []
        while waiting or open_turns:
            while waiting and len(open_turns) < room and due[waiting[0]] <= time.perf_counter():
                request = waiting.pop(0)
                self._begin(load, request, 0, [], due[request], open_turns, tells_each)
            if not open_turns:
                time.sleep(max(0.0, due[waiting[0]] - time.perf_counter()))
                continue
            outputs = self._engine.step()
            now = time.perf_counter()
            self._step_ends.append(now)
            for output in outputs:
                name = output.request_id
                request, number, prompt, turn = open_turns[name]
                token_ids = list(output.outputs[0].token_ids)
                if token_ids:
                    turn.times_s.append(now)
                    turn.token_ids += token_ids
                if output.finished:
                    del open_turns[name]
                    finished.append(turn)
                    if number + 1 < load.turns:
                        before = prompt + turn.token_ids
                        self._begin(load, request, number + 1, before, now, open_turns, tells_each)
        return finished

    def _begin(
        self, load: TokenLoad, request: int, number: int, before: list[int], due_s: float,
        open_turns: dict[str, tuple[int, int, list[int], Turn]], tells_each: bool,
    ) -> None:  # fmt: skip
        prompt = before + draw_tokens(load, request, number)
        name = f"{self._number}"
        self._number += 1
        turn = Turn(due_s, time.perf_counter())
        open_turns[name] = request, number, prompt, turn
        self._engine.add_request(name, {"prompt_token_ids": prompt}, self._sampling(load.tokens_out, tells_each))


def open_vllm(kind: str, rows: Sequence[PeerRow], kv: str) -> Stepper:
    """Start vLLM. Raises ImportError if it is not installed."""
    os.environ.update(_ENVIRONMENT)
    os.environ.setdefault("VLLM_CACHE_ROOT", os.path.join(tempfile.gettempdir(), "vllm-cache"))
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    folder = Path(tempfile.mkdtemp(prefix=f"peer-{kind}-"))
    (folder / "config.json").write_text(json.dumps(model_config(kind)))
    began = time.perf_counter()
    llm = LLM(
        str(folder), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=0, max_num_seqs=64,
        max_model_len=max(row.max_context_tokens for row in rows), gpu_memory_utilization=0.9, kv_cache_dtype=kv,
        enable_prefix_caching=True, attention_config={"backend": "FLASH_ATTN"},
    )  # fmt: skip
    print(f"vllm {vllm.__version__} {kind}: started in {time.perf_counter() - began:.0f} s", flush=True)

    def sampling(tokens: int, tells_each: bool) -> Any:
        kind = RequestOutputKind.DELTA if tells_each else RequestOutputKind.FINAL_ONLY
        return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=kind)

    return Stepper(llm.llm_engine, sampling)


def run_rows(stepper: Stepper, weights: str, rows: Sequence[PeerRow], file: Path, rate_files: Sequence[Path]) -> None:
    """Run the rows that the file does not have, and write each as soon as it is done.

    weights: how the rows name the kind of weights, and of keys and values.
    """
    stepper.run(TokenLoad(4, 64, 8, seed=1))
    for row in rows:
        rate = rate_of(rate_files) if row.needs_rate else None
        if row.needs_rate and rate is None:
            print(f"vllm {weights} {row.name}: left out; wanted the row that its rate follows from", flush=True)
            continue
        summaries = []
        for number in range(row.repeats):
            tells_each = row.kind in ("arrivals", "chats")
            summary = summarise_row(row, stepper.run(row.with_repeat(number, rate), tells_each))
            if row.kind == "step":
                summary["step_s"] = stepper.step_s(row.load.tokens_out)
            summaries.append(summary)
        print(describe_row(write_row(file, "vllm", weights, row, summaries)), flush=True)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m lab.speed.vllm_rows", description="Time vLLM at the rows of a peer.")
    made.add_argument("kind", choices=KINDS)
    made.add_argument("file", type=Path)
    made.add_argument("--rows", default="short")
    made.add_argument("--small", action="store_true")
    made.add_argument("--kv", default="auto")
    made.add_argument("--weights", help="how rows name the weights; default: by the kind")
    made.add_argument("--rate-of", type=Path, help="the other side's rows")
    made.add_argument("--rate", type=float, help="of arrivals a second; no row is wanted for it")
    return made


def main(arguments: Sequence[str]) -> int:
    asked = parser().parse_args(arguments)
    done = read_rows(asked.file)
    rows = [row for row in choose_rows(asked.rows, asked.small, asked.rate) if row.name not in done]
    if not rows:
        return 0
    try:
        stepper = open_vllm(asked.kind, rows, asked.kv)
    except ImportError as error:
        print(f"vllm: {error}; its side is left out; put it on PYTHONPATH by VLLM_PATH", file=sys.stderr)
        return NOT_INSTALLED
    rate_files = [asked.file] if asked.rate_of is None else [asked.file, asked.rate_of]
    run_rows(stepper, asked.weights or asked.kind, rows, asked.file, rate_files)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
