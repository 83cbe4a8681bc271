"""One step's requests as tensors: the packed batch, the tree the verifier walks, the sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from specdec_kernels.attention import slot_mapping
from specdec_kernels.engine.batch import Batch
from specdec_kernels.engine.drafters import Draft
from specdec_kernels.engine.request import RequestState
from specdec_kernels.sampling import Sampling
from specdec_kernels.tree import DraftTree, build_tree, chain_tree


class Chunk(NamedTuple):
    """`num_tokens` more tokens of a request's text to cache; with `last`, its last row gives the next token."""

    state: RequestState
    num_tokens: int
    last: bool


class Packed(NamedTuple):
    """`states` are the V requests to verify, trees first, then finished prefills (a lone root each); `batch` may hold
    further prefill chunks behind them. `root_lens` int32 [V]: cached tokens before each root."""

    batch: Batch
    states: list[RequestState]
    drafts: list[Draft]
    tree: DraftTree
    draft_token_ids: torch.Tensor
    root_lens: torch.Tensor
    branched: bool


def pack_step(
    decoding: Sequence[tuple[RequestState, Draft]],
    chunks: Sequence[Chunk],
    page_size: int,
    device: torch.device,
    vocab_size: int,
) -> Packed:
    """Lay out a step: the tree rows of every decoding request, then one causal run of rows per prefill chunk. The model
    is given ids below `vocab_size` only; the verifier sees the drafts as they are, and refuses the others."""
    chunks = sorted(chunks, key=lambda chunk: not chunk.last)
    rooted = [chunk for chunk in chunks if chunk.last]
    states = [state for state, _ in decoding] + [chunk.state for chunk in rooted]
    drafts = [draft for _, draft in decoding] + [Draft()] * len(rooted)
    branched = any(not draft.is_chain for draft in drafts)

    token_ids: list[int] = []
    sizes: list[int] = []
    for state, draft in decoding:
        token_ids.append(state.tokens[-1])
        token_ids.extend(draft.token_ids)
        sizes.append(len(draft) + 1)
    num_tree_rows = len(token_ids)
    chunk_positions: list[int] = []
    logit_rows = list(range(num_tree_rows))
    for state, size, last in chunks:
        start = state.context_len
        token_ids.extend(state.tokens[start : start + size])
        chunk_positions.extend(range(start, start + size))
        sizes.append(size)
        if last:
            logit_rows.append(len(token_ids) - 1)

    def tensor(values: Sequence, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    everyone = [state for state, _ in decoding] + [chunk.state for chunk in chunks]
    width = max(len(state.pages) for state in everyone)
    page_table = tensor([state.pages + [-1] * (width - len(state.pages)) for state in everyone])
    root_lens = tensor([s.context_len for s, _ in decoding] + [c.state.context_len + c.num_tokens - 1 for c in rooted])

    max_nodes = max((len(draft) + 1 for draft in drafts), default=1)
    if branched:
        parents = [p for draft in drafts for p in (-1, *draft.parents)]
        depth = max(draft.depth for draft in drafts)
        cu = list(accumulate((len(draft) + 1 for draft in drafts), initial=0))
        tree = build_tree(tensor(parents), tensor(cu), root_lens, max_nodes=max_nodes, max_depth=depth)
    else:
        counts = tensor([len(draft) for draft in drafts])
        total = len(logit_rows)
        tree = chain_tree(counts, root_lens, total_nodes=total, max_nodes=max_nodes)

    ids = tensor(token_ids, torch.int64)
    if chunks:
        positions = torch.cat([tree.positions[:num_tree_rows], tensor(chunk_positions)])
        context_lens = tensor([state.context_len for state in everyone])
        cu_nodes = tensor(list(accumulate(sizes, initial=0)))
        mask = tree.tree_mask[:num_tree_rows]
        if branched:  # prefill rows ignore their mask (`causal`), they only need to be there
            mask = torch.cat([mask, mask.new_zeros(len(chunk_positions), mask.shape[1])])
        rows = tensor(logit_rows or [0], torch.int64)
        draft_token_ids = ids[rows].to(torch.int32) if logit_rows else tensor([])
    else:
        positions, context_lens, cu_nodes, mask, rows = tree.positions, root_lens, tree.cu_nodes, tree.tree_mask, None
        draft_token_ids = ids.to(torch.int32)
    batch = Batch(
        token_ids=ids.clamp(0, vocab_size - 1) if any(len(draft) for draft in drafts) else ids,
        positions=positions,
        slots=slot_mapping(page_table, context_lens, cu_nodes, page_size, total_nodes=len(token_ids)),
        page_table=page_table,
        context_lens=context_lens,
        cu_nodes=cu_nodes,
        max_nodes=max(sizes),
        tree_mask=mask if branched else None,  # without a mask every request is a causal chain
        causal=tensor([False] * len(decoding) + [True] * len(chunks), torch.bool) if branched and chunks else None,
        logit_rows=rows,
    )
    return Packed(batch, states, drafts, tree, draft_token_ids, root_lens, branched)


def make_sampling(states: Sequence[RequestState], device: torch.device) -> Sampling:
    """The requests' sampling parameters; `position` is each request's next output position."""

    def tensor(values: list, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    requests = [state.request for state in states]
    return Sampling(
        temperature=tensor([r.temperature for r in requests], torch.float32),
        top_k=tensor([r.top_k for r in requests], torch.int32),
        top_p=tensor([r.top_p for r in requests], torch.float32),
        min_p=tensor([r.min_p for r in requests], torch.float32),
        seed=tensor([state.seed for state in states], torch.int64),
        position=tensor([state.num_output for state in states], torch.int64),
        step=tensor([state.num_steps for state in states], torch.int64),
    )
