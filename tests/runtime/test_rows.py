"""Taking rows by number and adding up their gradients: eager's bits, for numbers from the end too."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from memplan.runtime import compile as memplan_compile
from memplan.runtime.kernels import rows


class Rows(nn.Module):
    def __init__(self, count: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(count, width, generator=generator).to(dtype))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return (self.table * 2)[index].sin()


INDEX = torch.randint(0, 6, (40,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("width", [3, 512])
def test_bitwise_equal_to_eager(width: int, dtype: torch.dtype) -> None:
    model = Rows(6, width, dtype)
    eager = copy.deepcopy(model)
    compiled = memplan_compile(model, INDEX, sanitize="poison")
    functions = {bound.function for bound in compiled._calls.selector.main.program.bound}
    assert rows._take in functions
    assert (rows._add in functions) is (width == 512 and dtype is not torch.bfloat16)
    for index in (INDEX, INDEX - 6, INDEX.flip(0), torch.where(INDEX > 3, INDEX - 6, INDEX)):
        one, two = compiled(index), eager(index)
        assert torch.equal(one, two)
        one.sum().backward()
        two.sum().backward()
        assert model.table.grad is not None
        assert eager.table.grad is not None
        assert torch.equal(model.table.grad, eager.table.grad)
    with pytest.raises(IndexError):
        compiled(INDEX + 6)


def test_numbers_out_of_range_are_refused_as_eager_refuses_them() -> None:
    for index in (torch.tensor([0, 6]), torch.tensor([-7, 0])):
        with pytest.raises(IndexError):
            rows._add(torch.zeros(6, 4), [index], torch.ones(2, 4), True)
        with pytest.raises(IndexError):
            rows._take(torch.zeros(6, 4), [index], out=torch.empty(2, 4))
    empty = rows._take(torch.zeros(6, 0), [torch.tensor([-3, 1])], out=torch.empty(2, 0))
    assert empty.shape == (2, 0)
