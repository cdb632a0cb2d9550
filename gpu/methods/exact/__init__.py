"""Attend fully to contexts that stay on the device: the meaning of an empty slot `host`."""

from gpu.methods.method import Method, NoSettings


class Exact(Method):
    name = "exact"
    summary = "Every context stays on the device, and all of it is read there."
    serves_split_devices = True
    plan_name = "device"
    plan_words = "all on the device"
    scored = (NoSettings(),)


METHOD = Exact()
