"""SGLang's verifiers over our ops: greedy, target-only and rejection, on its links and into its buffers."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels.integrations.flashinfer import verify_chains
from specdec_kernels.sampling import Sampling, verify, verify_probs
from specdec_kernels.tree import DraftTree, SGLangTree, chain_tree, from_layout


def _tree_of(retrieve_index: Tensor, next_token: Tensor, next_sibling: Tensor) -> DraftTree:
    """Their links as our tree, at context length 0 (positions do not matter to verification)."""
    batch, nodes = retrieve_index.shape
    none = torch.zeros(batch, dtype=torch.int32, device=next_token.device)
    mask = torch.zeros(0, dtype=torch.bool, device=next_token.device)
    links = SGLangTree(mask, mask, retrieve_index, next_token.long(), next_sibling.long(), "QLEN_ONLY")
    return from_layout(links, context_lens=none, max_nodes=nodes)


def _write(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    retrieve_index: Tensor,
    tokens: Tensor,
    nodes: Tensor,
    num_emitted: Tensor,
) -> None:
    """Our outcome in their buffers: accepted nodes by their place in the batch, each place's next token in predicts."""
    steps = min(accept_index.shape[1], nodes.shape[1])
    nodes, tokens = nodes[:, :steps].long(), tokens[:, :steps]
    taken = torch.arange(steps, device=nodes.device) < num_emitted[:, None]
    place = retrieve_index.long().gather(1, nodes.clamp(min=0))
    accept_index.fill_(-1)
    accept_index[:, :steps] = torch.where(taken, place, -1).to(accept_index.dtype)
    accept_token_num.copy_(num_emitted - 1)
    # what is not taken goes to a spare place: rows chosen by a mask would wait for the device to count them
    wide = torch.cat([predicts, predicts.new_zeros(1)])
    target = torch.where(taken, place, len(predicts)).reshape(-1)
    predicts.copy_(wide.scatter_(0, target, tokens.to(predicts.dtype).reshape(-1))[:-1])


