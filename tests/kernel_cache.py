"""Where numba keeps its compiled kernels while tests run: in one folder for all checkouts in which they are the same.

By itself, numba looks at the file of a kernel alone, not at those whose kernels it calls, and at where the checkout is.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memplan-tests"


def keep_kernels() -> None:
    """Tell numba, which is not imported yet, and the processes that tests start, which folder that is."""
    if "NUMBA_CACHE_DIR" in os.environ:
        return
    kernels = sorted(ROOT.glob("memplan/**/*_kernel.py"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in kernels)).hexdigest()[:16]
    for folder in {file.parent for file in kernels}:
        kept = CACHE / digest / "_".join(folder.relative_to(ROOT).parts)
        kept.mkdir(parents=True, exist_ok=True)
        # The name that numba gives to a folder of sources.
        link = CACHE / digest / f"{folder.name}_{hashlib.sha1(str(folder).encode()).hexdigest()}"
        with suppress(FileExistsError):
            link.symlink_to(kept, target_is_directory=True)
    os.environ["NUMBA_CACHE_DIR"] = str(CACHE / digest)
