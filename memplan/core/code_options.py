"""Settings of a compiler that generates the kernels of a step, where they differ from its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeOptions:
    """Settings with which the kernels of a step were generated; a plan keeps them, to generate the same code again.

    Args:
        layouts: the compiler may run convolutions in layouts of its choice, with copies of their weights in that
            layout (Inductor's `layout_optimization`).

    Example:
        >>> memplan.plan(model, example_inputs, kernels="inductor", budget="60%").code
    """

    layouts: bool = True

    def __str__(self) -> str:
        return "" if self.layouts else "without layout_optimization"
