"""The kernel of an attention on a GPU: by capability, release of torch, version of cuDNN, types, sizes and mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from memplan.targets.attention import CUDNN_OF_WHEELS, RULES, Attention, attention_kernel, cudnn_version, release_of

RELEASES = [(2, 11), (2, 12), (2, 13), (2, 14)]
AMPERE, CONSUMER, ADA, HOPPER, DATACENTER, BLACKWELL = (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)
CAPABILITIES = [AMPERE, CONSUMER, ADA, HOPPER, DATACENTER, BLACKWELL]
SMALL = [AMPERE, CONSUMER, ADA, BLACKWELL]
BIG = [HOPPER, DATACENTER]
HALF, SINGLE = torch.bfloat16, torch.float32


def call(
    capability: tuple[int, int] = HOPPER,
    release: tuple[int, int] = (2, 13),
    *,
    width: int = 64,
    of_values: int = 0,
    heads: tuple[int, int] = (4, 4),
    lengths: tuple[int, int] = (16, 16),
    dtype: torch.dtype = HALF,
    trains: bool = True,
    offset: int = 0,
    mask: tuple[int, int, int, int] | None = None,
    mask_stride: int = 1,
    batch: int = 2,
    dropout: float = 0.0,
    causal: bool = False,
    grouped: bool = False,
    cudnn: int = 0,
) -> Attention:
    """Return an attention of meta tensors; `mask` is the shape of one, `offset` the query's in its storage."""

    def made(count: int, length: int, size: int) -> torch.Tensor:
        memory = torch.empty(offset + batch * count * length * size, dtype=dtype, device="meta", requires_grad=trains)
        return memory[offset:].view(batch, count, length, size)

    bias = None
    if mask is not None:
        bias = torch.empty_strided(mask, (1 << 20, 1 << 10, 1 << 5, mask_stride), dtype=torch.bool, device="meta")
    return Attention(
        query=made(heads[0], lengths[0], width),
        key=made(heads[1], lengths[1], width),
        value=made(heads[1], lengths[1], of_values or width),
        mask=bias,
        dropout=dropout,
        causal=causal,
        grouped=grouped,
        capability=capability,
        release=release,
        cudnn=cudnn or CUDNN_OF_WHEELS[release],
    )


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("how", "small", "big"),
    [
        pytest.param({}, "flash", "cudnn", id="half"),
        pytest.param({"dtype": torch.float16}, "flash", "cudnn", id="float16"),
        pytest.param({"dtype": SINGLE}, "efficient", "efficient", id="single"),
        pytest.param({"dtype": torch.float64}, "math", "math", id="double"),
        pytest.param({"mask": (2, 4, 16, 16)}, "efficient", "cudnn", id="a mask"),
        pytest.param({"mask": (2, 1, 1, 16)}, "efficient", "cudnn", id="a mask of keys"),
        pytest.param({"mask": (2, 4, 16, 16), "mask_stride": 0}, "math", "math", id="an expanded mask"),
        pytest.param({"width": 60}, "flash", "flash", id="no multiple of 8"),
        pytest.param({"width": 288}, "efficient", "efficient", id="too wide for flash"),
        pytest.param({"width": 64, "of_values": 32}, "efficient", "cudnn", id="narrower values"),
        pytest.param({"heads": (4, 2), "grouped": True}, "flash", "cudnn", id="grouped heads"),
        pytest.param({"heads": (4, 3), "grouped": True}, "math", "math", id="unequal groups"),
        pytest.param({"lengths": (16, 8), "causal": True}, "efficient", "cudnn", id="causal, and not square"),
        pytest.param({"lengths": (16, 1)}, "flash", "flash", id="one key"),
        pytest.param({"lengths": (1, 16)}, "flash", "cudnn", id="one query"),
        pytest.param({"lengths": (1, 16), "dropout": 0.25}, "flash", "flash", id="one query and dropout"),
        pytest.param({"lengths": (16, 0)}, "math", "math", id="no keys"),
        pytest.param({"cudnn": 91500}, "flash", "flash", id="an older cuDNN"),
    ],
)
def test_the_kernel_of_every_release(
    release: tuple[int, int], capability: tuple[int, int], how: dict[str, Any], small: str, big: str
) -> None:
    assert attention_kernel(call(capability, release, **how))[0] == (big if capability in BIG else small)


