"""Targets: the GPUs that are known, and their names."""

from __future__ import annotations

import pytest

from memplan.errors import UnsupportedDevice
from memplan.targets.target import find_target

NAMES = ("h200", "h100", "a100", "a100-40gb", "l4", "l40s", "rtx4090", "b200")


@pytest.mark.parametrize("name", NAMES)
def test_every_known_gpu_has_a_name_in_any_case(name: str) -> None:
    target = find_target(f" {name.upper()} ")
    assert target.name == name
    assert target.memory > 20 << 30
    assert target.full_name.startswith("NVIDIA")
    assert (48 << 10) < target.shared_memory < (256 << 10)


def test_a_capability_and_its_memory_name_a_gpu() -> None:
    assert find_target("sm90:80GiB").memory == 80 << 30
    assert find_target("sm_90").capability == find_target("h100").capability == (9, 0)
    assert find_target("sm86:24GiB").threads == 1536
    assert find_target("sm100").capability == (10, 0)


def test_another_name_of_a_gpu_is_the_same() -> None:
    assert find_target("h100-80gb") == find_target("h100")


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
        find_target(name)
    assert said in str(error.value)
    assert error.value.hint


def test_hopper_has_larger_workspaces() -> None:
    assert find_target("h100").workspace == find_target("h200").workspace > find_target("a100").workspace > 0
