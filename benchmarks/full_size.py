"""Models in the sizes in which they are trained, on the meta device: traced for planning, never run.

Each entry gives the inference model and inputs, and the training model (`model(*inputs)` is a loss) and inputs, at
batch 1 and at a usual batch, in float32 (which changes no ratio between two orders' needs).

    python -m benchmarks.full_size --models gpt2,bert,resnet

measures what a whole training step of a model needs beside parameters and optimizer state, eager against memplan: on
the CPU at batch 1, with fused AdamW; torch's profiler says what is allocated and not yet freed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)

import memplan
from benchmarks import zoo
from benchmarks.results import Cell, Row, Table, collect, parser_of
from benchmarks.runtime import WARM_UP, Step, eager_step, step_peak

CLASSES = 1000
Example = tuple[nn.Module, tuple[Any, ...]]


class Result(nn.Module):
    """What a model of transformers or diffusers computes: its first result alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor) -> Tensor:
        out: Tensor = self.model(*args, return_dict=False)[0]
        return out


class Denoised(Result):
    """Mean squared error of the predicted noise."""

    def forward(self, *args: Tensor) -> Tensor:
        return F.mse_loss(super().forward(*args[:-1]), args[-1])


class Inference(nn.Module):
    """A language model's logits, without a cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


class Encoder(nn.Module):
    """The logits of a masked language model or an image classifier."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.model(inputs).logits
        return logits


def gpt2(batch: int) -> tuple[Example, Example]:
    """GPT-2 small: 128 tokens at batch 1, 1024 otherwise."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = torch.zeros(batch, 128 if batch == 1 else 1024, dtype=torch.long)
    model = GPT2LMHeadModel(GPT2Config(use_cache=False))
    return (Inference(model), (tokens,)), (zoo.NextToken(model), (tokens,))


def llama(batch: int) -> tuple[Example, Example]:
    """Llama 3.2 1B: 256 tokens at batch 1, 2048 otherwise."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=16, hidden_size=2048, intermediate_size=8192, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    tokens = torch.zeros(batch, 256 if batch == 1 else 2048, dtype=torch.long)
    model = LlamaForCausalLM(config)
    return (Inference(model), (tokens,)), (zoo.NextToken(model), (tokens,))


def bert(batch: int) -> tuple[Example, Example]:
    """BERT base: 128 tokens at batch 1, 512 otherwise."""
    from transformers import BertConfig, BertForMaskedLM

    tokens = torch.zeros(batch, 128 if batch == 1 else 512, dtype=torch.long)
    model = BertForMaskedLM(BertConfig())
    return (Encoder(model), (tokens,)), (zoo.MaskedToken(model), (tokens, tokens))


def vit(batch: int) -> tuple[Example, Example]:
    """ViT base, 16 x 16 patches."""
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(num_labels=CLASSES))
    return (Encoder(model), (images(batch),)), (zoo.Classification(model), (images(batch), _labels(batch)))


def resnet(batch: int) -> tuple[Example, Example]:
    """ResNet-50."""
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig(num_labels=CLASSES))
    return (Encoder(model), (images(batch),)), (zoo.Classification(model), (images(batch), _labels(batch)))


