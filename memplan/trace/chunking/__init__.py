"""Row-independent ops run block by block of rows, so that their tensors never exist whole (`divide=`).

`rows.py` (which ops), `row_chains.py` (chains of them), `overwrite.py` (whose bytes a result may take), `chunk.py` and
`chunk_rewrite.py` (the graph written anew), `chunk_search.py` (how many blocks a budget needs).
"""
