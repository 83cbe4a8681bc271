"""SGLang plug-in: rejection by the drafts' law, KV compaction, eviction, by loops and through SGLang's own code."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from specdec_kernels.integrations import sglang_cache, sglang_verify
from tests.test_integration_flashinfer import laws, loop
from tests.test_integration_sglang import hooked_sglang, in_a_process, outcome, without_torchvisions_kernels


def links(parents: list[int], batch: int):
    """(retrieve_index, next_token, next_sibling) of one tree for every request."""
    nodes = len(parents)
    child, sibling = torch.full((nodes,), -1), torch.full((nodes,), -1)
    for node in range(nodes - 1, 0, -1):
        sibling[node], child[parents[node]] = child[parents[node]].clone(), node
    index = torch.arange(batch * nodes).view(batch, nodes)
    return index, child.repeat(batch, 1), sibling.repeat(batch, 1)


def chain_call(verifier, draft, ids, target, coins, final, **options):
    """(tokens [B, K + 1] with -1 behind the last, accepted) of a sampler with SGLang's arguments."""
    batch, drafts, _ = draft.shape
    nodes = drafts + 1
    index, child, sibling = links(list(range(-1, drafts)), batch)
    candidates = torch.cat([torch.zeros(batch, 1).long(), ids.long()], 1)
    predicts, accepted, count = outcome(batch, nodes, nodes)
    verifier(
        predicts, accepted, count, candidates, index, child, sibling,
        torch.cat([coins, torch.zeros(batch, 1)], 1), final, target, draft, 1.0, 1.0, True, **options,
    )  # fmt: skip
    taken = accepted >= 0
    assert torch.equal(taken.sum(1) - 1, count.long())
    return torch.where(taken, predicts[accepted.clamp(min=0).long()], -1), count


def test_chains_are_the_loops():
    draft, ids, target = laws(120, 3, 9, seed=5)
    rng = torch.Generator().manual_seed(6)
    coins, final = torch.rand(120, 3, generator=rng), torch.rand(120, generator=rng)
    tokens, count = chain_call(sglang_verify.sample_chain_for_sglang, draft, ids, target, coins, final)
    assert len(set(count.tolist())) >= 3
    for b in range(120):
        expected, accepted = loop(draft[b], ids[b], target[b], coins[b], final[b])
        assert int(count[b]) == accepted
        assert tokens[b].tolist() == expected + [-1] * (3 - accepted)


