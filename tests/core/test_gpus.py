"""The GPUs that are known, and their names."""

from __future__ import annotations

import pytest

from memplan.core.gpus import GPUS, find_gpu, gpu_called
from memplan.errors import UnsupportedDevice
from memplan.evict.costs import DEVICES


@pytest.mark.parametrize("name", GPUS)
def test_every_known_gpu_has_a_name_in_any_case(name: str) -> None:
    target = find_gpu(f" {name.upper()} ")
    assert target.name == name
    assert target.memory > 20 << 30
    assert target.full_name.startswith("NVIDIA")
    assert (48 << 10) < target.shared_memory < (256 << 10)
    costs = DEVICES[target.costs]
    assert costs.name == name
    assert (costs.bytes_per_second, costs.narrow_flops) == pytest.approx((0.9 * target.bandwidth, 0.8 * target.bf16))
    assert gpu_called(target.full_name) == target


@pytest.mark.parametrize(
    ("full_name", "name"),
    [
        ("NVIDIA H100 PCIe", "h100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA GeForce RTX 4090 D", "rtx4090"),
        ("NVIDIA L40", None),
        ("Tesla T4", None),
        ("", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_the_name_of_a_device_that_is_there_finds_its_gpu_and_no_other(full_name: str, name: str | None) -> None:
    assert gpu_called(full_name) == GPUS.get(name or "")


def test_what_is_taken_from_a_like_gpu_is_said(caplog: pytest.LogCaptureFixture) -> None:
    for capability, like in ((86, "RTX 3090"), (90, "H100")):
        with caplog.at_level("WARNING"):
            find_gpu(f"sm{capability}:24GiB")
        assert f"sm{capability}:24GiB is planned with the multiprocessors, cache and speed of NVIDIA" in caplog.text
        assert like in caplog.text


def test_a_capability_and_its_memory_name_a_gpu() -> None:
    assert find_gpu("sm90:80GiB").memory == 80 << 30
    assert find_gpu("sm_90").capability == find_gpu("h100").capability == (9, 0)
    assert find_gpu("sm86:24GiB").threads == 1536
    assert find_gpu("sm100").capability == (10, 0)
    assert find_gpu("h100-80gb") == find_gpu("h100")
    assert find_gpu("h100").workspace == find_gpu("h200").workspace > find_gpu("a100").workspace > 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h1000", "did you mean 'h100'"),
        ("tpu", "name one of h200, h100"),
        ("sm70:16GiB", "no rules are known for capability 7.0"),
        ("sm90:much", "'much' is not a size in bytes"),
        ("", "is no GPU that memplan knows"),
    ],
)
def test_what_is_no_target_is_refused_with_what_is_one(name: str, said: str) -> None:
    with pytest.raises(UnsupportedDevice, match="target=") as error:
        find_gpu(name)
    assert said in str(error.value)
    assert error.value.hint
