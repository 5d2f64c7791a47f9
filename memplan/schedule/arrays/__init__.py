"""A graph as flat arrays, and when a loop over them is compiled.

In: `Graph`. Out: `GraphArrays`, on which every policy, bound and search of `schedule/` works.
"""
