"""Each Triton kernel beside its peers, and beside the machine's copy bandwidth and rate of matrix products.

    python scripts/bench/bench_kernels.py --output results/published/kernels.md
    python scripts/bench/bench_kernels.py --kernels decode_attention --slots 32 --tokens 4096
    TRITON_INTERPRET=1 python scripts/bench/bench_kernels.py --tiny  # no GPU: whether the script works, no times

A time is the median of CUDA events around one replay of a CUDA graph, with the L2 cache emptied before each replay
(`do_bench`). A peer that cannot be captured runs from Python and is marked `eager`. A contender that takes over 0.3 s
is timed once. Copy bandwidth is that of copying 1 GiB in this run, bytes read plus bytes written. The matrix rate is
that of two 8192 x 8192 matrices in the precision in which the kernel multiplies: float32 for `redundancy`, else that of
its inputs.

Bytes and operations are those that every implementation must move and compute; size is the bytes of a number.
    decode_attention    one layer. Operations: 4 * q_heads * head_dim * live rows of all slots. Bytes:
                        size * head_dim * (2 * kv_heads * live rows + 2 * slots * q_heads), and
                        4 * slots * kv_heads * capacity where mass is returned. `ragged` spreads the lengths evenly
                        from half the capacity to all of it.
    packed_attention    one layer, the newest 128 rows of a slot in full precision. Operations as decode_attention.
                        Bytes: packed rows take those of `RowFormat`. The peer `unpacked` is our decode_attention over
                        the same rows, unpacked beforehand.
    compact             one slot of all layers. Bytes: 2 * size * tensors * kv_heads * kept * head_dim for the rows,
                        8 for each index. No operations.
    importance_labels   one layer. Operations: 2 * q_heads * head_dim * (pairs of a counting query and a key that it
                        sees + pairs that the label sums). Bytes: queries, keys, 4 * kv_heads * tokens of labels.
    redundancy          one layer of one slot. Operations: 2 * kv_heads * head_dim * (columns from the newest back to
                        the one that each row gives up + 2 * tokens). Bytes: keys, 4 * kv_heads * tokens of scores.
    observation         one layer of one slot. Operations: 4 * q_heads * window * tokens * head_dim. Bytes: keys,
                        queries, 4 for each score.

A kernel is not reported, and the exit status is 1, if its result on the measured inputs is further from the float64
reference than tests/kernels allow: 1e-6 in float32, 5e-3 in bfloat16, not one bit for `compact`. A peer that is further
than 3e-2 from the kernel is not timed. The last line is one JSON object.
"""

import argparse
import gc
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from kvsweep.compression.cache_rows import CacheShape
from kvsweep.harness.provenance import describe_code, describe_hardware, describe_machine
from kvsweep.kernels import reference
from kvsweep.kernels.implementation import check_available
from kvsweep.kernels.packing import pack_rows
from kvsweep.kernels.row_format import RowFormat
from kvsweep.messages.errors import UserError

