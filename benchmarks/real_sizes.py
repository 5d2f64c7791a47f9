"""The models that are measured on a GPU, at the sizes that people train: each is a model with its loss, and a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]


class LanguageModel(nn.Module):
    """A decoder with its loss, under autocast to bfloat16 or as it is."""

    def __init__(self, model: Any, device: str, *, autocast: bool) -> None:
        super().__init__()
        self.model, self.autocast = model, autocast
        self.kind = "cuda" if device == "meta" else torch.device(device).type

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.kind, torch.bfloat16, enabled=self.autocast):
            logits = self.model(input_ids=ids, use_cache=False).logits
        return cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


class MaskedLanguageModel(LanguageModel):
    """An encoder with its loss, under autocast to bfloat16."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.kind, torch.bfloat16):
            logits = self.model(input_ids=ids).logits
        return cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


class Images(LanguageModel):
    """A classifier of images with its loss, under autocast to bfloat16."""

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        with torch.autocast(self.kind, torch.bfloat16):
            out = self.model(pixel_values=images).logits
        return cross_entropy(out.float(), labels)


def gpt2(device: str = "meta", *, tiny: bool = False) -> Example:
    """GPT-2 of 124 million parameters, 8 x 1,024 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 256, "n_positions": 64}
    config = GPT2Config(**(small if tiny else {}))
    with torch.device(device):
        model = LanguageModel(GPT2LMHeadModel(config), device, autocast=True).train()
    return model, (_ids(config.vocab_size, (2, 32) if tiny else (8, 1024), device),)


def llama1b(device: str = "meta", *, tiny: bool = False) -> Example:
    """A Llama of 1.2 billion parameters in bfloat16, 2 x 2,048 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width, inner, heads, words = (2, 64, 128, 4, 256) if tiny else (16, 2048, 8192, 32, 128256)
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=heads // (2 if tiny else 4),
        vocab_size=words,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    with torch.device(device):
        model = LanguageModel(LlamaForCausalLM(config).to(torch.bfloat16), device, autocast=False).train()
    return model, (_ids(words, (2, 32) if tiny else (2, 2048), device),)


def bert(device: str = "meta", *, tiny: bool = False) -> Example:
    """BERT-large, 8 x 512 tokens."""
    from transformers import BertConfig, BertForMaskedLM

    layers, width, inner, heads = (2, 64, 128, 4) if tiny else (24, 1024, 4096, 16)
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
    }
    config = BertConfig(**sizes, **({"vocab_size": 256} if tiny else {}))
    with torch.device(device):
        model = MaskedLanguageModel(BertForMaskedLM(config), device, autocast=True).train()
    return model, (_ids(config.vocab_size, (2, 32) if tiny else (8, 512), device),)


def resnet(device: str = "meta", *, tiny: bool = False) -> Example:
    """ResNet-50, 32 images of 224 x 224."""
    from transformers import ResNetConfig, ResNetForImageClassification

    small = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
    config = ResNetConfig(num_labels=1000, **(small if tiny else {}))
    with torch.device(device):
        model = Images(ResNetForImageClassification(config), device, autocast=True).train()
        count, side = (2, 32) if tiny else (32, 224)
        images = torch.randn(count, 3, side, side)
    return model, (images, _ids(1000, (count,), device))


def _ids(words: int, shape: tuple[int, ...], device: str) -> torch.Tensor:
    return torch.randint(words, shape, device=device)


MODELS: Mapping[str, Callable[..., Example]] = {"gpt2": gpt2, "llama1b": llama1b, "bert": bert, "resnet": resnet}
