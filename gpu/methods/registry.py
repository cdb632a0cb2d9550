"""The methods that there are: the folders of `gpu.methods`, in whose names `_` stands for `+`. Adding one touches no
list.
"""

from importlib import import_module
from pkgutil import iter_modules

import gpu.methods
from gpu.methods.method import Method


def list_methods() -> dict[str, Method]:
    """All methods by name, in the order of their names."""
    names = sorted(module.name for module in iter_modules(gpu.methods.__path__) if module.ispkg)
    methods = {name.replace("_", "+"): import_module(f"gpu.methods.{name}").METHOD for name in names}
    misnamed = [name for name, method in methods.items() if method.name != name]
    assert not misnamed, f"methods: {misnamed[0]!r} is not the name of its folder"
    sideless = [name for name, method in methods.items() if (method.slot == "prefill") != bool(method.prefill_side)]
    assert not sideless, f"methods: {sideless[0]!r}: methods of the slot `prefill` have a prefill side, and no other"
    return methods
