#!/usr/bin/env bash
# Check and time kvsweep on one GPU; README.md in this folder says how.
#
#     scripts/bench/gpu_day/quarter.sh OUT [--deadline SECONDS] [--only PART ...] [--small]
set -euo pipefail
OUT=$(realpath -m "${1:?name the folder for the results}")
shift
cd "$(dirname "$0")/../../.."
PYTHON=${PYTHON:-python3}
# The packages that pack.sh collected, in a folder of their own, where the environment lacks them.
if ! "$PYTHON" -c "import hydra, math_verify, submitit" 2>/dev/null; then
    SITE=$(mktemp -d)
    trap 'rm -rf "$SITE"' EXIT
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --target "$SITE" build/wheels/*.whl
fi
export PYTHONPATH=${SITE:+$SITE:}$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
"$PYTHON" scripts/bench/gpu_day/quarter.py "$OUT" "$@"
