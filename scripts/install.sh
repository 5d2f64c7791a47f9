#!/usr/bin/env bash
# Installs memplan from this checkout into .venv, every version pinned. Usage: scripts/install.sh [EXTRA]
# EXTRA may be several: torch,docs. Without torch, memplan solves, and reads and checks saved plans. TORCH=2.11 (or 2.12, 2.14)
# installs that torch instead, by constraints/torch-2.11.txt.
# Needs python3 >= 3.11 with venv (or another interpreter named by $PYTHON). Running it again is quick.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-python3}"
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "memplan needs Python 3.11 or newer; '$python' is not. Name another one: PYTHON=python3.12 $0" >&2
    exit 2
fi
constraints=constraints.txt
if [[ -n "${TORCH:-}" ]]; then
    differences="constraints/torch-$TORCH.txt"
    if [[ ! -f "$differences" ]]; then
        echo "there is no $differences; TORCH is one of: $(ls constraints | sed 's/torch-//; s/.txt//' | xargs)" >&2
        exit 2
    fi
    constraints="$(mktemp)"
    trap 'rm -f "$constraints"' EXIT
    # The differences, and of constraints.txt the packages that they do not name.
    awk -F== '/^#/ { next } NR == FNR { named[$1] = 1 } NR == FNR || !($1 in named)' "$differences" constraints.txt \
        >"$constraints"
fi
if [[ ! -x .venv/bin/pip ]]; then
    "$python" -m venv .venv
fi
echo "Installing into .venv (about a minute the first time) ..." >&2
.venv/bin/python -m pip install --quiet --disable-pip-version-check -c "$constraints" -e ".${1:+[$1]}"
