"""Trees in other engines' layouts, to and from ours. Re-exported by `specdec_kernels.tree`.

Their layouts are rectangular, [B, N] with N = max_nodes; a smaller tree leaves rows that no link reaches. Everything is
plain tensor arithmetic on the tree's device: no value is read on the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import _ops
from specdec_kernels._draft_tree import DraftTree


class SGLangTree(NamedTuple):
    """SGLang's buffers, left-child right-sibling links, -1 for none.

    tree_mask by mask_mode: "FULL_MASK" bool, one request behind the other, each [N, L + N] (the context, then the
    tree); "QLEN_ONLY" bool [B N N]; "QLEN_ONLY_BITPACKING" one uint8, uint16 or uint32 a row (N <= 8, 16, 32), [B N].
    positions: int64 [B N], L + depth. retrive_index: int64 [B, N], flat row b N + i of each node.
    retrive_next_token, retrive_next_sibling: int64 [B, N], first child and next sibling, local.
    """

    tree_mask: Tensor
    positions: Tensor
    retrive_index: Tensor
    retrive_next_token: Tensor | None
    retrive_next_sibling: Tensor | None
    mask_mode: str


class TensorRTTree(NamedTuple):
    """TensorRT-LLM's buffers, all int32.

    packed_mask: [B, N, ceil(N / 32)]; position_offsets: [B, N], depths; generation_lengths: [B], nodes of each
    request; retrieve_index: [B, N], local; retrieve_next_token, retrieve_next_sibling: [B, N], links, -1 for none.
    """

    packed_mask: Tensor
    position_offsets: Tensor
    generation_lengths: Tensor
    retrieve_index: Tensor
    retrieve_next_token: Tensor
    retrieve_next_sibling: Tensor


class MedusaTree(NamedTuple):
    """Medusa's buffers. attention_mask: bool [B, N, N]; position_ids: int64 [B, N], depths.

    retrieve_indices: int64 [B, N, max_depth + 1]: one row a leaf, the latest leaf first, the path from the root to it,
    -1 behind a path and in rows without a leaf.
    """

    attention_mask: Tensor
    position_ids: Tensor
    retrieve_indices: Tensor


class FlashInferMask(NamedTuple):
    """FlashInfer's packed custom mask. packed_mask: uint8, least significant bit first.

    Request b starts at byte mask_indptr[b] (int32 [B + 1]); its bits are [N_b, L + N_b], the context included, row by
    row. qo_indptr: int32 [B + 1], our cu_nodes.
    """

    packed_mask: Tensor
    mask_indptr: Tensor
    qo_indptr: Tensor


class Padded(NamedTuple):
    """What the rectangular layouts need: counts, context_lens [B] (int64), node exists [B, N], its row [B, N]."""

    counts: Tensor
    context_lens: Tensor
    exists: Tensor
    row: Tensor


def padded(tree: DraftTree) -> Padded:
    cu = tree.cu_nodes.long()
    slots = torch.arange(tree.max_nodes, device=cu.device)
    counts = cu[1:] - cu[:-1]
    exists = slots < counts[:, None]
    row = torch.where(exists, cu[:-1, None] + slots, 0)
    lens = spread(tree.positions, Padded(counts, counts, exists, row), 0)[:, :1].sum(1)
    return Padded(counts, lens, exists, row)


def spread(values: Tensor, frame: Padded, fill: int) -> Tensor:
    """Packed [N] -> rectangular [B, max_nodes], int64."""
    if not values.shape[0]:
        return torch.full(frame.row.shape, fill, dtype=torch.int64, device=values.device)
    return torch.where(frame.exists, values.long()[frame.row], fill)


def columns_of(words: Tensor, frame: Padded) -> Tensor:
    """Packed mask words -> bool [B, N, N]."""
    nodes = frame.row.shape[1]
    slots = torch.arange(nodes, device=words.device)
    if not words.shape[0] or not nodes:
        return torch.zeros(*frame.row.shape, nodes, dtype=torch.bool, device=words.device)
    bits = words.long()[frame.row][..., slots // 32] >> (slots % 32) & 1
    return bits.bool() & frame.exists[..., None]


def locate(element: Tensor, ends: Tensor) -> Tensor:
    """The segment each element lies in, the number of segments behind the last."""
    return torch.searchsorted(ends, element, right=True)


def to_sglang(tree: DraftTree, mask_mode: str, total_context: int | None) -> SGLangTree:
    op = "to_layout"
    modes = ("FULL_MASK", "QLEN_ONLY", "QLEN_ONLY_BITPACKING")
    _ops.expect(op, "mask_mode", mask_mode in modes, f"one of {modes}", repr(mask_mode))
    frame = padded(tree)
    mask = columns_of(tree.tree_mask, frame)
    requests, nodes = frame.row.shape
    if mask_mode == "QLEN_ONLY":
        flat = mask.view(-1)
    elif mask_mode == "QLEN_ONLY_BITPACKING":
        _ops.expect(op, "mask_mode", nodes <= 32, "at most 32 nodes a request for QLEN_ONLY_BITPACKING", nodes)
        dtype = torch.uint8 if nodes <= 8 else torch.uint16 if nodes <= 16 else torch.uint32
        weights = 1 << torch.arange(nodes, device=mask.device)
        flat = (mask.long() * weights).sum(-1).view(-1).to(dtype)
    else:
        if total_context is None:
            raise TypeError(f"{op}: total_context: expected the sum of the context lengths, or a bound, got None")
        width = frame.context_lens + nodes
        ends = (nodes * width).cumsum(0)
        element = torch.arange(nodes * (total_context + requests * nodes), device=mask.device)
        flat = torch.zeros(element.shape[0], dtype=torch.bool, device=mask.device)
        if requests and nodes:
            segment = locate(element, ends)
            b = segment.clamp(max=requests - 1)
            inside = element - (ends - nodes * width)[b]
            row = torch.div(inside, width[b], rounding_mode="floor").clamp(max=nodes - 1)
            column = inside - row * width[b] - frame.context_lens[b]
            seen = (column < 0) | mask[b, row, column.clamp(min=0, max=nodes - 1)]
            flat = seen & (segment < requests)
    index = torch.arange(requests * nodes, device=mask.device).view(requests, nodes)
    first_child, next_sibling = (spread(links, frame, -1) for links in (tree.first_child, tree.next_sibling))
    return SGLangTree(flat, spread(tree.positions, frame, 0).view(-1), index, first_child, next_sibling, mask_mode)


def to_tensorrt(tree: DraftTree) -> TensorRTTree:
    frame = padded(tree)
    requests, nodes = frame.row.shape
    words = tree.tree_mask
    packed = words[frame.row] if words.shape[0] else words.new_zeros(requests, nodes, words.shape[1])
    packed = torch.where(frame.exists[..., None], packed, 0)
    index = torch.arange(nodes, dtype=torch.int32, device=words.device).expand(requests, nodes).contiguous()
    depths = spread(tree.depths, frame, 0).int()
    first_child, next_sibling = (spread(links, frame, -1).int() for links in (tree.first_child, tree.next_sibling))
    return TensorRTTree(packed, depths, frame.counts.int(), index, first_child, next_sibling)


def to_medusa(tree: DraftTree) -> MedusaTree:
    frame = padded(tree)
    requests, nodes = frame.row.shape
    mask = columns_of(tree.tree_mask, frame)
    depths = spread(tree.depths, frame, 0)
    leaf = frame.exists & (spread(tree.first_child, frame, -1) < 0)
    slots = torch.arange(nodes, device=mask.device)
    # leaves, the latest first, then the rest; then every ancestor of the leaf goes to the column of its depth
    order = torch.where(leaf, nodes - 1 - slots, 2 * nodes).argsort(dim=-1, stable=True)
    rows = torch.gather(mask & leaf[..., None], 1, order[..., None].expand(-1, -1, nodes))
    paths = torch.full((requests, nodes, tree.max_depth + 2), -1, dtype=torch.int64, device=mask.device)
    spare = tree.max_depth + 1
    column = torch.where(rows, depths[:, None, :].expand_as(rows), spare)
    paths.scatter_(2, column, slots.expand_as(column))
    return MedusaTree(mask, depths, paths[..., :spare].contiguous())


def to_flashinfer(tree: DraftTree, total_bytes: int | None) -> FlashInferMask:
    if total_bytes is None:
        raise TypeError("to_layout: total_bytes: expected a bound on the packed mask's bytes, got None")
    frame = padded(tree)
    requests, nodes = frame.row.shape
    mask = columns_of(tree.tree_mask, frame)
    width = frame.context_lens + frame.counts
    ends = torch.div(frame.counts * width + 7, 8, rounding_mode="floor").cumsum(0)
    indptr = torch.cat([ends.new_zeros(1), ends])
    if not requests or not nodes:
        packed = torch.zeros(total_bytes, dtype=torch.uint8, device=mask.device)
        return FlashInferMask(packed, indptr.int(), tree.cu_nodes)
    byte = torch.arange(total_bytes, device=mask.device)
    segment = locate(byte, ends)
    b = segment.clamp(max=requests - 1)[:, None]
    bit = (byte[:, None] - indptr[b]) * 8 + torch.arange(8, device=mask.device)
    row = torch.div(bit, width[b].clamp(min=1), rounding_mode="floor")
    column = bit - row * width[b] - frame.context_lens[b]
    inside = (row < frame.counts[b]) & (segment < requests)[:, None]
    seen = (column < 0) | mask[b, row.clamp(max=nodes - 1), column.clamp(min=0, max=nodes - 1)]
    packed = ((seen & inside).long() << torch.arange(8, device=mask.device)).sum(-1).to(torch.uint8)
    return FlashInferMask(packed, indptr.int(), tree.cu_nodes)


# ---- back


def parents_from_links(first_child: Tensor, next_sibling: Tensor) -> Tensor:
    """int64 [B, N] links -> parents [B, N], -1 for the root and for nodes that no link reaches; log2(N) rounds."""
    requests, nodes = first_child.shape
    slots = torch.arange(nodes, device=first_child.device).expand(requests, nodes)
    # a spare column takes the writes of links that say "none"
    head = torch.cat([slots, slots[:, :1]], 1).contiguous()
    head.scatter_(1, torch.where(next_sibling >= 0, next_sibling, nodes).clamp(max=nodes), slots)
    head = head[:, :nodes]
    for _ in range(max(1, (nodes - 1).bit_length())):
        head = torch.gather(head, 1, head)  # now twice as far back in the row of siblings
    above = torch.full((requests, nodes + 1), -1, dtype=torch.int64, device=first_child.device)
    above.scatter_(1, torch.where(first_child >= 0, first_child, nodes).clamp(max=nodes), slots)
    return torch.gather(above[:, :nodes].contiguous(), 1, head)


def parents_from_paths(paths: Tensor, nodes: int) -> Tensor:
    """Medusa's retrieve_indices [B, leaves, depth + 1] -> parents [B, N]."""
    requests = paths.shape[0]
    above = torch.full((requests, nodes + 1), -1, dtype=torch.int64, device=paths.device)
    child, parent = paths[..., 1:].flatten(1), paths[..., :-1].flatten(1)
    return above.scatter_(1, torch.where(child >= 0, child, nodes).clamp(max=nodes), parent)[:, :nodes]


