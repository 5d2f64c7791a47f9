"""memplan held against PyTorch's own test databases, OpInfo (`op_db`) and ModuleInfo (`module_db`).

`python -m tests.parity` runs everything (about an hour of CPU time), `test_sweep.py` one case of 1000. In the order
in which data flows: `catalog.py` reads the databases, `cases.py` says which cases there are and which of them are
selected, `layouts.py` lays tensors out, `programs.py` makes a module of a case, `contest.py` runs it by eager, by
aot_eager and by memplan, `judge.py` compares what they give, `worker.py` does so in a process of its own, `sweep.py`
starts these and limits their CPU time, `refusals.py` knows the refusals that are expected.
"""
