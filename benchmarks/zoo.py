"""The models that memplan is tested and measured on: each factory returns `(model, example_inputs)`.

Every model is wrapped so that `model(*example_inputs)` is a scalar training loss: a loss inside the traced graph
needs no tangent of the logits' size, and the `loss=` path of transformers breaks a full graph. Weights are random,
nothing is downloaded, models are in training mode with their libraries' default dropout. A factory draws from its
seed only and leaves the global random state as it was.

Sizes: `nano` is for tests (a step takes milliseconds), `medium` for benchmarks (30 to 300 ms on two cores).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)

Size = Literal["nano", "medium"]
Example = tuple[nn.Module, tuple[Any, ...]]


class Factory(Protocol):
    """Builds a model and its inputs, the same ones for the same size and seed."""

    def __call__(self, size: Size = "nano", seed: int = 0) -> Example: ...


class NextToken(nn.Module):
    """Cross-entropy of a causal language model's next tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class MaskedToken(nn.Module):
    """Cross-entropy of the masked tokens; a label of -100 means that the token is not masked."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Translation(nn.Module):
    """Cross-entropy of an encoder-decoder's target tokens, each predicted from those before it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        shifted = F.pad(target[:, :-1], (1, 0))  # token 0 starts the sequence, as T5 does it
        logits = self.model(input_ids=source, decoder_input_ids=shifted, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Transcription(nn.Module):
    """Cross-entropy of a transcript, each token predicted from those before it and the sound."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, spectrogram: Tensor, target: Tensor) -> Tensor:
        shifted = F.pad(target[:, :-1], (1, 0))
        logits = self.model(input_features=spectrogram, decoder_input_ids=shifted, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Recurrent(nn.Module):
    """Cross-entropy of next tokens by two LSTMs; their dropout is a module, because tracing loses their own."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.first, self.second = (nn.LSTM(width, width, batch_first=True) for _ in range(2))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.dropout(self.first(self.embedding(tokens))[0])
        logits = self.head(self.second(hidden)[0])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Classification(nn.Module):
    """Cross-entropy of an image classifier."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(pixel_values=images).logits, labels)


class Denoising(nn.Module):
    """Mean squared error of the noise that a conditional UNet predicts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, noisy: Tensor, timesteps: Tensor, context: Tensor, noise: Tensor) -> Tensor:
        predicted = self.model(noisy, timesteps, encoder_hidden_states=context, return_dict=False)[0]
        return F.mse_loss(predicted, noise)


class Regression(nn.Module):
    """Mean squared error of a plain network."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(self.model(inputs), targets)


class Block(nn.Module):
    """A transformer block: attention and MLP, each after a layer norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = (nn.LayerNorm(width) for _ in range(2))
        self.queries, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.queries(self.first(hidden)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        attended = F.scaled_dot_product_attention(*(part.transpose(-3, -2) for part in (query, key, value)))
        hidden = hidden + self.projection(attended.transpose(-3, -2).flatten(-2))
        mlp: Tensor = self.mlp(self.second(hidden))
        return hidden + mlp


class TwoTraversals(nn.Module):
    """Blocks that run one after the other, and all of them once more on the result: their weights are shared."""

    def __init__(self, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))

    def forward(self, hidden: Tensor) -> Tensor:
        for _ in range(2):
            for block in self.blocks:
                hidden = block(hidden)
        return hidden


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Weights and inputs drawn within depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _by_size(size: Size, *, nano: dict[str, int], medium: dict[str, int]) -> dict[str, int]:
    """The named dimensions of one size."""
    return {"nano": nano, "medium": medium}[size]


def mlp(size: Size = "nano", seed: int = 0) -> Example:
    """Three linear layers with GELU and dropout."""
    d = _by_size(size, nano={"batch": 8, "width": 32}, medium={"batch": 256, "width": 1024})
    width = d["width"]
    with _seeded(seed):
        layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width), nn.GELU(),
            nn.Linear(width, width),
        )  # fmt: skip
        return Regression(layers), (torch.randn(d["batch"], width), torch.randn(d["batch"], width))


