"""The models whose plans an H200 has made, at the sizes that people train, on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy


class LanguageModel(nn.Module):
    """A decoder with its loss, under autocast to bfloat16 or as it is."""

    def __init__(self, model: Any, *, autocast: bool) -> None:
        super().__init__()
        self.model, self.autocast = model, autocast

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast):
            logits = self.model(input_ids=ids, use_cache=False).logits
        return cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


class Images(nn.Module):
    """A classifier of images with its loss, under autocast to bfloat16."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            out = self.model(pixel_values=images).logits
        return cross_entropy(out.float(), labels)


def gpt2() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """GPT-2 of 124 million parameters, 8 x 1,024 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = LanguageModel(GPT2LMHeadModel(GPT2Config()), autocast=True).train()
        return model, (torch.zeros(8, 1024, dtype=torch.long),)


def llama1b() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A Llama of 1.2 billion parameters in bfloat16, 2 x 2,048 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=16,
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LanguageModel(LlamaForCausalLM(config).to(torch.bfloat16), autocast=False).train()
        return model, (torch.zeros(2, 2048, dtype=torch.long),)


def resnet() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """ResNet-50, 32 images of 224 x 224."""
    from transformers import ResNetConfig, ResNetForImageClassification

    with torch.device("meta"):
        model = Images(ResNetForImageClassification(ResNetConfig(num_labels=1000))).train()
        return model, (torch.empty(32, 3, 224, 224), torch.zeros(32, dtype=torch.long))


def bert() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """BERT-large, 8 x 512 tokens."""
    from transformers import BertConfig, BertForMaskedLM

    class Masked(LanguageModel):
        """An encoder with its loss."""

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                logits = self.model(input_ids=ids).logits
            return cross_entropy(logits.flatten(0, 1).float(), ids.flatten())

    config = BertConfig(num_hidden_layers=24, hidden_size=1024, intermediate_size=4096, num_attention_heads=16)
    with torch.device("meta"):
        return Masked(BertForMaskedLM(config), autocast=True).train(), (torch.zeros(8, 512, dtype=torch.long),)
