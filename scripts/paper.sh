#!/usr/bin/env bash
# The DynTS paper (arXiv 2601.18383) on one model, from the head to the table; docs/paper.md describes each line.
#
#     scripts/paper.sh r1_qwen_7b OUT               # or r1_llama_8b; OUT gets head, run, report and table.md
#     scripts/paper.sh r1_qwen_7b OUT --dry-run     # hours of each sweep on CARD, with PRICE=2.5 its price; what is missing
#     scripts/paper.sh r1_qwen_7b OUT --rehearse    # the same lines on an embedded model and its toy problems, in minutes
#
# Each line that is printed can be pasted, and the same command goes on where an earlier one stopped. MATH=FILE names the
# problems that the head learns from (rows with problem and answer); without it they are MATH's 7,500 training problems.
# DATA=DIR takes the problems from DIR/BENCHMARK.jsonl, where that file exists, and WEIGHTS=DIR the model from a folder,
# in place of the hub.
# LAUNCHER="launcher=slurm launcher.partition=gpu launcher.shards=8" submits the sweeps.
set -eu -o pipefail
[ $# -ge 2 ] || { sed -n '2,13p' "$0"; exit 2; }
MODEL=$1 OUT=$2 MODE=${3:-}
ROOT=$(cd "$(dirname "$0")/.." && pwd)
BIN=$ROOT/.venv/bin
KVSWEEP=${KVSWEEP:-$BIN/kvsweep} PYTHON=${PYTHON:-$BIN/python} HF=${HF:-$BIN/hf}
DATA=${DATA:-} WEIGHTS=${WEIGHTS:-} MATH=${MATH:-}
LAUNCHER=${LAUNCHER:-} CARD=${CARD:-h100} PRICE=${PRICE:-} LIMIT=${LIMIT:-6}
STANDS_IN='The dry run counts'  # so begins what a dry run says of a data set that it cannot have
TRACE_TOKENS=$((7100 * 4000))   # of the head's texts (conf/predictor/r1.yaml)
case $MODEL in
    r1_qwen_7b) FAMILY=r1_qwen RATIO=0.4 TOY=toy_qwen ;;
    r1_llama_8b) FAMILY=r1_llama RATIO=0.3 TOY=toy_llama ;;
    *) echo "paper.sh: $MODEL is not of the paper: r1_qwen_7b or r1_llama_8b." >&2; exit 2 ;;
esac
case $MODE in '' | --dry-run | --rehearse) ;; *) echo "paper.sh: $MODE is unknown: --dry-run, --rehearse or nothing." >&2; exit 2 ;; esac
RUN=$OUT/runs/paper HEAD=$OUT/head
WEIGHTS_ID=$(sed -n 's/^path: //p' "$ROOT/conf/model/$MODEL.yaml")
WEIGHTS_COMMIT=$(sed -n 's/^revision: //p' "$ROOT/conf/model/$MODEL.yaml")
# GPQA-Diamond is gated, so it comes last: the other benchmarks do not wait for its owner.
THREE=aime24,aime25,amc23 TWO=math500,gaokao2023en LAST=gpqa_diamond
WORDS=(impl=triton)
RECIPE=(recipe=r1 "model=$MODEL" recipe.impl=triton)
if [ -n "$WEIGHTS" ] && compgen -G "$WEIGHTS/*.safetensors" >/dev/null; then
    WORDS+=("model.path=$WEIGHTS")
    RECIPE+=("model.path=$WEIGHTS")
fi
SIZE=() GRID=() CHOSEN=() NO_WINDOW=() BUDGET=() TABLE=()
if [ "$MODE" = --rehearse ]; then
    THREE=toy_chain,toy_add,toy_regs TWO='' LAST=toy_groups
    WORDS=("model=$TOY" model.dtype=float32 benchmark.prompt=bare "benchmark.limit=$LIMIT" draws=2
        decoding.max_new_tokens=448)
    SIZE=(policy.budget=192) GRID=('grid.local_window=[16,32,48,64]') CHOSEN=('grid.local_window=[48]')
    NO_WINDOW=("grid.beside=[{policy: [dynts], keep_ratio: [$RATIO], local_window: [1], budget: [128]}]")
    BUDGET=('grid.budget=[96,128,160,192]' 'grid.local_window=[48]')
    RECIPE=(recipe=toy "model=$TOY" "recipe.toy_problems=$((16 * LIMIT))")
    TABLE=(--stand-in "$TOY=$MODEL" toy_chain=aime24 toy_add=aime25 toy_regs=amc23 toy_groups=gpqa_diamond)
fi

run() { # print a kvsweep command and do it
    printf '\n$ kvsweep'
    printf ' %q' "$@"
    echo
    "$KVSWEEP" "$@"
}

sweep() { # EXPERIMENT BENCHMARKS WORD...: one sweep into the run, or its hours
    local experiment=$1 benchmarks=$2 names=("$2") name
    shift 2
    [ -z "$DATA" ] || IFS=, read -ra names <<<"$benchmarks"
    for name in "${names[@]}"; do
        # shellcheck disable=SC2206
        local words=(-m "experiment=$experiment" "benchmark=$name" "results_dir=$OUT/runs" run_name=paper
            "${WORDS[@]}" "$@" $LAUNCHER)
        [ -z "$DATA" ] || [ ! -f "$DATA/$name.jsonl" ] || words+=("benchmark.path=$DATA/$name.jsonl")
        if [ "$MODE" = --dry-run ]; then
            # What cannot be had is named once, at the end.
            run "${words[@]}" "card=$CARD" ${PRICE:+"cost.per_hour=$PRICE"} --dry-run 2> >(grep -v "$STANDS_IN" >&2) |
                grep -E '^\$|^ +completions|in all|completions,|does not fit'
        else
            run "${words[@]}" "model.predictor=$HEAD/answer"
            [ -z "$LAUNCHER" ] || run status "$RUN" --watch
        fi
    done
}

