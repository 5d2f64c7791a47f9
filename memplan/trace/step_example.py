"""Makes a model and its inputs for any size of the batch and any type, on the meta device: sizes without bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from memplan.core.arguments import arguments_of
from memplan.errors import InvalidModel, InvalidSize, LibraryNotInstalled, MemplanError
from memplan.trace.capture.effects import with_fake_tensors
from memplan.trace.capture.refusals import module_of

_LENGTH = 2048  # the most tokens of a sequence, where nobody says how many
MAKE = "pass lambda batch: (model, example_inputs), which builds the inputs from the batch"


class _LanguageModel(nn.Module):
    """A causal language model of transformers that returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return found


def language_model(path: str, length: int | None = None) -> Callable[..., tuple[nn.Module, torch.Tensor]]:
    """Return a function from a batch size to the causal language model that a config.json of transformers describes,
    with its loss and tokens, all on the meta device.

    `length`: the tokens of a sequence; None: as many as the model takes, at most 2,048. Raises `LibraryNotInstalled`
    without transformers, and `InvalidModel` for a file that describes no such model.
    """
    if find_spec("transformers") is None:
        what, hint = "reads config.json by transformers, which is not installed", "pip install transformers"
        raise LibraryNotInstalled(what, where="--hf", hint=hint)
    if not os.path.exists(path):  # transformers would look for it elsewhere
        raise InvalidModel("does not exist", where=path, hint="give the config.json of a causal language model")
    if length is not None and length < 1:
        raise InvalidSize(f"{length} is no number of tokens", where="--length", hint="give 1 or more")
    from transformers import AutoConfig, AutoModelForCausalLM

    def make(batch: int = 1) -> tuple[nn.Module, torch.Tensor]:
        """Return the model and its tokens."""
        try:
            config = AutoConfig.from_pretrained(path, local_files_only=True)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
                longest = min(getattr(config, "max_position_embeddings", None) or _LENGTH, _LENGTH)
                return _LanguageModel(model).train(), torch.zeros(batch, length or longest, dtype=torch.long)
        except (OSError, ValueError, KeyError) as error:
            what = str(error).strip().partition("\n")[0]
            raise InvalidModel(what, where=path, hint="give the config.json of a causal language model") from error

    return make


@dataclass(frozen=True, slots=True)
class StepExample:
    """The model and its inputs for any size of the batch, on the meta device where a size or a type is asked for."""

    model: Any
    example: tuple[Any, Any] = ((), None)
    dtype: torch.dtype | None = None

    @property
    def is_function(self) -> bool:
        """Whether a function makes model and inputs."""
        return callable(self.model) and not isinstance(self.model, nn.Module)

    def made(self, batch: int | None) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """Return the model, its positional arguments and its keywords for a batch (None: the example's own)."""
        model, (inputs, kwargs) = self.model, self.example
        if self.is_function:
            returned = self._called(1 if batch is None else batch)
            if not isinstance(returned, (tuple, list)) or len(returned) not in (2, 3):
                what = f"returned an object of type {type(returned).__name__}"
                raise InvalidModel(what, where=f"make({batch})", hint=MAKE)
            model, inputs, kwargs = (*returned, None)[:3]
        model, (args, keywords) = module_of(model), arguments_of(inputs, kwargs)
        if self.dtype is not None:
            model, _ = with_fake_tensors(model, (), dtype=self.dtype)
        if self.dtype is not None or (batch is not None and not self.is_function):
            args, keywords = meta_inputs((args, keywords), batch=None if self.is_function else batch, dtype=self.dtype)
        return model, args, keywords

    def _called(self, batch: int) -> Any:
        """Return what the function makes for a batch. Raises `InvalidModel` if it raises something."""
        try:
            return self.model(batch)
        except MemplanError:
            raise
        except Exception as error:
            what = f"raised {type(error).__name__}: {error}".splitlines()[0]
            hint = f"{MAKE}; max_batch calls it on fake tensors, so it must not read their values"
            raise InvalidModel(what, where=f"make({batch})", hint=hint, see="max-batch") from error

    @property
    def can_change_batch(self) -> bool:
        """Whether other sizes of the batch can be tried."""
        return self.is_function or batch_of(self.example) is not None


def meta_inputs(inputs: Any, *, batch: int | None = None, dtype: torch.dtype | None = None) -> Any:
    """Return inputs on the meta device, for another size of the batch, their first dimension, and another type.

    Raises `InvalidSize` where `batch` is given and the tensors have no first dimension in common.
    """
    if batch is not None and batch_of(inputs) is None:
        what = "the example's tensors have no first dimension in common that could be the batch"
        hint = "give the factory an argument named batch: def factory(batch=8): return model, inputs"
        raise InvalidSize(what, where="batch", hint=hint)

    def meta(t: torch.Tensor) -> torch.Tensor:
        """Return a tensor like `t`, for the batch, on the meta device."""
        kind = _as(t, dtype)
        if batch is None or not t.ndim or t.shape[0] == batch:
            return torch.empty_like(t, device="meta", dtype=kind).requires_grad_(t.requires_grad)
        return torch.empty((batch, *t.shape[1:]), device="meta", dtype=kind).requires_grad_(t.requires_grad)

    return tree_map_only(torch.Tensor, meta, inputs)


def batch_of(inputs: Any) -> int | None:
    """Return the size of the first dimension that all tensors of the inputs have in common; None if there is none."""
    sizes = {leaf.shape[0] for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.ndim}
    return sizes.pop() if len(sizes) == 1 else None


def _as(t: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and t.is_floating_point() else t.dtype


def floating_type(name: str | torch.dtype) -> torch.dtype:
    """Return a floating-point type, or that of a name such as "bfloat16". Raises `InvalidSize` for anything else."""
    found = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else name
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        hint = "choose one of: float32, bfloat16, float16"
        raise InvalidSize(f"{name!r} is no floating-point type of torch", where="dtype", hint=hint)
    return found
