#!/usr/bin/env bash
# Installs memplan into .venv, plans a GPT-2 (124 million parameters, random weights), and trains it for a few steps
# in one arena: forward and backward on the CPU. Needs python3 >= 3.11 and about 4 GB of memory; downloads no weights.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/install.sh torch,zoo
.venv/bin/memplan report benchmarks/zoo.py:gpt2_small
.venv/bin/python -m scripts.train_step
