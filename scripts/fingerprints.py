"""Prints what every plan of the zoo is: to see which plans a change to the code alone has changed.

    python -m scripts.fingerprints --output before.json
    python -m scripts.fingerprints --against before.json [--models gpt2,resnet]

For each model: the plan for training and for inference, and for training with 80 %, 60 % and the least of the arena.
A plan's digest is the SHA-256 of its file without the versions that made it; its arena and its total are in bytes.
With `--against`, exits 1 when a plan differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import memplan
from benchmarks.zoo import ZOO
from memplan.errors import MemplanError

ASKED: dict[str, dict[str, Any]] = {
    "train": {},
    "infer": {"train": False},
    "0.8": {"arena_budget": 0.8},
    "0.6": {"arena_budget": 0.6},
    "min": {"arena_budget": "min"},
}


def fingerprint(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the digest, arena and total of the plan of a model of the zoo, or the error that refuses it."""
    module, inputs = ZOO[model]()
    try:
        plan = memplan.plan(module, inputs, **options)
    except MemplanError as error:
        return {"refused": type(error).__name__}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan.save(path)
        saved = json.loads(path.read_text())
    del saved["versions"]
    digest = hashlib.sha256(json.dumps(saved, sort_keys=True).encode()).hexdigest()
    return {"digest": digest[:16], "arena": plan.arena_size, "total": plan.total}


def changes(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each plan of `now` that is not that of `before`."""
    for name, plan in now.items():
        if before.get(name) != plan:
            yield f"{name}: {before.get(name)} -> {plan}"


def main() -> int:
    """Run the script; return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(ZOO), help="comma-separated; all of the zoo by default")
    parser.add_argument("--output", type=Path, help="write the fingerprints there")
    parser.add_argument("--against", type=Path, help="compare with the fingerprints of this file")
    arguments = parser.parse_args()
    now = {}
    for model in arguments.models.split(","):
        for asked, options in ASKED.items():
            now[f"{model} {asked}"] = fingerprint(model, options)
    if arguments.output:
        arguments.output.write_text(json.dumps(now, indent=1) + "\n")
    if arguments.against is None:
        return 0
    changed = list(changes(json.loads(arguments.against.read_text()), now))
    print("\n".join(changed) or f"the {len(now)} plans are those of {arguments.against}")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
