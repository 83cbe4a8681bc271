"""`specdec_triton::verify`: what is checked on the host, and the launches."""

import torch

from specdec_kernels._triton.rng import block_of, check, check_range, fail
from specdec_kernels._triton.sampling_drafts import columns_with_ids
from specdec_kernels._triton.sampling_laws import METHODS, laws_kernel
from specdec_kernels._triton.sampling_rows import LOGPROBS, MAX_VOCAB, check_rows, check_sampling, row_arguments
from specdec_kernels._triton.sampling_verify import walk_kernel

TARGET_LAW, PLAIN_LAW, DRAFT_LAW = range(3)


def _laws(nodes, device):
    """Room for a law a node."""
    new = torch.empty
    return (
        new((nodes, 5), dtype=torch.float32, device=device), new((nodes, 5), dtype=torch.int32, device=device),
        new((nodes, 2), dtype=torch.int64, device=device),
    )  # fmt: skip


def impl_verify(
    target_logits, draft_token_ids, cu_nodes, parents, first_child, next_sibling, tree_flags, temperature, top_k, top_p,
    min_p, seed, position, step, draft_logits, draft_rows, draft_temperature, draft_top_k, draft_top_p, draft_min_p,
    draft_log_probs, draft_lse, d2t, t2d, allowed, bias_cu, bias_ids, bias_values, uniforms, request_order, tile_stats,
    method, vocab_size, max_nodes, max_depth, return_logprobs, epsilon, delta, form, workspace, output_token_ids,
    num_emitted, accepted_nodes, flags, logprobs,
):  # fmt: skip
    """`specdec_triton::verify`."""
    op, bias = "verify", (bias_cu, bias_ids, bias_values)
    if method not in METHODS:
        fail(op, "method", ", ".join(METHODS), repr(method))
    if form not in ("auto", "eager", "lazy"):
        fail(op, "form", "auto, eager or lazy", repr(form))
    if return_logprobs not in LOGPROBS:
        fail(op, "return_logprobs", "'', 'raw', 'processed' or 'both'", repr(return_logprobs))
    nodes, columns, size = check_rows(op, target_logits, vocab_size, allowed, bias)
    requests = check_sampling(op, temperature, top_k, top_p, min_p, seed, position, step)
    check_range(op, "max_depth", max_depth, 0, 1 << 20)
    check_range(op, "max_nodes", max_nodes, 0, 65535)
    raw, processed = LOGPROBS[return_logprobs]
    width = max_depth + 1
    a_node, a_request, an_output = (nodes,), (requests,), (requests, width)
    for name, tensor, shape in (
        ("draft_token_ids", draft_token_ids, a_node),
        ("cu_nodes", cu_nodes, (requests + 1,)),
        ("parents", parents, a_node),
        ("first_child", first_child, a_node),
        ("next_sibling", next_sibling, a_node),
        ("tree_flags", tree_flags, a_request),
        ("draft_rows", draft_rows, a_node),
        ("request_order", request_order, (None,)),
        ("output_token_ids", output_token_ids, an_output),
        ("num_emitted", num_emitted, a_request),
        ("accepted_nodes", accepted_nodes, an_output),
        ("flags", flags, a_request),
    ):
        if tensor is not None:
            check(op, name, tensor, shape)
    if draft_log_probs is not None:
        check(op, "draft_log_probs", draft_log_probs, a_node, torch.float32)
    if raw or processed:
        check(op, "logprobs", logprobs, (requests, width, 2) if raw and processed else (requests, width), torch.float32)
    if uniforms is not None:
        check(op, "uniforms", uniforms, (nodes,), uniforms.dtype if uniforms.dtype == torch.float64 else torch.float32)
    if tile_stats is not None:
        if allowed is not None or bias_cu is not None:
            fail(op, "tile_stats", "none beside allowed or bias (they change the logits)", "both")
        check(op, "tile_stats", tile_stats, (nodes, (size + 4095) // 4096, 2), torch.float32)
    may_draw = method in ("rejection", "block")
    drawn = draft_logits is not None and may_draw
    if draft_logits is None and draft_rows is not None and may_draw:
        fail(op, "draft_logits", "the rows that draft_rows points into", "none")
    draft_size, in_all, q_allowed, q_filters = 0, 0, None, (temperature, top_k, top_p, min_p)
    if drawn:
        in_all, draft_columns, draft_size = check_rows(op, draft_logits, MAX_VOCAB)
        if draft_lse is not None:
            check(op, "draft_lse", draft_lse, (in_all,), torch.float32)
        if draft_temperature is not None:
            q_filters = (draft_temperature, draft_top_k, draft_top_p, draft_min_p)
            check(op, "draft_sampling", draft_temperature, (requests,), torch.float32)
        if d2t is not None:
            check(op, "d2t", d2t, (None,))
            if t2d is None:
                fail(op, "t2d", "the inverse of d2t", "none")
            check(op, "t2d", t2d, (None,))
            if t2d.numel() < size:
                fail(op, "t2d", f"at least {size} entries (the valid vocabulary)", t2d.numel())
            draft_size = min(draft_size, d2t.numel())
            q_allowed = columns_with_ids(d2t, draft_columns, draft_size, size, t2d).expand(in_all, -1)
        else:
            if t2d is not None:
                fail(op, "t2d", "d2t beside it", "t2d alone")
            draft_size = min(draft_size, size)
    count = requests if request_order is None else request_order.numel()
    if count == 0:
        return
    device = target_logits.device
    filler = torch.zeros((1,), dtype=torch.int32, device=device) if nodes == 0 else cu_nodes

    def some(tensor, other=filler):
        return other if tensor is None else tensor

    block = block_of(columns, 512, 2048)
    tuning = dict(BLOCK=block, num_warps=8 if block > 512 else 4, enable_fp_fusion=False)
    rows_mode = 0 if not drawn else 2 if draft_rows is None else 1
    tree = (cu_nodes, nodes, max_nodes, draft_token_ids, first_child, next_sibling, some(draft_rows), in_all, size)
    numbers = dict(METHOD=METHODS.index(method), ORDERED=request_order is not None, ROWS=rows_mode)
    stored = drawn and draft_lse is not None
    lse = some(draft_lse if drawn else None, temperature)

    def laws(kind, logits, filters, exists, edits, some_allowed, into, only=None):
        heat, k, p, least = filters
        laws_kernel[(count, max(1, max_nodes))](
            *row_arguments(logits, some_allowed, edits), exists, heat, some(k), some(p), some(least),
            some(request_order), requests, *tree, lse, *into, some(only),
            KIND=kind, ALLOWED=some_allowed is not None, BIASED=edits[0] is not None, HAS_K=k is not None,
            HAS_P=p is not None, HAS_MIN=least is not None, PROCESSED=processed, STORED=stored, POINTS=only is not None,
            **numbers, **tuning,
        )  # fmt: skip
        return into

    none = (None, None, None)
    targets = _laws(nodes, device)
    raws = edited = q_laws = targets
    if nodes and max_nodes:
        laws(TARGET_LAW, target_logits, (temperature, top_k, top_p, min_p), size, bias, allowed, targets)
        if raw:
            raws = laws(PLAIN_LAW, target_logits, (temperature, *none), size, none, None, _laws(nodes, device))
        if processed:
            edited = laws(PLAIN_LAW, target_logits, (temperature, *none), size, bias, allowed, _laws(nodes, device),
                          targets[1])  # fmt: skip
        if drawn and in_all:
            q_laws = laws(DRAFT_LAW, draft_logits, q_filters, draft_size, none, q_allowed, _laws(nodes, device))
    passes = torch.empty((nodes,), dtype=torch.int32, device=device) if method == "typical" else filler
    source = draft_logits if drawn else target_logits
    heat, k, p, least = q_filters
    walk_kernel[(count,)](
        *row_arguments(target_logits, allowed, bias), size,
        source, source.stride(0), some(q_allowed), 0, draft_size, some(t2d if drawn else None),
        some(d2t if drawn else None), some(draft_rows), in_all, some(draft_log_probs), lse, heat, some(k), some(p),
        some(least), some(request_order), requests, cu_nodes, nodes, max_nodes, max_depth, draft_token_ids, parents,
        first_child, next_sibling, some(tree_flags), seed, position, some(step), some(uniforms), epsilon, delta, passes,
        *targets, *raws, *edited, *q_laws, output_token_ids, num_emitted, accepted_nodes, flags,
        some(logprobs, temperature),
        ALLOWED=allowed is not None, BIASED=bias_cu is not None, MAPPED=drawn and d2t is not None, HAS_K=k is not None,
        HAS_P=p is not None, HAS_MIN=least is not None, KNOWN_Q=drawn and draft_log_probs is not None, STORED=stored,
        TOLD=tree_flags is not None, STEPPED=step is not None, COINS=uniforms is not None, RAW=raw, PROCESSED=processed,
        **numbers, **tuning,
    )  # fmt: skip
