"""The interface through which planning has a captured step traced again, with other ops for the same results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from memplan.core.code_options import CodeOptions
from memplan.core.division import Division
from memplan.errors import UnsupportedProblem
from memplan.trace.traced import TracedGraph


class Retracer(Protocol):
    """Traces one captured step as often as planning asks.

    A variant of a step computes the same by other ops. Functions that may plan another variant take a retracer as an
    argument; where they get None, the step is planned as it was traced.
    """

    def retrace(
        self, *, division: Division | None = None, compress: str = "", code: CodeOptions | None = None
    ) -> TracedGraph:
        """Return one variant of the step.

        Args:
            division: How chains of rows are divided into blocks; None: not at all.
            compress: How saved activations are compressed ("bits", "int8"); "": not at all.
            code: How a compiler generates the kernels; None: as it does by itself.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class RetracerInBlocks:
    """The retracer of variants of a step that are all divided in one way (`division`; None: not at all)."""

    retracer: Retracer
    division: Division | None

    def retrace(
        self, *, division: Division | None = None, compress: str = "", code: CodeOptions | None = None
    ) -> TracedGraph:
        """Return one variant of the step, divided in that way."""
        return self.retracer.retrace(division=self.division, compress=compress, code=code)


def retraced(
    traced: TracedGraph,
    retracer: Retracer | None,
    division: Division | None,
    compress: str,
    code: CodeOptions | None = None,
) -> TracedGraph:
    """Return this variant of a step: `traced` itself if that is the one, else what `retracer` makes.

    Raises `UnsupportedProblem` if that needs a retracer and there is none.
    """
    if (division, compress, code) == (traced.division, traced.compress, traced.code):
        return traced
    if retracer is None:
        where = "divide" if division != traced.division else "compress" if compress != traced.compress else "plan"
        raise UnsupportedProblem("this step cannot be traced again", where=where, hint=f"leave out {where}=")
    return retracer.retrace(division=division, compress=compress, code=code)
