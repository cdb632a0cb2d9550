"""Every kind of matrix has all that a matrix has, also those that only a card multiplies."""

import pytest

from gpu.weights.humming_matrix import HummingMatrix
from gpu.weights.matrix import Matrix, PackedMatrix, PlainMatrix, RoundingMatrix

KINDS = (PlainMatrix, PackedMatrix, RoundingMatrix, HummingMatrix)


@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_has_what_the_protocol_names(kind: type) -> None:
    asked = {name for name in vars(Matrix) if not name.startswith("_")}
    assert asked >= {"shape", "dtype", "linear", "logits"}
    assert not {name for name in asked if not hasattr(kind, name)}
