"""The cases of the sweep: which there are, what they are called, and which of them a run selects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from zlib import crc32

from tests.parity import catalog, layouts

# How the operator stands in the program: between two multiplications by parameters, alone, or after one of them with
# its results returned as they are.
FORMS = ("between", "plain", "raw")
# One case in so many is kept.
SHARES = {"float32": 1, "bfloat16": 8, "complex64": 8}
CALLS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One program and its calls. `layout` is the example's; the calls' and the gradients' follow from the name.

    `index`: the position of the sample among those of its entry and type.
    """

    entry: str
    dtype: str
    sample: str
    form: str
    layout: str
    index: int = 0

    @property
    def variant(self) -> str:
        """All but the entry: `float32/largest/between/dense`."""
        return f"{self.dtype}/{self.sample}/{self.form}/{self.layout}"

    @property
    def name(self) -> str:
        """What names the case on the command line and in the file of refusals: `entry|variant`."""
        return f"{self.entry}|{self.variant}"

    @property
    def call_layouts(self) -> tuple[str, ...]:
        """The layouts of the inputs of each call: the example's, dense ones, and one that its name decides."""
        third = layouts.NAMES[draw(self.name, "call") % len(layouts.NAMES)]
        return (self.layout, "dense", third)

    @property
    def gradient_layouts(self) -> tuple[str, ...]:
        """The layouts of the incoming gradients of each call."""
        first = draw(self.name, "gradient")
        return tuple(layouts.NAMES[(first + i) % len(layouts.NAMES)] for i in range(CALLS))


def draw(name: str, purpose: str) -> int:
    """A number that depends on the two texts alone: the same on every machine and in every run."""
    return crc32(f"{purpose}:{name}".encode())


def cases_of(entry: catalog.Entry, wanted: Callable[[Case], bool] = lambda case: True) -> Iterator[Case]:
    """The wanted cases of an entry: each chosen sample in each form, and the largest in each layout it can have.

    Samples are made only for what is wanted by name.
    """
    for dtype in entry.dtypes:
        possible = [c for c in _possible(entry.name, dtype) if wanted(c)]
        if not possible:
            continue
        chosen = entry.chosen(dtype)
        laid_out = any(c.layout != "dense" for c in possible)
        tensors = entry.sample(dtype, chosen["largest"], 0).tensors if laid_out and "largest" in chosen else []
        for case in possible:
            applies = case.layout == "dense" or any(layouts.applies(t, case.layout) for t in tensors)
            if case.sample in chosen and applies:
                yield replace(case, index=chosen[case.sample])


def _possible(entry: str, dtype: str) -> Iterator[Case]:
    """All cases that an entry could have in its share of the type, whatever samples it has."""
    dense = [(sample, form, "dense") for sample in catalog.SAMPLES for form in FORMS]
    for sample, form, layout in [*dense, *(("largest", "plain", layout) for layout in layouts.NAMES[1:])]:
        case = Case(entry=entry, dtype=dtype, sample=sample, form=form, layout=layout)
        if draw(case.name, "share") % SHARES[dtype] == 0:
            yield case


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which cases a run takes: one in `every`, of the entries in part `part` of `parts`; or the named ones alone."""

    every: int = 1
    part: int = 0
    parts: int = 1
    names: tuple[str, ...] = ()

    def takes(self, case: Case) -> bool:
        """Whether the case is selected. A name is that of a case or of an entry."""
        if self.names and case.name not in self.names and case.entry not in self.names:
            return False
        return draw(case.name, "tenth") % self.every == 0 and draw(case.entry, "part") % self.parts == self.part

    def cases(self) -> Iterator[Case]:
        """The selected cases, entry by entry."""
        for entry in catalog.entries().values():
            yield from cases_of(entry, self.takes)
