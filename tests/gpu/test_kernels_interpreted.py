"""The Triton kernels themselves, under Triton's interpreter: the kernels' own tests again, without a GPU.

In float32 (and in bf16 where nothing is multiplied in it: products of one token, and of integers): the interpreter
multiplies bf16 matrices wrongly.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpu.operations.arguments import INTERPRETED

ROOT = Path(__file__).parents[2]
KERNELS = ("elementwise", "attention", "linear", "simhash", "offload_rows", "exchange", "merge", "gather", "momo",
           "mac", "fused", "packed", "predictor", "predicted", "scattered", "kv_rows", "experts", "fetch_experts",
           "far_experts", "expert_request", "indexed", "indexed_errors", "indexed_words", "latent",
           "recurrent", "linked", "plain_tiles", "fp8")  # fmt: skip
FILES = [*(f"tests/gpu/test_kernels_{name}.py" for name in KERNELS),
         "tests/gpu/test_sampler_race.py", "tests/transfer/test_partial.py"]  # fmt: skip
SELECTED = " or ".join(
    (
        "(test_kernels_elementwise and cpu and float32 and not 4096 and not 5120)",
        "(test_kernels_attention and cpu and float32 and (contexts0-shape0 or contexts1-shape6 or padding or nan))",
        "(test_kernels_attention and cpu and float32 and (bounds_many-shape0 or largest or short_context))",
        "(test_kernels_attention and cpu and bfloat16 and int8 and (contexts0-shape0 or bounds_many-shape0 or nan))",
        "(test_kernels_attention and cpu and products_of_integers and not shape4)",
        "(test_kernels_linear and bfloat16 and (1-50-1056 or 3-50-1056 or 4-6-72))",
        "(test_kernels_plain_tiles and not cuda and not 16-)",
        "(test_sampler_race and cpu and (reference or edges) and not 200-24 and not 64-1025)",
        "(test_kernels_simhash and cpu and float32 and not 8193 and not random_rows)",
        "(test_kernels_offload_rows and cpu and float32 and not shape3 and not shape4)",
        "(test_kernels_exchange and cpu and float32 and not another_ask and not 32-128-150)",
        "(test_kernels_mac and cpu and float32 and (not_match or turned_now or heads_of_96 or refused or least_gap))",
        "(test_kernels_momo and cpu and float32 and (one or group3 or every_block or group4 or dim96))",
        "(test_kernels_momo and cpu and float32 and union and not 32-8-12)",
        "(test_kernels_predictor and cpu and float32 and (few-in8 or (step_by_step and in8) or made_again))",
        "(test_kernels_predictor and cpu and not_asked)",
        "(test_kernels_predicted and cpu)",
        "(test_kernels_indexed and cpu and (equal_scores or wants_nothing or (stay_in_their and int8)))",
        "(test_kernels_indexed and cpu and ((grows and 4-int8) or (means and 16-2) or (groups_softmax and 100)))",
        "(test_kernels_indexed_errors and cpu and (64-3-4-2 or halve or (in_full and int8) or read_there))",
        "(test_kernels_indexed and cpu and ((of_pages and int8) or (wrong_token and pages)))",
        "(test_kernels_indexed and cpu and in_pages and 64 and not plain)",
        "(test_kernels_indexed_words and cpu and (powers or planes or dimension or centres or 128-4-4-2))",
        "(test_kernels_scattered and cpu and float32 and (shape0 or shape1 or shape3) and 199)",
        "(test_kernels_latent and cpu and float32 and not wide)",
        "(test_partial and cpu and not partition)",
        "(test_kernels_gather and cpu and float32)",
        "(test_kernels_kv_rows and cpu and float32 and not shape1 and not shape2)",
        "(test_kernels_packed and cpu-float32 and (-2-int4-zeros or -2-fp8-blocks or -17-int4-order))",
        "(test_kernels_packed and a_product and cpu-float32 and (-1-int8-zeros or -1-int4-small))",
        "(test_kernels_packed and (int8-zeros-float32-cpu or fp8-blocks-float32-cpu or int4-runs-float32-cpu))",
        "(test_kernels_packed and a_product and cpu-float32 and (-2-int4-runs or -2-int8-runs or -1-int8-run-each))",
        "(test_kernels_packed and a_product and cpu-float32 and (-1-fp8-rows or -2-int8-halves or -1-int4-fine))",
        "(test_kernels_packed and every_make and float32-cpu and (int4-zeros or fp8-rows))",
        "(test_kernels_packed and swiglu and cpu-bfloat16-1-int4-order)",
        "(test_kernels_fp8 and not cuda and (nearest or plain_torch or stays_nan or (stand_around and float32)))",
        "(test_kernels_fetch_experts and (cpu or any_choice))",
        "(test_kernels_far_experts and (cpu-float32 and plain) or may_lie_far or is_named)",
        "(test_kernels_far_experts and cpu-float32 and left_out and (plain or few-2-int4-runs))",
        "(test_kernels_expert_request and not cuda and not bfloat16)",
        "(test_kernels_fused and cpu and float32 and not shape3)",
        "(test_kernels_linked and cpu and float32)",
        "(test_kernels_merge and cpu and float32 and not shape2)",
        "(test_kernels_recurrent and (steps_behind or of_one_token) and not (cuda or narrow or own2 or own3 or own5))",
        "(test_kernels_recurrent and (solved or steps_with) and not (cuda or own5))",
        "(test_kernels_recurrent and of_prompts and (dtype0 or own4) and not (cuda or own5))",
        "(test_kernels_recurrent and drawn_of_a_draft and own1 and not cuda)",
        "(test_kernels_recurrent and short and not cuda)",
        "(test_kernels_experts and cpu and (best_groups or folds_a_choice or equal_weights))",
        "(test_kernels_experts and cpu-float32 and over_the_residual)",
        "(test_kernels_experts and cpu-bfloat16 and share_the_columns and (int4-1 or fp8-9))",
        "(test_kernels_experts and cpu-float32 and weighed and (odd-rows-3 or odd-tiles-40 or many-tiles-2))",
        "(test_kernels_experts and cpu-float32 and weighed and all-rows-1)",
        "(test_kernels_experts and cpu-float32 and weighed and (odd-few-3 or many-few-16))",
        "(test_kernels_experts and cpu-float32 and without_gates and (biased or int4))",
        "(test_kernels_experts and what_tiles and cpu)",
        "(test_kernels_experts and cpu-float32 and own_share)",
        "(test_kernels_experts and cpu-float32 and few_bits and (int4-few-3 or fp8-tiles-2))",
        "(test_kernels_experts and cpu-float32 and few_bits and runs-few-1])",
        "(test_kernels_experts and cpu-float32 and one_of_two and (down-65 or down-1 or gate_up-1))",
        "(test_kernels_experts and cpu-float32 and (nobody or (one_expert and plain) or (no_other and tiles)))",
        "(test_kernels_experts and (lower_expert or who_takes or not_finite or (sorted_block and 700)) and not cuda)",
        "(test_kernels_experts and cpu-float32 and (its_routing or never_rounded) and (odd-5 or odd-1 or 7-3))",
        "(test_kernels_experts and cpu-float32 and never_rounded and 16-64)",
    )
)


LARGER = " or ".join(
    (
        "(test_kernels_attention and cpu and float32 and "
        "(contexts0-shape1 or bounds_one or skipped_range or bound_that))",
        "(test_sampler_race and cpu and (200-24 or 64-1025))",
        "(test_kernels_simhash and cpu and float32 and random_rows)",
        "(test_kernels_adapters and cpu and not bfloat16)",
        "(test_kernels_exchange and cpu and float32 and 32-128-150)",
        "(test_kernels_momo and cpu and float32)",
        "(test_kernels_scattered and cpu and float32)",
        "(test_kernels_indexed and cpu)",
        "(test_kernels_mac and cpu and float32 and "
        "(wraps or one_of or skipped_ranges or released or noticed or youngest))",
        "(test_kernels_packed and (cpu-float32 or cpu-bfloat16-1-))",
        "(test_kernels_experts and cpu-float32 and not thousands)",
        "(test_kernels_far_experts and cpu-float32)",
        "(test_kernels_predictor and cpu and float32 and (few or ragged or step_by_step))",
    )
)


@pytest.mark.skipif(INTERPRETED, reason="runs the suite under the interpreter, and this is the interpreter")
@pytest.mark.parametrize(
    ("names", "least_passed"),
    [
        pytest.param(SELECTED, 350, id="small"),
        pytest.param(LARGER, 100, marks=pytest.mark.long, id="larger"),
    ],
)
@pytest.mark.timeout(900)  # of some 300 tests in a program of its own, each of which has its limit there
def test_kernels_pass_their_tests_under_the_interpreter(names: str, least_passed: int) -> None:
    """least_passed: a test that gets another name is chosen no longer."""
    files = [name for name in FILES if Path(name).stem in names]  # to collect all takes seconds
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "tests.interpreter"]
    command += [*files, "-k", names]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert int(passed[1]) >= least_passed, done.stdout[-4000:]
