"""The predictor's kernel against the paper's formula: whole, step by step, ragged, and in each stored form."""

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu.operations.arguments import INTERPRETED
from gpu.predictor.history import compress, new_history, restore
from gpu.predictor.network import PredictorNetwork
from gpu.predictor.predict import EDGE_BLOCKS, PackedNetwork, pack, predict_blocks
from tests.gpu import predictor_oracle as oracle
from tests.gpu.kernel_oracles import DEVICES, DTYPES, wide
from tests.tolerances import PREDICTOR_BFLOAT16, PREDICTOR_BFLOAT16_ALIKE, PREDICTOR_FLOAT32

PARAMETERS = oracle.random_parameters(1)
STEPS = 4 if INTERPRETED else 40
ATOL = {torch.float32: PREDICTOR_FLOAT32, torch.bfloat16: PREDICTOR_BFLOAT16}
ATOL_ALIKE = ATOL | {torch.bfloat16: PREDICTOR_BFLOAT16_ALIKE}  # where rows of a history are


def packed(dtype: torch.dtype, device: str) -> PackedNetwork:
    network = PredictorNetwork()
    network.load_state_dict({name: torch.from_numpy(value).float() for name, value in PARAMETERS.items()})
    return pack(network, dtype, torch.device(device))


def attended(heads: int, rows: int, blocks: int, seed: int) -> np.ndarray:
    """Attention-like rows: a few blocks that stand out and drift, many that were not read."""
    generator = np.random.default_rng(seed)
    values = generator.random((heads, rows, blocks)) ** 6
    values[generator.random(values.shape) < 0.3] = 0
    return values


