"""Thresholds: the sizes and amounts of work at which the solvers change their method.

All thresholds are here, and modules read them at run time, so that tests can lower them and small problems take every
path. A test fails for a threshold that it does not lower. Compiled kernels treat globals as constants, so they take
thresholds as arguments.
"""

from __future__ import annotations

SMALL = 400  # buffers: up to here plain Python is fast enough, and greedy is tried before numpy is imported
MANY = 20_000  # buffers: above, first-fit over all takes longer than some seconds

QUICK = 2  # heuristics that are tried on a piece before it is searched
LARGE = 8_000  # buffers: larger pieces are not searched
ROUND = 1_250_000  # units of work: more than that is too long for first-fit over all buffers, again and again

EFFORT = 20_000  # units of work at first, on each capacity above the bound
LEAST_NODES = 100  # the fewest nodes of one run of the tree search
TABLE = 1 << 18  # states that the tree search remembers; a power of two

ROOM = 32  # trail entries per buffer that one propagation may add; it stops early if they do not suffice
ROUNDS = 3  # of a propagation, over everything that changed
