"""Run row-independent ops block by block of rows, so that their tensors never exist whole (`divide=`).

In: an fx graph and a `Division`. Out: the graph with chains of such ops in blocks. Start at `rows.py`, which says
which ops these are, `row_chains.py` finds chains of them, `overwrite.py` says whose bytes a result may take,
`chunk.py` and `chunk_rewrite.py` rewrite the graph, and `chunk_search.py` finds how many blocks a budget needs.
"""
