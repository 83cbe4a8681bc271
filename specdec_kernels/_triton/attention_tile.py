"""The device half of tree_attention in Triton: request geometry, key tiles, the end of a row."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def decode(x, FLOAT8: tl.constexpr, DTYPE: tl.constexpr):
    """Cache values in DTYPE; float8 from its bits: 1 e4m3 (a float16 with 3 mantissa bits, 2^8 too small), 2 e5m2."""
    if FLOAT8 == 0:
        return x
    bits = x.to(tl.int32)
    if FLOAT8 == 2:
        return (bits << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32).to(DTYPE)
    size = bits & 0x7F
    half = tl.where(size == 0x7F, 0x7E00, ((bits & 0x80) << 8) | (size << 7))
    return (half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(DTYPE)


@triton.jit
def capped(x, cap):
    """cap * tanh(x) by Lambert's continued fraction of tanh(x / 2), accurate near 0 (csrc/attention/rows_cpu.h)."""
    x = tl.where(x > 9.0, 9.0, tl.where(x < -9.0, -9.0, x))  # NaN passes
    h = x * 0.5
    z = h * h
    unit = 1.0 / 34459425.0
    n = z * unit + 990.0 * unit
    n = n * z + 135135.0 * unit
    n = n * z + 4729725.0 * unit
    n = (n * z + 1.0) * h
    d = z * (45.0 * unit) + 13860.0 * unit
    d = d * z + 945945.0 * unit
    d = d * z + 16216200.0 * unit
    d = d * z + 1.0
    return (n * d) * (2.0 * cap) / (d * d + n * n)


@triton.jit
def request(
    z, order_ptr, cu_nodes_ptr, context_lens_ptr, query_start_ptr, causal_ptr, num_requests, num_rows, capacity,
    MASK: tl.constexpr,
):  # fmt: skip
    """(request, first row, nodes, first slot, context length, plain causal) of grid slot z; garbage makes it empty."""
    b = z
    if order_ptr is not None:
        b = tl.load(order_ptr + z)
    known = (b >= 0) & (b < num_requests)
    b = tl.where(known, b, 0)
    begin = tl.load(cu_nodes_ptr + b, mask=known, other=0).to(tl.int64)
    end = tl.load(cu_nodes_ptr + b + 1, mask=known, other=0).to(tl.int64)
    valid = known & (begin >= 0) & (end >= begin) & (end <= num_rows)
    start = tl.zeros_like(begin)
    if query_start_ptr is not None:
        start = tl.maximum(tl.load(query_start_ptr + b, mask=known, other=0).to(tl.int64), 0)
    length = tl.load(context_lens_ptr + b, mask=known, other=0).to(tl.int64)
    length = tl.minimum(tl.maximum(length, 0), capacity)
    causal = tl.full((), 1, tl.int32)
    if MASK:
        causal = tl.full((), 0, tl.int32)
        if causal_ptr is not None:
            causal = tl.load(causal_ptr + b, mask=known, other=0).to(tl.int32)
    return b, tl.where(valid, begin, 0), tl.where(valid, end - begin, 0), start, length, causal != 0