def gpt2(size: Size = "nano", seed: int = 0) -> Example:
    """GPT-2, tied embeddings."""
    return _gpt2(
        seed,
        **_by_size(
            size,
            nano={"layers": 2, "width": 64, "heads": 2, "vocab": 256, "batch": 1, "length": 16},
            medium={"layers": 4, "width": 256, "heads": 4, "vocab": 8192, "batch": 4, "length": 128},
        ),
    )


def gpt2_small(seed: int = 0) -> Example:
    """GPT-2 as published (124 million parameters), batch 1, 128 tokens."""
    return _gpt2(seed, layers=12, width=768, heads=12, vocab=50257, batch=1, length=128)


def _gpt2(seed: int, *, layers: int, width: int, heads: int, vocab: int, batch: int, length: int) -> Example:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocab, n_positions=max(length, 64),
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    with _seeded(seed):
        return NextToken(GPT2LMHeadModel(config)), (torch.randint(vocab, (batch, length)),)


def llama(size: Size = "nano", seed: int = 0) -> Example:
    """Llama with grouped-query attention."""
    d = _by_size(
        size,
        nano={"layers": 2, "width": 64, "mlp": 172, "heads": 4, "kv": 2, "vocab": 256, "batch": 1, "length": 16},
        medium={"layers": 4, "width": 256, "mlp": 688, "heads": 4, "kv": 2, "vocab": 8192, "batch": 4, "length": 128},
    )
    return _llama(seed, **d)


def llama_of(dimensions: Mapping[str, int], *, batch: int, length: int, seed: int = 0) -> Example:
    """Llama of any dimensions (layers, width, mlp, heads, kv, vocab), on the meta device: for planning only."""
    with torch.device("meta"):
        return _llama(seed, **dimensions, batch=batch, length=length)


def llama_7b(seed: int = 0) -> Example:
    """Llama-2 7B (6.7 billion parameters), batch 1, 2048 tokens, on the meta device: for planning only."""
    with torch.device("meta"):
        return _llama(seed, layers=32, width=4096, mlp=11008, heads=32, kv=32, vocab=32000, batch=1, length=2048)


def _llama(
    seed: int, *, layers: int, width: int, mlp: int, heads: int, kv: int, vocab: int, batch: int, length: int
) -> Example:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=mlp, num_attention_heads=heads,
        num_key_value_heads=kv, vocab_size=vocab, max_position_embeddings=max(length, 64), use_cache=False,
    )  # fmt: skip
    with _seeded(seed):
        return NextToken(LlamaForCausalLM(config)), (torch.randint(vocab, (batch, length)),)


def bert(size: Size = "nano", seed: int = 0) -> Example:
    """BERT with the masked-token loss, 15 % of the tokens masked."""
    from transformers import BertConfig, BertForMaskedLM

    d = _by_size(
        size,
        nano={"layers": 2, "width": 64, "heads": 2, "vocab": 256, "batch": 1, "length": 16},
        medium={"layers": 4, "width": 256, "heads": 4, "vocab": 8192, "batch": 4, "length": 128},
    )
    config = BertConfig(
        num_hidden_layers=d["layers"], hidden_size=d["width"], num_attention_heads=d["heads"],
        intermediate_size=4 * d["width"], vocab_size=d["vocab"], max_position_embeddings=max(d["length"], 64),
    )  # fmt: skip
    with _seeded(seed):
        model = MaskedToken(BertForMaskedLM(config))
        tokens = torch.randint(1, d["vocab"], (d["batch"], d["length"]))
        masked = torch.rand(tokens.shape) < 0.15
        masked[:, 0] = True  # never an empty loss, which would be nan
        return model, (tokens.masked_fill(masked, 0), tokens.masked_fill(~masked, -100))


