"""Inductor's kernels as the ops of a step: Inductor generates them, memplan orders, keeps and places.

In: a captured joint graph. Out: a `TracedGraph` whose kernels are Inductor's. Start at `step.py`: `code_generation.py`
splits the joint graph and has Inductor generate code for both halves, which `wrapper.py` records line by line, and
hands it to `kernel_runs.py`, which replays the lines with stand-ins for tensors to learn what each kernel reads and
writes. `fused_graph.py` makes one graph of both. `deferred.py` compiles and launches kernels. `environment.py` refuses
machines without a compiler, what Inductor cannot compile, and what its code has that memplan cannot plan.
"""
