"""The race that draws a token: its hash, its winners, and how few of them change when logits are rounded."""

import numpy as np
import pytest
import torch
from scipy import stats

from gpu.operations.race import (
    GAMMA,
    MIX_A,
    MIX_B,
    exponentials_reference,
    hash_bits_reference,
    race,
    race_reference,
)
from gpu.sampling.sampler import KeyStream, Sampler
from gpu.sampling_params import SamplingParams
from tests.gpu.sampler_oracle import distribution, draw_key, race_flip_rate, split_mix_64, total_variation
from tests.tolerances import CHI_SQUARE_P, CHI_SQUARE_POWER_P, FLIPS_PER_TOTAL_VARIATION

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
VOCAB = 128_256
NOTHING = np.zeros(0, np.int32)
INF = float("inf")
NUM_SEEDS, NUM_DRAWS = 200, 30  # of the comparisons of rounded logits with exact ones


def signed(keys: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array([key % 2**64 for key in keys], np.uint64).view(np.int64))


def random_keys(num_keys: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.Philox(key=seed).random_raw(num_keys).view(np.int64))


def random_distance(rows: int, vocab: int) -> torch.Tensor:
    scores = 3 * torch.randn((rows, vocab), generator=torch.Generator().manual_seed(vocab))
    return scores.amax(1, keepdim=True) - scores


def key_with_hash(bits: int) -> int:
    """The key under which token 0 gets these 64 bits: SplitMix64 backwards."""

    def unshift(z: int, by: int) -> int:
        out = z
        for _ in range(64 // by + 1):
            out = z ^ out >> by
        return out

    z = unshift(bits, 31) * pow(MIX_B, -1, 2**64) % 2**64
    z = unshift(z, 27) * pow(MIX_A, -1, 2**64) % 2**64
    return (unshift(z, 30) - GAMMA) % 2**64


def test_the_hash_is_split_mix_64() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    keys = [1234567, 0, 2**63, 2**64 - 1]
    bits = hash_bits_reference(signed(keys), 300).numpy().view(np.uint64)
    assert bits[0, :4].tolist() == published
    for row, key in enumerate(keys):
        assert bits[row].tolist() == [split_mix_64(key, token) for token in range(300)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 3), (200, 24), (64, 1025), (3, 5000)])
def test_every_device_draws_what_the_reference_draws(rows: int, vocab: int, device: str) -> None:
    distance, keys = random_distance(rows, vocab), random_keys(rows, 1)
    distance[:, ::3].masked_fill_(distance[:, ::3] > 0, INF)
    before = distance.clone()
    drawn = race(distance.to(device), keys.to(device)).tolist()
    assert drawn == race_reference(distance, keys).tolist()
    assert torch.equal(distance, before)
    if rows > 1:
        assert race(distance.to(device), (keys + 1).to(device)).tolist() != drawn


@pytest.mark.parametrize("device", DEVICES)
def test_edges_of_the_hash_and_of_the_weights(device: str) -> None:
    least, most = key_with_hash(0), key_with_hash(2**64 - 1)
    assert split_mix_64(most, 0) == 2**64 - 1
    times = exponentials_reference(signed([least, most]), 1)[:, 0].tolist()
    assert 0 < times[0] < 2.0**-52
    assert 36 < times[1] < 37
    cases = [
        (least, [0.0, 0.0, 0.0], 0),
        (most, [0.0, INF, INF], 0),
        (most, [0.0, 3.4e38, 200.0], 0),
        (most, [INF, INF, 0.0], 2),
        (least, [INF, 0.0, INF], 1),
        (least, [3.4e38, 0.0, INF], 1),
        (least, [200.0, INF, 0.0], 2),
    ]
    distance = torch.tensor([distance for _, distance, _ in cases])
    drawn = race(distance.to(device), signed([key for key, _, _ in cases]).to(device))
    assert drawn.tolist() == [token for _, _, token in cases]
    beaten = race(torch.zeros((1, 2), device=device), signed([most]).to(device))
    assert beaten.tolist() == [1]


def test_arguments_of_another_kind_are_named() -> None:
    with pytest.raises(ValueError, match="race: distance is"):
        race(torch.zeros((1, 2), dtype=torch.float64), signed([0]))
    with pytest.raises(ValueError, match="race: keys is"):
        race(torch.zeros((1, 2)), signed([0, 1]))


def uniform(keys: torch.Tensor, num_tokens: int) -> np.ndarray:
    return 1 - np.exp(-exponentials_reference(keys, num_tokens).numpy())


def pair_p_value(first: np.ndarray, second: np.ndarray) -> float:
    """Chi-square of pairs on a 16 x 16 grid: uniform each, and independent."""
    counts, _, _ = np.histogram2d(first.ravel(), second.ravel(), bins=16, range=[[0, 1], [0, 1]])
    return float(stats.chisquare(counts.ravel()).pvalue)


def stream_keys(first_seed: int, first_number: int) -> torch.Tensor:
    """Keys of draws 16 apart, of seeds 2 apart."""
    streams = [KeyStream(first_seed + 2 * seed) for seed in range(200)]
    return torch.tensor([stream[first_number + 16 * number] for stream in streams for number in range(4)])


