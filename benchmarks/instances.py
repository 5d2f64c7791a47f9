"""Generators of offset-assignment problems: planted packings, network-like graphs, random ones, large ones.

Every generator is a pure function of its arguments (the seed among them).
"""

from __future__ import annotations

import random
from dataclasses import replace

from memplan.core.problem import Buffer, Interval, Problem


def planted(n: int, *, seed: int, density: float = 1.0, height: int = 1024, steps: int = 1000) -> Problem:
    """`n` rectangles cut out of one of `height` x `steps`, the capacity; `density` of the area is kept.

    With density 1 the packing is perfect: max live equals the capacity at every step, and an arena of that
    size exists because the cuts are one.
    """
    chance = random.Random(seed)
    total = round(n / density)
    pieces = [(0, 0, steps, height)]  # start, bottom, end, top
    while len(pieces) < total:
        # Cut a piece drawn by area, across its longer side (relative to the whole) most of the time.
        weights = [(e - s) * (t - b) if max(e - s, t - b) > 1 else 0 for s, b, e, t in pieces]
        place = chance.choices(range(len(pieces)), weights)[0]
        start, bottom, end, top = pieces.pop(place)
        in_time = (end - start) / steps > (top - bottom) / height if chance.random() < 0.7 else chance.random() < 0.5
        if (in_time and end - start > 1) or top - bottom == 1:
            cut = _cut(chance, start, end)
            pieces += [(start, bottom, cut, top), (cut, bottom, end, top)]
        else:
            cut = _cut(chance, bottom, top)
            pieces += [(start, bottom, end, cut), (start, cut, end, top)]
    chance.shuffle(pieces)
    kept = pieces[:n]
    buffers = tuple(
        Buffer(id=str(i), size=top - bottom, live=Interval(start, end))
        for i, (start, bottom, end, top) in enumerate(kept)
    )
    return Problem(buffers=buffers, capacity=height)


def _cut(chance: random.Random, low: int, high: int) -> int:
    """A cut strictly inside (low, high), rarely close to an end."""
    return min(max(low + round((high - low) * chance.uniform(0.2, 0.8)), low + 1), high - 1)


def network(layers: int, *, seed: int, width: int = 12) -> Problem:
    """A training step: saved activations live from their layer's forward to its backward, temporaries briefly."""
    chance = random.Random(seed)
    step, buffers = 0, []
    sizes = [chance.choice((1, 2, 3, 4, 8, 16)) * 64 * chance.randint(1, 48) for _ in range(width)]
    saved: list[tuple[int, int]] = []
    for _ in range(layers):
        for size in sizes:
            uses = chance.randint(1, 6)
            if chance.random() < 0.4:
                saved.append((step, size))
            else:
                buffers.append((step, step + 1 + uses, size))
            step += 1
    for start, size in reversed(saved):
        buffers.append((start, step + 1, size))
        for _ in range(2):
            buffers.append((step, step + chance.randint(2, 5), size))
            step += 1
    return _problem(buffers)


def tiled(problem: Problem, times: int) -> Problem:
    """`problem` run `times` in a row: splits in time."""
    length = max(b.live.end for b in problem.buffers)
    return _problem(
        [(b.live.start + i * length, b.live.end + i * length, b.size) for i in range(times) for b in problem.buffers]
    )


def scattered(n: int, *, seed: int, mean_life: float = 40.0) -> Problem:
    """Random births and sizes, exponential lifetimes: at every step something is alive, so it never splits."""
    chance = random.Random(seed)
    buffers = []
    for _ in range(n):
        start = chance.randrange(2 * n)
        buffers.append((start, start + 1 + int(chance.expovariate(1 / mean_life)), chance.randint(1, 1000) * 1024))
    return _problem(buffers)


LIVES = ("rare", "log-uniform", "half")


def mixed_lives(n: int, *, seed: int, lives: str = "log-uniform") -> Problem:
    """`n` buffers at random births, with long and short lives mixed so that hundreds to thousands are alive together.

    `lives` are "rare" (every fifth up to n/2 steps, the others up to 20; sizes uniform), "log-uniform" (1 to n/2
    steps; sizes uniform) or "half" (every second up to n/2 steps, the others up to 50; sizes log-uniform).
    """
    chance = random.Random(f"{seed} {lives}")
    buffers = []
    for _ in range(n):
        if lives == "log-uniform":
            life, size = round((n / 2) ** chance.random()), chance.randint(1, 1000) * 1024
        elif lives == "half":
            life = 1 + chance.randrange(n // 2 if chance.random() < 0.5 else 50)
            size = round(2 ** (16 * chance.random())) * 512
        else:
            life = 1 + chance.randrange(n // 2 if chance.random() < 0.2 else 20)
            size = chance.randint(1, 1 << 20)
        start = chance.randrange(n - life)
        buffers.append((start, start + life, size))
    return _problem(buffers)


def mixed(n: int, *, seed: int, pins: int = 0, longest: int | None = None) -> Problem:
    """`n` buffers, most of them brief, some long, one alive throughout; some with gaps, alignments, `pins` pinned.

    Sizes are a network's: a few values, from bytes to megabytes. No life but one is longer than `longest` steps.
    """
    chance = random.Random(seed)
    horizon = 2 * n
    longest = longest or max(4, horizon * 3 // 8)
    buffers = [Buffer(id="throughout", size=4100, live=Interval(0, horizon))]
    top = chance.choice((0, 4096))
    share_long, share_gaps, share_aligned = chance.choice((0.0, 0.05, 0.5)), chance.choice((0.0, 0.1)), chance.random()
    while len(buffers) < n:
        life = 1 + chance.randrange(longest if chance.random() < share_long else max(3, longest // 20))
        start = chance.randrange(horizon - life)
        size = chance.choice((4, 640, 4096, 4100, 1 << 20, 3 << 20, chance.randint(1, 1 << 16)))
        gaps: tuple[Interval, ...] = ()
        if life >= 4 and chance.random() < share_gaps:
            begin = chance.randint(start + 1, start + life - 3)
            gaps = (Interval(begin, chance.randint(begin + 1, start + life - 2)),)
        alignment = chance.choice((64, 256, 3)) if chance.random() < share_aligned / 2 else 1
        pinned = None
        if len(buffers) <= pins:  # stacked, so that they never collide
            alignment, pinned = 1, top
            top += size + chance.randrange(1 << 12)
        made = Buffer(id=str(len(buffers)), size=size, live=Interval(start, start + life), alignment=alignment)
        buffers.append(replace(made, gaps=gaps, pinned_offset=pinned))
    return Problem(buffers=tuple(buffers))


def _problem(buffers: list[tuple[int, int, int]]) -> Problem:
    return Problem(
        buffers=tuple(
            Buffer(id=str(i), size=size, live=Interval(start, end)) for i, (start, end, size) in enumerate(buffers)
        )
    )
