"""GGUF files: blocks of 2 to 8 bits, stated by each tensor and not by a configuration."""

from gpu.model.weight_format import WeightFormat

FORMAT = WeightFormat({}, ("gguf",), "gpu.formats.gguf.tensors", scale_dtype="float16")
