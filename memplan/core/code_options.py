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
        saved: the nodes of the joint graph, by name, that the forward saves for the backward; None: the compiler's own
            partition.
        knob: torch's `activation_memory_budget` when it chose the partition; 1.0, its default, changes nothing.

    Raises:
        InvalidPlan: a value is out of its range.

    Example:
        >>> memplan.plan(model, example_inputs, kernels="inductor", budget="60%").code
    """

    layouts: bool = True
    group_bytes: int | None = None
    saved: tuple[str, ...] | None = None
    knob: float = 1.0

    def __post_init__(self) -> None:
        if self.group_bytes is not None and self.group_bytes < 1:
            raise InvalidPlan(f"{self.group_bytes} bytes are too few for a kernel", where="code.group_bytes")
        if not 0 <= self.knob <= 1:
            raise InvalidPlan(f"{self.knob} is not between 0 and 1", where="code.knob")

    def __str__(self) -> str:
        said = [] if self.layouts else ["without layout_optimization"]
        said += [] if self.group_bytes is None else ["small groups of loops"]
        said += [] if self.saved is None else ["a partition of memplan's"]
        said += [] if self.knob == 1.0 else [f"activation_memory_budget={self.knob:g}"]
        return ", ".join(said)
