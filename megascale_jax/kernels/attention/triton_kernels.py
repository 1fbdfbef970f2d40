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
def _rows(pointer, place, rows, columns, stride: tl.constexpr, length: tl.constexpr):
    """A tile ``[rows, columns]`` of a matrix that begins at ``place``; zero behind its end."""
    return tl.load(pointer + place + rows[:, None] * stride + columns[None, :], mask=rows[:, None] < length, other=0.0)


@triton.jit
def _source(
    pointer,
    place,
    stride: tl.constexpr,
    length: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    TMA: tl.constexpr,
):
    """Where `_tile` loads from: a tensor descriptor, or the pointer itself."""
    if TMA:
        return tl.make_tensor_descriptor(pointer + place, [length, WIDTH], [stride, 1], [BLOCK, PART])
    else:
        return pointer


@triton.jit
def _tile(source, place, start, rows, columns, FIRST: tl.constexpr, stride: tl.constexpr, length: tl.constexpr, TMA: tl.constexpr):
    """A tile from row ``start`` and column ``FIRST`` on, which ``rows`` and ``columns`` list; zero behind the end."""
    if TMA:
        return source.load([start, FIRST])
    else:
        return _rows(source, place, rows, columns, stride, length)


@triton.jit
def _put_rows(pointer, place, rows, columns, value, stride: tl.constexpr, length: tl.constexpr):
    tl.store(pointer + place + rows[:, None] * stride + columns[None, :], value, mask=rows[:, None] < length)


@triton.jit
def _segments(pointer, place, rows, other: tl.constexpr, length: tl.constexpr, SEGMENTS: tl.constexpr):
    """Segment of each row; behind the end one that nothing else has."""
    if SEGMENTS:
        return tl.load(pointer + place + rows, mask=rows < length, other=other)
    else:
        return tl.where(rows < length, 1, other)


@triton.jit
def _sees(rows, keys, row_segments, key_segments, WINDOW: tl.constexpr):
    """Whether queries see keys; both already broadcast against each other."""
    distance = rows - keys
    return (distance >= 0) & (distance < WINDOW) & (row_segments == key_segments) & (row_segments > 0)