def verify_greedy_for_sglang(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    topk: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """`verify_tree_greedy_func`: the longest path on which every token is the target's own choice at its parent.

    The walk needs no vocabulary: to `verify`, a draft is token 1 if it is its parent's prediction, else 0, and every
    row of the target says 1.
    """
    batch, nodes = candidates.shape
    tree = _tree_of(retrieve_index, retrieve_next_token, retrieve_next_sibling)
    counts = (tree.cu_nodes[1:] - tree.cu_nodes[:-1]).long()
    total, place = tree.parents.shape[0], torch.arange(batch * nodes, device=candidates.device)
    row, slot = place // max(nodes, 1), place % max(nodes, 1)
    exists = slot < counts[row]
    packed = tree.cu_nodes[row].long() + slot
    parents = torch.where(exists, tree.parents[packed.clamp(max=max(total - 1, 0))].long(), 0).clamp(min=0)
    hit = candidates[row, slot] == target_predict[row, parents]
    ids = torch.zeros(total + 1, dtype=torch.int32, device=candidates.device)  # the last: of slots without a node
    ids = ids.scatter_(0, torch.where(exists, packed, total), hit.int())[:-1]
    says = torch.arange(2, dtype=torch.float32, device=candidates.device).expand(total, 2)
    sampling = Sampling.of(batch, temperature=0.0, device=candidates.device)
    found = verify(says, ids, tree, sampling, method="greedy")
    tokens = target_predict.gather(1, found.accepted_nodes.long().clamp(min=0))
    _write(
        predicts, accept_index, accept_token_num, retrieve_index, tokens, found.accepted_nodes, found.num_emitted
    )  # fmt: skip
    return predicts, accept_index, accept_token_num


def sample_target_only_for_sglang(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None = None,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """`tree_speculative_sampling_target_only` at thresholds 1, where it is lossless: a coin a visited node against the
    cumulative mass of its children. uniform_samples: float32 [B, N], the coin of a node decides among its children.
    NotImplementedError for lower thresholds, which accept tokens that the target would not have drawn."""
    if threshold_single < 1.0 or threshold_acc < 1.0:
        raise NotImplementedError(
            f"specdec_kernels.sglang: thresholds: expected 1 (lossless), got {threshold_single} and {threshold_acc}"
        )
    batch, nodes = candidates.shape
    tree = _tree_of(retrive_index, retrive_next_token, retrive_next_sibling)
    b, slot = _places(tree, batch, nodes)
    probs = target_probs.reshape(batch, nodes, -1)[b, slot].float()
    ids = candidates[b, slot].to(torch.int32)
    coins = uniform_samples.reshape(batch, nodes)[b, tree.parents.long().clamp(0, nodes - 1)].float()
    final = uniform_samples_for_final_sampling.reshape(-1)[:batch].float()
    found = verify_probs(probs, ids, tree, coins, final, method="target_only")
    _write(
        predicts, accept_index, accept_token_num, retrive_index, found.output_token_ids, found.accepted_nodes,
        found.num_emitted,
    )  # fmt: skip


def _sampling(batch: int, final: Tensor, coins: Tensor) -> Sampling:
    """Plain laws, with noise of its own for every call: seeds out of the bits of two of the engine's coins."""
    high, low = (x.reshape(batch, -1)[:, 0].float().contiguous().view(torch.int32).long() for x in (final, coins))
    neutral = Sampling.of(batch, device=final.device)
    return Sampling(neutral.temperature, seed=high << 31 ^ low, position=neutral.position, step=neutral.step)


def sample_chain_for_sglang(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
    *,
    block_verification: bool = False,
) -> None:
    """`chain_speculative_sampling_triton`: lossless rejection by the law that the drafts were drawn from.

    candidates: [B, N], a chain, the root first; draft_probs: [B, N - 1 or more, V], row k the law of candidate k + 1;
    uniform_samples: [B, N], coin k judges candidate k + 1; the last token by inverse CDF. SGLang ignores the thresholds
    here, and so do we. block_verification (Sun et al., 2403.10444): the last token is drawn with noise of our own.
    """
    batch, nodes = candidates.shape
    coins, final = uniform_samples.reshape(batch, nodes), uniform_samples_for_final_sampling.reshape(-1)[:batch]
    laws = draft_probs[:, : nodes - 1]
    if not block_verification:
        found = verify_chains(laws, candidates[:, 1:], target_probs, coins[:, :-1], final)
    else:
        found = verify(
            target_probs.reshape(batch * nodes, -1).float().log(), candidates.reshape(-1).int(),
            _chain(batch, nodes, candidates.device), _sampling(batch, final, coins), method="block",
            draft_logits=laws.reshape(batch * (nodes - 1), -1).float().log(),
            uniforms=coins.roll(1, 1).float().reshape(-1),
        )  # fmt: skip
    _write(
        predicts, accept_index, accept_token_num, retrive_index, found.output_token_ids, found.accepted_nodes,
        found.num_emitted,
    )  # fmt: skip


def _chain(batch: int, nodes: int, device: torch.device) -> DraftTree:
    counts = torch.full((batch,), nodes - 1, dtype=torch.int32, device=device)
    return chain_tree(counts, torch.zeros_like(counts), total_nodes=batch * nodes, max_nodes=nodes)


def sample_tree_rejection_for_sglang(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Lossless rejection on trees whose siblings were drawn without replacement, for a worker of one's own.

    Arguments as SGLang's `tree_speculative_sampling_target_only`, but draft_probs: [B, N, V], row n the law that the
    children of node n were drawn from, siblings in the order drawn (rising nodes), of each parent a prefix of what was
    drawn. Not registered: SGLang's own workers take the best tokens instead of drawing them, so they have no such law,
    and hand zeros. uniform_samples: [B, N], a node's own coin; the last token is drawn with noise of our own.
    """
    batch, nodes = candidates.shape
    tree = _tree_of(retrive_index, retrive_next_token, retrive_next_sibling)
    b, slot = _places(tree, batch, nodes)
    coins = uniform_samples.reshape(batch, nodes)
    parents = tree.parents.long()
    rows = torch.where(parents >= 0, b * nodes + parents.clamp(0, nodes - 1), -1)
    found = verify(
        target_probs.reshape(batch, nodes, -1)[b, slot].float().log(), candidates[b, slot].int(), tree,
        _sampling(batch, uniform_samples_for_final_sampling, coins), method="rejection",
        draft_logits=draft_probs.reshape(batch * nodes, -1).float().log(), draft_rows=rows.int(),
        uniforms=coins[b, slot].float(),
    )  # fmt: skip
    _write(
        predicts, accept_index, accept_token_num, retrive_index, found.output_token_ids, found.accepted_nodes,
        found.num_emitted,
    )  # fmt: skip


def _places(tree: DraftTree, batch: int, nodes: int) -> tuple[Tensor, Tensor]:
    """The request and the slot of each packed node."""
    place = torch.arange(tree.parents.shape[0], device=tree.parents.device)
    b = torch.searchsorted(tree.cu_nodes[1:].contiguous(), place.int(), right=True).clamp(max=max(batch - 1, 0))
    return b, (place - tree.cu_nodes[b]).clamp(0, nodes - 1)
