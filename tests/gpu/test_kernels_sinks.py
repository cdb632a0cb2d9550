"""Attention sinks against a float64 softmax with one logit more for each head."""

import numpy as np
import pytest
import torch

from gpu.config import Composition
from gpu.model.architecture import named_shape
from gpu.operations.sinks import add_sinks
from gpu.profiles import ProfileError, list_states, resolve_profiles
from tests.gpu.kernel_oracles import DEVICES, DTYPES, KERNEL_TOLERANCE, distance, random, wide
from transfer.partial import Partial, merge_all


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 8, 64), (5, 3, 40)])
def test_a_sink_takes_its_share_of_the_softmax(tokens, heads, dim, dtype, device):
    """Outputs and masses stand in other strides, as kernels give them; a row that saw nothing stays zero."""
    generator = np.random.default_rng(dim)
    logits = 3 * generator.normal(size=(tokens, heads, 20))
    values, sinks = generator.normal(size=(20, heads, dim)), 4 + random(generator, (heads,), dtype, device)
    masses = np.exp(logits)
    plain = np.einsum("thc,chd->thd", masses / masses.sum(2, keepdims=True), values)
    lse = torch.tensor(np.log(masses.sum(2)).T.copy(), dtype=torch.float32, device=device).T
    out = torch.tensor(plain.transpose(1, 0, 2).copy(), dtype=dtype, device=device).transpose(0, 1)
    shares = masses / (masses.sum(2, keepdims=True) + np.exp(wide(sinks))[None, :, None])
    wanted = np.einsum("thc,chd->thd", shares, values)
    got = add_sinks(out.clone(memory_format=torch.preserve_format), lse, sinks)
    assert distance(got, wanted) < 2 * KERNEL_TOLERANCE[dtype]
    assert distance(out, wanted) > 10 * KERNEL_TOLERANCE[dtype], "without sinks it is another output"
    empty = Partial.empty(tokens, heads, dim, device)
    assert not add_sinks(empty.out, empty.lse, sinks).any()


@pytest.mark.parametrize("device", DEVICES)
def test_a_sink_merged_last_is_a_partial_of_mass_and_no_value(device):
    """So methods that read, estimate or reuse partials of tokens need not know of it."""
    generator = np.random.default_rng(1)
    sides = [
        Partial(random(generator, (3, 4, 64), torch.float32, device), random(generator, (3, 4), torch.float32, device))
        for _ in range(2)
    ]
    sinks = random(generator, (4,), torch.float32, device)
    merged = merge_all(sides)
    sink = Partial(torch.zeros_like(merged.out), sinks.expand(3, 4).contiguous())
    wanted = merge_all([sink, *sides])
    assert distance(add_sinks(merged.out, merged.lse, sinks), wide(wanted.out)) < 2 * KERNEL_TOLERANCE[torch.float32]


def test_another_shape_is_refused_by_name():
    out, lse = torch.zeros(2, 4, 8), torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"add_sinks: lse is \(4, 2\); wanted \(2, 4\)"):
        add_sinks(out, lse.T, torch.zeros(4))
    with pytest.raises(ValueError, match=r"add_sinks: sinks is \(3,\)"):
        add_sinks(out, lse, torch.zeros(3))


def test_a_method_whose_outputs_have_no_mass_is_refused_with_sinks():
    profiles = resolve_profiles({"long": Composition.model_validate({"prefill": {"method": "momo"}})}, None)
    with pytest.raises(ProfileError, match=r"'momo' computes no softmax mass, with which tiny-gpt-oss merges its"):
        list_states(profiles.values(), named_shape("tiny-gpt-oss"))
    assert list_states(profiles.values(), named_shape("tiny-qwen3-moe"))