def neighbours() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    drawn = uniform(stream_keys(0, 0), 101)
    lone = uniform(random_keys(1, 3), VOCAB)
    return {
        "tokens i and i + 1 of one draw": (lone[:, :-1:2], lone[:, 1::2]),
        "tokens i and i + 1 of many draws": (drawn[:, :-1:2], drawn[:, 1::2]),
        "tokens i and i + 64": (lone[:, :64_000], lone[:, 64_064:128_064]),
        "seeds n and n + 1": (drawn, uniform(stream_keys(1, 0), 101)),
        "draws n and n + 1": (drawn, uniform(stream_keys(0, 1), 101)),
        "keys n and n + 1": (drawn, uniform(stream_keys(0, 0) + 1, 101)),
        "keys of another highest bit": (drawn, uniform(stream_keys(0, 0) ^ -(2**63), 101)),
    }


def test_times_are_exponential_over_tokens_of_a_key_and_over_keys_of_a_token() -> None:
    for seed in range(3):
        assert stats.kstest(uniform(random_keys(1, seed), VOCAB)[0], "uniform").pvalue > CHI_SQUARE_P
    for token in (0, 1, 77):
        drawn = uniform(torch.arange(50_000), 78)[:, token]
        assert stats.kstest(drawn, "uniform").pvalue > CHI_SQUARE_P
    assert stats.kstest(uniform(random_keys(1, 0), VOCAB)[0] ** 1.03, "uniform").pvalue < CHI_SQUARE_POWER_P


def test_neighbouring_tokens_seeds_and_draws_are_not_correlated() -> None:
    for name, (first, second) in neighbours().items():
        assert pair_p_value(first, second) > CHI_SQUARE_P, name


def test_the_pair_test_sees_a_hash_that_does_not_mix() -> None:
    """Power: multiples of an odd constant alone are evenly spread, and every one is its neighbour plus a constant."""
    state = (np.arange(VOCAB, dtype=np.uint64) * np.uint64(GAMMA)).astype(np.float64) / 2.0**64
    assert pair_p_value(state[:-1:2], state[1::2]) < CHI_SQUARE_POWER_P
    lone = uniform(random_keys(1, 3), VOCAB)
    assert pair_p_value(lone, 0.95 * lone + 0.05 * lone[:, ::-1]) < CHI_SQUARE_POWER_P


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("likely_mass", [1.0, 0.6])
def test_a_long_tail_is_drawn_as_often_as_it_weighs(likely_mass: float, device: str) -> None:
    """One likely token, and 128,255 that hold half of the mass together. A claim of 0.6 for it is the power test."""
    num_keys, block = 2000, 500
    distance = torch.full((block, VOCAB), 11.7, device=device)
    distance[:, 0] = 0.0
    counts = np.zeros(9)
    for begin in range(0, num_keys, block):
        tokens = race(distance, random_keys(num_keys, 7)[begin : begin + block].to(device)).cpu().numpy()
        counts += np.bincount(np.where(tokens == 0, 0, 1 + tokens * 8 // VOCAB), minlength=9)
    mass = np.append(likely_mass, np.full(8, (VOCAB - 1) / 8 * np.exp(np.float32(-11.7))))
    p_value = stats.chisquare(counts, mass / mass.sum() * counts.sum()).pvalue
    assert p_value > CHI_SQUARE_P if likely_mass == 1.0 else p_value < CHI_SQUARE_POWER_P


def drawn_tokens(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """int64 `[draws, seeds]` of one row of logits."""
    sampler = Sampler(NUM_SEEDS, len(logits), logits.device)
    for slot in range(NUM_SEEDS):
        sampler.assign(slot, SamplingParams(temperature=params.temperature, seed=slot), NOTHING, NOTHING)
    rows = logits.expand(NUM_SEEDS, len(logits))
    slots = list(range(NUM_SEEDS))
    drawn = [sampler.sample(rows, slots, [number] * NUM_SEEDS).tokens for number in range(NUM_DRAWS)]
    return torch.stack(drawn).cpu().numpy()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("vocab", "spread"), [(1000, 2.0), (4096, 3.0)])
def test_rounded_logits_flip_less_than_twice_the_mass_that_rounding_moves(
    vocab: int, spread: float, device: str
) -> None:
    params = SamplingParams(temperature=0.9)
    logits = spread * torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) + 8
    exact = distribution(logits.double().numpy(), params)
    rounded = distribution(logits.bfloat16().double().numpy(), params)
    moved = total_variation(exact, rounded)
    pair = (drawn_tokens(one.to(device), params) for one in (logits, logits.bfloat16()))
    flips = int(np.not_equal(*pair).sum())
    assert flips < FLIPS_PER_TOTAL_VARIATION * moved * NUM_SEEDS * NUM_DRAWS
    assert stats.binomtest(flips, NUM_SEEDS * NUM_DRAWS, race_flip_rate(exact, rounded)).pvalue > CHI_SQUARE_P


@pytest.mark.parametrize(("vocab", "spread"), [(1000, 2.0), (4096, 3.0)])
def test_an_inverse_cdf_would_flip_several_times_as_often(vocab: int, spread: float) -> None:
    """Power of the one above, with the same seeds and logits."""
    params = SamplingParams(temperature=0.9)
    logits = spread * torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) + 8
    exact = distribution(logits.double().numpy(), params)
    rounded = distribution(logits.bfloat16().double().numpy(), params)
    numbers = np.array([draw_key(seed, number) / 2**64 for seed in range(NUM_SEEDS) for number in range(NUM_DRAWS)])
    tokens = [np.searchsorted(one.cumsum(), numbers, side="right") for one in (exact, rounded)]
    flips = int(np.not_equal(*tokens).sum())
    assert flips > 2 * FLIPS_PER_TOTAL_VARIATION * total_variation(exact, rounded) * len(numbers)
