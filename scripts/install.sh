#!/usr/bin/env bash
# Installs memplan from this checkout into .venv, every version pinned. Usage: scripts/install.sh [EXTRA]
# Needs python3 >= 3.11 with venv (or another interpreter named by $PYTHON). Running it again is quick.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-python3}"
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "memplan needs Python 3.11 or newer; '$python' is not. Name another one: PYTHON=python3.12 $0" >&2
    exit 2
fi
if [[ ! -x .venv/bin/pip ]]; then
    "$python" -m venv .venv
fi
echo "Installing into .venv (about a minute the first time) ..." >&2
.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".${1:+[$1]}"
