"""The options `divide=` and `compress=`: ops divided into blocks of rows, and compressed saved activations."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.errors import InvalidSize, UnsupportedCall

WITHOUT_SUMS = "Inductor's kernels hold no tensor between the matrix products of a chain: only with these it is divided"
_WITH_SUMS = "sums=True is for Inductor's kernels: what is divided of eager's keeps its bits"
SUMS_HINT = "pass divide=memplan.Division(sums=True), with which results are equal up to rounding"
_FEWEST = 2  # blocks
NOTHING = -1  # `Division.over` where there was nothing to divide
_HINT = "pass True, a number of blocks (2 or more), or memplan.Division(...)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Settings for running chains of row-independent ops (softmax, cross-entropy, their gradients) block by block.

    Each chain runs one block of rows after the other, so that its intermediate tensors exist one block at a time. The
    results are bitwise the same, unless `sums` is set.

    Args:
        blocks: the number of blocks, 2 or more. None: as few as the budget needs, and no division without need.
        sums: for Inductor's kernels: divide the matrix products at the ends of a chain too, so that its widest tensor
            never exists whole. Results are then equal only up to rounding: other numbers of rows use other kernels, and
            gradients of weights are summed block by block. Gradients of a loss head are computed in the forward.
        over: divide the chains with an op that reads and writes more than this many bytes. None: the chains with
            the op of the largest working set.

    Raises:
        InvalidSize: a value is out of its range.

    Example:
        >>> memplan.plan(model, example_inputs, budget="8GiB", divide=memplan.Division(blocks=4))
    """

    blocks: int | None = None
    sums: bool = False
    over: int | None = None

    def __post_init__(self) -> None:
        if type(self.sums) is not bool:
            raise InvalidSize(f"{self.sums!r} is not True or False", where="divide.sums", hint=_HINT)
        if self.blocks is not None and (type(self.blocks) is not int or self.blocks < _FEWEST):
            raise InvalidSize(f"{self.blocks!r} is not a number of blocks", where="divide", hint=_HINT)
        if self.over is not None and type(self.over) is not int:
            raise InvalidSize(f"{self.over!r} is not a number of bytes", where="divide.over", hint=_HINT)


HEAD = Division(blocks=8, sums=True)  # of a loss head that is divided without being asked for


def require_sums(division: Division | None, kernels: str | None) -> None:
    """Raise `UnsupportedCall` unless a division has sums with Inductor's kernels, and none with eager's."""
    if division is None or kernels is None or division.sums is (kernels == "inductor"):
        return
    hint = 'leave out sums=, or pass kernels="inductor"' if division.sums else SUMS_HINT
    what = _WITH_SUMS if division.sums else WITHOUT_SUMS
    raise UnsupportedCall(what, where="divide", hint=hint, see="inductor-options")


Divide = bool | int | Division | None


def division_of(divide: Divide) -> Division | None:
    """Return the `Division` that the option `divide=` stands for, or None for no division. Raises `InvalidSize`."""
    if divide is None or isinstance(divide, Division):
        return divide
    if isinstance(divide, bool):
        return Division() if divide else None
    if not isinstance(divide, int):
        raise InvalidSize(f"{divide!r} says nothing about a division", where="divide", hint=_HINT)
    return Division(blocks=divide)
