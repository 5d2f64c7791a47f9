"""Makes a model and its inputs for any size of the batch, as `memplan.fits` asks for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memplan.core.arguments import arguments_of
from memplan.errors import InvalidModel, MemplanError
from memplan.trace.meta_model import batch_of, meta_inputs, meta_model


@dataclass(frozen=True, slots=True)
class StepExample:
    """The model and its inputs for any size of the batch, on the meta device where a size or a type is asked for."""

    model: Any
    example: tuple[Any, Any]
    dtype: torch.dtype | None

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
                raise InvalidModel(what, where=f"make({batch})", hint="return (model, example_inputs)")
            model, inputs, kwargs = (*returned, None)[:3]
        args, keywords = arguments_of(inputs, kwargs)
        if self.dtype is not None:
            model = meta_model(model, self.dtype)
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
            raise InvalidModel(what, where=f"make({batch})", hint="return (model, example_inputs)") from error

    @property
    def can_change_batch(self) -> bool:
        """Whether other sizes of the batch can be tried."""
        return self.is_function or batch_of(self.example) is not None
