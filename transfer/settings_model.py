"""Define the base of every configuration model: frozen, and strict about unknown keys."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A configuration model."""

    model_config = ConfigDict(frozen=True, extra="forbid")