MODELS = {
    "r1_qwen_7b": {"layers": 28, "q_heads": 28, "kv_heads": 4, "head_dim": 128},
    "r1_llama_8b": {"layers": 32, "q_heads": 32, "kv_heads": 8, "head_dim": 128},
}
TINY_MODELS = {"tiny": {"layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 16}}
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 5e-3}
SLOW = 0.3  # seconds
PEER_TOLERANCE = 3e-2  # the reference in bfloat16 rounds its logits
THRESHOLD = 0.5
Work = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes to measure: sequences and rows of the cache, lengths of texts, rows before and after an eviction."""

    slots: list[int]
    tokens: list[int]
    texts: list[int]
    rows: int
    kept: int


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel on one set of inputs.

    Attributes:
        shape: the inputs in words.
        ours: the kernel.
        peers: what stands beside it, by name.
        error: relative error of the kernel against the reference in float64, in the Euclidean norm.
        tolerance: the largest error that may be reported.
        moved: bytes, as above.
        operations: as above.
        multiplies: precision of its products.
        eager: contenders that ask the device something, and so cannot be captured.
    """

    shape: str
    ours: Work
    peers: dict[str, Work]
    error: Callable[[], float]
    tolerance: float
    moved: int
    operations: int
    multiplies: torch.dtype
    eager: frozenset[str] = field(default_factory=frozenset)


def main() -> None:
    args = parse_args()
    try:
        device, interpreted = prepare(args)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    dtype = getattr(torch, args.dtype)
    sizes = Sizes(slots=args.slots, tokens=args.tokens, texts=args.texts, rows=args.rows, kept=args.kept)
    with torch.no_grad():
        limits = measure_limits(device, dtype, args.tiny)
        tables: dict[str, list[dict[str, Any]]] = {kernel: [] for kernel in args.kernels}
        refused: dict[str, str] = {}
        for kernel, rows in tables.items():
            for model, shape in (TINY_MODELS if args.tiny else MODELS).items():
                for case in KERNELS[kernel](CacheShape(**shape, dtype=dtype), sizes, device):
                    rows.append({"model": model} | measure(case, limits, device))
                    print(f"{kernel} {model} {case.shape}: {told(rows[-1])}", file=sys.stderr, flush=True)
                    if "wrong" in rows[-1]:
                        refused.setdefault(kernel, f"{model}, {rows[-1]['wrong']}")
    tables = {kernel: rows for kernel, rows in tables.items() if kernel not in refused}
    page = markdown(tables, refused, limits, interpreted)
    print(page)
    if args.output:
        args.output.write_text(page)
    machine = {**describe_machine(), "limits": limits}
    print(json.dumps({"times_mean_nothing": interpreted, "refused": refused, "kernels": tables, **machine}))
    sys.exit(1 if refused else 0)


def prepare(args: argparse.Namespace) -> tuple[torch.device, bool]:
    """The device, and whether Triton's interpreter stands in for it; sizes that were not given.

    Raises:
        UserError: an output file for times that mean nothing, or in no folder; sizes that cannot be; neither a GPU nor
            the interpreter.
    """
    check_available("triton")
    from kvsweep.kernels.tiles import INTERPRETED

    args.tiny = args.tiny or INTERPRETED
    if args.output and args.tiny:
        raise UserError(
            f"--output={args.output} is refused with --tiny and in Triton's interpreter, whose times mean nothing: "
            "measure whole sizes on a GPU."
        )
    if args.output and not args.output.parent.is_dir():
        raise UserError(f"--output={args.output} cannot be written: {args.output.parent} is no folder, make it first.")
    defaults: dict[str, Any] = {"slots": [1, 32, 128], "tokens": [1024, 4096, 16384], "texts": [4096, 16384]}
    defaults |= {"rows": 5001, "kept": 1500}
    if args.tiny:
        defaults = {"slots": [1, 2], "tokens": [40], "texts": [70], "rows": 70, "kept": 31}
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if min(*args.slots, *args.tokens, *args.texts, args.kept) < 1 or args.kept > args.rows or args.rows < 33:
        raise UserError(
            "--slots, --tokens, --texts and --kept must be 1 or more, --rows 33 or more and at least --kept."
        )
    return torch.device("cpu" if INTERPRETED else "cuda"), INTERPRETED


def measure_limits(device: torch.device, dtype: torch.dtype, tiny: bool) -> dict[str, float]:
    """Bytes per second of a large copy ("copy"), operations per second of a large matrix product by precision."""
    source = torch.zeros(2**20 if tiny else 2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    limits: dict[str, float] = {"copy": 2 * source.nbytes / seconds(lambda: target.copy_(source), device)}
    for precision in dict.fromkeys((dtype, torch.float32)):
        one, other = torch.randn(2, *(2 * [64 if tiny else 8192]), device=device).to(precision)
        limits[str(precision)] = 2 * len(one) ** 3 / seconds(lambda a=one, b=other: a @ b, device)
    return limits


def measure(case: Case, limits: dict[str, float], device: torch.device) -> dict[str, Any]:
    """The case's figures; where the kernel is wrong, or does not run, nothing but what was seen."""
    try:
        error = case.error()
        if not error <= case.tolerance:
            return {"wrong": f"{case.shape}: relative error {error:.1e}, allowed {case.tolerance:.0e}"}
        ours, computed = seconds(case.ours, device), result(case.ours)
    except Exception as failure:  # whatever it is: the other kernels' figures are not to be lost
        return {"wrong": f"{case.shape}: {first_line(failure)}"}
    times: dict[str, float | str] = {"triton": ours}
    for name, work in case.peers.items():
        eager = name in case.eager
        try:
            away = distance([(result(work), computed)])
            title = name + " (eager)" * eager
            times[title] = f"differs by {away:.1e}" if away > PEER_TOLERANCE else seconds(work, device, graph=not eager)
        except RuntimeError as failure:  # a peer that cannot do it is a finding
            times[name] = first_line(failure)
    return {
        "shape": case.shape,
        "error": error,
        "bytes": case.moved,
        "operations": case.operations,
        "of_copy": case.moved / ours / limits["copy"],
        "of_matrix": case.operations / ours / limits[str(case.multiplies)],
        "seconds": times,
    }


def first_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {''.join(str(failure).splitlines()[:1])[:80]}"


def result(work: Work) -> Tensor:
    """The first tensor that it returns, flat, zero where it has no label; nothing for what changes its input."""
    found = work()
    first = found[0] if isinstance(found, tuple) else found
    return first.flatten().nan_to_num() if isinstance(first, Tensor) else torch.zeros(1)


def seconds(work: Work, device: torch.device, *, graph: bool = True) -> float:
    """Median time of `work`, see above; in the interpreter of one call."""
    if device.type == "cpu":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    from triton.testing import do_bench

    work()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    work()
    last.record()
    torch.cuda.synchronize()
    if first.elapsed_time(last) > 1000 * SLOW:
        return first.elapsed_time(last) / 1000
    return do_bench(captured(work) if graph else work, return_mode="median") / 1000


def captured(work: Work) -> Work:
    """`work` as a CUDA graph: its launches then cost the host next to nothing."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def distance(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The largest relative error among results and what they should be; infinite where one is not a number."""
    worst = 0.0
    for actual, exact in pairs:
        actual, exact = actual.double(), exact.double()
        error = float((actual - exact).norm() / exact.norm().clamp(min=1e-30))
        worst = max(worst, error if error < float("inf") else float("inf"))
    return worst


def fits(what: str, needed: int, device: torch.device) -> bool:
    """True if twice this many bytes are free; else says that it is left out."""
    if device.type == "cpu":
        return True
    gc.collect()
    torch.cuda.empty_cache()
    enough = 2 * needed < torch.cuda.mem_get_info(device)[0]
    if not enough:
        print(f"{what}: left out, it does not fit", file=sys.stderr)
    return enough


def decode_attention_cases(shape: CacheShape, sizes: Sizes, device: torch.device) -> Iterator[Case]:
    middle = sizes.slots[len(sizes.slots) // 2], sizes.tokens[len(sizes.tokens) // 2]
    for slots, tokens in product(sizes.slots, sizes.tokens):
        size = (slots, shape.kv_heads, tokens, shape.head_dim)
        needed = 4 * torch.Size(size).numel() * shape.dtype.itemsize
        if not fits(f"decode_attention {slots} slots x {tokens}", needed, device):
            continue
        yield decode_attention_case(shape, size, device)
        yield decode_attention_case(shape, size, device, mass=True)
        if (slots, tokens) == middle:
            yield decode_attention_case(shape, size, device, ragged=True)


def decode_attention_case(
    shape: CacheShape, size: tuple[int, ...], device: torch.device, *, mass: bool = False, ragged: bool = False
) -> Case:
    from kvsweep.kernels import decode_attention as kernel

    torch.manual_seed(0)
    slots, kv_heads, tokens, head_dim = size
    query = torch.randn(slots, shape.q_heads, head_dim, device=device).to(shape.dtype)
    keys, values = (torch.randn(size, device=device, dtype=shape.dtype) for _ in range(2))
    lengths = torch.linspace(tokens // 2 if ragged else tokens, tokens, slots, device=device).long()
    how: dict[str, Any] = {"scaling": head_dim**-0.5, "return_mass": mass}
    live = int(lengths.sum())

    def error() -> float:
        found, found_mass = kernel.decode_attention(query, keys, values, lengths, **how)
        pairs, step = [], max(1, 2**27 // keys[0].numel())
        for part in (slice(first, first + step) for first in range(0, slots, step)):
            inputs = (tensor[part].double() for tensor in (query, keys, values))
            exact, exact_mass = reference.decode_attention(*inputs, lengths[part], **how)
            pairs.append((found[part], exact))
            if found_mass is not None and exact_mass is not None:
                pairs.append((found_mass[part], exact_mass))
        return distance(pairs)

    # A group's query heads as so many queries of one key head: torch's kernels then read each key once.
    grouped = query.view(slots, kv_heads, -1, head_dim)
    live_rows = torch.arange(tokens, device=device) < lengths[:, None, None, None] if ragged else None
    peers: dict[str, Work] = {"reference": lambda: reference.decode_attention(query, keys, values, lengths, **how)}
    if not mass:  # which neither can return
        peers["SDPA"] = lambda: F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=live_rows, scale=how["scaling"]
        )
        peers["flex_attention"] = flex(grouped, keys, values, lengths if ragged else None, how["scaling"])
    return Case(
        shape=f"{slots} x {tokens}" + ", mass" * mass + ", ragged" * ragged,
        ours=lambda: kernel.decode_attention(query, keys, values, lengths, **how),
        peers=peers,
        error=error,
        tolerance=TOLERANCE[shape.dtype],
        moved=keys.element_size() * head_dim * 2 * (kv_heads * live + slots * shape.q_heads)
        + mass * 4 * slots * kv_heads * tokens,
        operations=4 * shape.q_heads * head_dim * live,
        multiplies=shape.dtype,
    )


def packed_attention_cases(shape: CacheShape, sizes: Sizes, device: torch.device) -> Iterator[Case]:
    for slots, tokens, bits in product(sizes.slots, sizes.tokens, (8, 4, 2)):
        whole = 2 * slots * shape.kv_heads * tokens * shape.head_dim * shape.dtype.itemsize
        if not fits(f"packed_attention {slots} slots x {tokens}", 2 * whole, device):
            continue
        yield packed_attention_case(shape, (slots, shape.kv_heads, tokens, shape.head_dim), bits, device)


def packed_attention_case(shape: CacheShape, size: tuple[int, ...], bits: int, device: torch.device) -> Case:
    from kvsweep.kernels import decode_attention
    from kvsweep.kernels import packed_attention as kernel

    torch.manual_seed(0)
    slots, kv_heads, tokens, head_dim = size
    formats = 2 * (RowFormat(bits=bits, group=min(32, head_dim), head_dim=head_dim),)
    residual = min(128, tokens // 2)
    query = torch.randn(slots, shape.q_heads, head_dim, device=device).to(shape.dtype)
    # Packed slot by slot, since the numbers take four bytes each on the way.
    one = (2, *size[1:])
    kinds = torch.stack([pack_rows(torch.randn(one, device=device), formats[0]) for _ in range(slots)], dim=1)
    newest = torch.randn(slots, 2, kv_heads, residual, head_dim, device=device).to(shape.dtype)
    positions = torch.arange(tokens, device=device).expand(slots, kv_heads, tokens)
    counts = torch.full((slots, kv_heads), tokens - residual, device=device)
    lengths = torch.full((slots,), tokens, device=device)
    given = (query, *kinds, newest, positions, counts, lengths)
    scaling = head_dim**-0.5
    rows = [
        reference.whole_rows(*(tensor[slot : slot + 1] for tensor in given[1:6]), formats=formats)
        for slot in range(slots)
    ]
    keys, values = (torch.cat([row[which] for row in rows]) for which in range(2))

    def exact(slot: int) -> Tensor:
        one = slice(slot, slot + 1)
        inputs = (tensor[one].double() for tensor in (query, keys, values))
        return reference.decode_attention(*inputs, lengths[one], scaling=scaling)[0][0]

    def error() -> float:
        found = kernel.packed_attention(*given, formats=formats, scaling=scaling)[0]
        return distance((found[slot], exact(slot)) for slot in range(slots))

    return Case(
        shape=f"{slots} x {tokens}, {bits} bits",
        ours=lambda: kernel.packed_attention(*given, formats=formats, scaling=scaling),
        peers={
            "reference": lambda: reference.packed_attention(*given, formats=formats, scaling=scaling),
            "unpacked": lambda: decode_attention.decode_attention(query, keys, values, lengths, scaling=scaling),
        },
        error=error,
        tolerance=TOLERANCE[shape.dtype],
        moved=2 * slots * kv_heads * (tokens - residual) * formats[0].row_bytes + newest.nbytes + 2 * query.nbytes,
        operations=4 * shape.q_heads * head_dim * slots * tokens,
        multiplies=shape.dtype,
    )


def flex(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor | None, scaling: float) -> Work:
    """`flex_attention`, compiled on a GPU; its blocks beyond each length are skipped."""
    mask = None
    if lengths is not None:
        mask = create_block_mask(
            lambda slot, head, row, col: col < lengths[slot],
            len(query),
            None,
            query.shape[2],
            keys.shape[2],
            device=str(query.device),
        )
    attend: Callable[..., Any] = flex_attention
    if query.device.type == "cuda":
        torch._dynamo.reset()
        attend = torch.compile(flex_attention, dynamic=False)
    return lambda: attend(query, keys, values, block_mask=mask, scale=scaling)


def compact_cases(shape: CacheShape, sizes: Sizes, device: torch.device) -> Iterator[Case]:
    torch.manual_seed(0)
    size = (2 * shape.layers, shape.kv_heads, sizes.rows, shape.head_dim)
    if not fits(f"compact {sizes.rows} rows", 2 * torch.Size(size).numel() * shape.dtype.itemsize, device):
        return
    caches = torch.randn(size, device=device, dtype=shape.dtype)
    order = torch.rand(shape.layers, shape.kv_heads, sizes.rows, device=device).argsort(dim=-1)
    keep = order[..., : sizes.kept].sort(dim=-1).values
    yield compact_case(f"{sizes.rows} -> {sizes.kept}, shared", caches, keep[0, 0].contiguous())
    yield compact_case(f"{sizes.rows} -> {sizes.kept}, per layer and head", caches, keep)


def compact_case(name: str, caches: Tensor, keep: Tensor) -> Case:
    from kvsweep.kernels import compact as kernel

    rows, kept = list(caches), keep.shape[-1]

    def error() -> float:
        expected, found = caches.clone(), caches.clone()
        reference.compact_layers(list(expected), keep)
        kernel.compact_layers(list(found), keep)
        return 0.0 if torch.equal(found.view(torch.int16), expected.view(torch.int16)) else float("inf")

    return Case(
        shape=name,
        ours=lambda: kernel.compact_layers(rows, keep),
        peers={
            "reference": lambda: reference.compact_layers(rows, keep),
            "gather + copy": gather_and_copy(rows, keep),
        },
        error=error,
        tolerance=0.0,
        moved=2 * caches[:, :, :kept].numel() * caches.element_size() + keep.nbytes,
        operations=0,
        multiplies=caches.dtype,
    )


def gather_and_copy(rows: list[Tensor], keep: Tensor) -> Work:
    """Tensor by tensor, through a scratch copy that is held ready."""
    kept = keep.shape[-1]
    scratch = torch.empty_like(rows[0][:, :kept])

    def work() -> None:
        for index, tensor in enumerate(rows):
            if keep.dim() == 1:
                torch.index_select(tensor, 1, keep, out=scratch)
            else:
                torch.gather(tensor, 1, keep[index // 2, :, :, None].expand_as(scratch), out=scratch)
            tensor[:, :kept].copy_(scratch)

    return work


def importance_labels_cases(shape: CacheShape, sizes: Sizes, device: torch.device) -> Iterator[Case]:
    for tokens, kind in product(sizes.texts, ("answer", "far_max", "later")):
        yield importance_labels_case(shape, tokens, kind, device)


def importance_labels_case(shape: CacheShape, tokens: int, kind: str, device: torch.device) -> Case:
    from kvsweep.kernels import importance_labels as kernel

    torch.manual_seed(0)
    query = torch.randn(shape.q_heads, tokens, shape.head_dim, device=device).to(shape.dtype)
    key = torch.randn(shape.kv_heads, tokens, shape.head_dim, device=device).to(shape.dtype)
    first, near = (tokens - tokens // 8, 1) if kind == "answer" else (0, 32)
    how: dict[str, Any] = {"kind": kind, "scaling": shape.head_dim**-0.5, "answer_start": first, "min_distance": near}
    seen = range(first + 1, tokens + 1)  # keys that each counting query sees

    def error() -> float:
        found = kernel.importance_labels(query, key, **how)
        exact = reference.importance_labels(query.double(), key.double(), **how)
        # Tokens that no query is far enough from have no label.
        if not torch.equal(found.isnan(), exact.isnan()):
            return float("inf")
        return distance([(found.nan_to_num(), exact.nan_to_num())])

    return Case(
        shape=f"{tokens} tokens, {kind}",
        ours=lambda: kernel.importance_labels(query, key, **how),
        peers={"reference": lambda: reference.importance_labels(query, key, **how)},
        error=error,
        tolerance=TOLERANCE[shape.dtype],
        moved=query.nbytes + key.nbytes + 4 * shape.kv_heads * tokens,
        operations=2 * shape.q_heads * shape.head_dim * (sum(seen) + sum(max(0, keys - near) for keys in seen)),
        multiplies=shape.dtype,
        eager=frozenset({"reference"}),
    )


def redundancy_cases(shape: CacheShape, sizes: Sizes, device: torch.device) -> Iterator[Case]:
    torch.manual_seed(0)
    alone = torch.randn(shape.kv_heads, sizes.rows, shape.head_dim, device=device)
    # Cosines of about 0.9 within a kind and 0 between two: none so near the threshold that rounding decides.
    kinds = torch.randn(shape.kv_heads, 64, shape.head_dim, device=device)
    often = kinds[:, torch.randint(64, (sizes.rows,), device=device)] + 0.3 * alone
    yield redundancy_case(f"{sizes.rows} rows of 64 kinds", often.to(shape.dtype))
    yield redundancy_case(f"{sizes.rows} rows, few alike", alone.to(shape.dtype))


def redundancy_case(name: str, keys: Tensor) -> Case:
    from kvsweep.kernels import scores as kernel

    heads, tokens, head_dim = keys.shape

    def error() -> float:
        exact = reference.redundancy(keys.double(), threshold=THRESHOLD)
        return distance([(kernel.redundancy(keys, threshold=THRESHOLD), exact)])

    return Case(
        shape=name,
        ours=lambda: kernel.redundancy(keys, threshold=THRESHOLD),
        peers={"reference": lambda: reference.redundancy(keys, threshold=THRESHOLD)},
        error=error,
        # The kernel widens its keys before it does anything, as the reference does.
        tolerance=TOLERANCE[torch.float32],
        moved=keys.nbytes + 4 * heads * tokens,
        operations=2 * head_dim * (columns_until_similar(keys) + 2 * heads * tokens),
        multiplies=torch.float32,
    )


def columns_until_similar(keys: Tensor) -> int:
    """Columns from the newest back to the last that is similar, summed over rows and heads."""
    unit = F.normalize(keys.float(), dim=-1)
    cosine = unit @ unit.transpose(-1, -2)
    cosine.diagonal(dim1=-2, dim2=-1).zero_()
    columns = torch.arange(keys.shape[1], device=keys.device)
    return int((keys.shape[1] - torch.where(cosine > THRESHOLD, columns, 0).amax(dim=-1)).sum())


def observation_cases(shape: CacheShape, sizes: Sizes, device: torch.device) -> Iterator[Case]:
    rkv = {"past_only": True, "pool_logits": True, "pooling": 7, "pool": "max"}
    yield observation_case(f"{sizes.rows} rows, R-KV, window 8", shape, sizes.rows, 8, rkv, device)
    snapkv = {"pooling": 5, "pool": "mean"}
    yield observation_case(f"{sizes.rows} rows, SnapKV, window 32", shape, sizes.rows, 32, snapkv, device)


def observation_case(
    name: str, shape: CacheShape, rows: int, window: int, policy: dict[str, Any], device: torch.device
) -> Case:
    from kvsweep.kernels import scores as kernel

    torch.manual_seed(0)
    queries = torch.randn(shape.q_heads, window, shape.head_dim, device=device).to(shape.dtype)
    keys = torch.randn(shape.kv_heads, rows, shape.head_dim, device=device).to(shape.dtype)
    how: dict[str, Any] = {"scaling": shape.head_dim**-0.5, **policy}
    members = 1 if policy.get("pool_logits") else shape.q_heads // shape.kv_heads

    def error() -> float:
        exact = reference.observation_scores(queries.double(), keys.double(), **how)
        return distance([(kernel.observation_scores(queries, keys, **how), exact)])

    return Case(
        shape=name,
        ours=lambda: kernel.observation_scores(queries, keys, **how),
        peers={"reference": lambda: reference.observation_scores(queries, keys, **how)},
        error=error,
        tolerance=TOLERANCE[shape.dtype],
        moved=queries.nbytes + keys.nbytes + 4 * shape.kv_heads * members * (rows - window),
        operations=4 * shape.q_heads * window * rows * shape.head_dim,
        multiplies=shape.dtype,
    )


KERNELS: dict[str, Callable[[CacheShape, Sizes, torch.device], Iterator[Case]]] = {
    "decode_attention": decode_attention_cases,
    "packed_attention": packed_attention_cases,
    "compact": compact_cases,
    "importance_labels": importance_labels_cases,
    "redundancy": redundancy_cases,
    "observation": observation_cases,
}


def markdown(
    tables: dict[str, list[dict[str, Any]]], refused: dict[str, str], limits: dict[str, float], interpreted: bool
) -> str:
    unit = "meaningless ms" if interpreted else "ms"
    lines = ["# Kernels", "", *about(limits, interpreted), ""]
    for kernel, rows in tables.items():
        names = list(dict.fromkeys(name for row in rows for name in row["seconds"] if name != "triton"))
        titles = ["model", "inputs", "MB", "GFLOP", f"triton {unit}", "of copy bandwidth", "of matrix rate", *names]
        lines += [f"## {kernel}", "", f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
        for row in rows:
            ours = row["seconds"]["triton"]
            cells = [row["model"], row["shape"], f"{row['bytes'] / 1e6:.1f}", f"{row['operations'] / 1e9:.1f}"]
            shares = [row["of_copy"], row["of_matrix"]]
            cells += [f"{1000 * ours:.3f}", *("none" if interpreted else f"{share:.0%}" for share in shares)]
            cells += [beside(row["seconds"].get(name, ""), ours) for name in names]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    lines += [f"not reported: {kernel}, wrong on {wrong}" for kernel, wrong in refused.items()]
    return "\n".join(lines).rstrip() + "\n"


def about(limits: dict[str, float], interpreted: bool) -> list[str]:
    hardware, code = describe_hardware(), describe_code()
    where = "Triton's interpreter on a CPU" if interpreted else ", ".join(hardware["gpus"])
    packages = f"torch {torch.__version__}, triton {code['packages']['triton']}, CUDA {torch.version.cuda}"
    rates = [f"{limits['copy'] / 1e9:,.0f} GB/s copied"]
    rates += [f"{v / 1e12:,.1f} TFLOP/s in {k[6:]}" for k, v in limits.items() if k != "copy"]
    revision = f"{str(code['git_revision'])[:12]}{' with changes' * bool(code['git_dirty'])}"
    lines = [
        f"{time.strftime('%Y-%m-%d')}, {where}; {packages}, Python {code['python']}, revision {revision}.",
        f"Measured in the same run: {', '.join(rates)}. A peer's milliseconds, in brackets as a multiple of ours.",
        "",
        f"`python {shlex.join(sys.argv)}`",
    ]
    if interpreted:
        lines.insert(
            0, "**These times are the interpreter's and mean nothing: the run shows that the script works.**\n"
        )
    return lines


def beside(taken: float | str, ours: float) -> str:
    return taken if isinstance(taken, str) else f"{1000 * taken:.3f} ({taken / ours:.2f})"


def told(row: dict[str, Any]) -> str:
    if "wrong" in row:
        return f"wrong: {row['wrong']}"
    return ", ".join(
        f"{name} {t if isinstance(t, str) else f'{1000 * t:.3f} ms'}" for name, t in row["seconds"].items()
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--slots", type=int, nargs="+", help="sequences in the cache (1 32 128)")
    parser.add_argument("--tokens", type=int, nargs="+", help="rows of each in decode_attention (1024 4096 16384)")
    parser.add_argument("--texts", type=int, nargs="+", help="lengths of importance_labels' texts (4096 16384)")
    parser.add_argument("--rows", type=int, help="rows of compact, redundancy and observation (5001)")
    parser.add_argument("--kept", type=int, help="rows that compact keeps (1500)")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--tiny", action="store_true", help="a small model; always so in the interpreter")
    parser.add_argument("--output", type=Path, help="also write the tables here, as Markdown")
    return parser.parse_args()


if __name__ == "__main__":
    main()
