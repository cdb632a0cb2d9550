"""What a profile did is told by the engine's own counts, and what decides its answers is in its records' keys."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from evals.meter import Fractions
from evals.run import name_weights
from evals.serving import ServingEngine
from gpu.config import Composition
from gpu.methods.mac import COUNTERS
from gpu.model.architecture import named_shape
from gpu.profiles import resolve_profiles
from gpu.step import PartId
from scheduler.engine.decode_reads import DecodeReads
from tests.gpu.family_checkpoints import checkpoint
from transfer.host_config import HostConfig

NAMED = {
    "reusing": {"reuse": "mac"},
    "sparse": {"prefill": {"method": "momo", "dense_until_tokens": 1000}},
    "reusing-sampled": {"reuse": "mac", "host": "sampled"},
}


def reused(cells: int) -> dict[str, list[int]]:
    """Return MAC's counts of 50 tries that took over so many cells."""
    return {key: [0] for key in COUNTERS} | {"reuse_tries": [50], "reuse_skipped_cells": [cells]}


NOTHING = DecodeReads(1000, 0, 0, 0, methods={key: [0] for key in COUNTERS})


class Counts:
    """An engine that has read so much."""

    def __init__(self, reads: DecodeReads) -> None:
        self._reads = reads

    def decode_reads(self) -> DecodeReads:
        return self._reads

    def first_own_token(self, prefill_method: PartId) -> int | None:
        return 1024 if prefill_method.method == "momo" else None


def engine_of(named: dict[str, Any], host: HostConfig | None, reads: DecodeReads) -> ServingEngine:
    compositions = {name: Composition.model_validate(tree) for name, tree in named.items()}
    engine: Any = Counts(reads)
    shape = named_shape("tiny")
    return ServingEngine(engine, shape, resolve_profiles(compositions, host), 1, {})


@pytest.mark.parametrize(
    ("profile", "reads", "tokens", "wanted"),
    [
        ("exact", {}, 9000, None),
        ("offloaded", {}, 9000, False),  # all of it stayed on the device
        ("offloaded", {"host_tokens": 800, "host_keys": 800}, 9000, True),
        ("sampled", {}, 9000, False),
        ("sampled", {"host_tokens": 800, "host_keys": 800}, 9000, False),  # offloaded, but no tables yet
        ("sampled", {"host_tokens": 800, "host_keys": 799}, 9000, True),
        ("reusing", {}, 9000, False),
        ("reusing", {"methods": reused(0)}, 9000, False),  # it looked, and found nothing
        ("reusing", {"methods": reused(3)}, 9000, True),
        ("reusing-sampled", {"host_tokens": 8, "host_keys": 8, "methods": reused(0)}, 9000, False),
        ("reusing-sampled", {"host_tokens": 8, "host_keys": 8, "methods": reused(3)}, 9000, True),
        ("sparse", {}, 1152, False),  # the last block of 128 is dense
        ("sparse", {}, 1153, True),
    ],
)
def test_a_profile_applied_where_it_did_something(
    profile: str, reads: dict[str, Any], tokens: int, wanted: bool | None
) -> None:
    counted: dict[str, Any] = {"host_tokens": 0, "host_keys": 0, "host_bytes": 0, "methods": reused(0)} | reads
    engine = engine_of(NAMED, HostConfig(), DecodeReads(2000, **counted))
    assert engine.did_apply(NOTHING, profile, tokens) is wanted


def test_a_method_of_the_decoder_applied_where_it_spared_anything() -> None:
    assert not Fractions(1.0, 1.0, 1.0, 1.0).spares
    assert not Fractions(1.0 - 1e-7, 1.0, 1.0, 1.0).spares, "rounding"
    assert not Fractions(float("nan"), float("nan"), 1.0, 1.0).spares, "it handled no layer"
    assert Fractions(0.99, 1.2, 1.0, 1.1).spares
    assert Fractions(1.0, 1.0, 1.0, 1.0, {"acceptance": 0.1, "skipped_fraction": 0.0}).spares


def test_exact_is_the_same_record_in_every_deployment_and_other_settings_are_another() -> None:
    bare, full = engine_of({}, None, NOTHING), engine_of(NAMED, HostConfig(), NOTHING)
    assert bare.settings_of("exact") == full.settings_of("exact")
    changes: list[tuple[str, dict[str, Any], HostConfig]] = [
        ("sparse", {"sparse": {"prefill": {"method": "momo", "dense_until_tokens": 2000}}}, HostConfig()),
        ("reusing", {"reusing": {"reuse": {"method": "mac", "tau": 0.6}}}, HostConfig()),
        ("sampled", {}, HostConfig(resident_tokens=16)),
    ]
    for name, changed, host in changes:
        other = engine_of(NAMED | changed, host, NOTHING)
        assert other.settings_of(name) != full.settings_of(name), name


def test_records_are_filed_by_the_weights_and_not_by_their_name(tmp_path: Path) -> None:
    one, other = tmp_path / "one" / "model", tmp_path / "other" / "model"
    for folder in (one, other):
        shutil.copytree(checkpoint("llama2").folder, folder)
    assert name_weights(one) == name_weights(other)
    content = bytearray((other / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (other / "model.safetensors").write_bytes(content)
    assert name_weights(one) != name_weights(other)
