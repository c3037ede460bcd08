#!/usr/bin/env bash
# Collect in build/wheels the packages that a GPU machine with torch, transformers and pandas lacks, and print what has
# to be copied there.
#
#     scripts/bench/gpu_day/pack.sh
#     PYTHON_VERSION=3.12 PYTHON=.venv/bin/python scripts/bench/gpu_day/pack.sh
set -euo pipefail
cd "$(dirname "$0")/../../.."
PYTHON=${PYTHON:-python3}
WHEELS=build/wheels
LACKING=(hydra-core omegaconf math-verify latex2sympy2_extended msgspec pydantic pydantic_core annotated-types
    typing-inspection submitit pebble backports.zstd pint flexcache flexparser platformdirs babel datasets dill multiprocess)

pinned() { grep -i "^$1==" constraints.txt; }

rm -rf "$WHEELS"
mkdir -p "$WHEELS"
pins=()
for name in "${LACKING[@]}"; do pins+=("$(pinned "$name")"); done
platforms=()
for of in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do platforms+=(--platform "${of}_x86_64"); done
"$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp \
    --python-version "${PYTHON_VERSION:-3.12}" "${platforms[@]}" --dest "$WHEELS" "${pins[@]}"
# This one has no wheel to download, so it is built.
"$PYTHON" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$WHEELS" "$(pinned antlr4-python3-runtime)"

tracked=$(git ls-files -z | xargs -0 stat --format=%s | awk '{ sum += $1 } END { print sum }')
wheels=$(cat "$WHEELS"/*.whl | wc -c)
awk -v count="$(find "$WHEELS" -name '*.whl' | wc -l)" -v tracked="$tracked" -v wheels="$wheels" 'BEGIN {
    printf "%d wheels, %.1f MB; with the tracked files %.1f MB\n", count, wheels / 1e6, (tracked + wheels) / 1e6 }'
