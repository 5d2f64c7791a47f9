"""Represents a graph as flat arrays, and compiles loops over them for large graphs.

In: a `Graph`. Out: `GraphArrays`, the input of every policy, bound and search of `schedule/`.
"""
