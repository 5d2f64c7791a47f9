"""Training programs as their owners write them, small, with random weights and synthetic data.

Each program is a function of a `Run` (`benchmarks.program_run`), which says how its models are compiled and takes its
losses and results: `examples.py` (pytorch/examples), `recipes.py` (loops that are common elsewhere), `language.py`
(transformers, peft), `vision.py` (timm, torchvision) and `trainers.py` (Trainer, accelerate, Lightning).
`benchmarks.programs` runs them all and compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from benchmarks.program_run import Program
from benchmarks.program_zoo import examples, language, recipes, trainers, vision

PROGRAMS: Mapping[str, Program] = MappingProxyType(
    {**examples.PROGRAMS, **recipes.PROGRAMS, **language.PROGRAMS, **vision.PROGRAMS, **trainers.PROGRAMS}
)
