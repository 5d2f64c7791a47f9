"""memplan's choice of what to recompute for plain `torch.compile`, whose kernels and allocations stay Inductor's.

Start at `partitioner.py`. In: the joint graph of AOTAutograd. Out: the graphs of forward and backward, partitioned so
that the step's peak keeps a budget. `lowering.py` lowers both graphs with Inductor, without building kernels;
`wrapper_lines.py` reads what they allocate, `step_bytes.py` sums it up; `kernel_graph.py` makes a `Graph` of their
kernels, in which `memplan.evict` decides; `trace/passes/saved_nodes.py` carries the decision back to the joint graph.
"""
