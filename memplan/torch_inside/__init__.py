"""The one room that names what torch keeps to itself: dynamo, AOTAutograd, fake tensors, and the versions of torch.

`versions.py` says what differs between the releases of torch, `dynamo.py` how Python is read into a graph, and
`graphs.py` what joint graphs consist of, and how they are made and partitioned. A new release of torch is met here;
Inductor's own code is known to `trace/fused/`, and to `integrations/partitioner.py`, which runs inside of Inductor.
"""
