"""Command-line options that benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """A parser of comma-separated names out of `known`, or all of them."""

    def parse(text: str) -> list[str]:
        chosen = list(known) if text == "all" else text.split(",")
        if unknown := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(known)}, all")
        return chosen

    return parse
