"""Before torch is imported: one thread, so that every kernel adds in the same order each time.

Some CPU kernels (`index_put` that accumulates) do not with several, and tests compare bits.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
