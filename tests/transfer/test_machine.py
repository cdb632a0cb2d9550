"""The machine profile: what a process may use, and its way to JSON and back."""

from pathlib import Path

import pynvml
import pytest

from transfer import machine
from transfer.machine import (
    MachineError,
    MachineProfile,
    load_machine,
    probe_machine,
    read_processor,
    select_instruction_sets,
)

RECORDED = sorted((Path(__file__).parents[2] / "deploy" / "machines").glob("*.json"))


def test_this_machine_has_cores_and_memory() -> None:
    profile = probe_machine()
    assert profile.physical_cores >= 1
    assert profile.memory_bytes > 2**28
    assert profile.numa_nodes >= 1


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_profile_survives_json(path: Path) -> None:
    profile = load_machine(path)
    assert profile.name == path.stem
    assert MachineProfile.model_validate_json(profile.model_dump_json()) == profile


def test_the_probed_profile_survives_json(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    path.write_text(probe_machine().model_dump_json())
    assert load_machine(path) == probe_machine()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [(None, "is missing"), ("{", "Invalid JSON"), ("{}", "name: Field required"), ('{"nmae": 1}', "machine.json")],
)
def test_a_bad_profile_is_one_line_that_names_the_file(tmp_path: Path, text: str | None, wanted: str) -> None:
    path = tmp_path / "machine.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(MachineError) as error:
        load_machine(path)
    assert wanted in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_instruction_sets_have_one_spelling() -> None:
    flags = ["sse2", "avx2", "avx512_bf16", "avx512bf16", "amx_tile", "avx512_vnni", "fma"]
    assert select_instruction_sets(flags) == ("amx_tile", "avx2", "avx512bf16", "avx512vnni", "fma")


@pytest.mark.parametrize("visible", ["", "-1"])
def test_a_hidden_gpu_is_no_gpu(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.probe_gpu() is None


def test_a_machine_without_a_driver_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine.probe_gpu() is None


def test_the_visible_gpu_is_the_one_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        total = 24 * 2**30

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: f"card {handle}")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCudaComputeCapability", lambda handle: (8, 9))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle: Memory)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMaxPcieLinkGeneration", lambda handle: 4)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMaxPcieLinkWidth", lambda handle: 16)
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "600.1")
    profile = machine.probe_gpu()
    assert profile.name == "card 3"
    assert (profile.compute_capability, profile.pcie_generation, profile.pcie_width) == ((8, 9), 4, 16)


@pytest.mark.parametrize(
    ("membership", "file", "text"),
    [("0::/a/b", "a/memory.max", "1000"), ("4:memory:/a/b\n0::/", "memory/a/b/memory.limit_in_bytes", "1000")],
)
def test_a_cgroup_limit_above_the_own_group_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, membership: str, file: str, text: str
) -> None:
    mount, members = tmp_path / "mount", tmp_path / "cgroup"
    (mount / file).parent.mkdir(parents=True)
    (mount / file).write_text(text + "\n")
    members.write_text(membership + "\n")
    monkeypatch.setattr(machine, "CGROUP_ROOT", mount)
    assert machine.cgroup_memory_limits(members) == [1000]


def test_an_unlimited_cgroup_sets_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "cgroup").write_text("0::/\n")
    monkeypatch.setattr(machine, "CGROUP_ROOT", tmp_path)
    assert machine.cgroup_memory_limits(tmp_path / "cgroup") == []


@pytest.mark.parametrize(("text", "wanted"), [("150000 100000", 1.5), ("max 100000", None)])
def test_a_cpu_quota_is_read_in_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, wanted: float | None
) -> None:
    (tmp_path / "cpu.max").write_text(text + "\n")
    (tmp_path / "cgroup").write_text("0::/\n")
    monkeypatch.setattr(machine, "CGROUP_ROOT", tmp_path)
    assert machine.cpu_quota(tmp_path / "cgroup") == wanted


def test_a_processor_is_the_first_that_linux_lists_and_an_unreadable_list_is_none(tmp_path: Path) -> None:
    listed = tmp_path / "cpuinfo"
    listed.write_text(
        "processor\t: 0\nmodel name\t: Fast: one\nflags\t\t: fma avx2\npower management:\n\n"
        "processor\t: 1\nmodel name\t: Slow\nflags\t\t: sse\n"
    )
    found = read_processor(listed)
    assert (found["model name"], found["flags"]) == ("Fast: one", "fma avx2")
    assert read_processor(tmp_path / "none") == {}


@pytest.mark.parametrize(("visible", "wanted"), [(None, 4), ("3,1", 2), ("0", 1), ("2,-1,1", 1), ("", None)])
def test_visible_gpus_are_counted(monkeypatch: pytest.MonkeyPatch, visible: str | None, wanted: int | None) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(machine, "probe_gpu", lambda: None if visible == "" else "a card")
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 4)
    assert machine.count_gpus() == wanted
