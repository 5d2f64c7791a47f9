"""Searches for an order with a smaller max live.

In: `GraphArrays` and a bound. Out: an order, or the proof that there is none below the bound. Start at `ideals.py`,
which searches over ideals (sets of ops that can run first): its policy `beam` keeps the best states of each level, and
`exact` drops only states that cannot be better; `auto` runs the same search within limits of work. `cpsat.py` uses
constraint programming.
"""
