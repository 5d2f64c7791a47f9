#!/usr/bin/env bash
# Everything that needs a CUDA device, in one command: the tests, then the benchmark. Results are for committing:
# benchmarks/results/runtime-cuda-*.{json,md}. Keeps the torch of PYTHON (default: python3); packages that are missing
# are installed beside it, from the folder WHEELS if that is set. SIZES, MODELS, ROUNDS and CAPACITY may be set, too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-python3}"
missing="$("$python" -c '
from importlib.util import find_spec
needed = "numpy numba ortools typer rich transformers diffusers pytest hypothesis fastjsonschema PIL".split()
print(*("pillow" if name == "PIL" else name for name in needed if find_spec(name) is None))
')"
if [[ -n "$missing" ]]; then
    # shellcheck disable=SC2086  # words
    "$python" -m pip install --quiet ${WHEELS:+--no-index --find-links "$WHEELS"} $missing
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

"$python" -m pytest -p no:cacheprovider -m cuda -rs tests/runtime
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "No CUDA device is visible to $python: its tests were skipped, the benchmark is left out." >&2
    exit 0
fi

contenders=eager,inductor,inductor-graph,memplan,memplan-graph
for size in ${SIZES:-nano medium}; do
    "$python" -m benchmarks.runtime --device cuda --size "$size" --models "${MODELS:-all}" --rounds "${ROUNDS:-20}" \
        --capacity "${CAPACITY:-8GiB}" --contenders "$contenders" --output "runtime-cuda-$size"
    "$python" -m benchmarks.runtime --device cuda --size "$size" --models "${MODELS:-all}" --rounds "${ROUNDS:-20}" \
        --capacity "${CAPACITY:-8GiB}" --contenders eager-step,memplan-step,memplan-step-graph \
        --output "runtime-cuda-step-$size"
done
