"""Small models of transformers that are not in the zoo: what was written with the zoo at hand has to run them too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo import NextToken


def opt(size: str = "nano") -> tuple[nn.Module, tuple[Tensor]]:
    """OPT: learned positions with an offset, ReLU, dropout."""
    from transformers import OPTConfig, OPTForCausalLM

    d = _dimensions(size)
    config = OPTConfig(
        num_hidden_layers=d["layers"], hidden_size=d["width"], ffn_dim=4 * d["width"], num_attention_heads=4,
        word_embed_proj_dim=d["width"], vocab_size=d["vocab"], max_position_embeddings=d["length"], use_cache=False,
    )  # fmt: skip
    return _example(lambda: OPTForCausalLM(config), d)


def gpt_neox(size: str = "nano") -> tuple[nn.Module, tuple[Tensor]]:
    """GPT-NeoX: attention and feed-forward beside each other, rotary positions on a part of each head."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    d = _dimensions(size)
    config = GPTNeoXConfig(
        num_hidden_layers=d["layers"], hidden_size=d["width"], intermediate_size=4 * d["width"],
        num_attention_heads=4, vocab_size=d["vocab"], max_position_embeddings=d["length"], use_cache=False,
    )  # fmt: skip
    return _example(lambda: GPTNeoXForCausalLM(config), d)


def bloom(size: str = "nano") -> tuple[nn.Module, tuple[Tensor]]:
    """BLOOM: distances in place of positions (ALiBi), a norm after the embedding."""
    from transformers import BloomConfig, BloomForCausalLM

    d = _dimensions(size)
    config = BloomConfig(
        n_layer=d["layers"], hidden_size=d["width"], n_head=4, vocab_size=d["vocab"], use_cache=False
    )  # fmt: skip
    return _example(lambda: BloomForCausalLM(config), d)


def _dimensions(size: str) -> dict[str, int]:
    if size == "nano":
        return {"layers": 2, "width": 64, "vocab": 256, "batch": 1, "length": 16}
    return {"layers": 4, "width": 256, "vocab": 8192, "batch": 4, "length": 128}


def _example(make: Callable[[], nn.Module], d: Mapping[str, int]) -> tuple[nn.Module, tuple[Tensor]]:
    """Return a model with weights that are the same each time, and its inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return NextToken(make()), (torch.randint(d["vocab"], (d["batch"], d["length"])),)


OUTSIDE: Mapping[str, Any] = MappingProxyType({one.__name__: one for one in (opt, gpt_neox, bloom)})
