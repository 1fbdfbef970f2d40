"""FlashAttention-2 in Triton's language: three kernels. What each is launched with is in `triton.py`.

Each has one loop with one mask. Scores live in base 2. A row without a visible key has output 0 and a log-sum-exp of infinity, which
makes its weights 0 in the backward pass. Heads of 96 and 192 are cut in a large and a small power of two (``K1``, ``K2``) rather than
padded. With ``TMA`` (compute capability 90 and later), what a loop walks over is loaded by tensor descriptors, which saves
registers for addresses.
"""

import math

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(math.log2(math.e))
_LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def _rows(pointer, place, rows, stride: tl.constexpr, length: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr):
    """Both parts of a tile of rows of a matrix that begins at ``place``, zero behind its end; one part twice where there is but one."""
    mask = rows[:, None] < length
    part_1 = tl.load(pointer + place + rows[:, None] * stride + tl.arange(0, K1)[None, :], mask=mask, other=0.0)
    part_2 = part_1
    if K2:
        part_2 = tl.load(pointer + place + rows[:, None] * stride + (K1 + tl.arange(0, K2))[None, :], mask=mask, other=0.0)
    return part_1, part_2


@triton.jit
def _source(
    pointer,
    place,
    stride: tl.constexpr,
    length: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    TMA: tl.constexpr,
):
    """Where `_tile` loads a part from: a tensor descriptor, or the pointer itself."""
    if TMA:
        return tl.make_tensor_descriptor(pointer + place, [length, WIDTH], [stride, 1], [BLOCK, PART])
    else:
        return pointer


@triton.jit
def _tile(
    source_1,
    source_2,
    place,
    start,
    rows,
    stride: tl.constexpr,
    length: tl.constexpr,
    K1: tl.constexpr,
    K2: tl.constexpr,
    TMA: tl.constexpr,
):
    """`_rows` from row ``start`` on, which ``rows`` lists."""
    if TMA:
        part_1 = source_1.load([start, 0])
        part_2 = part_1
        if K2:
            part_2 = source_2.load([start, K1])
        return part_1, part_2
    else:
        return _rows(source_1, place, rows, stride, length, K1, K2)


