"""An attention method in a folder outside the project, which no list names."""

import sys
from pathlib import Path

import pytest

import gpu.methods
from transfer.reading import Reading

TOY = '''"""A toy."""

from pydantic import Field

from gpu.methods.method import Method, possible
from gpu.methods.kept import Kept
from transfer.reading import Reading
from transfer.settings import Settings


class ToySettings(Settings):
    size: int = Field(3, ge=1, description="how large the toy is")
    colour: str = Field("red", description="changes nothing")


METHOD = Method(
    name="toy", summary="Plays.", slot="{slot}", settings=ToySettings, shared_key=None,
    kv_settings={{"size": "size"}}, kv_host={{}},
    slot_bytes=lambda settings, architecture: settings.size * architecture.num_layers,
    rings=None, refuses={refuses}, why_impossible=possible, reading={reading},
    keeps=lambda settings, host, architecture: Kept(host.sink_tokens // 2, settings.size + 90, (1,)),
    device_side=None, prefill_side={side}, align_tokens=lambda settings: 1, scored=(ToySettings(),),
)
'''


def add_toy(
    folder: Path, monkeypatch: pytest.MonkeyPatch, slot: str, reading: Reading, refuses: dict[str, str] | None = None
) -> None:
    side = "gpu.methods.toy" if slot == "prefill" else None
    (folder / "toy").mkdir()
    (folder / "toy" / "__init__.py").write_text(
        TOY.format(slot=slot, reading=reading, side=repr(side), refuses=repr(refuses or {}))
    )
    monkeypatch.setattr(gpu.methods, "__path__", [*gpu.methods.__path__, str(folder)])
    monkeypatch.delitem(sys.modules, "gpu.methods.toy", raising=False)
