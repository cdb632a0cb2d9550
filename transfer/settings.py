"""What every configuration model is made of: frozen, and strict about unknown keys."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """renamed: keys that were once known, by what they are called now."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    renamed: ClassVar[Mapping[str, str]] = {}
