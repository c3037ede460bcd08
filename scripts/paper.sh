#!/usr/bin/env bash
# The DynTS paper (arXiv 2601.18383) on one model, from the head to the table; docs/paper.md describes each line.
#
#     scripts/paper.sh r1_qwen_7b OUT               # or r1_llama_8b; OUT gets head, run, report and table.md
#     scripts/paper.sh r1_qwen_7b OUT --dry-run     # the tokens and hours of each sweep on CARD; nothing is run
#     scripts/paper.sh r1_qwen_7b OUT --rehearse    # the same lines on an embedded model and its toy problems, in minutes
#
# Each line that is printed can be pasted, and the same command goes on where an earlier one stopped. MATH=FILE names the
# problems that the head learns from (rows with problem and answer). DATA=DIR takes the problems from DIR/BENCHMARK.jsonl
# in place of the hub. LAUNCHER="launcher=slurm launcher.partition=gpu launcher.shards=8" submits the sweeps.
set -eu -o pipefail
[ $# -ge 2 ] || { sed -n '2,10p' "$0"; exit 2; }
MODEL=$1 OUT=$2 MODE=${3:-}
ROOT=$(cd "$(dirname "$0")/.." && pwd)
KVSWEEP=${KVSWEEP:-$ROOT/.venv/bin/kvsweep} PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
DATA=${DATA:-} LAUNCHER=${LAUNCHER:-} CARD=${CARD:-h100} LIMIT=${LIMIT:-6}
case $MODEL in
    r1_qwen_7b) FAMILY=r1_qwen RATIO=0.4 GPQA_WINDOW=2000 TOY=toy_qwen ;;
    r1_llama_8b) FAMILY=r1_llama RATIO=0.3 GPQA_WINDOW=2500 TOY=toy_llama ;;
    *) echo "paper.sh: $MODEL is not of the paper: r1_qwen_7b or r1_llama_8b." >&2; exit 2 ;;
esac
case $MODE in '' | --dry-run | --rehearse) ;; *) echo "paper.sh: $MODE is unknown: --dry-run, --rehearse or nothing." >&2; exit 2 ;; esac
RUN=$OUT/runs/paper HEAD=$OUT/head
THREE=aime24,aime25,amc23 FOURTH=gpqa_diamond WINDOW=2000
# The methods of the paper's table as its code has them, at one size beside the full cache.
METHODS=full,dynts,rkv_dynts_code,snapkv_dynts_code,h2o_dynts_code,sepllm_dynts_code,streaming_llm_dynts_code,window
WORDS=(impl=triton)
RECIPE=(recipe=r1 "model=$MODEL" "benchmark.path=${MATH:-MATH.jsonl}" recipe.impl=triton)
SIZE=() GRID=() BUDGET=() TABLE=()
if [ "$MODE" = --rehearse ]; then
    THREE=toy_chain,toy_add,toy_regs FOURTH=toy_groups WINDOW=48 GPQA_WINDOW=48
    WORDS=("model=$TOY" model.dtype=float32 benchmark.prompt=bare "benchmark.limit=$LIMIT" draws=2
        decoding.max_new_tokens=448)
    SIZE=(policy.budget=192) GRID=('grid.local_window=[16,32,48,64]')
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
    local experiment=$1 benchmarks=$2 files=("")
    shift 2
    [ -z "$DATA" ] || IFS=, read -ra files <<<"$benchmarks"
    for file in "${files[@]}"; do
        # shellcheck disable=SC2206
        local words=(-m "experiment=$experiment" "benchmark=${file:-$benchmarks}" "results_dir=$OUT/runs" run_name=paper
            "${WORDS[@]}" "$@" $LAUNCHER)
        [ -z "$file" ] || words+=("benchmark.path=$DATA/$file.jsonl")
        if [ "$MODE" = --dry-run ]; then
            run "${words[@]}" "card=$CARD" --dry-run | grep -E '^\$|in all|completions,|does not fit'
        else
            run "${words[@]}" "model.predictor=$HEAD/answer"
            [ -z "$LAUNCHER" ] || run status "$RUN" --watch
        fi
    done
}

mkdir -p "$OUT"
if [ "$MODE" = '' ]; then # the weights
    hf download "$(sed -n 's/^path: //p' "$ROOT/conf/model/$MODEL.yaml")" \
        --revision "$(sed -n 's/^revision: //p' "$ROOT/conf/model/$MODEL.yaml")"
fi
if [ "$MODE" != --dry-run ]; then
    # A head is trained once: another one would make other cells.
    for stage in $([ -e "$HEAD/answer/predictor.safetensors" ] || echo traces labels train) eval; do
        run predictor "$stage" "${RECIPE[@]}" "recipe.out=$HEAD" 'recipe.label=[answer]'
    done
fi
sweep "heatmap_$FAMILY" "$THREE,$FOURTH" "${SIZE[@]}" "${GRID[@]}"
CHOSEN=("${SIZE[@]}" "grid.policy=[$METHODS]" "grid.keep_ratio=[$RATIO]")
sweep "heatmap_$FAMILY" "$THREE" "${CHOSEN[@]}" "grid.local_window=[$WINDOW]"
sweep "heatmap_$FAMILY" "$FOURTH" "${CHOSEN[@]}" "grid.local_window=[$GPQA_WINDOW]"
sweep "ablation_$FAMILY" "$THREE" "${SIZE[@]}" "grid.local_window=[$WINDOW]"
sweep "budget_$FAMILY" "$THREE" "${BUDGET[@]}"
[ "$MODE" != --dry-run ] || exit 0
run verify "$RUN"
run report "$RUN" --columns 4 --width 14
"$PYTHON" "$ROOT/scripts/study/paper_table.py" "$RUN" "${TABLE[@]}" | tee "$OUT/table.md"
