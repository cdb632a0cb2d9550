"""The settings of MAC-Attention that are compared, each as a method of the reference decoder and as a profile.

Invariant: a setting's method and its profile agree in all that decides an answer: both match in contexts of any length,
and no layer stops.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from evals.served_method import PREFIX
from gpu.config import Composition

TAUS = (0.3, 0.45, 0.6, 0.75, 0.9)
WINDOWS = ((256, 64), (512, 128), (1024, 256))
"""The paper's (K, r): entries of a ring, and cells in front of a match that are read again."""

OVERS = ("exact", "sampled")

BESIDE = (
    *(f"{name}budget={keys}" for name in ("topk:", "snapkv:", "h2o:observe=64,") for keys in (0.0125, 0.05)),
    *(f"oracle:budget={budget}" for budget in (0.03, 0.15)),
    *(f"quest:budget={budget}" for budget in (0.01, 0.034)),
    *(f"streaming:budget={budget}" for budget in (0.05, 0.2)),
    "sampled:bits_per_table=10,num_tables=150",
    "sampled:bits_per_table=9,num_tables=120",
)
"""Other methods at about the bytes that MAC's windows read of 16,384 tokens at the least and at the most, 5 and 20 %,
where a method can read so little. Their budgets are keys of a query head; the reference model's four heads a group
read apart."""


@dataclass(frozen=True)
class Setting:
    """capacity, band: the paper's K and r. share: `max_prefix_share`, 1 in the paper. over: what becomes of a context,
    and so what a head that misses reads.
    """

    tau: float
    share: float
    capacity: int
    band: int
    over: str

    @property
    def method(self) -> str:
        """Return its name in the reference decoder, where heads that miss read everything."""
        return f"mac:tau={self.tau:g},max_prefix_share={self.share:g},capacity={self.capacity},band={self.band}"

    @property
    def profile(self) -> str:
        return f"mac-{self.capacity}-{self.band}-{self.tau:g}-{self.share:g}-{self.over}"

    @property
    def served(self) -> str:
        """Return the method that is the profile, end to end."""
        return PREFIX + self.profile

    @property
    def window(self) -> tuple[int, int]:
        return self.capacity, self.band

    def composition(self, rings: int) -> Composition:
        """Return rings: of requests that run at once."""
        reuse = {
            "method": "mac", "tau": self.tau, "max_prefix_share": self.share, "capacity": self.capacity,
            "band": self.band, "min_context_tokens": 0, "stops_matching": False, "rings": rings,
        }  # fmt: skip
        return Composition.model_validate({"reuse": reuse, "host": self.over})

    def told(self, is_served: bool) -> dict[str, Any]:
        """Return what a row says of it. `family`: settings that differ in their threshold alone, by the way that they
        ran.
        """
        family = f"mac {self.capacity}:{self.band}" + ("" if self.share == 1 else f", share {self.share:g}")
        family += "" if self.over == "exact" else f" over {self.over}"
        return {**asdict(self), "family": family + (", served" if is_served else "")}


def spread(
    taus: Sequence[float], share: float, windows: Sequence[tuple[int, int]], overs: Sequence[str]
) -> list[Setting]:
    """Return every setting, those of one placement and window together."""
    return [Setting(tau, share, *window, over) for over, window, tau in product(overs, windows, taus)]


def by_label(settings: Sequence[Setting]) -> dict[str, dict[str, Any]]:
    """Return what rows of these methods and profiles say of their settings."""
    return {one.method: one.told(False) for one in settings if one.over == "exact"} | {
        one.served: one.told(True) for one in settings
    }
