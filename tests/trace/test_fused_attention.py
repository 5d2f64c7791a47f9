"""Masks in rows that fused kernels take: their strides, and the bits of an attention with them.

That these kernels run is held in `tests/targets`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from memplan.trace.capture.fused_attention import FusedAttention, in_rows

BATCH, HEADS, LENGTH = 2, 3, 5
SHAPE = (BATCH, HEADS, LENGTH, LENGTH)
Mask = Callable[[], torch.Tensor]


def _rows_of_queries() -> torch.Tensor:
    """Return a mask of queries, expanded along the keys."""
    return torch.arange(BATCH * LENGTH).view(BATCH, 1, LENGTH, 1).remainder(3).ne(0).expand(-1, -1, -1, LENGTH)


@pytest.mark.parametrize(
    ("make", "copied"),
    [
        pytest.param(_rows_of_queries, (BATCH, 1, LENGTH, LENGTH), id="expanded along the keys"),
        pytest.param(lambda: _rows_of_queries().expand(SHAPE), (BATCH, 1, LENGTH, LENGTH), id="and the heads"),
        pytest.param(lambda: torch.randn(LENGTH, LENGTH, HEADS).permute(2, 0, 1)[None], SHAPE[1:], id="a bias"),
        pytest.param(lambda: torch.randn(LENGTH, LENGTH).t(), (LENGTH, LENGTH), id="transposed"),
        pytest.param(lambda: torch.randn(1, 1, 1, 1).expand(SHAPE), (LENGTH,), id="one number"),
        pytest.param(lambda: torch.randn(LENGTH, 2)[:, :1].expand(-1, 1), (LENGTH, 1), id="one key"),
    ],
)
def test_a_mask_in_rows_has_the_same_numbers_and_the_attention_the_same_bits(
    make: Mask, copied: tuple[int, ...]
) -> None:
    mask = make()
    laid = in_rows(mask)
    assert torch.equal(laid, mask)
    assert laid.stride(-1) == 1
    assert laid.untyped_storage().nbytes() == torch.Size(copied).numel() * mask.element_size()
    query, key, value = (torch.randn(BATCH, HEADS, LENGTH, 8) for _ in range(3))
    with sdpa_kernel(SDPBackend.MATH):
        ours, theirs = (scaled_dot_product_attention(query, key, value, x) for x in (laid, mask))
    assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


def test_attention_of_other_devices_is_left_alone() -> None:
    query = torch.randn(BATCH, HEADS, LENGTH, 8)
    with FusedAttention(lay_out=True) as fused:
        found = scaled_dot_product_attention(query, query, query, attn_mask=_rows_of_queries())
    assert torch.equal(
        found.nan_to_num(), scaled_dot_product_attention(query, query, query, _rows_of_queries()).nan_to_num()
    )
    assert not fused.reasons
