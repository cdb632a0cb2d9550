"""Parse policy labels with settings: `a3`, or `a3:select_layer=3,seam_tokens=1`."""

from collections.abc import Sequence

import msgspec

from gpu.fusion.fusion_plan import VANILLA, UnknownPolicyError, chooses_tokens
from scheduler.messages import Fusion

SETTINGS: dict[str, type[int] | type[float]] = {
    "select_layer": int, "seam_tokens": int, "ratio": float,
}  # fmt: skip
PAPERS_LAYER = 1
"""The layer in which the A3 paper chooses tokens."""


class UnknownLabelError(ValueError):
    """A label names an unknown policy or setting; the message says what was wanted."""


def parse_fusions(label: str, ratios: Sequence[float]) -> list[Fusion]:
    """Parse a label into one fusion for each ratio.

    There is a single fusion if the policy has no ratio or the label sets one, and none for the vanilla policy. Raises
    UnknownLabelError for an unknown policy, setting or value, and for a setting that the policy does not use.
    """
    name, _, text = label.partition(":")
    try:
        chooses = chooses_tokens(name)
    except UnknownPolicyError as error:
        raise UnknownLabelError(str(error)) from None
    given = dict(part.partition("=")[::2] for part in text.split(",") if part)
    settings = {key: _read(label, key, value) for key, value in given.items()}
    for key in settings:
        if not chooses:
            raise UnknownLabelError(f"policy {label!r}: {name} does not use {key}; leave it out")
    if name == VANILLA:
        return []
    own = settings.pop("ratio", None)
    chosen: Sequence[float] = (0.0,) if not chooses else ratios if own is None else (own,)
    return [
        msgspec.convert({"select_layer": PAPERS_LAYER} | settings | {"policy": name, "ratio": ratio}, Fusion)
        for ratio in chosen
    ]


def _read(label: str, key: str, value: str) -> float:
    if key not in SETTINGS:
        raise UnknownLabelError(f"policy {label!r}: unknown setting {key!r}; have {', '.join(SETTINGS)}")
    try:
        number = SETTINGS[key](value)
    except ValueError:
        number = -1
    most = 1.0 if key == "ratio" else float("inf")
    if not 0 <= number <= most:
        wanted = "a number from 0 to 1" if key == "ratio" else "a whole number that is not negative"
        raise UnknownLabelError(f"policy {label!r}: {key} is {value!r}; wanted {wanted}")
    return number
