"""Collect the weight formats, one folder each. There is no list: folders are found by looking.

A folder's `__init__.py` has FORMAT (`gpu.model.weight_format.WeightFormat`): it reads `quantization_config` without
torch. Its `tensors.py` has `stored_tensors`, which names a module's tensors and puts them into a packed matrix.
"""
