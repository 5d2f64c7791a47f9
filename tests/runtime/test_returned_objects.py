"""Objects that forward returns beside tensors: the cache of a language model, and objects with plain attributes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.errors import UnsupportedCall

LENGTH = 16


def _llama(*, cache: bool = True) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 2 * LENGTH}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    how = {"use_cache": cache, "attn_implementation": "eager"}  # other attention skips a mask beside a cache only
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **how))


def _batch(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (4, LENGTH), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def test_a_language_model_returns_its_cache_as_in_eager() -> None:
    eager, model = _llama(), _llama()
    compiled = memplan.compile(model, _batch(0), fullgraph=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, eager)]
    for seed in range(2):
        one, two = compiled(**_batch(seed)), eager(**_batch(seed))
        assert torch.equal(one.loss, two.loss)
        assert torch.equal(one.logits, two.logits)
        assert type(one.past_key_values) is type(two.past_key_values)
        assert one.past_key_values.get_seq_length() == LENGTH
        for a, b in zip(one.past_key_values.layers, two.past_key_values.layers, strict=True):
            assert torch.equal(a.keys, b.keys)
            assert torch.equal(a.values, b.values)
            assert a.keys.requires_grad is b.keys.requires_grad is True
        for output, optimizer in zip((one, two), optimizers, strict=True):
            optimizer.zero_grad()
            output.loss.backward()
            optimizer.step()


class Record:
    """An object with plain attributes: tensors, others, and another object in a list."""

    def __init__(self, hidden: torch.Tensor, inner: list[Any]) -> None:
        self.hidden, self.name, self.inner, self.device = hidden, "record", inner, hidden.device


class Note:
    """An object that equals nothing but itself."""


class Recorded(nn.Module):
    """Returns a result and a `Record` of how it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Record]:
        hidden = self.one(x).relu()
        return self.two(hidden), Record(hidden, [Record(hidden * 2, [Note()]), 3])


def test_an_object_with_plain_attributes_is_made_anew_by_each_call() -> None:
    torch.manual_seed(0)
    model, x = Recorded(), torch.randn(4, 8)
    compiled = memplan.compile(model, x, fullgraph=True)
    (out, one), (expected, two) = compiled(x), model(x)
    assert torch.equal(out, expected)
    assert (type(one), one.name, one.inner[1], one.device) == (Record, "record", 3, two.device)
    assert torch.equal(one.hidden, two.hidden)
    assert torch.equal(one.inner[0].hidden, two.inner[0].hidden)
    assert type(one.inner[0].inner[0]) is Note
    gradients = [torch.autograd.grad(y.sum(), list(model.parameters())) for y in (out, expected)]
    assert all(map(torch.equal, *gradients))
    _, later = compiled(x)
    assert later is not one
    assert later.inner is not one.inner


def test_a_loss_of_a_returned_object_raises() -> None:
    model, x = Recorded(), torch.randn(4, 8)
    compiled = memplan.compile(model, x, fullgraph=True)
    out, record = compiled(x)
    with pytest.raises(UnsupportedCall, match="for which no gradient is planned"):
        (out.sum() + record.hidden.sum()).backward()
