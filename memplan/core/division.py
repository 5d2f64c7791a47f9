"""Ops divided by rows, tensors that wait in fewer bytes: what a user may allow, and what a plan records of it."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.errors import InvalidSize

_HINT = "pass True, a number of blocks (2 or more), or memplan.Division(...)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How chains of row-independent ops (a loss head: softmax, cross-entropy and their gradients) are divided.

    Each chain runs block of rows by block of rows, so that what lies between its ops exists one block at a time.
    `blocks`: into how many (None: as few as a budget needs, and none where it needs none). `over`: chains with an op
    that reads and writes more bytes than this are divided (None: those with the hungriest op). What is divided gives
    the same bits. `sums`: divide the matrix products at the ends of a chain too, so that its widest tensor never exists
    whole. Other numbers of rows take other kernels, and gradients of weights are summed block by block: equal up to
    rounding only, which is why it must be asked for.
    """

    blocks: int | None = None
    sums: bool = False
    over: int | None = None

    def __post_init__(self) -> None:
        if self.blocks is not None and (type(self.blocks) is not int or self.blocks < 2):
            raise InvalidSize(f"{self.blocks!r} is no number of blocks", where="divide", hint=_HINT)
        if type(self.sums) is not bool:
            raise InvalidSize(f"{self.sums!r} is not True or False", where="divide.sums", hint=_HINT)
        if self.over is not None and type(self.over) is not int:
            raise InvalidSize(f"{self.over!r} is no number of bytes", where="divide.over", hint=_HINT)


Divide = bool | int | Division | None


def division_of(divide: Divide) -> Division | None:
    """What a user's `divide=` allows; None: nothing. Raises `InvalidSize`."""
    if divide is None or isinstance(divide, Division):
        return divide
    if isinstance(divide, bool):
        return Division() if divide else None
    if not isinstance(divide, int):
        raise InvalidSize(f"{divide!r} says nothing about a division", where="divide", hint=_HINT)
    return Division(blocks=divide)


COMPRESSIONS = ("bits", "int8")  # the second: masks as bits, and real numbers as 8-bit codes


def compression_of(compress: str | None) -> str:
    """What a user's `compress=` asks for; "": nothing. Raises `InvalidSize`."""
    if compress is None or compress == "":
        return ""
    if compress not in COMPRESSIONS:
        hint = f"choose one of: {', '.join(COMPRESSIONS)}"
        raise InvalidSize(f"there is no compression {compress!r}", where="compress", hint=hint)
    return compress
