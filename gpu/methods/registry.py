"""List the attention methods: the folders of `gpu.methods`. No list names them. No torch."""

from importlib import import_module
from pkgutil import iter_modules

import gpu.methods
from gpu.methods.counters import Counter, RequestFigure
from gpu.methods.method import Method


def list_methods() -> dict[str, Method]:
    """Return all methods by name, sorted."""
    names = sorted(module.name for module in iter_modules(gpu.methods.__path__) if module.ispkg)
    methods = {name.replace("_", "+"): import_module(f"gpu.methods.{name}").METHOD for name in names}
    for name, method in methods.items():
        assert method.name == name, f"methods: {method.name!r} is in a folder for {name!r}, where `_` is `+`"
    sideless = [name for name, method in methods.items() if (method.slot == "prefill") != bool(method.prefill_side)]
    assert not sideless, f"methods: {sideless[0]!r}: methods of the slot `prefill` have a prefill side, and no other"
    return methods


def list_counters() -> dict[str, Counter]:
    """Return the counters of all methods by name. Methods may share a counter, which must then be the same in each."""
    counters: dict[str, Counter] = {}
    for method in list_methods().values():
        for name, counter in method.counters.items():
            assert counters.setdefault(name, counter) == counter, f"methods: two meanings of the counter {name!r}"
    return counters


def list_host_counters() -> dict[str, Counter]:
    """Return the counters of all methods that the host tier counts, by name.

    Methods may share a counter, which must then be the same in each.
    """
    counters: dict[str, Counter] = {}
    for method in list_methods().values():
        for name, counter in method.host_counters.items():
            assert not counter.by_layer, f"methods: the host tier does not count {name!r} by layer"
            assert not counter.is_gauge, f"methods: the host tier has no gauge {name!r}"
            assert counters.setdefault(name, counter) == counter, f"methods: two meanings of the counter {name!r}"
    return counters


def list_figures() -> dict[str, RequestFigure]:
    """Return the request figures of all methods by name.

    Methods may share a figure, which must then be the same in each.
    """
    figures: dict[str, RequestFigure] = {}
    for method in list_methods().values():
        assert method.has_rings or not method.figures, f"methods: {method.name!r} has figures of requests, but no rings"
        for name, figure in method.figures.items():
            assert figures.setdefault(name, figure) == figure, f"methods: two meanings of the figure {name!r}"
    return figures


def list_shares() -> list[str]:
    """Return the names of the shares that evaluations report over all layers, of all methods."""
    shares = (item for method in list_methods().values() for item in method.shares.items())
    return list(dict.fromkeys(name for name, share in shares if share.of_all_layers))