def t5(size: Size = "nano", seed: int = 0) -> Example:
    """T5, encoder and decoder, relative position bias."""
    from transformers import T5Config, T5ForConditionalGeneration

    d = _by_size(
        size,
        nano={"layers": 2, "width": 64, "heads": 2, "vocab": 256, "batch": 1, "length": 16},
        medium={"layers": 3, "width": 256, "heads": 4, "vocab": 8192, "batch": 4, "length": 96},
    )
    config = T5Config(
        num_layers=d["layers"], d_model=d["width"], num_heads=d["heads"], d_kv=d["width"] // d["heads"],
        d_ff=4 * d["width"], vocab_size=d["vocab"], use_cache=False,
    )  # fmt: skip
    with _seeded(seed):
        model = Translation(T5ForConditionalGeneration(config))
        source, target = (torch.randint(1, d["vocab"], (d["batch"], d["length"])) for _ in range(2))
        return model, (source, target)


def vit(size: Size = "nano", seed: int = 0) -> Example:
    """Vision Transformer."""
    from transformers import ViTConfig, ViTForImageClassification

    d = _by_size(
        size,
        nano={"layers": 2, "width": 64, "heads": 2, "image": 32, "patch": 8, "labels": 10, "batch": 1},
        medium={"layers": 6, "width": 256, "heads": 4, "image": 96, "patch": 8, "labels": 100, "batch": 4},
    )
    config = ViTConfig(
        num_hidden_layers=d["layers"], hidden_size=d["width"], num_attention_heads=d["heads"],
        intermediate_size=4 * d["width"], image_size=d["image"], patch_size=d["patch"], num_labels=d["labels"],
    )  # fmt: skip
    with _seeded(seed):
        return Classification(ViTForImageClassification(config)), _images(d["batch"], d["image"], d["labels"])


def resnet(size: Size = "nano", seed: int = 0) -> Example:
    """ResNet with batch norm in training mode: its running statistics change with every call."""
    from transformers import ResNetConfig, ResNetForImageClassification

    d = _by_size(
        size,
        nano={"stem": 8, "width": 16, "stages": 2, "depth": 1, "image": 32, "labels": 10, "batch": 2},
        medium={"stem": 32, "width": 64, "stages": 4, "depth": 2, "image": 96, "labels": 100, "batch": 4},
    )
    config = ResNetConfig(
        embedding_size=d["stem"], hidden_sizes=[d["width"] * 2**stage for stage in range(d["stages"])],
        depths=[d["depth"]] * d["stages"], layer_type="basic", num_labels=d["labels"],
    )  # fmt: skip
    with _seeded(seed):
        return Classification(ResNetForImageClassification(config)), _images(d["batch"], d["image"], d["labels"])


def _images(batch: int, side: int, labels: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, side, side), torch.randint(labels, (batch,))


def unet(size: Size = "nano", seed: int = 0) -> Example:
    """Diffusion UNet with self-attention and cross-attention."""
    from diffusers import UNet2DConditionModel

    d = _by_size(
        size,
        nano={"width": 16, "groups": 4, "layers": 1, "heads": 2, "image": 16, "context": 16, "batch": 1},
        medium={"width": 64, "groups": 16, "layers": 1, "heads": 4, "image": 32, "context": 64, "batch": 4},
    )
    with _seeded(seed):
        model = UNet2DConditionModel(
            sample_size=d["image"], in_channels=3, out_channels=3, layers_per_block=d["layers"],
            block_out_channels=(d["width"], 2 * d["width"]), norm_num_groups=d["groups"],
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=d["heads"], cross_attention_dim=d["context"],
        )  # fmt: skip
        noisy, noise = (torch.randn(d["batch"], 3, d["image"], d["image"]) for _ in range(2))
        timesteps = torch.randint(1000, (d["batch"],))
        return Denoising(model), (noisy, timesteps, torch.randn(d["batch"], 8, d["context"]), noise)


