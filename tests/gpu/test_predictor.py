"""The predictor's network, its files and the history it reads, against numpy and against what must be refused."""

import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gpu.predictor.history import (
    attended_maxima,
    block_maxima,
    compress,
    new_history,
    prompt_maxima,
    restore,
)
from gpu.predictor.network import SHAPES, PredictorError, PredictorNetwork, load_network, save_network
from tests.gpu import predictor_oracle as oracle
from tests.tolerances import HISTORY_CODE_RTOL, HISTORY_FLOAT32, PREDICTOR_FLOAT32

PARAMETERS = oracle.random_parameters(2)


def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value).float() for name, value in PARAMETERS.items()}


def network() -> PredictorNetwork:
    made = PredictorNetwork()
    made.load_state_dict(tensors())
    return made


@pytest.mark.parametrize(("steps", "blocks"), [(64, 33), (64, 16), (5, 1), (1, 40)])
def test_the_network_is_the_papers(steps, blocks):
    rows = np.random.default_rng(blocks).random((2, steps, blocks)) ** 4
    history = torch.from_numpy(rows).float()
    got = network()(history, None).detach().numpy()
    wanted = np.stack([oracle.predict(one, PARAMETERS) for one in rows])
    np.testing.assert_allclose(got, wanted, atol=PREDICTOR_FLOAT32, rtol=0)
    turned = PARAMETERS | {"conv2.weight": PARAMETERS["conv2.weight"][:, :, ::-1]}
    assert np.abs(oracle.predict(rows[0], turned) - wanted[0]).max() > 10 * PREDICTOR_FLOAT32 or steps == 1


def test_a_row_of_a_batch_sees_its_own_blocks_alone():
    rows = torch.rand(2, 6, 20)
    widths = torch.tensor([20, 7])
    got = network()(rows, widths)
    torch.testing.assert_close(got[1:, :7], network()(rows[1:, :, :7], None), atol=PREDICTOR_FLOAT32, rtol=0)
    assert (network()(rows, None)[1, 6] - got[1, 6]).abs() > 10 * PREDICTOR_FLOAT32


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_file_is_read_back(tmp_path, suffix):
    path = tmp_path / f"predictor{suffix}"
    if suffix == ".pth":
        torch.save(tensors(), path)
    else:
        save_network(network(), path, {"model": "tiny"})
    for name, tensor in load_network(path).state_dict().items():
        torch.testing.assert_close(tensor, tensors()[name], atol=0, rtol=0)


class Trap:
    def __reduce__(self):
        return (pytest.fail, ("a file ran code",))


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    path = tmp_path / "trap.pth"
    for write in (lambda: torch.save({"conv1.weight": Trap()}, path), lambda: path.write_bytes(pickle.dumps(Trap()))):
        write()
        with pytest.raises(PredictorError, match=r"trap.pth: holds no tensors"):
            load_network(path)


def edited(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    changed = {name.replace("_", "."): value for name, value in changes.items()}
    return {name: value for name, value in (tensors() | changed).items() if value is not None}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (edited(conv2_bias=None), "lacks conv2.bias; wanted conv1.weight"),
        (edited(conv4_bias=torch.zeros(1)), "has conv4.bias, which is not of the network"),
        (edited(conv3_weight=torch.zeros(1, 32, 3)), r"conv3.weight is \(1, 32, 3\); wanted \(1, 32, 1\)"),
        (edited(conv1_bias=torch.full((16,), torch.nan)), "conv1.bias has numbers that are not finite"),
    ],
)
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_file_that_is_no_predictor_is_refused_by_name(given, words, suffix, tmp_path):
    path = tmp_path / f"other{suffix}"
    (torch.save if suffix == ".pth" else save_file)(given, path)
    with pytest.raises(PredictorError, match=words):
        load_network(path)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(PredictorError, match=r"suffix '.bin'; wanted one of .safetensors, .pth"):
        load_network(tmp_path / "predictor.bin")
    (tmp_path / "cut.safetensors").write_bytes(b"{}")
    with pytest.raises(PredictorError, match="holds no tensors"):
        load_network(tmp_path / "cut.safetensors")
    with pytest.raises(OSError, match="none"):
        load_network(tmp_path / "none.pth")
    assert sum(np.prod(shape) for shape in SHAPES.values()) == 4833


