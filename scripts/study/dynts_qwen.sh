#!/usr/bin/env bash
# DynTS on a public model: a head for Qwen2.5-Coder-1.5B-Instruct from its own texts on GSM8K, and DynTS beside its rivals.
#
#     scripts/study/dynts_qwen.sh GGUF PROBLEMS              # all parts, one after the other
#     scripts/study/dynts_qwen.sh GGUF PROBLEMS texts head   # these parts alone
#     TEXTS=4 LIMIT=2 MORE=decoding.max_new_tokens=96 SUFFIX=_try scripts/study/dynts_qwen.sh GGUF PROBLEMS   # a trial
#
# GGUF, PROBLEMS and DTYPE are those of gsm8k_qwen.sh. The same command goes on where an earlier one stopped.
#
# The model closes its thinking with no tag, so its own box does: model.think_end=\boxed, whose answers are read in the
# whole text. The head's texts are on problems behind the 384th, which no evaluation asks.
set -eu -o pipefail
cd "$(dirname "$0")/../.."
[ $# -ge 2 ] || { sed -n '2,11p' "$0"; exit 2; }
GGUF=$(realpath "$1") PROBLEMS=$(realpath "$2")
shift 2
SUM=cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046
KVSWEEP=${KVSWEEP:-.venv/bin/kvsweep}
TEXTS=${TEXTS:-600} SLOTS=${SLOTS:-48} SUFFIX=${SUFFIX:-} MORE=${MORE:-}
BEFORE=384 # problems of the evaluations
if [ -z "${DTYPE:-}" ]; then
    DTYPE=float32
    if grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo; then DTYPE=bfloat16; fi
fi
RUNS=results/runs
WRITTEN=dynts_qwen_texts_$DTYPE$SUFFIX
HEAD=results/predictors/dynts_qwen_$DTYPE$SUFFIX
MODEL="model=qwen25_coder_1_5b model.gguf=$GGUF model.dtype=$DTYPE model.think_end=\\boxed"
RUN="$MODEL benchmark=gsm8k benchmark.answer_from=whole_text decoding=r1 $MORE"

texts() { # one draw of the full cache on each of TEXTS problems behind the evaluations' ones
    mkdir -p "$HEAD"
    tail -n "+$((BEFORE + 1))" "$PROBLEMS" >"$HEAD/problems.jsonl"
    # shellcheck disable=SC2086
    "$KVSWEEP" $RUN "benchmark.path=$HEAD/problems.jsonl" "benchmark.limit=$TEXTS" "slots=$SLOTS" policy=full \
        "run_name=$WRITTEN"
}

# Hours of each part on one free core of an AMD EPYC with AVX2 in float32, where 32 slots decode 13 tokens a CPU second
# and read 21 tokens of a prompt; llama.cpp was as fast on that processor.
PARTS=(
    texts # 4.3
)
[ $# -gt 0 ] || set -- "${PARTS[@]}"
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
