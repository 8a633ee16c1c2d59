#!/usr/bin/env bash
# The checks that need a real accelerator: one command, under three minutes on one GPU.
#
#   tests/gpu/run.sh                       on the machine's accelerator; says "no GPU" and exits 0 where there is none
#   tests/gpu/run.sh --device sim --quick  the same checks on the simulated accelerator, as a test of themselves
#
# WHEELS=DIR   takes missing packages from the wheels in DIR; nothing is downloaded, and torch is never replaced
# OUT=DIR      where gpu.json and gpu.md go; left out: docs/benchmarks
# PYTHON=...   the interpreter; it needs torch 2.11 or newer
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi

if [ -n "${WHEELS:-}" ]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$PYTHON" -m pip install -qq --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$WHEELS"/*.whl
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 PYTHONUNBUFFERED=1
export CUBLAS_WORKSPACE_CONFIG=:4096:8 # the same bits every time
"$PYTHON" tests/gpu/checks.py "$@"
