"""The doctor: what fits is good, what clashes is bad and says what to do."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from server.commands import doctor
from server.commands.doctor import (
    DoctorError,
    examine_fbgemm,
    examine_libraries,
    examine_machine,
    examine_measured,
    examine_system,
    installed_versions,
    measure_rates,
    print_rates,
)
from transfer.machine import load_machine

MACHINES = Path(__file__).parents[2] / "deploy" / "machines"
GOOD = {"torch": "2.13.0+cpu", "fbgemm-gpu-cpu": "1.8.0"}


def test_this_environment_fits_itself() -> None:
    bad = [finding for finding in examine_libraries(installed_versions()) if finding.verdict == "bad"]
    assert bad == []


@pytest.mark.parametrize(
    ("versions", "verdict", "words"),
    [
        (GOOD, "good", "1.8.0"),
        ({"torch": "2.11.0", "fbgemm-gpu": "1.6.0"}, "good", "1.6.0"),
        ({"torch": "2.13.0", "fbgemm-gpu": "1.6.0"}, "bad", "fbgemm 1.8"),
        ({**GOOD, "fbgemm-gpu": "1.8.0"}, "bad", "uninstall both"),
        ({"torch": "2.13.0"}, "bad", "pip install"),
    ],
)
def test_fbgemm_comes_once_and_from_the_release_for_this_torch(
    versions: dict[str, str], verdict: str, words: str
) -> None:
    finding = examine_fbgemm(versions)
    assert finding.verdict == verdict
    assert words in finding.value + finding.advice


def test_a_library_that_wants_another_version_of_its_neighbour_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    wants = {"torch": ['triton==3.9.0; python_version >= "3"', 'numpy==1.0; extra == "old"']}
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: wants.get(name))
    findings = {item.name: item for item in examine_libraries({**GOOD, "triton": "3.6.0", "numpy": "2.4.6"})}
    assert findings["torch"].verdict == "bad"
    assert "wants triton==3.9.0, got 3.6.0" in findings["torch"].advice
    assert "numpy" not in findings["torch"].advice


def test_a_missing_library_is_bad_and_says_how_to_get_it() -> None:
    findings = {item.name: item for item in examine_libraries(GOOD)}
    assert findings["numba"].verdict == "bad"
    assert "pip install" in findings["numba"].advice


def test_a_machine_without_a_gpu_is_noted_and_not_bad() -> None:
    findings = examine_machine(load_machine(MACHINES / "laptop.json"))
    assert findings[0].verdict == "note"
    assert not [item for item in findings if item.verdict == "bad"]


def test_an_old_card_or_a_processor_without_avx2_is_bad() -> None:
    profile = load_machine(MACHINES / "rtx4090.json")
    old = profile.gpu.model_copy(update={"compute_capability": (7, 0), "pcie_width": 8})
    findings = {
        item.name: item
        for item in examine_machine(profile.model_copy(update={"gpu": old, "instruction_sets": ("f16c",)}))
    }
    assert findings["GPU"].verdict == "bad"
    assert findings["instruction sets"].verdict == "bad"
    assert findings["link"].verdict == "note"


@pytest.mark.parametrize(
    ("text", "verdict"), [("always [madvise] never", "good"), ("always madvise [never]", "note"), (None, "note")]
)
def test_huge_pages_that_are_off_are_noted(tmp_path: Path, text: str | None, verdict: str) -> None:
    path = tmp_path / "sys/kernel/mm/transparent_hugepage/enabled"
    path.parent.mkdir(parents=True)
    if text is not None:
        path.write_text(text)
    assert examine_system(tmp_path)[0].verdict == verdict


def test_measured_rates_are_the_last_line_of_the_measuring_process(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"host_stream_gb_s": 30.5, "bf16_matmul_tflop_s": 700.25}
    rows = [{"name": "host_stream_gb_s", "rates": rates}, {"name": "bf16_matmul_tflop_s", "rates": rates}]

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[:3] == [sys.executable, "-m", "bench.rates"]
        return subprocess.CompletedProcess(command, 0, f"some words\n{json.dumps(rows)}\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert measure_rates() == rates
    page = io.StringIO()
    print_rates(rates, Console(file=page, width=100))
    assert [line.split() for line in page.getvalue().splitlines()] == [
        ["host", "stream", "30.5", "GB/s"],
        ["bf16", "matmul", "700.2", "TFLOP/s"],
    ]


def test_a_failed_measurement_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: object) -> None:
        raise subprocess.CalledProcessError(1, command, "", "Traceback\n  somewhere\nNo memory left\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(DoctorError, match=r"^doctor: measuring failed: No memory left$"):
        measure_rates()


def test_kernels_that_engines_chose_on_a_gpu_like_this_one_are_told() -> None:
    machine = load_machine(MACHINES / "rtx4090.json")
    of = {"gpu": machine.gpu.name, "heads": 32, "kv_heads": 8, "dim": 128, "dtype": "bfloat16", "torch": "2.13.0"}
    rates = {"flash": 359.4, "cudnn": 671.6}
    result = {"whole": "flash", "least_past": {"2048": 2048}, "tflop_s": rates, "out": {"efficient": "no kernel"}}
    entries = [
        {"what": "prefill_attention", "of": of, "result": result},
        {"what": "prefill_attention", "of": {**of, "dim": 64}, "result": {**result, "least_past": {}}},
        {"what": "prefill_attention", "of": {**of, "gpu": "another"}, "result": result},
        {"what": "something else", "of": of, "result": {}},
    ]
    found = examine_measured(machine, entries)
    assert [finding.value for finding in found] == [
        "cudnn (flash 359, cudnn 672 TFLOP/s): 32/8 heads of 128, bfloat16, torch 2.13.0",
        "flash (flash 359, cudnn 672 TFLOP/s): 32/8 heads of 64, bfloat16, torch 2.13.0",
    ]
    assert found[0].advice == "efficient is out: no kernel"
    assert [finding.verdict for finding in examine_measured(machine, [])] == ["note"]
    assert examine_measured(load_machine(MACHINES / "laptop.json"), entries) == []
