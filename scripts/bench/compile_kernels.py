"""Lowers every kernel and variant for Hopper, without a GPU, and prints what `test_compile` asserts, as JSON.

A program of its own: a process that has TRITON_INTERPRET set cannot compile.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvsweep.kernels import (
    compact,
    decode_attention,
    draw_tokens,
    fused_pointwise,
    importance_labels,
    linear,
    packed_attention,
    scores,
    tiles,
)

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
TYPES = ("bf16", "fp32")
ATTENTION = (decode_attention._attend_chunk, decode_attention._attend, packed_attention._attend_packed)

# Width of a head, query heads a group: gpt-oss, no power of two, R1-Qwen, without groups, the largest group, Gemma 3.
HEADS = ((64, 8), (96, 4), (128, 7), (128, 1), (128, 16), (256, 2))


# Of a drawing: top_p, top_k, and whether top_k is first.
CUTS = ((True, False, False), (True, True, False), (True, True, True), (False, True, True), (False, False, False))


def power(number):
    return 1 << (number - 1).bit_length()


def of(kind, names):
    """The type of several arguments."""
    return dict.fromkeys(names.split(), kind)


def shape_of(dim, dtype="fp32"):
    return {"DIM": dim, "DIM_PADDED": power(dim), "DEPTH": tiles.row_tile(getattr(torch, NAMES[dtype]), dim)["DEPTH"]}


def variants():
    """(name, kernel, types of the run-time arguments, constants, warps) of every form that the engine may ask for."""
    lengths = {"lengths": "*i64"}
    for dtype, (dim, group) in itertools.product(TYPES, HEADS):
        common = {"GROUP": group, **shape_of(dim, dtype)}
        for mass in (False, True):
            types = of(f"*{dtype}", "query keys values")
            types |= of("*fp32", "part peak total logits_out") | {"scaling": "fp32"} | lengths
            constants = {
                **common,
                "GROUP_PADDED": power(group),
                "BLOCK": decode_attention.block(getattr(torch, NAMES[dtype])),
            }
            constants |= {"MASS": mass, "ALONE": False, **of(None, "key_scales value_scales")}
            for softcap in (None, 50.0) if dim == 256 else (None,):
                name = f"attend_chunk {dtype} D={dim} G={group} mass={int(mass)} softcap={softcap}"
                yield name, decode_attention._attend_chunk, types, {**constants, "SOFTCAP": softcap}, 4
            if not mass:
                whole, own = {**types, "part": f"*{dtype}"}, {**constants, "SOFTCAP": None, "ALONE": True}
                yield f"attend_chunk {dtype} D={dim} G={group} alone", decode_attention._attend_chunk, whole, own, 4
            for rows, scaled in (("fp8e4nv", True), ("fp8e5", False)) if mass else ():
                of_rows = of(f"*{rows}", "keys values")
                of_rows |= of("*fp32", "key_scales value_scales")
                how = decode_attention.launch(getattr(torch, NAMES[dtype]), torch.float8_e5m2, dim)
                name = f"attend_chunk {dtype} {rows} D={dim} G={group} mass=1 scaled={int(scaled)}"
                own = {**constants, "SOFTCAP": None}
                if scaled:
                    del own["key_scales"], own["value_scales"]
                yield name, decode_attention._attend_chunk, types | of_rows, own, how["num_warps"]
            types = of(f"*{dtype}", "query keys values output") | {
                "mass": "*fp32",
                "scaling": "fp32",
            }
            at_once = decode_attention.tokens_at_once(getattr(torch, NAMES[dtype]), power(group))
            warps = decode_attention.warps(getattr(torch, NAMES[dtype]), dim, mass)
            del constants["DEPTH"]
            if not mass:
                constants["mass"] = None
            name = f"attend {dtype} D={dim} G={group} mass={int(mass)}"
            yield name, decode_attention._attend, types, {**constants, "TOKENS": at_once}, warps
        for sinks in (False, True) if dim == 64 else ():
            types = of("*fp32", "part peak total norm") | {"output": f"*{dtype}"} | lengths
            own = common if sinks else {**common, "sinks": None}
            types |= {"sinks": f"*{dtype}"}
            name = f"join_chunks {dtype} D={dim} sinks={int(sinks)}"
            yield name, decode_attention._join_chunks, types, own, 4
    places = of("*i64", "positions counts lengths")
    for dtype, (keys, bits) in itertools.product(TYPES, ((8, 8), (4, 4), (2, 2), (4, 2))):
        types = of(f"*{dtype}", "query newest") | places
        types |= {"keys": "*u8", "key_fields": "*fp16", "values": "*u8", "value_fields": "*fp16"}
        types |= of("*fp32", "part peak total logits_out") | {"scaling": "fp32"}
        constants = {"GROUP": 7, "GROUP_PADDED": 8, **shape_of(128, dtype), "SHARE": 32}
        constants |= {"KEY_BITS": keys, "VALUE_BITS": bits}
        constants |= {"RESIDUAL": 128, "MASS": True, "SOFTCAP": None}
        name = f"attend_packed {dtype} bits={keys} {bits}"
        yield name, packed_attention._attend_packed, types, constants, packed_attention.WARPS
    for dtype, outs in itertools.product(TYPES, (3584, 152064)):
        tile = linear.tile(torch.empty(outs, 0, dtype=getattr(torch, NAMES[dtype])))
        for bias in (False, True):
            types = of(f"*{dtype}", "inputs weight bias output")
            constants = tile if bias else {**tile, "bias": None}
            name = f"multiply {dtype} outs={outs} bias={int(bias)}"
            yield name, linear._multiply, types, constants, 4
    types = of("*fp32", "logits norm mass") | lengths
    yield "sum_group", decode_attention._sum_group, types, {"GROUP": 7}, 4
    for shared, unit in ((False, 4), (True, 4), (True, 1)):
        constants = {"UNIT": unit, "SHARED": shared}
        name = f"move_rows shared={int(shared)} unit={unit}"
        yield name, compact._move_rows, of("*i64", "pointers keep"), constants, 4
    for dtype, dim in itertools.product(TYPES, (96, 128)):
        common = {"GROUP": 7, **shape_of(dim, dtype)}
        types = {"query": f"*{dtype}", "key": f"*{dtype}", "norm": "*fp32", "columns": "*fp32", "scaling": "fp32"}
        yield f"row_norms {dtype} D={dim}", importance_labels._row_norms, types, common, 8
        for largest in (False, True):
            name = f"columns {dtype} D={dim} largest={int(largest)}"
            yield name, importance_labels._columns, types, {**common, "LARGEST": largest}, 8
    for dim in (96, 128):
        types = {"unit": "*fp32", "last": "*i32", "lost": "*fp32", "threshold": "fp32"}
        yield f"last_similar D={dim}", scores._last_similar, types, shape_of(dim), 8
    types = {"last": "*i32", "lost": "*fp32", "taken": "*fp32"}
    yield "sum_lost", scores._sum_lost, types, {}, 4
    for dtype, dim, window in itertools.product(TYPES, (96, 128), (8, 32)):
        types = {"queries": f"*{dtype}", "keys": f"*{dtype}", "norm": "*fp32", "scores": "*fp32", "scaling": "fp32"}
        common = {"WINDOW": window, "WINDOW_PADDED": max(16, window), **shape_of(dim, dtype), "GROUP": 7}
        common |= {"MERGED": 7 if window == 8 else 1}
        name = f"{dtype} D={dim} W={window}"
        yield f"window_norms {name}", scores._window_norms, types, {**common, "PAST_ONLY": window == 8}, 4
        pooling = {"POOLING": 7 if window == 8 else 5, "LARGEST": window == 8}
        yield f"pooled_scores {name}", scores._pooled_scores, types, {**common, **pooling}, 4
    for dtype, (top_p, top_k, k_first) in itertools.product(("bf16", "fp16", "fp32"), CUTS):
        types = {"logits": f"*{dtype}", **of("*i64", "keys counters drawn")}
        types |= of("fp32", "temperature top_p")
        constants = {"TOP_P": top_p, "TOP_K": top_k, "K_FIRST": k_first, "BLOCK": draw_tokens.BLOCK}
        constants |= {"SHIFT": draw_tokens.ZERO_BITS[getattr(torch, NAMES[dtype])]}
        name = f"draw {dtype} top_p={int(top_p)} top_k={int(top_k)} k_first={int(k_first)}"
        yield name, draw_tokens._draw, types, constants, draw_tokens.WARPS
    # The widths of R1-Qwen-7B, R1-Llama-8B and the toys; heads of Qwen2 and of Qwen3, whose are normed.
    for dtype, width, add in itertools.product(("bf16", "fp16", "fp32"), (3584, 4096, 128), (False, True)):
        types = {**of(f"*{dtype}", "states update weight total normed"), "epsilon": "fp32"}
        how = fused_pointwise.row_block(width)
        name, constants = f"add_norm {dtype} width={width} add={int(add)}", {"BLOCK": how["BLOCK"]}
        constants |= {} if add else {"update": None}
        yield name, fused_pointwise._add_norm, types, constants, how["num_warps"]
    for dtype in ("bf16", "fp16", "fp32"):
        types = of(f"*{dtype}", "gate_up output")
        yield f"gate {dtype}", fused_pointwise._gate, types, {}, 4
        tensors = ("heads", "cos", "sin", "q_weight", "k_weight", "query", "keys", "values")
        types = {**dict.fromkeys(tensors, f"*{dtype}"), "lines": "*i64", "epsilon": "fp32"}
        for heads, kv_heads, norms in ((28, 4, False), (32, 8, True)):
            constants = {"Q_HEADS": heads, "KV_HEADS": kv_heads}
            constants |= {} if norms else of(None, "q_weight k_weight")
            name = f"rotate {dtype} norms={int(norms)}"
            yield name, fused_pointwise._rotate, types, {**constants, "DIM": 128, "DIM_PADDED": 128}, 4


def lower(kernel, types, constants, warps, stages):
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    # As the launcher would find them: tensors start at multiples of 16 bytes; strides of rows are multiples of 16.
    whole = ("stride_slot", "stride_head", "stride_row", "width", "key_slot", "key_head", "key_row")
    whole += ("value_slot", "value_head", "value_row", "vocabulary")
    aligned = [n for n, t in signature.items() if t[0] == "*" or n in whole]
    # Compaction counts its strides in units of 16 bytes, which need not be multiples of anything.
    aligned = [n for n in aligned if kernel is not compact._move_rows or signature[n][0] == "*"]
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = ASTSource(kernel, signature, {n: v for n, v in constants.items() if n in names}, attrs)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def inspect(compiled):
    """The GPU resources of one kernel, and its memory operations and barriers in the order of the disassembly."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()

        def dump(flag):
            return subprocess.run([CUOBJDUMP, flag, file.name], capture_output=True, text=True, check=True).stdout

        usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", dump("--dump-resource-usage")))
        sass = re.findall(r"\b(?:LDG|LDGSTS|STG|LDL|STL|BAR)\b[.\w]*", dump("-sass"))
    # The tool sees the memory that is shared statically; Triton asks for its own at launch.
    return {key: int(value) for key, value in usage.items()} | {"SHARED": compiled.metadata.shared, "sass": sass}


if __name__ == "__main__":
    only = sys.argv[1] if len(sys.argv) > 1 else ""
    for name, kernel, types, constants, warps in variants():
        if only in name:
            halves = "*bf16" in types.values() and kernel is not decode_attention._join_chunks
            stages = 2 if halves or (kernel in ATTENTION and " fp8" not in name) else 1
            stages = linear.STAGES if kernel is linear._multiply else stages
            found = inspect(lower(kernel, types, constants, warps, stages))
            print(json.dumps({"name": name, **found}), flush=True)
