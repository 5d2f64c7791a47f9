"""Thresholds: the sizes and the amounts of work at which the solvers change how they work.

All of them are here, and every module reads them from here when it runs, so that tests can lower them:
then small problems go down every path (`tests/solve/test_thresholds.py`, which refuses a threshold that it does
not lower). Compiled kernels bake in what is global to them, so they take these as arguments.
"""

from __future__ import annotations

SMALL = 400  # buffers: up to here plain Python greedy is tried before numba is even imported
COMPILED = 400  # buffers: above, compiling (or loading) the numba kernel pays for itself
PLAIN = 10_000  # buffers up to which plain Python greedy takes the place of compiled heuristics that all failed

STEPS_EACH = 4  # per segment: with no more steps than that, a table of all of them is quicker than sorting
PAIRS = 2_000_000  # above as many pairs of buffers alive together, fitting one by one takes longer than 0.3 s
FEW = 2_000  # buffers that are looked through faster than found
PAINTED = 20_000  # buffers: above, the bound with alignment takes one padding for all sections

QUICK = 2  # heuristics that are tried on what will be searched
LARGE = 2_000  # buffers: larger pieces are searched through their busiest sections
TRACKED, ADDED = 16, 8  # sections searched at first, and added after every round
EXACT = 64  # buffers up to which CP-SAT is asked at all
EJECTED = 4_000  # buffers up to which ejection search runs: it keeps a table of pairs

EFFORT = 20_000  # units of work at first, on each capacity above the bound
HEAD_START = 500_000  # units of work that the tree search alone gets at first, where capacities may be tight
TURNS = 1_000  # of the ejection search, in one go
FORM_RUNS = 10  # on a form with guessed joins, before another one is made
LEAST_NODES = 100  # of one run of the tree search
TABLE = 1 << 18  # states that the tree search remembers; a power of two

BLOCK = 6  # buffers of a block at most, when certain joins are looked for
ROOM = 32  # trail entries per buffer that one call of `tighten` may add; it stops early where they do not suffice
ENDS = 3  # how far up a section `tighten` looks at starts
ROUNDS = 3  # of `tighten`, through all that changed
