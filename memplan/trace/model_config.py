"""Makes the training step of a transformers configuration: the model on the meta device, its inputs and its loss.

Nothing is downloaded and no weight is read: sizes come from the configuration file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)

from memplan.core.extras import require_library
from memplan.errors import InvalidModel, InvalidSize, UnreadableFile
from memplan.trace.meta_model import floating_type

USUAL_LENGTH = 2048  # tokens, where the model takes so many
_IMAGE = 224  # pixels of a side, where the configuration does not say
_TASKS = {  # the end of a class's name -> its task
    "ForCausalLM": "next token",
    "LMHeadModel": "next token",
    "ForMaskedLM": "masked token",
    "ForConditionalGeneration": "translation",
    "ForSequenceClassification": "classification",
    "ForImageClassification": "classification",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigModel:
    """The step of a configuration.

    `make(batch)` returns the model and its inputs, on the meta device. `name` is that of the class, `length` the tokens
    of a sequence (0: it reads none), `dtype` the type of its parameters.
    """

    name: str
    model: nn.Module
    length: int
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    kinds: tuple[torch.dtype, ...]

    def make(self, batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """Return the model, and inputs of `batch` samples."""
        made = (torch.empty((batch, *s), dtype=k, device="meta") for s, k in zip(self.shapes, self.kinds, strict=True))
        return self.model, tuple(made)


class ConfigLoss(nn.Module):
    """The loss of a model of transformers, computed from its logits; the last input are the targets."""

    def __init__(self, model: nn.Module, task: str, first: str) -> None:
        super().__init__()
        self.model, self.task, self.first = model, task, first

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        source, targets = inputs[0], inputs[-1]
        if self.task == "next token":
            logits = self.model(input_ids=source, use_cache=False).logits
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), source[:, 1:].flatten())
        if self.task == "translation":
            shifted = F.pad(targets[:, :-1], (1, 0))
            logits = self.model(**{self.first: source}, decoder_input_ids=shifted, use_cache=False).logits
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        logits = self.model(**{self.first: source}).logits
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def model_of_config(
    path: str | os.PathLike[str],
    *,
    architecture: str | None = None,
    length: int | None = None,
    dtype: str | None = None,
) -> ConfigModel:
    """Return the training step of a configuration of transformers.

    Args:
        path: The configuration, or the folder that holds it as config.json.
        architecture: The class of the model ("LlamaForCausalLM"); None: the first that the configuration names.
        length: The tokens of a sequence; None: what the model takes, at most `USUAL_LENGTH`.
        dtype: The type of the parameters; None: the configuration's, or else float32.

    Raises:
        UnreadableFile: The file cannot be read, or is not JSON.
        InvalidModel: It is no configuration of a model that transformers has, or of one without a known loss.
        InvalidSize: The length or the type has no valid value.
        LibraryNotInstalled: transformers is not installed.
    """
    require_library("transformers", where="--hf", install="pip install 'memplan[zoo]'")
    where = os.fspath(path)
    data = _read(Path(where) / "config.json" if os.path.isdir(where) else Path(where))
    config, name, task = _config(data, where, architecture)
    kind = dtype or str(data.get("dtype") or data.get("torch_dtype") or "float32").removeprefix("torch.")
    model = _model(config, name, floating_type(kind), where)
    limits = (getattr(config, key, None) for key in ("max_position_embeddings", "n_positions", "max_target_positions"))
    most = next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)
    if length is not None and (length < 2 or (most is not None and length > most)):
        what = f"{length} is not a length from 2 to {most or 'what the model takes'}"
        raise InvalidSize(what, where="sequence", hint="leave it out for the usual one")
    tokens = length or min(most or USUAL_LENGTH, USUAL_LENGTH)
    first = getattr(model, "main_input_name", "input_ids")
    source = _source(config, first, tokens, where)
    shapes: tuple[tuple[int, ...], ...] = (source, () if task == "classification" else (tokens,))
    kinds: tuple[torch.dtype, ...] = (torch.long if first == "input_ids" else floating_type(kind), torch.long)
    if task == "next token":  # its targets are its inputs
        shapes, kinds = shapes[:1], kinds[:1]
    reads_tokens = any(k is torch.long and len(s) == 1 for s, k in zip(shapes, kinds, strict=True))
    return ConfigModel(
        name=name,
        model=ConfigLoss(model, task, first).train(),
        length=tokens if reads_tokens else 0,
        dtype=kind,
        shapes=shapes,
        kinds=kinds,
    )


def _read(path: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise UnreadableFile(f"cannot be read: {error.strerror or error}", where=str(path)) from error
    except (ValueError, RecursionError) as error:
        hint = "give the config.json of a model of transformers"
        raise UnreadableFile(f"is not JSON: {error}", where=str(path), hint=hint) from error
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        what, hint = "is no configuration of a model: it has no model_type", "give the config.json of a model"
        raise InvalidModel(what, where=str(path), hint=hint)
    if data.get("quantization_config"):
        hint = "remove quantization_config: the model is then planned in its dtype"
        raise InvalidModel("is of a quantized model, whose sizes are its library's", where=str(path), hint=hint)
    return data


def _config(data: Mapping[str, Any], where: str, architecture: str | None) -> tuple[Any, str, str]:
    """Return the configuration, the name of the model's class, and its task. Raises `InvalidModel`."""
    import transformers
    from transformers import AutoConfig

    values = {key: value for key, value in data.items() if key not in ("model_type", "transformers_version")}
    try:
        config = AutoConfig.for_model(data["model_type"], **values)
    except Exception as error:
        reason = str(error).partition(" Should contain one of")[0]  # the names of all models follow
        what = f"transformers {transformers.__version__} does not take it: {reason}".splitlines()[0][:300]
        raise InvalidModel(what, where=where, hint="update transformers, or write a factory") from error
    named = data.get("architectures") or [None]
    name = architecture or (named[0] if isinstance(named, list) else None)
    if not isinstance(name, str):
        what, hint = "names no architecture", "add --architecture LlamaForCausalLM, the class of the model"
        raise InvalidModel(what, where=where, hint=hint)
    task = next((task for end, task in _TASKS.items() if name.endswith(end)), None)
    if task == "translation" and not getattr(config, "is_encoder_decoder", False):
        task = None
    if task is None:
        what = f"{name} has no training loss that is known here"
        hint = f"write a factory, or name a class that ends in: {', '.join(_TASKS)}"
        raise InvalidModel(what, where=where, hint=hint)
    return config, name, task