def gather_rows(values: Tensor, counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Rectangular [B, N] -> (packed int32 [total], -1 behind the last; cu [B + 1])."""
    requests, nodes = values.shape
    cu = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    place = torch.arange(total, device=values.device)
    if not requests or not nodes:
        return torch.full((total,), -1, dtype=torch.int32, device=values.device), cu.int()
    b = locate(place, cu[1:]).clamp(max=requests - 1)
    packed = values[b, (place - cu[b]).clamp(min=0, max=nodes - 1)]
    return torch.where(place < cu[-1], packed, -1).int(), cu.int()


def mask_rows_from_sglang(tree_mask: Tensor, mask_mode: str, context_lens: Tensor, nodes: int) -> Tensor:
    """SGLang's mask in any mode -> bool [B, N, N]."""
    requests = context_lens.shape[0]
    slots = torch.arange(nodes, device=tree_mask.device)
    if mask_mode == "QLEN_ONLY":
        return tree_mask[: requests * nodes * nodes].view(requests, nodes, nodes)
    if mask_mode == "QLEN_ONLY_BITPACKING":
        return (tree_mask.long().view(requests, nodes, 1) >> slots & 1).bool()
    lens = context_lens.long()
    width = lens + nodes
    start = (nodes * width).cumsum(0) - nodes * width
    place = start[:, None, None] + slots[:, None] * width[:, None, None] + lens[:, None, None] + slots
    return tree_mask[place]


def mask_rows_from_flashinfer(mask: FlashInferMask, context_lens: Tensor, nodes: int) -> Tensor:
    """FlashInfer's packed mask -> bool [B, N, N]."""
    counts = (mask.qo_indptr[1:] - mask.qo_indptr[:-1]).long()
    lens = context_lens.long()
    slots = torch.arange(nodes, device=counts.device)
    bit = slots[:, None] * (lens + counts)[:, None, None] + lens[:, None, None] + slots
    exists = (slots[:, None] < counts[:, None, None]) & (slots < counts[:, None, None])
    byte = torch.div(bit, 8, rounding_mode="floor") + mask.mask_indptr[:-1, None, None]
    if not mask.packed_mask.shape[0]:
        return torch.zeros_like(exists)
    words = mask.packed_mask[torch.where(exists, byte, 0)].long()
    return exists & (words >> (bit % 8) & 1).bool()


def last_true(present: Tensor) -> Tensor:
    """bool [B, N] -> 1 + the last true column of each row, 0 if there is none."""
    slots = torch.arange(1, present.shape[1] + 1, device=present.device)
    return torch.where(present, slots, 0).amax(1) if present.shape[1] else present.sum(1)


def parents_of(
    source: SGLangTree | TensorRTTree | MedusaTree | FlashInferMask,
    context_lens: Tensor,
    max_nodes: int | None,
    backend: str | None,
) -> tuple[Tensor, Tensor, int]:
    """(packed parents, cu_nodes, N) of a foreign layout."""
    rows: Tensor | None = None
    if isinstance(source, FlashInferMask):
        if max_nodes is None:
            raise TypeError("from_layout: max_nodes: expected the largest number of nodes of a request, got None")
        nodes, counts = max_nodes, (source.qo_indptr[1:] - source.qo_indptr[:-1]).long()
        rows = mask_rows_from_flashinfer(source, context_lens, nodes)
    elif isinstance(source, MedusaTree):
        nodes = source.attention_mask.shape[-1]
        counts = source.retrieve_indices.flatten(1).amax(1) + 1
        links = parents_from_paths(source.retrieve_indices, nodes)
    elif isinstance(source, TensorRTTree):
        nodes, counts = source.retrieve_next_token.shape[1], source.generation_lengths.long()
        links = parents_from_links(source.retrieve_next_token.long(), source.retrieve_next_sibling.long())
    elif source.retrive_next_token is None or source.retrive_next_sibling is None:
        nodes = source.retrive_index.shape[1]
        rows = mask_rows_from_sglang(source.tree_mask, source.mask_mode, context_lens, nodes)
        counts = last_true(rows.any(-1))
    else:
        nodes = source.retrive_next_token.shape[1]
        links = parents_from_links(source.retrive_next_token, source.retrive_next_sibling)
        counts = last_true(links >= 0).clamp(min=min(1, nodes))
    total = context_lens.shape[0] * nodes
    if rows is None:
        return (*gather_rows(links, counts, total), nodes)
    words = torch.empty(total, (nodes + 31) // 32, dtype=torch.int32, device=rows.device)
    _ops.call("pack_mask", backend, rows.device, rows.reshape(total, nodes), words)
    # tree_from_mask on rectangular offsets, then packed: rows of absent nodes are not read
    rectangular = torch.arange(context_lens.shape[0] + 1, dtype=torch.int32, device=rows.device) * nodes
    parents = torch.empty(total, dtype=torch.int32, device=rows.device)
    _ops.call("tree_from_mask", backend, rows.device, words, rectangular, nodes, parents)
    return (*gather_rows(parents.view(-1, nodes), counts, total), nodes)
