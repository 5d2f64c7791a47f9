"""Every model of the zoo builds, repeats itself under its seed, and has a loss to train on."""

import pytest
import torch
from torch.utils import _pytree as pytree

from benchmarks.zoo import ZOO, llama_7b
from tests.slow import zoo


@pytest.mark.parametrize("name", zoo())
def test_loss_is_a_finite_scalar_that_reaches_every_trained_parameter(name: str) -> None:
    model, inputs = ZOO[name]()
    assert model.training
    loss = model(*inputs)
    assert loss.shape == ()
    assert torch.isfinite(loss)
    loss.backward()
    assert [key for key, p in model.named_parameters() if p.grad is None and p.requires_grad] == []


@pytest.mark.parametrize("name", zoo())
def test_same_seed_same_model_and_inputs(name: str) -> None:
    (one, inputs), (two, again) = ZOO[name](seed=3), ZOO[name](seed=3)
    assert [*one.state_dict()] == [*two.state_dict()]
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(pytree.tree_leaves(inputs), pytree.tree_leaves(again), strict=True))


@pytest.mark.parametrize("name", zoo())
def test_inputs_share_no_storage_and_the_global_random_state_is_kept(name: str) -> None:
    before = torch.random.get_rng_state()
    _, inputs = ZOO[name](seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    pointers = [tensor.untyped_storage().data_ptr() for tensor in pytree.tree_leaves(inputs)]
    assert len(set(pointers)) == len(pointers)


def test_the_large_model_has_seven_billion_parameters_and_no_memory() -> None:
    model, inputs = llama_7b()
    assert sum(parameter.numel() for parameter in model.parameters()) == 6_738_415_616
    tensors = [*model.parameters(), *model.buffers(), *inputs]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
