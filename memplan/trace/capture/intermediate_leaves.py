"""Lets dynamo trace `tensor.requires_grad = True` on what forward computes, as it traces `tensor.requires_grad_()`.

T5 of transformers does so inside of its activation checkpoints. Dynamo has rules for the method only, and breaks the
graph at the assignment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def tracing_assignments() -> Iterator[None]:
    """Trace assignments to `requires_grad` of intermediates; the caller holds torch's compile lock.

    Other versions of torch, which name the rule for `setattr` otherwise, break the graph there as before.
    """
    from torch._dynamo import variables

    owner: Any = getattr(variables, "SetAttrBuiltinVariable", None)
    rule: Any = getattr(owner, "_call_setattr", None)
    if rule is None:
        yield
        return

    def assigned(self: Any, tx: Any, obj: Any, name: Any, value: Any) -> Any:
        """Trace the method instead of the assignment where the tensor is neither an input nor a parameter."""
        is_flag = name.is_python_constant() and name.as_python_constant() == "requires_grad"
        if is_flag and isinstance(obj, variables.TensorVariable) and not obj.source and value.is_python_constant():
            obj.method_requires_grad_(tx, value)
            return variables.ConstantVariable.create(None)
        return rule(self, tx, obj, name, value)

    with mock.patch.object(owner, "_call_setattr", assigned):
        yield
