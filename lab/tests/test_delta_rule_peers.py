"""Time the peer's delta rule: both sides compute what float64 does, from the same rows."""

from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.model.spec import Recurrent
from gpu.operations.recurrent.delta_rule import delta_rule_reference
from lab.speed import delta_rule_peers as peers

OWN = Recurrent(2, 4, 16, 24, 4)
CPU = torch.device("cpu")


def rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **given: object) -> tuple[Tensor, Tensor]:
    """Compute what fla-core documents of its rules, sequence by sequence: neighbouring value heads share a key head."""
    decay_log, bias = given["A_log"], given["dt_bias"]
    assert isinstance(decay_log, Tensor), "gates are made in the kernel"
    decay = -decay_log.exp() * F.softplus(g.float() + bias)
    shared, outs, states = value.shape[2] // key.shape[2], [], []
    for row in range(len(value)):
        q, k = (one[row].float().repeat_interleave(shared, 1) for one in (query, key))
        q, k = (one * (one.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for one in (q, k))
        zeros = torch.zeros(value.shape[2], key.shape[3], value.shape[3])
        out, state = delta_rule_reference(
            q * q.shape[2] ** -0.5, k, value[row].float(), decay[row], beta[row].float().sigmoid(), zeros
        )
        outs.append(out)
        states.append(state)
    return torch.stack(outs), torch.stack(states)


def convolve(rows: Tensor, taps: Tensor, activation: str) -> tuple[Tensor, None]:
    assert activation == "silu"
    padded = F.pad(rows.float().transpose(1, 2), (taps.shape[1] - 1, 0))
    return F.silu(F.conv1d(padded, taps.float()[:, None], groups=len(taps))).transpose(1, 2), None


def norm(rows: Tensor, gates: Tensor, weight: Tensor, bias: None, eps: float) -> Tensor:
    normed = rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt()
    return normed * weight.float() * F.silu(gates.float())


@pytest.fixture
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"chunk_gated_delta_rule": rule, "fused_recurrent_gated_delta_rule": rule, "causal_conv1d": convolve,
            "rms_norm_gated": norm}  # fmt: skip
    monkeypatch.setattr(peers, "_peer", lambda module, name: made[name])


@pytest.mark.usefixtures("_stand_in")
def test_a_prompt_is_handed_to_the_peer_as_the_formula_has_it() -> None:
    """To float32's rounding; power: heads that share keys as a GGUF file has them are seen."""
    drawn = peers.draw(OWN, 70, CPU)
    out, state = peers.exact(drawn)
    made, behind = peers.peer_prompt(drawn)()
    assert peers.relative_error(made, out) < 1e-5
    assert peers.relative_error(behind, state) < 1e-5
    assert peers.relative_error(peers.peer_prompt(drawn, False)()[1], state) < 1e-5
    tiled = peers.Drawn(Recurrent(2, 4, 16, 24, 4, is_tiled=True), drawn.weights, drawn.mixed, drawn.gates)
    assert peers.relative_error(made, peers.exact(tiled)[0]) > 0.1


@pytest.mark.usefixtures("_stand_in")
def test_a_token_of_each_sequence_is_the_first_of_a_prompt() -> None:
    drawn = peers.draw(OWN, 3, CPU)
    out, states = peers.exact_steps(drawn)
    made, behind = peers.our_steps(drawn)()
    assert peers.relative_error(made, out) < 1e-2, "outputs are bf16"
    assert peers.relative_error(behind, states) < 1e-5
    assert peers.relative_error(peers.peer_steps(drawn)()[1], states) < 1e-2, "rows are rounded behind the convolution"


def test_floors_are_of_rows_states_and_products() -> None:
    work = peers.prompt_work(OWN, 64)
    assert work.num_bytes == 2 * 64 * (2 * 32 + 96 + 96 + 8 + 96) + 4 * 4 * 16 * 24
    assert work.flops == 2 * 4 * (3 * 64 * 64 * 16 + 2 * 64 * 64 * 24 + 3 * 64 * 16 * 24)
    assert peers.step_work(OWN, 2).num_bytes == 2 * (8 * 4 * 16 * 24 + 2 * (160 + 96 + 8 + 96 + 160 * 4))


def test_kernels_that_are_chosen_are_found_below_what_wraps_them() -> None:
    tuner = SimpleNamespace(configs=[1, 2], arg_names=["x"], fn=SimpleNamespace(arg_names=["x"], fn=None))
    module, other = ModuleType("one"), ModuleType("other")
    module.kernel = SimpleNamespace(arg_names=["x"], fn=tuner)
    other.again, other.number = tuner, 3
    assert peers.tuners_of(iter([module, other])) == [tuner]