@triton.jit
def _put(pointer, place, rows, part_1, part_2, stride: tl.constexpr, length: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr):
    mask = rows[:, None] < length
    to = pointer + place + rows[:, None] * stride
    tl.store(to + tl.arange(0, K1)[None, :], part_1.to(pointer.dtype.element_ty), mask=mask)
    if K2:
        tl.store(to + (K1 + tl.arange(0, K2))[None, :], part_2.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _zeros(ROWS: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr):
    part_1 = tl.zeros([ROWS, K1], tl.float32)
    part_2 = part_1
    if K2:
        part_2 = tl.zeros([ROWS, K2], tl.float32)
    return part_1, part_2


@triton.jit
def _products(left_1, left_2, right_1, right_2, K2: tl.constexpr):
    """Products of all rows of two tiles."""
    total = tl.dot(left_1, tl.trans(right_1))
    if K2:
        total = tl.dot(left_2, tl.trans(right_2), total)
    return total


@triton.jit
def _add(weights, part_1, part_2, total_1, total_2, K2: tl.constexpr):
    """The totals and the weighted sums of a tile's rows."""
    total_1 = tl.dot(weights, part_1, total_1)
    if K2:
        total_2 = tl.dot(weights, part_2, total_2)
    return total_1, total_2


@triton.jit
def _segments(pointer, place, rows, other: tl.constexpr, length: tl.constexpr, SEGMENTS: tl.constexpr):
    """Segment of each row; behind the end one that nothing else has."""
    if SEGMENTS:
        return tl.load(pointer + place + rows, mask=rows < length, other=other)
    else:
        return tl.where(rows < length, 1, other)


@triton.jit
def _masked(products, rows, keys, row_segments, key_segments, SCALE: tl.constexpr, WINDOW: tl.constexpr):
    """Scores in base 2, minus infinity where a query does not see a key; all are broadcast against each other."""
    distance = rows - keys
    seen = (distance >= 0) & (distance < WINDOW) & (row_segments == key_segments) & (row_segments > 0)
    return tl.where(seen, products * (SCALE * _LOG2_E), float("-inf"))


@triton.jit
def _queries(
    S: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, WINDOW: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Of a program over a tile of queries: rows, batch, where its q and its k begin, first and last key. The longest rows come first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head = tl.program_id(1) // H, tl.program_id(1) % H
    q_place = (batch.to(tl.int64) * S * H + head) * K
    k_place = (batch.to(tl.int64) * S * G + head // (H // G)) * K
    first = tl.maximum(tile * BLOCK_Q - WINDOW + 1, 0) // BLOCK_K * BLOCK_K
    return tile * BLOCK_Q + tl.arange(0, BLOCK_Q), batch, q_place, k_place, first, tl.minimum((tile + 1) * BLOCK_Q, S)


@triton.jit
def forward_kernel(
    q, k, v, segments, out, lse,
    SCALE: tl.constexpr, S: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    WINDOW: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of a tile of queries."""
    K: tl.constexpr = K1 + K2
    rows, batch, q_place, k_place, first, end = _queries(S, H, G, K, WINDOW, BLOCK_Q, BLOCK_K)
    q_1, q_2 = _rows(q, q_place, rows, H * K, S, K1, K2)
    row_segments = _segments(segments, batch * S, rows, -1, S, SEGMENTS)
    top = tl.full([BLOCK_Q], _LOWEST, tl.float32)
    weight = tl.zeros([BLOCK_Q], tl.float32)
    total_1, total_2 = _zeros(BLOCK_Q, K1, K2)
    k_source_1 = _source(k, k_place, G * K, S, BLOCK_K, K, K1, TMA)
    v_source_1 = _source(v, k_place, G * K, S, BLOCK_K, K, K1, TMA)
    k_source_2 = _source(k, k_place, G * K, S, BLOCK_K, K, K2, TMA) if K2 else k_source_1
    v_source_2 = _source(v, k_place, G * K, S, BLOCK_K, K, K2, TMA) if K2 else v_source_1
    for start in tl.range(first, end, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        k_1, k_2 = _tile(k_source_1, k_source_2, k_place, start, keys, G * K, S, K1, K2, TMA)
        key_segments = _segments(segments, batch * S, keys, -2, S, SEGMENTS)
        products = _products(q_1, q_2, k_1, k_2, K2)
        scores = _masked(products, rows[:, None], keys[None, :], row_segments[:, None], key_segments[None, :], SCALE, WINDOW)
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        weight = weight * shrink + tl.sum(weights, 1)
        total_1 = total_1 * shrink[:, None]
        if K2:
            total_2 = total_2 * shrink[:, None]
        v_1, v_2 = _tile(v_source_1, v_source_2, k_place, start, keys, G * K, S, K1, K2, TMA)
        total_1, total_2 = _add(weights.to(v.dtype.element_ty), v_1, v_2, total_1, total_2, K2)
        top = new_top
    none = weight == 0.0
    weight = tl.where(none, 1.0, weight)
    _put(out, q_place, rows, total_1 / weight[:, None], total_2 / weight[:, None], H * K, S, K1, K2)
    log_total = tl.where(none, float("inf"), (top + tl.log2(weight)) / _LOG2_E)
    tl.store(lse + tl.program_id(1) * S + rows, log_total, mask=rows < S)


@triton.jit
def backward_q_kernel(
    q, k, v, segments, out, lse, d_out, d_q, delta,
    SCALE: tl.constexpr, S: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    WINDOW: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Gradient of a tile of q, and ``sum(out * d_out)`` of its queries."""
    K: tl.constexpr = K1 + K2
    rows, batch, q_place, k_place, first, end = _queries(S, H, G, K, WINDOW, BLOCK_Q, BLOCK_K)
    do_1, do_2 = _rows(d_out, q_place, rows, H * K, S, K1, K2)
    out_1, out_2 = _rows(out, q_place, rows, H * K, S, K1, K2)
    mean = tl.sum(do_1.to(tl.float32) * out_1.to(tl.float32), 1)
    if K2:
        mean += tl.sum(do_2.to(tl.float32) * out_2.to(tl.float32), 1)
    # the other kernel wants it too
    tl.store(delta + tl.program_id(1) * S + rows, mean, mask=rows < S)
    q_1, q_2 = _rows(q, q_place, rows, H * K, S, K1, K2)
    log_total = tl.load(lse + tl.program_id(1) * S + rows, mask=rows < S, other=float("inf")) * _LOG2_E
    row_segments = _segments(segments, batch * S, rows, -1, S, SEGMENTS)
    total_1, total_2 = _zeros(BLOCK_Q, K1, K2)
    k_source_1 = _source(k, k_place, G * K, S, BLOCK_K, K, K1, TMA)
    v_source_1 = _source(v, k_place, G * K, S, BLOCK_K, K, K1, TMA)
    k_source_2 = _source(k, k_place, G * K, S, BLOCK_K, K, K2, TMA) if K2 else k_source_1
    v_source_2 = _source(v, k_place, G * K, S, BLOCK_K, K, K2, TMA) if K2 else v_source_1
    for start in tl.range(first, end, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        k_1, k_2 = _tile(k_source_1, k_source_2, k_place, start, keys, G * K, S, K1, K2, TMA)
        v_1, v_2 = _tile(v_source_1, v_source_2, k_place, start, keys, G * K, S, K1, K2, TMA)
        key_segments = _segments(segments, batch * S, keys, -2, S, SEGMENTS)
        products = _products(q_1, q_2, k_1, k_2, K2)
        scores = _masked(products, rows[:, None], keys[None, :], row_segments[:, None], key_segments[None, :], SCALE, WINDOW)
        d_weights = _products(do_1, do_2, v_1, v_2, K2)
        d_scores = (tl.exp2(scores - log_total[:, None]) * (d_weights - mean[:, None])).to(q.dtype.element_ty)
        total_1, total_2 = _add(d_scores, k_1, k_2, total_1, total_2, K2)
    _put(d_q, q_place, rows, total_1 * SCALE, total_2 * SCALE, H * K, S, K1, K2)


@triton.jit
def backward_kv_kernel(
    q, k, v, segments, lse, d_out, delta, d_k, d_v,
    SCALE: tl.constexpr, S: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    WINDOW: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
    WANT_K: tl.constexpr, WANT_V: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of k (``WANT_K``) and v (``WANT_V``)."""
    # the first keys are seen by the most rows and come first by themselves
    tile = tl.program_id(0)
    batch, group = tl.program_id(1) // G, tl.program_id(1) % G
    K: tl.constexpr = K1 + K2
    k_place = (batch.to(tl.int64) * S * G + group) * K
    keys = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    k_1, k_2 = _rows(k, k_place, keys, G * K, S, K1, K2)
    if WANT_K:
        v_1, v_2 = _rows(v, k_place, keys, G * K, S, K1, K2)
        dk_1, dk_2 = _zeros(BLOCK_K, K1, K2)
    if WANT_V:
        dv_1, dv_2 = _zeros(BLOCK_K, K1, K2)
    key_segments = _segments(segments, batch * S, keys, -2, S, SEGMENTS)
    first = tile * BLOCK_K // BLOCK_Q * BLOCK_Q
    end = tl.minimum((tile + 1) * BLOCK_K - 1 + WINDOW, S)
    for member in tl.range(0, H // G):
        head = group * (H // G) + member
        q_place = (batch.to(tl.int64) * S * H + head) * K
        place = (batch * H + head) * S
        q_source_1 = _source(q, q_place, H * K, S, BLOCK_Q, K, K1, TMA)
        do_source_1 = _source(d_out, q_place, H * K, S, BLOCK_Q, K, K1, TMA)
        q_source_2 = _source(q, q_place, H * K, S, BLOCK_Q, K, K2, TMA) if K2 else q_source_1
        do_source_2 = _source(d_out, q_place, H * K, S, BLOCK_Q, K, K2, TMA) if K2 else do_source_1
        for start in tl.range(first, end, BLOCK_Q):
            rows = start + tl.arange(0, BLOCK_Q)
            q_1, q_2 = _tile(q_source_1, q_source_2, q_place, start, rows, H * K, S, K1, K2, TMA)
            do_1, do_2 = _tile(do_source_1, do_source_2, q_place, start, rows, H * K, S, K1, K2, TMA)
            log_total = tl.load(lse + place + rows, mask=rows < S, other=float("inf")) * _LOG2_E
            row_segments = _segments(segments, batch * S, rows, -1, S, SEGMENTS)
            products = _products(k_1, k_2, q_1, q_2, K2)
            scores = _masked(products, rows[None, :], keys[:, None], row_segments[None, :], key_segments[:, None], SCALE, WINDOW)
            weights = tl.exp2(scores - log_total[None, :])
            if WANT_V:
                dv_1, dv_2 = _add(weights.to(v.dtype.element_ty), do_1, do_2, dv_1, dv_2, K2)
            if WANT_K:
                d_weights = _products(v_1, v_2, do_1, do_2, K2)
                mean = tl.load(delta + place + rows, mask=rows < S, other=0.0)
                d_scores = (weights * (d_weights - mean[None, :])).to(q.dtype.element_ty)
                dk_1, dk_2 = _add(d_scores, q_1, q_2, dk_1, dk_2, K2)
    if WANT_K:
        _put(d_k, k_place, keys, dk_1 * SCALE, dk_2 * SCALE, G * K, S, K1, K2)
    if WANT_V:
        _put(d_v, k_place, keys, dv_1, dv_2, G * K, S, K1, K2)
