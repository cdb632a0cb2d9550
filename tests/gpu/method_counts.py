"""A method's counters as attributes, without the first word of their names; one number where it is not by layer."""

from types import SimpleNamespace

from gpu.methods.device_side import DeviceSide
from gpu.methods.registry import list_counters


def counts_of(side: DeviceSide) -> SimpleNamespace:
    known = list_counters()
    told = {name: numbers if known[name].by_layer else numbers[0] for name, numbers in side.counts().items()}
    return SimpleNamespace(**{name.split("_", 1)[1]: numbers for name, numbers in told.items()})
