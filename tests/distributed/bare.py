"""Scenarios for the launcher itself, which import no more than it does."""

from __future__ import annotations

import os
import time


def fails_and_hangs() -> None:
    """Exit with an error on rank 0, while rank 1 waits for it."""
    if os.environ["RANK"] == "0":
        print("said before it failed", flush=True)
        os._exit(3)
    time.sleep(60)


def hangs() -> None:
    """Wait for longer than a test."""
    print("said before it hung", flush=True)
    time.sleep(60)
