#!/usr/bin/env bash
# Everything that needs a CUDA device, the most telling first: what is there, the tests, then benchmarks.
#   scripts/gpu_suite.sh [--device cpu] [STEP...]      STEPs: doctor tests nano step medium fit (all, in this order)
# Each step writes as it goes, so that one that is cut off leaves what it had: into RESULTS (benchmarks/results), for
# committing (runtime-cuda-*.json and .md). A benchmark that is run again goes on where it was (.runtime-*.lines there). The
# tests end within LIMIT (480) seconds, and gpu-checks.json says what ran, what did not, and with which versions
# (scripts/gpu_checks.py). --device cpu goes through the same steps without a GPU.
#
# Keeps the torch of PYTHON (python3; 2.11 or newer). Packages that are missing are installed from the folder WHEELS
# if that is set, without the network. To fill it (about 35 MB for Python 3.12 where transformers, numba, pytest,
# hypothesis, pandas, protobuf, rich and typer are present):
#   pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
#       --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
#       --platform manylinux2014_x86_64 -d WHEELS \
#       ortools==9.15.6755 immutabledict==4.3.1 diffusers==0.42.1 importlib-metadata==10.2.0
# Also taken from the environment: SIZE of the search for batches, MODELS, ROUNDS, CAPACITY.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

device=cuda
if [[ "${1:-}" == --device ]]; then
    device="$2"
    shift 2
fi
steps="${*:-doctor tests nano step medium fit}"
python="${PYTHON:-python3}"
results="${RESULTS:-benchmarks/results}"
mkdir -p "$results"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

missing="$("$python" -c '
from importlib.util import find_spec
needed = {name: name for name in "numpy numba ortools typer rich transformers diffusers pytest hypothesis".split()}
needed |= {"PIL": "pillow", "absl": "absl-py", "immutabledict": "immutabledict"}
needed |= {"pandas": "pandas", "importlib_metadata": "importlib-metadata", "google": "protobuf"}
print(*(package for name, package in needed.items() if find_spec(name) is None))
')"
for package in $missing; do
    "$python" -m pip install --quiet --no-deps ${WHEELS:+--no-index --find-links "$WHEELS"} "$package" ||
        echo "without $package" >&2
done
if [[ "$device" == cuda ]] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "No CUDA device is visible to $python: its tests are skipped, benchmarks run with --device cpu only." >&2
    steps="doctor tests"
fi

failed=""
benchmark() {  # name, size, contenders, more options
    local name="$1" size="$2" contenders="$3"
    shift 3
    [[ "$device" == cuda ]] || contenders="$(tr , '\n' <<<"$contenders" | grep -v graph | paste -sd,)"
    "$python" -m benchmarks.runtime --device "$device" --size "$size" --models "${MODELS:-all}" \
        --rounds "${ROUNDS:-10}" --contenders "$contenders" --directory "$results" \
        --output "runtime-$device-$name" --keep "$results/.runtime-$device-$name.lines" "$@" || failed="$failed $name"
}
for step in $steps; do
    echo "== $step ($(date -u +%H:%M:%S))" >&2
    case "$step" in
    doctor) "$python" -m memplan doctor || true ;;
    tests)
        "$python" -m scripts.gpu_checks --python "$python" --output "$results/gpu-checks.json" \
            --limit "${LIMIT:-480}" || failed="$failed tests"
        ;;
    nano) benchmark nano nano eager,memplan,memplan-graph,inductor,inductor-graph ;;
    step) benchmark step-nano nano eager-step,memplan-step,memplan-step-graph ;;
    medium) benchmark medium medium eager,memplan,memplan-graph ;;
    fit)
        benchmark "fit-${SIZE:-medium}" "${SIZE:-medium}" eager,memplan --fit eager,memplan --capacity "${CAPACITY:-8GiB}"
        ;;
    *) echo "no step is called $step" >&2 && exit 2 ;;
    esac
done
if [[ -n "$failed" ]]; then
    echo "failed:$failed" >&2
    exit 1
fi