def unet(batch: int) -> tuple[Example, Example]:
    """The UNet of Stable Diffusion 1.5 (860 million parameters), 64 x 64 latents."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=64, in_channels=4, out_channels=4, layers_per_block=2, block_out_channels=(320, 640, 1280, 1280),
        cross_attention_dim=768, attention_head_dim=8,
    )  # fmt: skip
    noisy, context = torch.randn(batch, 4, 64, 64), torch.randn(batch, 77, 768)
    steps = torch.zeros(batch, dtype=torch.long)
    return (Result(model), (noisy, steps, context)), (zoo.Denoising(model), (noisy, steps, context, noisy.clone()))


def ddpm(batch: int) -> tuple[Example, Example]:
    """The unconditional UNet of diffusers' training example (114 million parameters), 64 x 64 images."""
    from diffusers import UNet2DModel

    plain, attends = "DownBlock2D", "AttnDownBlock2D"
    model = UNet2DModel(
        sample_size=64, in_channels=3, out_channels=3, layers_per_block=2,
        block_out_channels=(128, 128, 256, 256, 512, 512),
        down_block_types=(plain, plain, plain, plain, attends, plain),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D", "UpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    noisy, steps = torch.randn(batch, 3, 64, 64), torch.zeros(batch, dtype=torch.long)
    return (Result(model), (noisy, steps)), (Denoised(model), (noisy, steps, noisy.clone()))


def images(batch: int) -> Tensor:
    """Return a batch of images of 224 x 224 pixels."""
    return torch.randn(batch, 3, 224, 224)


def _labels(batch: int) -> Tensor:
    return torch.zeros(batch, dtype=torch.long)


FULL_SIZE: Mapping[str, tuple[Callable[[int], tuple[Example, Example]], int]] = MappingProxyType(
    {
        "gpt2": (gpt2, 8),
        "llama": (llama, 4),
        "bert": (bert, 32),
        "vit": (vit, 64),
        "resnet": (resnet, 64),
        "unet": (unet, 16),
        "ddpm": (ddpm, 16),
    }
)  # name -> factory, usual batch


def example(name: str, *, training: bool, real_batch: bool) -> Example:
    """A model on the meta device and its inputs; in training mode, or in evaluation mode."""
    make, usual = FULL_SIZE[name]
    with torch.device("meta"):
        inference, train = make(usual if real_batch else 1)
        model, inputs = train if training else inference
        return model.train(training), inputs


COLUMNS = {
    "model": "model",
    "parameters_mb": "parameters, MB",
    "eager_mb": "eager's peak, MB",
    "peak_mb": "memplan's peak, MB",
    "ratio": "memplan's / eager's",
    "max_live_mb": "max live, MB",
    "max_live_ratio": "max live / eager's peak",
    "bound_ratio": "proven bound of any order / eager's peak",
}
NOTES = (
    "Peaks: the arena, and the highest sum of the profiler's memory events within a step that begins without gradients."
    " Parameters, inputs and optimizer state are in none of them. MB = 10^6 bytes.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the table; returns the exit status."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)

    def table(rows: Sequence[Row]) -> Table:
        title = "Memory of a whole step, full-size models, batch 1, cpu"
        settings: dict[str, Cell] = {"threads": options.threads}
        return Table(name=options.output, title=title, columns=COLUMNS, rows=rows, settings=settings, notes=NOTES)

    return collect((_rows(name) for name in options.models), table, options.directory)


def _rows(name: str) -> list[dict[str, Cell]]:
    print(f"{name} ...", file=sys.stderr, flush=True)
    return [row(name, FULL_SIZE[name][0](1)[1])]


def row(name: str, example: Example) -> dict[str, Cell]:
    """One model's figures; `example` is the model, which returns a loss, and its inputs."""
    model, inputs = example
    model.train()
    eager = _peak(eager_step(model, inputs))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = memplan.compile_step(model, optimizer, nn.Identity(), inputs)
    plan = step.plan
    peak = _peak(Step(run=partial(step, *inputs), clear=optimizer.zero_grad, standing=plan.arena_size))
    return {
        "model": name,
        "parameters_mb": sum(p.nbytes for p in model.parameters()) / 1e6,
        "eager_mb": eager / 1e6,
        "peak_mb": peak / 1e6,
        "ratio": peak / eager,
        "max_live_mb": plan.max_live / 1e6,
        "max_live_ratio": plan.max_live / eager,
        "bound_ratio": plan.schedule.bound / eager,
    }


def _peak(step: Step) -> int:
    for _ in range(WARM_UP):
        step.run()
    return step.standing + step_peak(step)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("full_size", __doc__ or "", list(FULL_SIZE), ["gpt2", "bert", "resnet"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
