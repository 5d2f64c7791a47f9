"""Puts `torch.utils.checkpoint` around the blocks of a model, as its users would."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


class Checkpointed(nn.Module):
    """A module whose calls keep only their arguments for the backward, which runs the call a second time."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns for the same arguments."""
        return checkpoint(self.module, *args, use_reentrant=False, **kwargs)


def checkpoint_blocks(model: nn.Module) -> str:
    """Checkpoint each block of `model`, in place; returns how, for people to read.

    Models of transformers and diffusers have a method for it. In other models, the blocks are the members of the
    longest `nn.ModuleList` or `nn.Sequential`, the first one of several.

    Raises:
        ValueError: The model has neither such a method nor such a container.
    """
    for part in model.modules():
        if getattr(part, "supports_gradient_checkpointing", False) is True:  # a model of transformers
            part.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
            return "gradient_checkpointing_enable()"
        if getattr(part, "_supports_gradient_checkpointing", False) is True:  # a model of diffusers
            part.enable_gradient_checkpointing()  # type: ignore[operator]
            return "enable_gradient_checkpointing()"
    named = [(name, part) for name, part in model.named_modules() if isinstance(part, (nn.ModuleList, nn.Sequential))]
    if not named:
        raise ValueError(f"{type(model).__name__} has no blocks: no ModuleList and no Sequential")
    name, blocks = max(named, key=lambda pair: len(pair[1]))
    for index, block in enumerate(blocks):
        blocks[index] = Checkpointed(block)
    return f"checkpoint of each of {len(blocks)} members of {name or 'the model'}"
