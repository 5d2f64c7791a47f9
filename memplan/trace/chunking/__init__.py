"""Run row-independent ops block by block of rows, so that their tensors never exist whole (`divide=`).

In: an fx graph and a `Division`. Out: the graph with chains of such ops in blocks. Start at `rows.py`, which says
which ops these are and finds chains of them; `chunk.py` rewrites the graph.
"""
