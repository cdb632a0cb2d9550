"""What every configuration model is made of: frozen, and strict about unknown keys."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
