"""Full attention over a context that stays on the device: what an empty slot `host` means."""

from gpu.methods.method import Method, NoSettings


class Exact(Method):
    name = "exact"
    summary = "Every context stays on the device, and all of it is read there."
    plan_name = "device"
    plan_words = "all on the device"
    scored = (NoSettings(),)


METHOD = Exact()
