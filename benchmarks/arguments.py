"""Command-line options that benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.results import RESULTS


def parser_of(
    name: str, description: str, models: Sequence[str], default: Sequence[str] | None = None
) -> argparse.ArgumentParser:
    """A parser that asks which of `models` to measure (`default`: all), and where the results go."""
    parser = argparse.ArgumentParser(prog=f"benchmarks.{name}", description=description)
    chosen = list(models if default is None else default)
    parser.add_argument("--models", type=names(models), default=chosen, help="comma-separated, or all")
    parser.add_argument("--output", default=name.replace("_", "-"), help="name of the result files")
    parser.add_argument("--directory", type=Path, default=RESULTS, help="folder of the result files")
    return parser


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """A parser of comma-separated names out of `known`, or all of them."""

    def parse(text: str) -> list[str]:
        chosen = list(known) if text == "all" else text.split(",")
        if unknown := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(known)}, all")
        return chosen

    return parse
