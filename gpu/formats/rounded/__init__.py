"""Plain checkpoints whose matrices are rounded to few bits as they are loaded (`model.weights`)."""

from gpu.model.weight_format import WeightFormat

FORMAT = WeightFormat({}, ("rounded",), "gpu.formats.rounded.tensors", scale_dtype="bfloat16")