def p_value(seen: torch.Tensor, law: torch.Tensor) -> float:
    kept = law > 0
    assert not seen[~kept].any()
    expected = (law * seen.sum())[kept]
    statistic = ((seen[kept].double() - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc((kept.sum() - 1) / 2.0, statistic / 2))


def joint(tokens: torch.Tensor, vocab: int, second: torch.Tensor) -> torch.Tensor:
    """Counts of the first two tokens; where one was emitted alone the next comes from the target's law."""
    drawn = torch.multinomial(second, len(tokens), replacement=True, generator=torch.Generator().manual_seed(9))
    following = torch.where(tokens[:, 1] >= 0, tokens[:, 1].long(), drawn)
    return torch.bincount(tokens[:, 0].long() * vocab + following, minlength=vocab * vocab)


@pytest.mark.parametrize("block", [False, True])
def test_the_joint_law_of_two_tokens(block):
    rounds, vocab = 30000, 5
    draft, _, target = laws(2, 3, vocab, seed=8)
    draft, target = draft[1, :2], target[1, :3]  # the first request's have zeros
    rng = torch.Generator().manual_seed(2)
    ids = torch.stack([torch.multinomial(law, rounds, replacement=True, generator=rng) for law in draft], 1)
    coins, final = torch.rand(rounds, 2, generator=rng), torch.rand(rounds, generator=rng)
    tokens, count = chain_call(
        sglang_verify.sample_chain_for_sglang, draft.expand(rounds, -1, -1), ids, target.expand(rounds, -1, -1), coins,
        final, block_verification=block,
    )  # fmt: skip
    assert set(count.tolist()) == {0, 1, 2}
    law = (target[0].double()[:, None] * target[1].double()).flatten()
    seen = joint(tokens, vocab, target[1])
    assert p_value(seen, law) > 1e-9
    assert p_value(seen, 0.9 * law + 0.1 * law.roll(3)) < 1e-9  # control


@pytest.mark.parametrize("drawn_in_order", [True, False], ids=["in order", "control: reversed"])
def test_trees_of_drawn_siblings_keep_the_law(drawn_in_order):
    """A root with two children drawn without replacement and a grandchild. Siblings in another order are biased."""
    rounds, vocab = 30000, 5
    draft, _, target = laws(2, 4, vocab, seed=11)
    laws_by_node, target = draft[1], target[1, :4]
    rng = torch.Generator().manual_seed(4)
    keys = laws_by_node[0].log() - torch.empty(rounds, vocab).exponential_(generator=rng).log()
    pair = keys.topk(2, dim=1).indices
    if not drawn_in_order:
        pair = pair.flip(1)
    third = torch.multinomial(laws_by_node[1], rounds, replacement=True, generator=rng)
    candidates = torch.cat([torch.zeros(rounds, 1).long(), pair, third[:, None]], 1)
    index, child, sibling = links([-1, 0, 0, 1], rounds)
    predicts, accepted, count = outcome(rounds, 4, 3)
    sglang_verify.sample_tree_rejection_for_sglang(
        predicts, accepted, count, candidates, index, child, sibling, torch.rand(rounds, 4, generator=rng),
        torch.rand(rounds, generator=rng), target.expand(rounds, -1, -1), laws_by_node.expand(rounds, -1, -1),
    )  # fmt: skip
    assert set(count.tolist()) == {0, 1, 2}
    first = predicts[accepted[:, 0].long()].long()
    seen = torch.bincount(first, minlength=vocab)
    assert (p_value(seen, target[0].double()) > 1e-9) == drawn_in_order


# ---- the cache


class MHATokenToKVPool:
    """As much of SGLang's pool as the compaction reads: one [slots, heads, dim] tensor a layer."""

    def __init__(self, slots: int, dtype=torch.float32):
        self.layer_num, self.k_scale_buffer, self.kv_cache_layout = 2, None, "nhd"
        values = torch.arange(2 * 2 * slots * 3 * 8).view(2, 2, slots, 3, 8)
        self.k_buffer, self.v_buffer = ([layer.to(dtype).clone() for layer in part] for part in values)


def moved(pool, window, accepted):
    """The buffers after the moves, by a loop over copies."""
    expected = [[buffer.clone() for buffer in part] for part in (pool.k_buffer, pool.v_buffer)]
    for slots, nodes in zip(window.tolist(), accepted.tolist()):
        for place, node in enumerate(n for n in nodes if n >= 0):
            for part, made in zip((pool.k_buffer, pool.v_buffer), expected):
                for layer in range(len(part)):
                    made[layer][slots[place]] = part[layer][slots[node % len(slots)]]
    return expected


WINDOW = torch.tensor([[4, 5, 6, 30, 31, 9], [12, 13, 14, 15, 16, 17], [20, 22, 21, 23, 25, 27]])
ACCEPTED = torch.tensor([[0, 2, 5, -1], [6, 7, 8, 9], [12, -1, -1, -1]], dtype=torch.int32)


def expect_moved(pool, before):
    for part, made in zip((pool.k_buffer, pool.v_buffer), before):
        for buffer, expected in zip(part, made):
            assert torch.equal(buffer, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_accepted_paths_move_to_the_front(dtype):
    pool = MHATokenToKVPool(40, dtype)
    before = moved(pool, WINDOW, ACCEPTED)
    assert not torch.equal(before[0][0], pool.k_buffer[0])
    batch = types.SimpleNamespace(out_cache_loc=WINDOW.flatten())
    allocator = types.SimpleNamespace(get_kvcache=lambda: pool)
    for _ in range(2):  # what was moved is at the front: the second call finds other nodes
        sglang_cache.compact_kv_for_sglang(pytest.fail, batch, ACCEPTED, (ACCEPTED >= 0).sum(1) - 1, allocator)
        expect_moved(pool, before)
        before = moved(pool, WINDOW, ACCEPTED)


@pytest.mark.parametrize(
    "change", [{"kv_cache_layout": "hnd"}, {"k_scale_buffer": []}, {"layer_num": 0}, {"__class__": object}]
)
def test_other_pools_go_to_sglang(change):
    pool = MHATokenToKVPool(4)
    if "__class__" in change:
        pool = types.SimpleNamespace(**vars(pool))
    else:
        vars(pool).update(change)
    called = []
    allocator = types.SimpleNamespace(get_kvcache=lambda: pool)
    sglang_cache.compact_kv_for_sglang(lambda *a: called.append(a), "batch", ACCEPTED, "counts", allocator)
    assert called == [("batch", ACCEPTED, "counts", allocator)]


def test_soft_nodes_go_first_then_the_longest_unused():
    facts = [(0, 1), (-1, 9), (3, 0), (-1, 8)]
    nodes = [types.SimpleNamespace(priority=priority, last_access_time=time) for priority, time in facts]
    order = sorted(nodes, key=sglang_cache.SoftFirst().get_priority)
    assert order == [nodes[3], nodes[1], nodes[2], nodes[0]]


# ---- with SGLang (make test-sglang)


def test_sglangs_own_cache_code_calls_ours():
    in_a_process("c.drive_cache()")


def drive_cache() -> None:
    """SGLang's pool compacted through its `_finalize_accept_tree_path`; its radix cache under our eviction policy."""
    hooked_sglang()
    common = importlib.import_module("sglang.srt.speculative.eagle_worker_common")
    pools = importlib.import_module("sglang.srt.mem_cache.memory_pool")
    pool = pools.MHATokenToKVPool(
        size=40, page_size=1, dtype=torch.float32, head_num=3, head_dim=8, layer_num=2, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.normal_()
    before = moved(pool, WINDOW, ACCEPTED)
    batch = types.SimpleNamespace(seq_lens=torch.ones(3), out_cache_loc=WINDOW.flatten())
    allocator = types.SimpleNamespace(get_kvcache=lambda: pool)
    states = types.SimpleNamespace(hidden_states=torch.randn(18, 4))
    called = []
    whole = sglang_cache.commit_kv
    sglang_cache.commit_kv = lambda *a, **k: (called.append("commit"), whole(*a, **k))[1]
    predicts = torch.arange(18)
    kept = common._finalize_accept_tree_path(
        batch, ACCEPTED, (ACCEPTED >= 0).sum(1), predicts, states, 3, token_to_kv_pool_allocator=allocator,
        num_draft_tokens=6,
    )  # fmt: skip
    assert called == ["commit"]
    expect_moved(pool, before)
    assert kept.view(3, 6)[0, :3].tolist() == [0, 2, 5]

    radix = importlib.import_module("sglang.srt.mem_cache.radix_cache")
    base = importlib.import_module("sglang.srt.mem_cache.base_prefix_cache")
    freed: list[list[int]] = []
    mock = types.SimpleNamespace(device="cpu", free_segment=lambda value, start_pos: freed.append(value.tolist()))
    cache = radix.RadixCache.create_simulated(mock_allocator=mock)
    cache.eviction_strategy = importlib.import_module("sglang.srt.mem_cache.utils").get_eviction_strategy(
        sglang_cache.SOFT_FIRST
    )

    def insert(ids, priority=0):
        key = radix.RadixKey(importlib.import_module("array").array("q", ids))
        value = torch.tensor(ids, dtype=torch.int64) * 10
        cache.insert(base.InsertParams(key=key, value=value, priority=priority))

    insert([1, 2, 3])
    insert([7, 8])
    insert([1, 2, 3, 4], sglang_cache.SOFT_PRIORITY)
    insert([1, 2, 3, 5], sglang_cache.SOFT_PRIORITY)
    insert([1, 2, 3, 5])  # a text took this path: no longer soft
    cache.evict(base.EvictParams(num_tokens=1))
    assert freed == [[40]]  # the newest but soft one before the oldest
    cache.evict(base.EvictParams(num_tokens=1))
    assert freed[1:] == [[70, 80]]  # then by age


def test_sglangs_own_chain_kernel_is_ours():
    """SGLang's Triton kernel in Triton's interpreter, in a process of its own, on the same coins."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("no sglang here (make test-sglang)")
    code = "from tests import test_integration_sglang_cache as c; c.compare_chain_kernel(); print('SAME', flush=True)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1],
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert "SAME" in done.stdout, (done.stdout + done.stderr)[-4000:]


def compare_chain_kernel() -> None:
    without_torchvisions_kernels()
    theirs = importlib.import_module("sglang.kernels.ops.speculative.reject_sampling").chain_speculative_sampling_triton
    draft, ids, target = laws(40, 3, 9, seed=12)
    rng = torch.Generator().manual_seed(6)
    coins, final = torch.rand(40, 3, generator=rng), torch.rand(40, generator=rng)
    ours = chain_call(sglang_verify.sample_chain_for_sglang, draft, ids, target, coins, final)
    right = chain_call(theirs, draft, ids, target, coins, final)
    assert torch.equal(ours[1], right[1])
    assert torch.equal(ours[0], right[0])
    assert len(set(right[1].tolist())) >= 3