@pytest.mark.parametrize(
    ("how", "capabilities", "found"),
    [
        pytest.param({"dropout": 0.1}, BIG, ["cudnn", "flash", "flash", "flash"], id="dropout that is no 16th"),
        pytest.param({"dropout": 0.125}, BIG, ["cudnn"] * 4, id="dropout of two 16ths"),
        pytest.param({"dropout": 0.1}, SMALL, ["flash"] * 4, id="dropout of flash"),
        pytest.param({"width": 192}, [HOPPER], ["cudnn", "cudnn", "cudnn", "flash"], id="192, trained"),
        pytest.param({"width": 192, "trains": False}, [HOPPER], ["cudnn"] * 4, id="192"),
        pytest.param({"width": 192}, [DATACENTER], ["flash"] * 4, id="192, trained on 10.0"),
        pytest.param({"width": 192, "trains": False}, [DATACENTER], ["flash"] * 3 + ["cudnn"], id="192 on 10.0"),
        pytest.param({"width": 256}, [DATACENTER], ["flash"] * 3 + ["cudnn"], id="256 on 10.0"),
        pytest.param({"width": 192, "of_values": 128}, [DATACENTER], ["cudnn"] * 4, id="192 and 128"),
        pytest.param({"width": 224}, [CONSUMER, ADA, BLACKWELL], ["efficient"] * 4, id="224, trained"),
        pytest.param({"width": 224}, [AMPERE], ["flash"] * 4, id="224 on 8.0"),
        pytest.param({"width": 224, "trains": False}, [CONSUMER, ADA, BLACKWELL], ["flash"] * 4, id="224"),
        pytest.param({"width": 256}, [CONSUMER, ADA, BLACKWELL], ["flash"] * 4, id="256, trained"),
        pytest.param({"width": 256, "dropout": 0.5}, [CONSUMER, ADA], ["efficient"] * 4, id="256 and dropout"),
        pytest.param(
            {"heads": (4, 2), "grouped": True, "dtype": SINGLE},
            CAPABILITIES,
            ["math"] * 3 + ["efficient"],
            id="grouped in single",
        ),
        pytest.param(
            {"heads": (4, 2), "grouped": True, "mask": (2, 4, 16, 16)},
            SMALL,
            ["math"] * 3 + ["efficient"],
            id="grouped with a mask: cuDNN's comes after single ops",
        ),
        pytest.param({"heads": (4, 1)}, SMALL, ["math"] * 3 + ["flash"], id="one head of keys, not said to be grouped"),
        pytest.param({"dtype": SINGLE, "offset": 1}, SMALL, ["efficient"] * 2 + ["math"] * 2, id="not aligned"),
        pytest.param({"batch": 65536}, BIG, ["cudnn"] * 2 + ["flash"] * 2, id="too many samples for cuDNN"),
        pytest.param({"dropout": 0.125, "cudnn": 91200}, BIG, ["flash"] * 4, id="a cuDNN without dropout"),
    ],
)
def test_what_differs_between_releases_and_capabilities(
    how: dict[str, Any], capabilities: list[tuple[int, int]], found: list[str]
) -> None:
    for capability in capabilities:
        assert [attention_kernel(call(capability, release, **how))[0] for release in RELEASES] == found


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"mask": (2, 4, 16, 16), "mask_stride": 0}, "the last stride of its mask"),
        ({"dtype": torch.float64}, "its types are float64, float64, float64"),
        ({"heads": (4, 2), "grouped": True, "dtype": SINGLE}, "takes no grouped heads"),
    ],
)
def test_why_attention_is_not_fused(how: dict[str, Any], said: str) -> None:
    assert said in attention_kernel(call(**how))[1]


def test_every_rule_is_broken_by_something_and_has_its_source() -> None:
    assert all(rule.source and rule.otherwise and rule.kernels for rule in RULES)
    assert all(rule.holds(call()) for rule in RULES if "cudnn" in rule.kernels)


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (SDPBackend.FLASH_ATTENTION, "flash"),
        (SDPBackend.EFFICIENT_ATTENTION, "efficient"),
        (SDPBackend.MATH, "math"),
        (SDPBackend.CUDNN_ATTENTION, "cudnn"),
    ],
)
@pytest.mark.parametrize("capability", [HOPPER, AMPERE])
def test_the_flags_of_torch_are_followed(
    allowed: SDPBackend, expected: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with sdpa_kernel(allowed):
        assert attention_kernel(call(capability))[0] == expected
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match=r"No available kernel.*mask"):
        attention_kernel(call(capability, mask=(2, 4, 16, 16)))
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert attention_kernel(call(HOPPER))[0] == "flash"


def test_deterministic_algorithms_leave_out_cudnns() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert attention_kernel(call())[0] == "flash"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("version", ["2.15.0", "2.15.0a0+git1", "3.1", "2.10.1"])
def test_a_release_without_rules_is_said(version: str) -> None:
    release, note = release_of(version)
    assert release in RELEASES
    assert note == f"attention: no rule for torch {version}: assumed as for {release[0]}.{release[1]}"
    assert release_of("2.13.0+cpu") == ((2, 13), "")
    assert cudnn_version((2, 13)) > 91500
