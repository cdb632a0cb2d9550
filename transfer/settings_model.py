"""Define the base of every configuration model: frozen, and strict about unknown keys."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A configuration model. renamed: old names of keys, with their new names."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    renamed: ClassVar[Mapping[str, str]] = {}
