"""Rates of a machine: measured before written down before assumed, and each says which it is."""

import json
from pathlib import Path

import pytest

from transfer.machine import MachineError, MachineProfile, load_machine
from transfer.machine_rates import find_rates, keep_rates, with_rates

MACHINES = Path(__file__).parents[2] / "deploy" / "machines"


def machine_of(name: str, **changes: object) -> MachineProfile:
    return load_machine(MACHINES / f"{name}.json").model_copy(update=changes)


def test_what_was_measured_of_such_a_machine_counts_before_its_profile(tmp_path: Path) -> None:
    machine, file = machine_of("rtx4090"), tmp_path / "tandem" / "measured.json"
    keep_rates(machine, {"device_stream_gb_s": 871.0, "device_copy_gb_s": 800.0}, file)
    rates = find_rates(machine, file)
    assert (rates.of["device_stream_gb_s"], rates.sources["device_stream_gb_s"]) == (871.0, "measured")
    assert rates.sources["host_stream_gb_s"] == "profile"
    assert rates.of["host_stream_gb_s"] == 60.0
    assert f"device_stream_gb_s: measured by `tandem doctor --measure` ({file})" in rates.text
    assert "machine profile 'rtx4090' (published" in rates.text
    keep_rates(machine, {"device_stream_gb_s": 900.0}, file)
    assert find_rates(machine, file).of["device_stream_gb_s"] == 900.0


@pytest.mark.parametrize("change", [{"cpu": "another"}, {"physical_cores": 3}, {"gpu": None}])
def test_what_was_measured_of_another_machine_does_not_count(tmp_path: Path, change: dict[str, object]) -> None:
    file = tmp_path / "measured.json"
    keep_rates(machine_of("rtx4090"), {"host_stream_gb_s": 1.0}, file)
    assert find_rates(machine_of("rtx4090", **change), file).sources["host_stream_gb_s"] == "profile"


def test_without_either_rates_are_assumed_of_cores_and_link_and_said_to_be(tmp_path: Path) -> None:
    bare = machine_of("rtx4090", rates=None, rates_from=None, physical_cores=4)
    rates = find_rates(bare, tmp_path / "no.json")
    assert set(rates.sources.values()) == {"assumed"}
    assert rates.text.startswith("assumed for want of a measurement")
    assert rates.of["host_stream_gb_s"] == 4 * 8
    assert rates.of["host_to_device_gb_s"] == pytest.approx(0.8 * 0.985 * 2 * 16)
    many = find_rates(bare.model_copy(update={"physical_cores": 64, "numa_nodes": 2}), tmp_path / "no.json")
    assert many.of["host_stream_gb_s"] == 2 * 45
    assert "device_stream_gb_s" not in find_rates(bare.model_copy(update={"gpu": None}), tmp_path / "no.json").of


@pytest.mark.parametrize("bad", ["fast", 0, -3.0, None, [1]])
def test_an_entry_that_is_no_rate_is_passed_over(tmp_path: Path, bad: object) -> None:
    machine, file = machine_of("laptop"), tmp_path / "measured.json"
    keep_rates(machine, {"host_stream_gb_s": 7.0}, file)
    entries = json.loads(file.read_text())
    entries[0]["result"]["host_random_rows_gb_s"] = bad
    file.write_text(json.dumps(entries))
    rates = find_rates(machine, file)
    assert rates.of["host_stream_gb_s"] == 7.0
    assert rates.sources["host_random_rows_gb_s"] == "profile"


def test_a_profile_carries_measured_rates_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    measured = with_rates(machine_of("laptop"), {"host_stream_gb_s": 21.0, "host_nonsense": 3.0})
    path.write_text(measured.model_dump_json())
    assert load_machine(path) == measured
    rates = find_rates(load_machine(path), tmp_path / "no.json")
    assert rates.of["host_stream_gb_s"] == 21.0
    assert "measured by `tandem doctor --measure`" in rates.text


@pytest.mark.parametrize(("key", "rate"), [("warp_gb_s", 1.0), ("host_stream_gb_s", 0), ("host_stream_gb_s", "fast")])
def test_a_profile_with_another_rate_or_none_is_refused_in_a_line(tmp_path: Path, key: str, rate: object) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(json.loads((MACHINES / "laptop.json").read_text()) | {"rates": {key: rate}}))
    with pytest.raises(MachineError, match=f"rates.*{key}"):
        load_machine(path)


@pytest.mark.parametrize("name", [path.stem for path in sorted(MACHINES.glob("*.json"))])
def test_a_recorded_machine_has_all_its_rates_and_says_where_from(name: str, tmp_path: Path) -> None:
    rates = find_rates(machine_of(name), tmp_path / "no.json")
    assert set(rates.sources.values()) == {"profile"}
    assert rates.of["host_random_rows_gb_s"] < rates.of["host_stream_gb_s"]
    assert "not measured" in rates.text
