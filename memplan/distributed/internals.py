"""Reads what FSDP2 and `DistributedDataParallel` know where torch keeps it.

Neither says by public names how it gathers and reduces. The names that are read are those of torch 2.11 to 2.14; where
one of them is missing, a model is refused, instead of read halfway.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from traceback import walk_tb
from typing import Any

import torch

from memplan.errors import UnsupportedGraph
from memplan.torch_inside.versions import KNOWN


@contextlib.contextmanager
def reading_torch() -> Iterator[None]:
    """Raise `UnsupportedGraph` where this torch does not have a name that is read within; errors of others remain."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        homes = {str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in walk_tb(error.__traceback__)}
        if homes - {"torch", "memplan"} - sys.stdlib_module_names:  # code of the model
            raise
        what = f"does not keep what memplan reads of it where it is known to be: {error}"
        hint = f"install torch {KNOWN[-1]}, or train without memplan"
        raise UnsupportedGraph(f"torch {torch.__version__}", what, hint, see="ranks-refused") from error


def groups_of(state: Any) -> list[Any]:
    """Return the groups of parameters in the state of a module that `fully_shard` was called for."""
    if hasattr(state, "_fsdp_param_group"):  # torch 2.11: one, or none
        return [group for group in (state._fsdp_param_group,) if group is not None]
    return list(state._fsdp_param_groups)


def placement_of(param: Any) -> Any:
    """Return how the DTensor was placed that `fully_shard` has divided further; None for a plain tensor."""
    if not param.is_dtensor:
        return None
    return param._tp_spec if hasattr(param, "_tp_spec") else param._unsharded_dtensor_spec  # torch 2.11, and later ones
