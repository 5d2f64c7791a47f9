"""Training on many ranks: reads torch's parallel modules, and runs the collectives of a plan.

`ops.py` are the collectives as ops of a graph; `parallelism.py` reads FSDP2's and DDP's objects into plain values, with
the refusals in `refusals.py`, and those of other versions of torch in `internals.py`; `local.py` is the tensor of this
rank behind a DTensor; `whole_copy.py` is the model as if it were on one rank, for tracing; `agreement.py` compares the
ranks' programs before they run; `fake_ranks.py` stands for ranks that are not there, for plans.
"""
