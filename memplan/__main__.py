"""`python -m memplan` is the command `memplan`."""

from __future__ import annotations

import sys

from memplan.cli import main

if __name__ == "__main__":
    sys.exit(main())