missing_sets() { # BENCHMARK...: a line for each data set that is neither in DATA nor to be had, and for any other error
    local name hub=()
    for name; do [ -f "$DATA/$name.jsonl" ] || hub+=("$name"); done
    [ ${#hub[@]} -gt 0 ] || return 0
    { "$KVSWEEP" -m policy=full "benchmark=$(IFS=,; echo "${hub[*]}")" --dry-run 2>&1 >/dev/null || true; } |
        sed "s/ $STANDS_IN.*//"
}

missing_files() { # a line for each file that was named and does not exist
    [ -z "$WEIGHTS" ] || compgen -G "$WEIGHTS/*.safetensors" >/dev/null || echo "WEIGHTS=$WEIGHTS has no *.safetensors."
    # In a run the predictor's first stage refuses it.
    [ "$MODE" = '' ] || [ -z "$MATH" ] || [ -f "$MATH" ] || echo "MATH=$MATH is no file."
}

to_make() { # a line for each part that the run itself fetches or makes, with what it takes
    local stored=${HF_HUB_CACHE:-${HF_HOME:-$HOME/.cache/huggingface}/hub}/models--${WEIGHTS_ID//\//--} bytes
    if [ -z "$WEIGHTS" ] && ! compgen -G "$stored/snapshots/$WEIGHTS_COMMIT/*.safetensors" >/dev/null; then
        sed -n '1s/^# \(.*\)\.$/Weights \1, or WEIGHTS=DIR names their folder./p' "$ROOT/conf/model/$MODEL.yaml"
    fi
    if [ ! -e "$HEAD/answer/predictor.safetensors" ]; then
        [ -n "$MATH" ] || [ -e "$OUT/MATH.jsonl" ] ||
            echo "The head's problems: MATH's training problems from the hub, or MATH=FILE names rows with problem and answer."
        bytes=$((TRACE_TOKENS * 2 * $(sed -n 's/^  hidden_size: //p' "$ROOT/conf/model/$MODEL.yaml")))
        echo "The head $HEAD/answer: about $(((bytes + 500000000) / 1000000000)) GB of disk for hidden states; by estimate, not" \
            "measured, 2 to 4 hours of one GPU for texts, a prefill of each for labels, and 15 readings of the states."
    fi
}

sweeps() { # ALL FOUR: the paper's sweeps; its table and its selections have ALL benchmarks, its other figures FOUR
    local all=$1 four=$2
    sweep "heatmap_$FAMILY" "$four" "${SIZE[@]}" "${GRID[@]}"
    sweep "table_$FAMILY" "$all" "${SIZE[@]}" "${CHOSEN[@]}"
    sweep "ablation_$FAMILY" "$all" "${SIZE[@]}" "${CHOSEN[@]}" "${NO_WINDOW[@]}"
    sweep "budget_$FAMILY" "$four" "${BUDGET[@]}"
}

mkdir -p "$OUT"
if [ "$MODE" = '' ]; then
    # Better said now than after days. Without a login the hub refuses GPQA, for which the others do not wait.
    missing=$(missing_files; missing_sets ${THREE//,/ } ${TWO//,/ })
    missing_sets "$LAST" >&2
    if [ -n "$missing" ]; then
        printf 'paper.sh: missing (DATA=DIR takes DIR/BENCHMARK.jsonl for a data set):\n%s\n' "$missing" >&2
        exit 2
    fi
    [ -n "$WEIGHTS" ] || "$HF" download "$WEIGHTS_ID" --revision "$WEIGHTS_COMMIT"
    [ -n "$MATH" ] || [ -e "$OUT/MATH.jsonl" ] || "$PYTHON" "$ROOT/scripts/math_problems.py" "$OUT/MATH.jsonl"
    RECIPE+=("benchmark.path=${MATH:-$OUT/MATH.jsonl}")
fi
if [ "$MODE" != --dry-run ]; then
    # A head is trained once: another one would make other cells.
    for stage in $([ -e "$HEAD/answer/predictor.safetensors" ] || echo traces labels train) eval; do
        run predictor "$stage" "${RECIPE[@]}" "recipe.out=$HEAD" 'recipe.label=[answer]'
    done
fi
sweeps "$THREE${TWO:+,$TWO}" "$THREE"
sweeps "$LAST" "$LAST"
if [ "$MODE" = --dry-run ]; then
    fetched=$(to_make)
    missing=$(missing_files; missing_sets ${THREE//,/ } ${TWO//,/ } "$LAST")
    printf '\nThe run fetches or makes first:\n%s\n' "${fetched:-nothing}"
    printf '\nMissing (DATA=DIR takes DIR/BENCHMARK.jsonl for a data set):\n%s\n' "${missing:-nothing}"
    exit 0
fi
run verify "$RUN"
run report "$RUN" --columns 4 --width 14 --pdf
"$PYTHON" "$ROOT/scripts/study/paper_table.py" "$RUN" "${TABLE[@]}" | tee "$OUT/table.md"