def _model(config: Any, name: str, dtype: torch.dtype, where: str) -> nn.Module:
    """Return the model on the meta device. Raises `InvalidModel`."""
    import transformers

    made: Any = None
    try:
        cls: Any = getattr(transformers, name)
        if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
            raise TypeError(f"transformers.{name} is no model")
        config.use_cache = False
        with torch.device("meta"):
            made = cls._from_config(config)  # type: ignore[attr-defined]
        made = made.to(dtype)
    except Exception as error:
        what = f"transformers cannot make it: {type(error).__name__}: {error}".splitlines()[0][:300]
        raise InvalidModel(what, where=where, hint="name the class of the configuration, or write a factory") from error
    return made  # type: ignore[no-any-return]


def _source(config: Any, first: str, tokens: int, where: str) -> tuple[int, ...]:
    """Return the shape of one sample of the first input, without the batch. Raises `InvalidModel`."""
    if first == "input_ids":
        return (tokens,)
    if first == "pixel_values":
        size = getattr(config, "image_size", None) or _IMAGE
        sides = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
        return (getattr(config, "num_channels", 3), *sides)
    if first == "input_features" and hasattr(config, "num_mel_bins"):
        return (config.num_mel_bins, 2 * config.max_source_positions)
    what, hint = f"reads {first!r}, whose shape the configuration does not say", "write a factory"
    raise InvalidModel(what, where=where, hint=hint)
