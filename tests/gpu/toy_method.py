"""An attention method in a folder outside the project, which no list names."""

import sys
from pathlib import Path

import pytest

import gpu.methods
from transfer.reading import Reading

TOY = '''"""A toy."""

from pydantic import Field

from gpu.methods.method import Footprint, Method
from gpu.methods.kept import Kept
from transfer.reading import Reading
from transfer.settings_model import Settings


class ToySettings(Settings):
    size: int = Field(3, ge=1, description="how large the toy is")
    colour: str = Field("red", description="changes nothing")


class Toy(Method):
    name = "toy"
    summary = "Plays."
    slot = "{slot}"
    settings = ToySettings
    kv_settings = {{"size": "size"}}
    refuses = {refuses}
    reading = {reading}
    prefill_side = {side}

    def footprint(self, settings, architecture, max_running):
        return Footprint(sequence_bytes=settings.size * architecture.num_layers)

    def find_kept(self, settings, host, architecture):
        return Kept(host.sink_tokens // 2, settings.size + 90, (1,))


METHOD = Toy()
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