def kept_of(rows: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Rows `[steps, heads, blocks]` in which eight blocks side by side have what they had but a share of the time, and
    from block 56 on always.
    """
    changes = np.random.default_rng(seed).random((len(rows), rows.shape[1], -(-rows.shape[2] // 8))) < share
    changes[..., 7:] = False
    kept = [rows[0]]
    for row, own in zip(rows[1:], changes[1:].repeat(8, 2)[..., : rows.shape[2]], strict=True):
        kept.append(np.where(own, row, kept[-1]))
    return np.stack(kept)


class Driver:
    """A history that is filled a step at a time, and what the kernel says after each; NaN wherever it may not look."""

    def __init__(
        self, widths: list[int], steps: int, room: int, stored: torch.dtype, product: torch.dtype, device: str,
        moved: int = 1,
    ):  # fmt: skip
        self.network, self.device, self.heads = packed(product, device), torch.device(device), len(widths)
        self.history = new_history(1, self.heads, steps, moved, room, stored, self.device)
        if stored != torch.uint8:
            for head, width in enumerate(widths):
                self.history.ring[0, head, :, width:] = torch.nan
        self.widths = torch.tensor(widths, dtype=torch.int32, device=device)
        self.predicted = self.widths.clone()  # as they were then
        self.scores = torch.full((self.heads, room), torch.nan, device=device)

    def put(self, rows: np.ndarray) -> None:
        self.history.advance()
        for head, width in enumerate(self.widths.tolist()):
            given = torch.from_numpy(rows[head, :width]).float().to(self.device)
            self.history.ring[0, head, self.history.newest, :width] = compress(given, self.history.ring.dtype)

    def predict(self, is_whole: list[bool]) -> Tensor:
        oldest = torch.full((self.heads,), self.history.oldest, dtype=torch.int32, device=self.device)
        kept = self.widths - torch.where(self.widths == self.predicted, 0, EDGE_BLOCKS)
        stale = torch.where(torch.tensor(is_whole, device=self.device), 0, kept.clamp(0)).int()
        self.predicted = self.widths.clone()
        predict_blocks(self.history.ring[0], oldest, self.widths, stale, self.scores, self.network, self.history.spare)
        return self.scores.clone()

    def wanted(self, head: int) -> np.ndarray:
        width = int(self.widths[head])
        stored = self.history.window(0, 0, width, torch.float64)[head]
        return oracle.predict(wide(stored), PARAMETERS)

    def check(self, scores: Tensor, atol: float) -> None:
        for head, width in enumerate(self.widths.tolist()):
            np.testing.assert_allclose(wide(scores[head, :width]), self.wanted(head), atol=atol, rtol=0)
            assert (scores[head, width:] == -torch.inf).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("product", DTYPES)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.uint8], ids=["in32", "in16", "in8"])
@pytest.mark.parametrize(
    ("widths", "steps", "room"),
    [
        pytest.param([1, 0, 64], 5, 64, id="few"),
        pytest.param([130, 67, 3], 8, 131, id="ragged"),
        pytest.param([200], 64, 200, id="published"),
    ],
)
def test_scores_are_those_of_the_published_network(widths, steps, room, stored, product, device):
    driver = Driver(widths, steps, room, stored, product, device)
    for row in attended(len(widths), steps + 3, room, 7).transpose(1, 0, 2):
        driver.put(row)
    driver.check(driver.predict([True] * len(widths)), ATOL[product])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("product", DTYPES)
@pytest.mark.parametrize("stored", [torch.float32, torch.uint8], ids=["in32", "in8"])
@pytest.mark.parametrize("moved", [1, 2, 4])
def test_scores_made_step_by_step_are_those_made_whole(moved, stored, product, device):
    """Or every few steps, in which the window moves on; of some blocks nothing changes for a while."""
    steps = 5 + moved
    driver = Driver([64, 70], steps, 96, stored, product, device, moved)
    rows = kept_of(attended(2, steps + moved * STEPS, 96, 3).transpose(1, 0, 2), 0.2, 4)
    rows[:, 0, 64:] = 0.25  # what a block holds that leaves the recent window, before and behind that
    for row in rows[:steps]:
        driver.put(row)
    driver.predict([True] * 2)
    for number, row in enumerate(rows[steps:]):
        call, is_between = divmod(number + 1, moved)
        if not is_between and call % 2 == 0:  # a block leaves the recent window now and then
            driver.history.ring[0, 0, :, driver.widths[0]] = compress(torch.tensor(0.25), stored)
            driver.widths += torch.tensor([1, 0], dtype=torch.int32, device=device)
        driver.put(row)
        if not is_between:
            driver.check(driver.predict([False, call == 5]), ATOL_ALIKE[product])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("product", DTYPES)
@pytest.mark.parametrize("stored", [torch.uint8], ids=["in8"])
def test_a_block_is_made_again_where_rows_of_it_or_of_two_beside_it_differ_and_else_keeps_its_score(
    stored, product, device
):
    if device == "cpu" and not INTERPRETED:
        pytest.skip("without a kernel all is made")
    driver = Driver([270, 64, 70], 6, 288, stored, product, device, 2)
    rows = attended(3, 2, 288, 5).transpose(1, 0, 2)
    for _ in range(8):
        driver.put(rows[0])
    driver.predict([True] * 3)
    changed = rows[0].copy()
    changed[0, [20, 256]] = 1 - changed[0, [20, 256]]  # one at the first of a chunk
    for row in (changed, *[rows[0]] * 7):  # the last time it has left the window, but was in the one before
        driver.put(row)
        is_between = driver.history.newest % 2 == 0
        if is_between:
            continue
        driver.scores += 1.0
        scores = driver.predict([False, False, True])
        wanted = driver.wanted(0) + 1
        for block in (20, 256):
            near = slice(block - 2, block + 3)
            wanted[near] = driver.wanted(0)[near]
        np.testing.assert_allclose(wide(scores[0, :270]), wanted, atol=ATOL_ALIKE[product], rtol=0)
        np.testing.assert_allclose(wide(scores[1, :64]), driver.wanted(1) + 1, atol=ATOL_ALIKE[product], rtol=0)
        np.testing.assert_allclose(wide(scores[2, :70]), driver.wanted(2), atol=ATOL_ALIKE[product], rtol=0)
        driver.predict([True] * 3)


@pytest.mark.parametrize("device", DEVICES)
def test_a_head_that_is_not_asked_for_keeps_all_of_its_scores(device):
    driver = Driver([70, 40], 6, 70, torch.float32, torch.float32, device)
    for row in attended(2, 7, 70, 5).transpose(1, 0, 2):
        driver.put(row)
    driver.widths[0] = -1
    scores = driver.predict([True] * 2)
    assert scores[0].isnan().all()
    np.testing.assert_allclose(wide(scores[1, :40]), driver.wanted(1), atol=PREDICTOR_FLOAT32, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_that_is_missing_or_shifted_is_seen(device):
    driver = Driver([70], 6, 70, torch.float32, torch.float32, device)
    for row in attended(1, 6, 70, 5).transpose(1, 0, 2):
        driver.put(row)
    right = driver.predict([True])
    driver.history.ring[0, :, driver.history.newest, 40] += 0.001
    assert (driver.predict([True]) - right).abs().max() > 10 * PREDICTOR_FLOAT32
    driver.history.ring[0, :, driver.history.newest, 40] -= 0.001
    driver.history.newest -= 1
    assert (driver.predict([True]) - right).abs().max() > 2 * PREDICTOR_BFLOAT16


def test_a_wrong_argument_is_named():
    driver = Driver([70], 6, 70, torch.float32, torch.float32, "cpu")
    oldest = stale = torch.zeros(1, dtype=torch.int32)
    ring, rest = driver.history.ring[0], (driver.scores, driver.network, 1)
    with pytest.raises(ValueError, match=r"history of 1 rows; wanted more than the 1 steps between calls"):
        predict_blocks(ring[:, :1], oldest, driver.widths, stale, *rest)
    with pytest.raises(ValueError, match=r"history is torch.float16.*wanted float32, bfloat16 or uint8"):
        predict_blocks(ring.half(), oldest, driver.widths, stale, *rest)
    with pytest.raises(ValueError, match=r"predict_blocks: widths is \(1,\) torch.int64"):
        predict_blocks(ring, oldest, driver.widths.long(), stale, *rest)


def test_a_stored_history_is_restored_as_the_kernel_reads_it():
    codes = torch.arange(256, dtype=torch.uint8)
    values = restore(codes, torch.float64)
    assert values[0] == 0
    assert values[255] == 1
    torch.testing.assert_close(compress(values[1:].float(), torch.uint8), codes[1:])