def mixtral(size: Size = "nano", seed: int = 0) -> Example:
    """Mixtral, every expert on every token at once: its default loop over experts depends on the data."""
    from transformers import MixtralConfig, MixtralForCausalLM

    d = _by_size(
        size,
        nano={"layers": 2, "width": 64, "mlp": 64, "heads": 4, "kv": 2, "experts": 4, "vocab": 256, "batch": 1,
              "length": 16},
        medium={"layers": 3, "width": 256, "mlp": 256, "heads": 4, "kv": 2, "experts": 4, "vocab": 8192, "batch": 2,
                "length": 64},
    )  # fmt: skip
    config = MixtralConfig(
        num_hidden_layers=d["layers"], hidden_size=d["width"], intermediate_size=d["mlp"],
        num_attention_heads=d["heads"], num_key_value_heads=d["kv"], num_local_experts=d["experts"],
        num_experts_per_tok=2, vocab_size=d["vocab"], max_position_embeddings=max(d["length"], 64), use_cache=False,
    )  # fmt: skip
    with _seeded(seed):
        model = MixtralForCausalLM(config)
        model.set_experts_implementation("batched_mm")
        return NextToken(model), (torch.randint(d["vocab"], (d["batch"], d["length"])),)


def whisper(size: Size = "nano", seed: int = 0) -> Example:
    """Whisper: convolutions and an encoder over a spectrogram, a decoder over the transcript.

    Some releases of transformers compare a random number with the probability of dropping a layer even where that is
    zero: a branch on data, which nothing can trace. There, encoder and decoder are without dropout of their own.
    """
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    d = _by_size(
        size,
        nano={"layers": 2, "width": 64, "heads": 2, "vocab": 256, "mels": 16, "frames": 32, "length": 16, "batch": 1},
        medium={"layers": 3, "width": 256, "heads": 4, "vocab": 8192, "mels": 80, "frames": 256, "length": 64,
                "batch": 2},
    )  # fmt: skip
    config = WhisperConfig(
        encoder_layers=d["layers"], decoder_layers=d["layers"], d_model=d["width"], encoder_attention_heads=d["heads"],
        decoder_attention_heads=d["heads"], encoder_ffn_dim=4 * d["width"], decoder_ffn_dim=4 * d["width"],
        vocab_size=d["vocab"], num_mel_bins=d["mels"], max_source_positions=d["frames"] // 2,
        max_target_positions=max(d["length"], 64), pad_token_id=0, bos_token_id=0, eos_token_id=0,
        decoder_start_token_id=0, dropout=0.1, use_cache=False,
    )  # fmt: skip
    with _seeded(seed):
        whole = WhisperForConditionalGeneration(config)
        model = Transcription(whole)
        for part in (whole.model.encoder, whole.model.decoder):
            part.training = "if self.training and self.layerdrop" in inspect.getsource(type(part).forward)
        spectrogram = torch.randn(d["batch"], d["mels"], d["frames"])
        return model, (spectrogram, torch.randint(1, d["vocab"], (d["batch"], d["length"])))


def swin(size: Size = "nano", seed: int = 0) -> Example:
    """Swin: attention in windows that shift from layer to layer."""
    from transformers import SwinConfig, SwinForImageClassification

    d = _by_size(
        size,
        nano={"width": 16, "stages": 2, "depth": 2, "window": 4, "image": 32, "patch": 4, "labels": 10, "batch": 1},
        medium={"width": 64, "stages": 3, "depth": 2, "window": 6, "image": 96, "patch": 4, "labels": 100, "batch": 4},
    )
    config = SwinConfig(
        embed_dim=d["width"], depths=[d["depth"]] * d["stages"], num_heads=[2 * 2**i for i in range(d["stages"])],
        window_size=d["window"], image_size=d["image"], patch_size=d["patch"], num_labels=d["labels"],
    )  # fmt: skip
    with _seeded(seed):
        return Classification(SwinForImageClassification(config)), _images(d["batch"], d["image"], d["labels"])