@triton.jit
def forward_kernel(
    q, k, v, segments, out, lse,
    SCALE: tl.constexpr, S: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    WINDOW: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of a tile of queries."""
    # the longest rows first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head = tl.program_id(1) // H, tl.program_id(1) % H
    K: tl.constexpr = K1 + K2
    q_place = (batch.to(tl.int64) * S * H + head) * K
    k_place = (batch.to(tl.int64) * S * G + head // (H // G)) * K
    rows = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    one = tl.arange(0, K1)
    q_1 = _rows(q, q_place, rows, one, H * K, S)
    if K2:
        two = K1 + tl.arange(0, K2)
        q_2 = _rows(q, q_place, rows, two, H * K, S)
        total_2 = tl.zeros([BLOCK_Q, K2], tl.float32)
    row_segments = _segments(segments, batch * S, rows, -1, S, SEGMENTS)
    top = tl.full([BLOCK_Q], _LOWEST, tl.float32)
    weight = tl.zeros([BLOCK_Q], tl.float32)
    total_1 = tl.zeros([BLOCK_Q, K1], tl.float32)
    k_source = _source(k, k_place, G * K, S, K, BLOCK_K, K1, TMA)
    v_source = _source(v, k_place, G * K, S, K, BLOCK_K, K1, TMA)
    if K2:
        k_source_2 = _source(k, k_place, G * K, S, K, BLOCK_K, K2, TMA)
        v_source_2 = _source(v, k_place, G * K, S, K, BLOCK_K, K2, TMA)
    first = tl.maximum(tile * BLOCK_Q - WINDOW + 1, 0) // BLOCK_K * BLOCK_K
    for start in tl.range(first, tl.minimum((tile + 1) * BLOCK_Q, S), BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        scores = tl.dot(q_1, tl.trans(_tile(k_source, k_place, start, keys, one, 0, G * K, S, TMA)))
        if K2:
            scores = tl.dot(q_2, tl.trans(_tile(k_source_2, k_place, start, keys, two, K1, G * K, S, TMA)), scores)
        key_segments = _segments(segments, batch * S, keys, -2, S, SEGMENTS)
        seen = _sees(rows[:, None], keys[None, :], row_segments[:, None], key_segments[None, :], WINDOW)
        scores = tl.where(seen, scores * (SCALE * _LOG2_E), float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        weight = weight * shrink + tl.sum(weights, 1)
        weights = weights.to(v.dtype.element_ty)
        total_1 = tl.dot(weights, _tile(v_source, k_place, start, keys, one, 0, G * K, S, TMA), total_1 * shrink[:, None])
        if K2:
            total_2 = tl.dot(weights, _tile(v_source_2, k_place, start, keys, two, K1, G * K, S, TMA), total_2 * shrink[:, None])
        top = new_top
    none = weight == 0.0
    weight = tl.where(none, 1.0, weight)
    _put_rows(out, q_place, rows, one, (total_1 / weight[:, None]).to(out.dtype.element_ty), H * K, S)
    if K2:
        _put_rows(out, q_place, rows, two, (total_2 / weight[:, None]).to(out.dtype.element_ty), H * K, S)
    log_total = tl.where(none, float("inf"), (top + tl.log2(weight)) / _LOG2_E)
    tl.store(lse + tl.program_id(1) * S + rows, log_total, mask=rows < S)


@triton.jit
def backward_q_kernel(
    q, k, v, segments, out, lse, d_out, d_q, delta,
    SCALE: tl.constexpr, S: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    WINDOW: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Gradient of a tile of q, and ``sum(out * d_out)`` of its queries."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head = tl.program_id(1) // H, tl.program_id(1) % H
    K: tl.constexpr = K1 + K2
    q_place = (batch.to(tl.int64) * S * H + head) * K
    k_place = (batch.to(tl.int64) * S * G + head // (H // G)) * K
    rows = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    one = tl.arange(0, K1)
    do_1 = _rows(d_out, q_place, rows, one, H * K, S)
    mean = tl.sum(do_1.to(tl.float32) * _rows(out, q_place, rows, one, H * K, S).to(tl.float32), 1)
    q_1 = _rows(q, q_place, rows, one, H * K, S)
    if K2:
        two = K1 + tl.arange(0, K2)
        do_2 = _rows(d_out, q_place, rows, two, H * K, S)
        mean += tl.sum(do_2.to(tl.float32) * _rows(out, q_place, rows, two, H * K, S).to(tl.float32), 1)
        q_2 = _rows(q, q_place, rows, two, H * K, S)
        total_2 = tl.zeros([BLOCK_Q, K2], tl.float32)
    # the other kernel wants it too
    tl.store(delta + tl.program_id(1) * S + rows, mean, mask=rows < S)
    log_total = tl.load(lse + tl.program_id(1) * S + rows, mask=rows < S, other=float("inf")) * _LOG2_E
    row_segments = _segments(segments, batch * S, rows, -1, S, SEGMENTS)
    total_1 = tl.zeros([BLOCK_Q, K1], tl.float32)
    k_source = _source(k, k_place, G * K, S, K, BLOCK_K, K1, TMA)
    v_source = _source(v, k_place, G * K, S, K, BLOCK_K, K1, TMA)
    if K2:
        k_source_2 = _source(k, k_place, G * K, S, K, BLOCK_K, K2, TMA)
        v_source_2 = _source(v, k_place, G * K, S, K, BLOCK_K, K2, TMA)
    first = tl.maximum(tile * BLOCK_Q - WINDOW + 1, 0) // BLOCK_K * BLOCK_K
    for start in tl.range(first, tl.minimum((tile + 1) * BLOCK_Q, S), BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        k_1 = _tile(k_source, k_place, start, keys, one, 0, G * K, S, TMA)
        scores = tl.dot(q_1, tl.trans(k_1))
        d_weights = tl.dot(do_1, tl.trans(_tile(v_source, k_place, start, keys, one, 0, G * K, S, TMA)))
        if K2:
            k_2 = _tile(k_source_2, k_place, start, keys, two, K1, G * K, S, TMA)
            scores = tl.dot(q_2, tl.trans(k_2), scores)
            d_weights = tl.dot(do_2, tl.trans(_tile(v_source_2, k_place, start, keys, two, K1, G * K, S, TMA)), d_weights)
        key_segments = _segments(segments, batch * S, keys, -2, S, SEGMENTS)
        seen = _sees(rows[:, None], keys[None, :], row_segments[:, None], key_segments[None, :], WINDOW)
        weights = tl.exp2(tl.where(seen, scores * (SCALE * _LOG2_E), float("-inf")) - log_total[:, None])
        d_scores = (weights * (d_weights - mean[:, None])).to(q.dtype.element_ty)
        total_1 = tl.dot(d_scores, k_1, total_1)
        if K2:
            total_2 = tl.dot(d_scores, k_2, total_2)
    _put_rows(d_q, q_place, rows, one, (total_1 * SCALE).to(d_q.dtype.element_ty), H * K, S)
    if K2:
        _put_rows(d_q, q_place, rows, two, (total_2 * SCALE).to(d_q.dtype.element_ty), H * K, S)


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
    one = tl.arange(0, K1)
    k_1 = _rows(k, k_place, keys, one, G * K, S)
    if WANT_K:
        v_1 = _rows(v, k_place, keys, one, G * K, S)
        dk_1 = tl.zeros([BLOCK_K, K1], tl.float32)
    if WANT_V:
        dv_1 = tl.zeros([BLOCK_K, K1], tl.float32)
    if K2:
        two = K1 + tl.arange(0, K2)
        k_2 = _rows(k, k_place, keys, two, G * K, S)
        if WANT_K:
            v_2 = _rows(v, k_place, keys, two, G * K, S)
            dk_2 = tl.zeros([BLOCK_K, K2], tl.float32)
        if WANT_V:
            dv_2 = tl.zeros([BLOCK_K, K2], tl.float32)
    key_segments = _segments(segments, batch * S, keys, -2, S, SEGMENTS)
    first = tile * BLOCK_K // BLOCK_Q * BLOCK_Q
    end = tl.minimum((tile + 1) * BLOCK_K - 1 + WINDOW, S)
    for member in tl.range(0, H // G):
        head = group * (H // G) + member
        q_place = (batch.to(tl.int64) * S * H + head) * K
        place = (batch * H + head) * S
        q_source = _source(q, q_place, H * K, S, K, BLOCK_Q, K1, TMA)
        do_source = _source(d_out, q_place, H * K, S, K, BLOCK_Q, K1, TMA)
        if K2:
            q_source_2 = _source(q, q_place, H * K, S, K, BLOCK_Q, K2, TMA)
            do_source_2 = _source(d_out, q_place, H * K, S, K, BLOCK_Q, K2, TMA)
        for start in tl.range(first, end, BLOCK_Q):
            rows = start + tl.arange(0, BLOCK_Q)
            q_1 = _tile(q_source, q_place, start, rows, one, 0, H * K, S, TMA)
            do_1 = _tile(do_source, q_place, start, rows, one, 0, H * K, S, TMA)
            scores = tl.dot(k_1, tl.trans(q_1))
            if K2:
                q_2 = _tile(q_source_2, q_place, start, rows, two, K1, H * K, S, TMA)
                do_2 = _tile(do_source_2, q_place, start, rows, two, K1, H * K, S, TMA)
                scores = tl.dot(k_2, tl.trans(q_2), scores)
            log_total = tl.load(lse + place + rows, mask=rows < S, other=float("inf")) * _LOG2_E
            row_segments = _segments(segments, batch * S, rows, -1, S, SEGMENTS)
            seen = _sees(rows[None, :], keys[:, None], row_segments[None, :], key_segments[:, None], WINDOW)
            weights = tl.exp2(tl.where(seen, scores * (SCALE * _LOG2_E), float("-inf")) - log_total[None, :])
            if WANT_V:
                lowered = weights.to(v.dtype.element_ty)
                dv_1 = tl.dot(lowered, do_1, dv_1)
                if K2:
                    dv_2 = tl.dot(lowered, do_2, dv_2)
            if WANT_K:
                d_weights = tl.dot(v_1, tl.trans(do_1))
                if K2:
                    d_weights = tl.dot(v_2, tl.trans(do_2), d_weights)
                mean = tl.load(delta + place + rows, mask=rows < S, other=0.0)
                d_scores = (weights * (d_weights - mean[None, :])).to(q.dtype.element_ty)
                dk_1 = tl.dot(d_scores, q_1, dk_1)
                if K2:
                    dk_2 = tl.dot(d_scores, q_2, dk_2)
    if WANT_K:
        _put_rows(d_k, k_place, keys, one, (dk_1 * SCALE).to(d_k.dtype.element_ty), G * K, S)
        if K2:
            _put_rows(d_k, k_place, keys, two, (dk_2 * SCALE).to(d_k.dtype.element_ty), G * K, S)
    if WANT_V:
        _put_rows(d_v, k_place, keys, one, dv_1.to(d_v.dtype.element_ty), G * K, S)
        if K2:
            _put_rows(d_v, k_place, keys, two, dv_2.to(d_v.dtype.element_ty), G * K, S)
