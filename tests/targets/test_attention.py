"""Which kernel of attention a GPU takes, by the rules of torch's sdp_utils.cpp."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from memplan.targets.attention import attention_kernel

HOPPER, AMPERE = (9, 0), (8, 0)


def _tensors(
    width: int = 64, heads: tuple[int, int] = (4, 4), dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key = (torch.empty(2, each, 16, width, dtype=dtype, device="meta") for each in heads)
    return query, key, key.clone()


def _mask(*, stride: int = 1) -> torch.Tensor:
    return torch.empty_strided((2, 1, 16, 16), (256, 256, 16, stride), dtype=torch.bool, device="meta")


@pytest.mark.parametrize(
    ("tensors", "mask", "grouped", "hopper", "ampere"),
    [
        pytest.param({}, None, False, "cudnn", "flash", id="half"),
        pytest.param({"dtype": torch.float32}, None, False, "efficient", "efficient", id="single"),
        pytest.param({"dtype": torch.float64}, None, False, "math", "math", id="double"),
        pytest.param({}, 1, False, "cudnn", "efficient", id="a mask"),
        pytest.param({}, 0, False, "math", "math", id="a mask whose last stride is not 1"),
        pytest.param({"width": 192}, None, False, "flash", "flash", id="wide heads"),
        pytest.param({"width": 288}, None, False, "efficient", "efficient", id="too wide for flash"),
        pytest.param({"width": 60}, None, False, "flash", "flash", id="no multiple of 8"),
        pytest.param({"heads": (4, 2)}, None, True, "cudnn", "flash", id="grouped heads"),
        pytest.param({"heads": (4, 2), "dtype": torch.float32}, None, True, "math", "math", id="grouped in single"),
    ],
)
def test_the_kernel_follows_the_rules(
    tensors: dict[str, Any], mask: int | None, grouped: bool, hopper: str, ampere: str
) -> None:
    given = _tensors(**tensors)
    masked = None if mask is None else _mask(stride=mask)
    for capability, expected in ((HOPPER, hopper), (AMPERE, ampere)):
        assert attention_kernel(*given, masked, grouped, capability) == expected


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (SDPBackend.FLASH_ATTENTION, "flash"),
        (SDPBackend.EFFICIENT_ATTENTION, "efficient"),
        (SDPBackend.MATH, "math"),
        (SDPBackend.CUDNN_ATTENTION, "cudnn"),
    ],
)
def test_the_flags_of_torch_are_followed(allowed: SDPBackend, expected: str) -> None:
    with sdpa_kernel(allowed):
        assert attention_kernel(*_tensors(), None, False, HOPPER) == expected