@triton.jit
def attend(
    acc, row_max, row_sum, q, first_tile, last_tile, k_base, v_base, table, positions, k_stride_page, k_stride_row,
    v_stride_page, v_stride_row, page_size, num_pages, key_end, length, dense_end, query_position, words, num_words,
    tree_row, tree, window, scale, cap, MASKED: tl.constexpr, WINDOW: tl.constexpr, FLOAT8: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Online softmax of the rows over tiles first_tile .. last_tile - 1."""
    lanes = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    for tile in range(first_tile, last_tile):
        keys = tile * BLOCK_N + lanes
        live = keys < key_end
        page = tl.load(table + keys // page_size, mask=live, other=-1)
        live = live & (page >= 0) & (page < num_pages)
        page = tl.where(live, page, 0).to(tl.int64)
        row = (keys % page_size).to(tl.int64)
        k_at = page * k_stride_page + row * k_stride_row
        v_at = page * v_stride_page + row * v_stride_row
        k = tl.load(k_base + k_at[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0)
        v = tl.load(v_base + v_at[:, None] + dv[None, :], mask=live[:, None] & (dv < DV)[None, :], other=0)
        k = decode(k, FLOAT8, q.dtype)
        v = decode(v, FLOAT8, q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if cap > 0.0:
            scores = capped(scores, cap)
        visible = live[None, :]
        if MASKED:
            # Slots of this tile begin at `first` (-64: none); three words of a row hold the bits of 64 slots.
            first = tl.maximum(tile * BLOCK_N - length, -64).to(tl.int32)
            word = (first + 64) // 32 - 2 + tl.zeros_like(dense_end)  # one a row: masks are compared as blocks
            bit = (first + 64) % 32 + lanes
            w0 = tl.load(words + word, mask=tree_row & (word >= 0) & (word < num_words), other=0)
            w1 = tl.load(words + word + 1, mask=tree_row & (word >= -1) & (word < num_words - 1), other=0)
            w2 = tl.load(words + word + 2, mask=tree_row & (word >= -2) & (word < num_words - 2), other=0)
            low = tl.where((bit < 32)[None, :], w0[:, None], tl.where((bit < 64)[None, :], w1[:, None], w2[:, None]))
            seen = ((low >> (bit % 32)[None, :]) & 1) != 0
            slot = first + lanes
            visible = live[None, :] & ((keys[None, :] < dense_end[:, None]) | (seen & (slot >= 0)[None, :]))
            if WINDOW:
                key_position = keys.to(tl.int64)
                if positions is not None:
                    of_tree = tl.where(slot >= 0, tree, 0) != 0
                    of_slot = tl.load(positions + slot, mask=live & of_tree, other=0).to(tl.int64)
                    key_position = tl.where(of_tree, of_slot, key_position)
                visible = visible & (query_position[:, None] - key_position[None, :] < window)
        scores = tl.where(visible, scores, float("-inf"))
        top = tl.maximum(row_max, tl.max(scores, 1))
        base = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(row_max - base)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        row_max = top
        if MASKED:
            # A hidden key's weight 0 times NaN is NaN: sum finite values, then give the others to those who see them.
            wide = v.to(tl.float32)
            odd = (wide - wide) != 0.0
            if tl.max(tl.max(odd.to(tl.int32), 1), 0) != 0:
                sees = visible.to(tl.float16)
                high = tl.dot(sees, (wide == float("inf")).to(tl.float16))
                deep = tl.dot(sees, (wide == float("-inf")).to(tl.float16))
                none = tl.dot(sees, (wide != wide).to(tl.float16))
                acc += tl.where(high > 0.0, float("inf"), 0.0) + tl.where(deep > 0.0, float("-inf"), 0.0)
                acc += tl.where(none > 0.0, float("nan"), 0.0)
                v = tl.where(odd, 0.0, wide).to(v.dtype)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit
def finish(
    acc, row_max, row_sum, rows, heads, active, kv_head, out_ptr, lse_ptr, sinks_ptr, v_scale_ptr, v_scale_stride,
    out_stride_n, out_stride_h, lse_stride_n, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Normalise, apply the value scale and the sink (one more key of weight 2^sink, value 0), write out and lse."""
    total = row_sum
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + heads, mask=active, other=0.0) * LOG2E
        total += tl.where(row_sum != 0.0, tl.exp2(sink - row_max), 0.0)
    factor = 1.0
    if v_scale_ptr is not None:
        factor = tl.load(v_scale_ptr + kv_head * v_scale_stride)
    seen = row_sum != 0.0  # a NaN sum goes on to the output
    result = tl.where(seen[:, None], acc * (factor / tl.where(seen, total, 1.0))[:, None], 0.0)
    dv = tl.arange(0, BLOCK_DV)
    at = rows * out_stride_n + heads.to(tl.int64) * out_stride_h
    tl.store(out_ptr + at[:, None] + dv[None, :], result.to(out_ptr.dtype.element_ty),
             mask=active[:, None] & (dv < DV)[None, :])  # fmt: skip
    if lse_ptr is not None:
        lse = tl.where(seen, (row_max + tl.log2(tl.where(seen, row_sum, 1.0))) * LN2, float("-inf"))
        tl.store(lse_ptr + rows * lse_stride_n + heads, lse, mask=active)