def convnext(size: Size = "nano", seed: int = 0) -> Example:
    """ConvNeXt: depthwise convolutions and layer norms, channels last within a block."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    d = _by_size(
        size,
        nano={"width": 16, "stages": 2, "depth": 1, "image": 32, "labels": 10, "batch": 1},
        medium={"width": 48, "stages": 4, "depth": 2, "image": 96, "labels": 100, "batch": 4},
    )
    config = ConvNextConfig(
        hidden_sizes=[d["width"] * 2**i for i in range(d["stages"])], depths=[d["depth"]] * d["stages"],
        num_stages=d["stages"], image_size=d["image"], num_labels=d["labels"],
    )  # fmt: skip
    with _seeded(seed):
        return Classification(ConvNextForImageClassification(config)), _images(d["batch"], d["image"], d["labels"])


def lstm(size: Size = "nano", seed: int = 0) -> Example:
    """A recurrent language model: embedding, two layers of LSTM with dropout between them, output layer."""
    d = _by_size(
        size,
        nano={"width": 32, "vocab": 256, "batch": 2, "length": 8},
        medium={"width": 256, "vocab": 4096, "batch": 16, "length": 32},
    )
    with _seeded(seed):
        tokens = torch.randint(d["vocab"], (d["batch"], d["length"]))
        return Recurrent(d["vocab"], d["width"]), (tokens,)


def two_traversals(size: Size = "nano", seed: int = 0) -> Example:
    """Six transformer blocks that run twice, the second time on the result of the first (pytorch#193193)."""
    d = _by_size(
        size,
        nano={"width": 32, "heads": 2, "batch": 2, "length": 16},
        medium={"width": 200, "heads": 4, "batch": 4, "length": 174},
    )
    with _seeded(seed):
        model = TwoTraversals(d["width"], d["heads"], blocks=6)
        inputs, targets = (torch.randn(d["batch"], d["length"], d["width"]) for _ in range(2))
        return Regression(model), (inputs, targets)


_FACTORIES = (mlp, gpt2, llama, mixtral, bert, t5, whisper, vit, swin, resnet, convnext, unet, lstm)
ZOO: Mapping[str, Factory] = MappingProxyType({factory.__name__: factory for factory in _FACTORIES})
EXTRAS: Mapping[str, Factory] = MappingProxyType({"two_traversals": two_traversals})  # for single benchmarks


def opt(size: str = "nano") -> tuple[nn.Module, tuple[Tensor]]:
    """OPT: learned positions with an offset, ReLU, dropout."""
    from transformers import OPTConfig, OPTForCausalLM

    d = _outside_dimensions(size)
    config = OPTConfig(
        num_hidden_layers=d["layers"], hidden_size=d["width"], ffn_dim=4 * d["width"], num_attention_heads=4,
        word_embed_proj_dim=d["width"], vocab_size=d["vocab"], max_position_embeddings=d["length"], use_cache=False,
    )  # fmt: skip
    return _outside_example(lambda: OPTForCausalLM(config), d)


def gpt_neox(size: str = "nano") -> tuple[nn.Module, tuple[Tensor]]:
    """GPT-NeoX: attention and feed-forward beside each other, rotary positions on a part of each head."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    d = _outside_dimensions(size)
    config = GPTNeoXConfig(
        num_hidden_layers=d["layers"], hidden_size=d["width"], intermediate_size=4 * d["width"],
        num_attention_heads=4, vocab_size=d["vocab"], max_position_embeddings=d["length"], use_cache=False,
    )  # fmt: skip
    return _outside_example(lambda: GPTNeoXForCausalLM(config), d)


def bloom(size: str = "nano") -> tuple[nn.Module, tuple[Tensor]]:
    """BLOOM: distances in place of positions (ALiBi), a norm after the embedding."""
    from transformers import BloomConfig, BloomForCausalLM

    d = _outside_dimensions(size)
    config = BloomConfig(
        n_layer=d["layers"], hidden_size=d["width"], n_head=4, vocab_size=d["vocab"], use_cache=False
    )  # fmt: skip
    return _outside_example(lambda: BloomForCausalLM(config), d)


def _outside_dimensions(size: str) -> dict[str, int]:
    if size == "nano":
        return {"layers": 2, "width": 64, "vocab": 256, "batch": 1, "length": 16}
    return {"layers": 4, "width": 256, "vocab": 8192, "batch": 4, "length": 128}


def _outside_example(make: Callable[[], nn.Module], d: Mapping[str, int]) -> tuple[nn.Module, tuple[Tensor]]:
    """Return a model with weights that are the same each time, and its inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return NextToken(make()), (torch.randint(d["vocab"], (d["batch"], d["length"])),)


OUTSIDE: Mapping[str, Any] = MappingProxyType({one.__name__: one for one in (opt, gpt_neox, bloom)})
