"""Settings of a compiler that generates the kernels of a step, where they differ from its own."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.errors import InvalidPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeOptions:
    """Settings with which the kernels of a step were generated; a plan keeps them, to generate the same code again.

    Args:
        layouts: the compiler may run convolutions in layouts of its choice, with copies of their weights in that
            layout (Inductor's `layout_optimization`).
        group_bytes: a kernel that runs several loops one after another touches at most this many bytes; None: the
            compiler's own grouping.

    Raises:
        InvalidPlan: a value is out of its range.

    Example:
        >>> memplan.plan(model, example_inputs, kernels="inductor", budget="60%").code
    """

    layouts: bool = True
    group_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.group_bytes is not None and self.group_bytes < 1:
            raise InvalidPlan(f"{self.group_bytes} bytes are too few for a kernel", where="code.group_bytes")

    def __str__(self) -> str:
        said = [] if self.layouts else ["without layout_optimization"]
        said += [] if self.group_bytes is None else ["small groups of loops"]
        return ", ".join(said)