@pytest.mark.parametrize("context", [48, 50])
def test_a_prompts_history_is_the_exact_attention_of_its_last_queries(context):
    draw = np.random.default_rng(context)
    queries, keys = draw.standard_normal((4, 5, 8)) * 2, draw.standard_normal((2, context + 3, 8))
    given = torch.from_numpy(keys).float()
    given[:, context:] = torch.nan
    got = prompt_maxima(torch.from_numpy(queries).float(), given, context, 16).numpy()
    assert got.shape == (4, 5, -(-context // 16))
    wanted = np.zeros_like(got, dtype=np.float64)
    for head in range(4):
        for row in range(5):
            end = context - 5 + row + 1
            weights = np.exp(keys[head // 2, :end] @ queries[head, row] / np.sqrt(8))
            weights /= weights.sum()
            for block in range(-(-end // 16)):
                wanted[head, row, block] = weights[16 * block : 16 * block + 16].max()
    np.testing.assert_allclose(got, wanted, atol=HISTORY_FLOAT32, rtol=0)
    assert np.abs(np.roll(got, 1, axis=1) - wanted).max() > 10 * HISTORY_FLOAT32


def test_blocks_that_were_not_read_are_zero_whatever_the_mass():
    got = attended_maxima(torch.tensor([[1.0, -torch.inf, 0.0]]), torch.tensor([2.0]))
    np.testing.assert_allclose(got[0], [np.exp(-1), 0, np.exp(-2)], atol=HISTORY_FLOAT32)
    assert attended_maxima(torch.full((1, 2), -torch.inf), torch.tensor([-torch.inf])).tolist() == [[0, 0]]
    assert block_maxima(torch.tensor([1.0, 2.0, -3.0]), 2, -torch.inf).tolist() == [2.0, -3.0]


@pytest.mark.parametrize(("stored", "rtol"), [(torch.uint8, HISTORY_CODE_RTOL), (torch.bfloat16, 2**-8)])
def test_stored_attention_is_near_what_it_was(stored, rtol):
    values = torch.from_numpy(np.random.default_rng(3).random(4000) ** 20)
    values = values[values > 2.0**-31]
    got = restore(compress(values, stored), torch.float64)
    assert ((got - values).abs() <= rtol * values).all()
    assert ((got - values).abs() > 0.8 * rtol * values).any(), "the bound is no wider than it must be"
    edges = torch.tensor([0.0, 2.0**-40, 1.0])
    assert restore(compress(edges, torch.uint8), torch.float32).tolist() == [0.0, 0.0, 1.0]


def test_a_ring_gives_the_last_steps_oldest_first():
    steps, blocks = 5, 7
    history = new_history(2, 3, steps, 1, blocks, torch.float32, torch.device("cpu"))
    assert history.window(0, 0, blocks, torch.float64).abs().sum() == 0
    put = []
    for number in range(14):
        rows = torch.rand(2, 3, 4 if number % 4 == 1 else blocks)
        history.advance()
        for layer in range(2):
            history.put(layer, rows[layer])
        put.append(torch.nn.functional.pad(rows, (0, blocks - rows.shape[2])))
        last = ([torch.zeros(2, 3, blocks)] * steps + put)[-steps:]
        for layer in range(2):
            wanted = torch.stack([row[layer] for row in last], 1)[..., 1:6]
            assert (history.window(layer, 1, 6, torch.float32) == wanted).all()
    spare = history.ring[1, :, (history.oldest - 1) % (steps + 1)]
    assert (spare == put[-steps - 1][1]).all(), "the row that left last is still there"
