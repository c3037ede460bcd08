#!/usr/bin/env bash
# DynTS on a public model: a head for Qwen2.5-Coder-1.5B-Instruct from its own texts on GSM8K, and DynTS beside its rivals.
#
#     scripts/study/dynts_qwen.sh GGUF PROBLEMS              # all parts, one after the other
#     scripts/study/dynts_qwen.sh GGUF PROBLEMS texts heads  # these parts alone
#     TEXTS=4 LIMIT=2 MORE=decoding.max_new_tokens=96 SUFFIX=_try scripts/study/dynts_qwen.sh GGUF PROBLEMS   # a trial
#
# GGUF, PROBLEMS and DTYPE are those of gsm8k_qwen.sh. The same command goes on where an earlier one stopped.
#
# The model closes its thinking with no tag, so its own box does: model.think_end=\boxed, whose answers are read in the
# whole text. The head's texts are on problems behind the 384th, which no evaluation asks.
#
# What the head learns is fixed before the evaluation. The answer is either what stands behind the mark (about six tokens)
# or the last paragraph, which holds the mark (about 23), and the target is `power` or `linear`: that head is taken which
# finds most of the true top 20% of tokens of held-out texts in its own top 20%; within .01 the box before the paragraph,
# and power before linear (dynts_spans.py). It is the recipe of R1, at the size of these texts: 27 steps an epoch.
set -eu -o pipefail
cd "$(dirname "$0")/../.."
[ $# -ge 2 ] || { sed -n '2,16p' "$0"; exit 2; }
GGUF=$(realpath "$1") PROBLEMS=$(realpath "$2")
shift 2
SUM=cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046
KVSWEEP=${KVSWEEP:-.venv/bin/kvsweep} PYTHON=${PYTHON:-.venv/bin/python}
TEXTS=${TEXTS:-600} LIMIT=${LIMIT:-96} SLOTS=${SLOTS:-48} SUFFIX=${SUFFIX:-} MORE=${MORE:-}
BEFORE=384  # problems of the evaluations
HELD_OUT=5  # one text in so many
STEPS=27    # of an epoch, as released
EPOCHS=15
if [ -z "${DTYPE:-}" ]; then
    DTYPE=float32
    if grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo; then DTYPE=bfloat16; fi
fi
RUNS=results/runs
WRITTEN=dynts_qwen_texts_$DTYPE$SUFFIX DECODED=dynts_qwen_$DTYPE$SUFFIX
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

cell_of() { # the folder of a run's full cache
    grep -l "^  name: full$" "$RUNS/$1"/*/cell.yaml | xargs -n 1 dirname
}

predictor() { # a stage for traces in a folder, with further settings
    local stage=$1 folder=$2
    shift 2
    # shellcheck disable=SC2086
    "$KVSWEEP" predictor "$stage" recipe=r1 $MODEL "recipe.out=$folder" "recipe.held_out=$HELD_OUT" \
        recipe.min_distance=32 recipe.shard_mib=64 'recipe.widths=[3072,768]' "recipe.epochs=$EPOCHS" "$@"
}

made() { # the folder of the heads of the right texts that are there: HEAD/NUMBER
    echo "$HEAD/$(grep -c '"kept":true' "$HEAD/traces/traces.jsonl")"
}

heads() { # heads for both spans and both targets, on all right texts that are there
    local folder span target fitted batch
    "$KVSWEEP" grade "$RUNS/$WRITTEN"
    predictor traces "$HEAD/traces" recipe.target=power "recipe.import_from=$(cell_of "$WRITTEN")"
    folder=$(made)
    mkdir -p "$folder/box"
    cp "$HEAD/traces/"{traces.jsonl,traces.json,questions.json} "$folder/box"
    "$PYTHON" scripts/study/dynts_spans.py paragraph "$GGUF" "$folder/box" "$folder/paragraph"
    fitted=$((${folder##*/} - ${folder##*/} / HELD_OUT))
    batch=$((fitted / STEPS > 2 ? fitted / STEPS : 2))
    for span in box paragraph; do
        predictor labels "$folder/$span" recipe.target=power
        for target in power linear; do
            mkdir -p "$folder/$span/$target"
            for file in traces.jsonl traces.json questions.json cache; do
                ln -sfn "../$file" "$folder/$span/$target/$file"
            done
            for stage in train eval; do
                predictor "$stage" "$folder/$span/$target" "recipe.target=$target" "recipe.batch=$batch" \
                    recipe.whole_traces.ranks=1 recipe.whole_traces.micro_batch=1
            done
        done
    done
    "$PYTHON" scripts/study/dynts_spans.py choose "$folder"
}

drawn() { # the first LIMIT problems with these settings
    # shellcheck disable=SC2086
    "$KVSWEEP" $RUN "benchmark.path=$PROBLEMS" "benchmark.limit=$LIMIT" "slots=$SLOTS" "run_name=$DECODED" "$@"
}

decoded() { # one draw of the full cache, DynTS, its rivals, and DynTS with the true labels, at two sizes
    local folder chosen labels size
    folder=$(made)
    chosen=$("$PYTHON" -c 'import json, sys; print(json.load(open(sys.argv[1]))["head"])' "$folder/choice.json")
    size="policy.question=on_top grid.keep_ratio=[0.3,0.5]"
    # shellcheck disable=SC2086
    drawn policy=dynts "model.predictor=$folder/$chosen/answer" 'grid.policy=[full,dynts,random,h2o,rkv,window]' $size
    labels=$folder/first_$LIMIT
    "$KVSWEEP" grade "$RUNS/$DECODED"
    predictor traces "$labels/box" recipe.target=power "recipe.import_from=$(cell_of "$DECODED")"
    "$PYTHON" scripts/study/dynts_spans.py paragraph "$GGUF" "$labels/box" "$labels/paragraph"
    labels=$labels/${chosen%/*}
    predictor labels "$labels" "recipe.target=${chosen#*/}"
    predictor oracle "$labels" "recipe.target=${chosen#*/}"
    # shellcheck disable=SC2086
    drawn policy=oracle_answer "policy.predictor=$folder/$chosen/answer" \
        "policy.labels=$labels/oracle_answer.safetensors" $size
}

report() { # the page
    "$KVSWEEP" report "$RUNS/$DECODED"
}

# Hours of each part on one free core of an AMD EPYC with AVX2 in float32, where 32 slots decode 13 tokens a CPU second
# and read 21 tokens of a prompt; llama.cpp was as fast on that processor.
PARTS=(
    texts   # 4.3
    heads   # 1 for 350 right texts
    decoded # 8, estimated from the pace of texts
    report  # a minute
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
