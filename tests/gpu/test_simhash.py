"""SimHash codes against signs counted in numpy; one draw for every device; wrong shapes are named."""

import numpy as np
import pytest
import torch

from gpu.methods.sampled import hyperplanes as simhash
from gpu.methods.sampled.hyperplanes import draw_projections, encode_reference

CPU = torch.device("cpu")


def draw(dim: int = 64, bits: int = 9, tables: int = 7, seed: int = 0, dtype: torch.dtype = torch.float32):
    return draw_projections(dim, bits, tables, seed, dtype, CPU)


def oracle_codes(rows: np.ndarray, matrix: np.ndarray, bits: int, tables: int) -> np.ndarray:
    codes = np.zeros((len(rows), tables), dtype=np.int64)
    for number, row in enumerate(rows):
        for table in range(tables):
            for bit in range(bits):
                if float(row @ matrix[:, table * bits + bit]) > 0:
                    codes[number, table] |= 1 << bit
    return codes


@pytest.mark.parametrize("bits", [1, 7, 16])
def test_codes_are_the_signs_of_the_products_in_order(bits: int) -> None:
    projections = draw(bits=bits)
    rows = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1))
    codes = encode_reference(rows.double(), projections)
    wanted = oracle_codes(rows.double().reshape(15, 64).numpy(), projections.matrix.double().numpy(), bits, 7)
    assert codes.dtype == torch.uint16
    assert codes.shape == (3, 5, 7)
    np.testing.assert_array_equal(codes.to(torch.int32).reshape(15, 7).numpy(), wanted)
    reversed_bits = encode_reference(rows, draw(bits=bits, seed=1)).to(torch.int32).reshape(15, 7).numpy()
    assert (reversed_bits != wanted).any()  # other hyperplanes give other codes: equality above says something


def test_chunks_do_not_change_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, projections = torch.randn(50, 64, generator=torch.Generator().manual_seed(2)), draw()
    whole = encode_reference(rows, projections)
    monkeypatch.setattr(simhash, "MAX_PRODUCTS", 3 * 63)
    assert torch.equal(encode_reference(rows, projections).to(torch.int32), whole.to(torch.int32))


def test_codes_do_not_depend_on_length_and_opposites_share_no_bit() -> None:
    projections = draw(bits=16)
    rows = torch.randn(20, 64, generator=torch.Generator().manual_seed(3))
    codes = encode_reference(rows, projections).to(torch.int32)
    assert torch.equal(encode_reference(0.25 * rows, projections).to(torch.int32), codes)
    assert torch.equal(encode_reference(-rows, projections).to(torch.int32), codes ^ 0xFFFF)
    assert not encode_reference(torch.zeros(2, 64), projections).to(torch.int32).any()


def test_a_draw_is_its_seed_and_begins_with_the_tables_of_a_smaller_one() -> None:
    assert torch.equal(draw().matrix, draw().matrix)
    assert not torch.equal(draw().matrix, draw(seed=1).matrix)
    assert torch.equal(draw(tables=20).matrix[:, : 7 * 9], draw().matrix)
    narrow = draw(dtype=torch.bfloat16)
    assert torch.equal(narrow.matrix, draw().matrix.bfloat16())
    assert torch.equal(draw().to(CPU, torch.bfloat16).matrix, narrow.matrix)


@pytest.mark.parametrize(
    ("bits", "tables", "named"), [(0, 5, "bits_per_table is 0"), (17, 5, "17"), (8, 0, "num_tables")]
)
def test_a_draw_that_fits_no_code_is_refused(bits: int, tables: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        draw(bits=bits, tables=tables)


def test_rows_of_another_dim_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3, 32\).*\[\.\.\., 64\]"):
        encode_reference(torch.zeros(3, 32), draw())


@pytest.mark.gpu
def test_every_device_has_the_same_draw_and_nearly_the_same_codes() -> None:
    cuda = torch.device("cuda")
    mine = draw_projections(64, 9, 7, 0, torch.float32, cuda)
    assert torch.equal(mine.matrix.cpu(), draw().matrix)
    rows = torch.randn(512, 64, generator=torch.Generator().manual_seed(4))
    theirs = encode_reference(rows.to(cuda), mine).cpu().to(torch.int32)
    same = (theirs == encode_reference(rows, draw()).to(torch.int32)).float().mean().item()
    assert same > 0.999  # only products within a few ulps of zero may fall on the other side
