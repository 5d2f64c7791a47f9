"""Small random problems with every feature, and the definitions that kernels are compared with."""

from __future__ import annotations

import random
from collections.abc import Iterator

from ortools.sat.python import cp_model

from memplan.core.problem import Buffer, Interval, Problem
from memplan.solvers.arrays import Ints, PieceOutcome, ProblemArrays, make_problem_arrays


def small_problem(seed: int, *, most: int = 9, aligned: bool = True, gaps: bool = True, pins: bool = False) -> Problem:
    """Up to `most` buffers of 1 to 9 bytes within 10 steps; at most one of them is pinned."""
    chance = random.Random(seed)
    made: list[Buffer] = []
    for i in range(chance.randint(1, most)):
        start = chance.randrange(8)
        end = start + chance.randint(1, 10 - start)
        cuts = sorted(chance.sample(range(start + 1, end), 2 * ((end - start - 1) // 2))) if end - start > 2 else []
        holes = tuple(Interval(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=True))
        made.append(
            Buffer(
                id=f"b{i}",
                size=chance.randint(1, 9),
                live=Interval(start, end),
                alignment=chance.choice((1, 1, 2, 4)) if aligned else 1,
                gaps=holes if gaps and chance.random() < 0.4 else (),
            )
        )
    if pins and chance.random() < 0.5:
        b = made[0]
        made[0] = Buffer(id=b.id, size=b.size, live=b.live, gaps=b.gaps, pinned_offset=chance.randrange(12))
    return Problem(buffers=tuple(made))


def problem_of(*rows: tuple[int, int, int], alignment: int = 1) -> Problem:
    """Buffers (size, start, end), named by their place."""
    made = (Buffer(id=str(i), size=n, live=Interval(a, b), alignment=alignment) for i, (n, a, b) in enumerate(rows))
    return Problem(buffers=tuple(made))


def small_cores(count: int, **options: bool | int) -> Iterator[tuple[int, ProblemArrays]]:
    """(seed, arrays) of `count` small problems."""
    for seed in range(count):
        yield seed, make_problem_arrays(small_problem(seed, **options))  # type: ignore[arg-type]


def sections_of_buffer(arrays: ProblemArrays, b: int) -> set[int]:
    """The sections in which `b` is alive."""
    ranges = range(int(arrays.seg_ptr[b]), int(arrays.seg_ptr[b + 1]))
    return {s for k in ranges for s in range(int(arrays.seg_lo[k]), int(arrays.seg_hi[k]))}


def alive_together(arrays: ProblemArrays, one: int, two: int) -> bool:
    """Whether two buffers share a section."""
    return bool(sections_of_buffer(arrays, one) & sections_of_buffer(arrays, two))


def decide(arrays: ProblemArrays, max_offset: Ints) -> PieceOutcome:
    """Whether a placement up to these offsets (units) exists, by CP-SAT, which shares nothing with the solvers."""
    model, solver = cp_model.CpModel(), cp_model.CpSolver()
    in_time, in_space = [], []
    for b in range(arrays.n):
        size, align = int(arrays.size[b]), int(arrays.align[b])
        if max_offset[b] < arrays.low[b]:
            return PieceOutcome.EXHAUSTED
        step = model.new_int_var(-(-int(arrays.low[b]) // align), int(max_offset[b]) // align, "")
        for k in range(int(arrays.seg_ptr[b]), int(arrays.seg_ptr[b + 1])):
            start, end = int(arrays.seg_lo[k]), int(arrays.seg_hi[k])
            in_time.append(model.new_fixed_size_interval_var(start, end - start, ""))
            in_space.append(model.new_fixed_size_interval_var(step * align, size, ""))
    model.add_no_overlap_2d(in_time, in_space)
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.INFEASIBLE)
    return PieceOutcome.EXHAUSTED if status == cp_model.INFEASIBLE else PieceOutcome.SOLVED


def least_arena(problem: Problem) -> int:
    """The bytes of the smallest arena, by `decide`."""
    arrays = make_problem_arrays(problem)
    low, high = problem.max_live - 1, sum(b.size + b.alignment for b in problem.buffers)
    high = max([high, *((b.pinned_offset or 0) + b.size for b in problem.buffers)])
    while arrays.n and high - low > 1:
        middle = (low + high) // 2
        solved = decide(arrays, arrays.max_offset(middle)) is PieceOutcome.SOLVED
        low, high = (low, middle) if solved else (middle, high)
    return high if arrays.n else 0
