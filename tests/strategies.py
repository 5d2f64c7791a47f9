"""Hypothesis strategies for offset-assignment problems, and a plain random generator for fuzzing in bulk."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import strategies as st

from memplan.core.problem import Buffer, Interval, Problem

_ALIGNMENTS = (1, 1, 1, 2, 4, 64)


@st.composite
def buffers(draw: st.DrawFn, name: str, *, horizon: int = 12, aligned: bool = True, gaps: bool = True) -> Buffer:
    """A buffer born before step `horizon`; sizes of zero included."""
    start = draw(st.integers(0, horizon - 1))
    end = start + draw(st.integers(1, horizon))
    holes: tuple[Interval, ...] = ()
    if gaps and end - start >= 4 and draw(st.booleans()):
        first = draw(st.integers(start + 1, end - 3))
        holes = (Interval(first, draw(st.integers(first + 1, end - 2))),)
    alignment = draw(st.sampled_from(_ALIGNMENTS)) if aligned else 1
    return Buffer(
        id=name, size=draw(st.integers(0, 40)), live=Interval(start, end), alignment=alignment, gaps=holes
    )  # fmt: skip


@st.composite
def problems(draw: st.DrawFn, *, most: int = 12, aligned: bool = True, gaps: bool = True) -> Problem:
    """Up to `most` buffers, no capacity, nothing pinned."""
    count = draw(st.integers(0, most))
    return Problem(buffers=tuple(draw(buffers(f"b{i}", aligned=aligned, gaps=gaps)) for i in range(count)))


def random_problem(seed: int) -> Problem:
    """A problem with any feature: alignments, gaps, pins that do not collide, a capacity that may not suffice."""
    chance = random.Random(seed)
    count = chance.choice((1, 3, 6, 10, 20, 40))
    horizon, largest = chance.choice((4, 10, 30)), chance.choice((1, 5, 50, 1_000_000))
    alignments = chance.choice(((1,), (64,), (1, 2, 8), (3, 5, 64)))
    made: list[Buffer] = []
    for i in range(count):
        start = chance.randrange(horizon)
        end = start + chance.randint(1, horizon)
        alignment, pinned = chance.choice(alignments), None
        gaps: tuple[Interval, ...] = ()
        if end - start >= 4 and chance.random() < 0.2:
            first = chance.randint(start + 1, end - 3)
            gaps = (Interval(first, chance.randint(first + 1, end - 2)),)
        if chance.random() < 0.03 and not any(b.pinned_offset is not None for b in made):
            pinned = alignment * chance.randrange(20)
        size = chance.randint(0, largest)
        made.append(
            Buffer(
                id=f"b{i}", size=size, live=Interval(start, end), alignment=alignment, gaps=gaps, pinned_offset=pinned
            )
        )
    problem = Problem(buffers=tuple(made))
    if chance.random() < 0.3:
        problem = Problem(buffers=problem.buffers, capacity=int(problem.max_live * chance.uniform(0.8, 1.4)))
    return problem


@st.composite
def layered_problems(draw: st.DrawFn, *, most: int = 12, horizon: int = 12) -> Problem:
    """Problems with everything at once: buffers that live throughout (they go to the bottom), gaps, alignments, pins.

    Pinned buffers do not collide: they are stacked, with room between them.
    """
    long = draw(st.lists(st.integers(1, 30), max_size=2))
    made = [Buffer(id=f"long{i}", size=size, live=Interval(0, 2 * horizon)) for i, size in enumerate(long)]
    made.extend(draw(problems(most=most)).buffers)
    top = 0
    if draw(st.booleans()):
        for i in range(draw(st.integers(1, 3))):
            pinned = draw(buffers(f"pin{i}", horizon=horizon, aligned=False, gaps=False))
            top += draw(st.integers(0, 30))
            made.append(replace(pinned, pinned_offset=top))
            top += pinned.size
    return Problem(buffers=tuple(draw(st.permutations(made))))
