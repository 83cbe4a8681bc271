"""The SGLang plug-in against loops that follow SGLang's kernels node by node, and its registration with stand-ins."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from specdec_kernels.integrations import sglang as plugin
from specdec_kernels.integrations import sglang_verify as verify


def drafted(batch: int, topk: int, levels: int, nodes: int, seed: int = 0):
    """What SGLang's draft loop hands to its tree builder, from random cumulative scores: (parent_list,
    top_scores_index). Level 0 has topk candidates under the root, every further one topk * topk under the topk best of
    the level before; entries of parent_list: the root's, then those topk candidates a level."""
    rng = torch.Generator().manual_seed(seed)
    lists, chosen = [], []
    for _ in range(batch):
        scores = torch.rand(topk, generator=rng).log().tolist()
        entries = [-1]
        best = list(range(topk))
        for _ in range(levels - 1):
            entries += best
            first = len(scores)
            for candidate in best:
                scores += [scores[candidate] + float(torch.rand((), generator=rng).log()) for _ in range(topk)]
            level = range(first, len(scores))
            best = sorted(sorted(level, key=lambda c: -scores[c])[:topk])
        lists.append(entries)
        chosen.append(sorted(sorted(range(len(scores)), key=lambda c: -scores[c])[: nodes - 1]))
    return torch.tensor(lists), torch.tensor(chosen)


def loop_tree(parents_of_entry, kept, topk):
    """Parent of every node, links from the last node to the first as SGLang makes them."""
    parents = [-1]
    for candidate in kept:
        entry = candidate // topk
        parents.append(0 if entry == 0 else kept.index(parents_of_entry[entry]) + 1)
    first, sibling = [-1] * len(parents), [-1] * len(parents)
    for node in range(len(parents) - 1, 0, -1):
        sibling[node], first[parents[node]] = first[parents[node]], node
    return parents, first, sibling


def buffers(batch, nodes, lens, mode):
    size = {"FULL_MASK": int(lens.sum()) * nodes + batch * nodes * nodes, "QLEN_ONLY": batch * nodes * nodes}.get(
        mode, batch * nodes
    )
    dtype = torch.bool if mode != "QLEN_ONLY_BITPACKING" else torch.uint8 if nodes <= 8 else torch.uint16
    links = [torch.full((batch, nodes), -7) for _ in range(3)]
    return torch.zeros(size, dtype=dtype), torch.full((batch * nodes,), -7), *links


@pytest.mark.parametrize("mode", plugin.MASK_MODES)
@pytest.mark.parametrize(("topk", "levels", "nodes"), [(4, 3, 12), (1, 5, 6), (8, 1, 5), (2, 4, 16)])
def test_trees_are_those_of_the_loop(mode, topk, levels, nodes):
    nodes = min(nodes, 1 + topk + (levels - 1) * topk * topk)
    entries, kept = drafted(3, topk, levels, nodes)
    lens = torch.tensor([5, 0, 9])
    mask, positions, index, child, sibling = buffers(3, nodes, lens, mode)
    plugin.build_tree_for_sglang(
        entries, kept, lens, mask, positions, index, child, sibling, topk, levels, nodes, plugin.MASK_MODES.index(mode)
    )
    assert index.tolist() == torch.arange(3 * nodes).view(3, nodes).tolist()
    at = 0
    for b in range(3):
        parents, first, following = loop_tree(entries[b].tolist(), kept[b].tolist(), topk)
        assert child[b].tolist() == first
        assert sibling[b].tolist() == following
        seen = torch.eye(nodes, dtype=torch.bool)
        depths = [0] * nodes
        for node in range(1, nodes):
            seen[node] |= seen[parents[node]]
            depths[node] = depths[parents[node]] + 1
        assert positions[b * nodes : (b + 1) * nodes].tolist() == [int(lens[b]) + d for d in depths]
        if mode == "QLEN_ONLY_BITPACKING":
            words = (seen.long() << torch.arange(nodes)).sum(-1)
            assert mask[b * nodes : (b + 1) * nodes].long().tolist() == words.tolist()
            continue
        width = nodes + (int(lens[b]) if mode == "FULL_MASK" else 0)
        rows = mask[at : at + nodes * width].view(nodes, width)
        at += nodes * width
        assert rows[:, width - nodes :].tolist() == seen.tolist()
        assert rows[:, : width - nodes].all()


def outcome(batch, nodes, depth):
    return (
        torch.zeros(batch * nodes, dtype=torch.int32), torch.full((batch, depth), -1, dtype=torch.int32),
        torch.full((batch,), -9, dtype=torch.int32),
    )  # fmt: skip


def walk(first, sibling, accept):
    """Nodes of the accepted path: at each node the first child that `accept(parent, child, tried)` takes."""
    path = [0]
    while True:
        tried, child = [], first[path[-1]]
        while child != -1 and not accept(path[-1], child, tried):
            tried.append(child)
            child = sibling[child]
        if child == -1:
            return path, tried
        path.append(child)


@pytest.mark.parametrize("seed", range(6))
def test_greedy_is_the_loops(seed):
    batch, nodes, topk = 5, 14, 3
    entries, kept = drafted(batch, topk, 4, nodes, seed)
    _, _, index, child, sibling = made = buffers(batch, nodes, torch.zeros(batch, dtype=torch.long), "QLEN_ONLY")
    plugin.build_tree_for_sglang(entries, kept, torch.zeros(batch, dtype=torch.long), *made, topk, 4, nodes, 1)
    rng = torch.Generator().manual_seed(seed)
    candidates, target = torch.randint(0, 3, (2, batch, nodes), generator=rng)
    predicts, accepted, count = plugin.verify_greedy_for_sglang(
        *outcome(batch, nodes, 5), candidates, index, child, sibling, target, topk=topk
    )
    lengths = set()
    for b in range(batch):
        path, _ = walk(child[b].tolist(), sibling[b].tolist(), lambda p, c, t, b=b: candidates[b, c] == target[b, p])
        lengths.add(len(path))
        assert int(count[b]) == len(path) - 1
        assert accepted[b].tolist() == [b * nodes + n for n in path] + [-1] * (5 - len(path))
        for node in range(nodes):
            assert int(predicts[b * nodes + node]) == (int(target[b, node]) if node in path else 0)
    assert len(lengths) > 1


def test_target_only_sampling_is_the_loops():
    """Coins on both sides of every threshold, by chance; the last token by inverse CDF over what was not tried."""
    batch, nodes, topk, vocab = 40, 10, 3, 6
    entries, kept = drafted(batch, topk, 3, nodes, 3)
    lens = torch.zeros(batch, dtype=torch.long)
    _, _, index, child, sibling = made = buffers(batch, nodes, lens, "QLEN_ONLY")
    plugin.build_tree_for_sglang(entries, kept, lens, *made, topk, 3, nodes, 1)
    rng = torch.Generator().manual_seed(4)
    candidates = torch.randint(0, vocab, (batch, nodes), generator=rng)
    for b in range(batch):  # siblings are different tokens
        for node in range(nodes):
            at, used = int(child[b, node]), set()
            while at != -1:
                candidates[b, at] = next(
                    t for t in range(vocab) if t not in used and (t + b + node) % 2 == len(used) % 2
                )
                used.add(int(candidates[b, at]))
                at = int(sibling[b, at])
    probs = torch.rand(batch, nodes, vocab, generator=rng).softmax(-1)
    coins, final = torch.rand(batch, nodes, generator=rng), torch.rand(batch, generator=rng)
    predicts, accepted, count = outcome(batch, nodes, 4)
    plugin.sample_target_only_for_sglang(
        predicts, accepted, count, candidates, index, child, sibling, coins, final, probs, torch.zeros_like(probs)
    )
    for b in range(batch):

        def accept(parent, node, tried, b=b):
            mass = sum(probs[b, parent, candidates[b, n]].double() for n in [*tried, node])
            return coins[b, parent].double() < mass

        path, tried = walk(child[b].tolist(), sibling[b].tolist(), accept)
        left = probs[b, path[-1]].double().clone()
        left[[int(candidates[b, n]) for n in tried]] = 0
        token = int(torch.searchsorted(left.cumsum(0), final[b].double() * left.sum(), right=True))
        assert int(count[b]) == len(path) - 1
        assert accepted[b, : len(path)].tolist() == [b * nodes + n for n in path]
        assert int(predicts[b * nodes + path[-1]]) == token
        for node, following in itertools.pairwise(path):
            assert int(predicts[b * nodes + node]) == int(candidates[b, following])
    assert len(set(count.tolist())) > 2
    with pytest.raises(NotImplementedError, match="thresholds: expected 1"):
        plugin.sample_target_only_for_sglang(
            predicts, accepted, count, candidates, index, child, sibling, coins, final, probs, threshold_acc=0.9
        )


# ---- registration


@pytest.mark.parametrize("call", ["greedy", "target_only", "chain", "tree"])
def test_verifiers_read_no_value_of_the_device(call):
    """Whoever counts on the host what a mask chooses raises under fake tensors."""
    batch, nodes, vocab = 2, 4, 9
    index = torch.arange(batch * nodes).view(batch, nodes)
    child, sibling = (torch.tensor([row] * batch) for row in ([1, 2, 3, -1], [-1] * 4))
    candidates = torch.randint(0, vocab, (batch, nodes))
    probs, coins, final = torch.rand(batch * nodes, vocab).softmax(1), torch.rand(batch, nodes), torch.rand(batch)
    out = (torch.zeros(batch * nodes + 1).int(), torch.zeros(batch, nodes).int(), torch.zeros(batch).int())
    rows = probs.view(batch, nodes, vocab)
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(t) for t in (*out, candidates, index, child, sibling)]
        laws = [mode.from_tensor(t) for t in (coins, final, probs, rows)]
        if call == "greedy":
            verify.verify_greedy_for_sglang(*given, mode.from_tensor(candidates))
        elif call == "target_only":
            verify.sample_target_only_for_sglang(*given, *laws[:3])
        elif call == "chain":
            verify.sample_chain_for_sglang(*given, *laws)
            verify.sample_chain_for_sglang(*given, *laws, block_verification=True)
        else:
            verify.sample_tree_rejection_for_sglang(*given, *laws)


class Registry:
    def __init__(self):
        self.hooks = {}

    def register(self, target, hook, hook_type):
        self.hooks[target] = (hook, hook_type)


def fake_sglang(monkeypatch, **functions):
    """Modules with SGLang's names and parameters; one sampler is None, as on the CPU."""
    registry = Registry()
    factories: dict[str, object] = {"lru": object}
    modules = {
        "sglang": {"__version__": "0.5.23"}, "sglang.srt": {}, "sglang.srt.plugins": {}, "sglang.srt.speculative": {},
        "sglang.srt.mem_cache": {}, "sglang.srt.arg_groups": {},
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": registry, "HookType": types.SimpleNamespace(REPLACE="replace", AROUND="around"),
        },
        plugin._USER: {
            "build_tree_kernel_efficient_func": plugin.build_tree_for_sglang,
            "verify_tree_greedy_func": plugin.verify_greedy_for_sglang,
            "tree_speculative_sampling_target_only": None,
            "chain_speculative_sampling_triton": plugin.sample_chain_for_sglang, **functions,
        },
        "sglang.srt.speculative.spec_utils": {
            "move_accept_tokens_to_target_kvcache":
                lambda batch, accept_index, num_correct_drafts, token_to_kv_pool_allocator: None,
        },
        "sglang.srt.mem_cache.utils": {
            "_EVICTION_POLICY_FACTORIES": factories, "get_eviction_strategy": lambda eviction_policy, config=None: None,
        },
        "sglang.srt.arg_groups.choices": {"add_radix_eviction_policy_choices": [].extend},
    }  # fmt: skip
    for name, content in modules.items():
        made = types.ModuleType(name)
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, name, made)
    return registry, factories


def test_register_replaces_by_name(monkeypatch):
    registry, factories = fake_sglang(monkeypatch)
    assert plugin.register()
    assert plugin.register()  # once more changes nothing
    replaced = {path: (ours, "replace") for path, ours in plugin.HOOKS.items() if "target_only" not in path}
    around = (plugin.compact_kv_for_sglang, "around")
    assert registry.hooks == replaced | {
        "sglang.srt.speculative.spec_utils.move_accept_tokens_to_target_kvcache": around
    }
    assert list(factories) == ["lru", "specdec_soft_first"]


def test_a_moved_function_leaves_sglang_alone(monkeypatch, caplog):
    registry, factories = fake_sglang(monkeypatch, verify_tree_greedy_func=lambda predicts, candidates: None)
    assert not plugin.register()
    assert not registry.hooks
    assert list(factories) == ["lru"]
    (record,) = caplog.records
    assert "verify_tree_greedy_func: expected parameters predicts, accept_index" in record.getMessage()
    assert "\n" not in record.getMessage()
    fake_sglang(monkeypatch, build_tree_kernel_efficient_func=None)
    assert "build_tree_kernel_efficient_func: TypeError" in plugin.moved_hooks()[0]
    fake_sglang(monkeypatch, chain_speculative_sampling_triton=lambda predicts: None)
    assert "chain_speculative_sampling_triton: expected parameters predicts" in plugin.moved_hooks()[0]
    fake_sglang(monkeypatch)
    del sys.modules["sglang.srt.speculative.spec_utils"].move_accept_tokens_to_target_kvcache
    assert "move_accept_tokens_to_target_kvcache: AttributeError" in plugin.moved_hooks()[0]
    monkeypatch.setitem(sys.modules, "sglang", None)
    assert not plugin.register()


# ---- with SGLang (make test-sglang)


def in_a_process(call: str) -> None:
    """SGLang's registry patches every module that imported what it replaces: not for a test session."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("no sglang here (make test-sglang)")
    code = f"import os; from tests import test_integration_sglang as t, test_integration_sglang_cache as c; {call}"
    code += "; print('DROVE', flush=True); os._exit(0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert "DROVE" in done.stdout, (done.stdout + done.stderr)[-4000:]


def test_sglangs_own_tree_organisation_calls_ours():
    in_a_process("t.drive_sglang()")


def without_torchvisions_kernels() -> None:
    """torchvision's wheel wants CUDA; SGLang only imports it here."""
    sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")


def hooked_sglang():
    """SGLang's EAGLE module with our functions in it, as its own registry puts them there."""
    without_torchvisions_kernels()
    eagle_utils = importlib.import_module(plugin._USER)
    assert plugin.moved_hooks() == []
    assert plugin.register()
    importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry.apply_hooks()
    return eagle_utils


def drive_sglang() -> None:
    """From SGLang's draft lists through its `organize_draft_results` and `build_tree_kernel_efficient` to the greedy
    verifier, with our functions in its EAGLE module as its own registry puts them there: the results are the loop's."""
    eagle_utils = hooked_sglang()
    batch, nodes, topk, levels = 3, 12, 4, 3
    rng = torch.Generator().manual_seed(8)
    scores, tokens, parents = [], [], []
    for level in range(levels):
        width = topk if level == 0 else topk * topk
        scores.append(torch.rand(batch, 1 if level == 0 else topk, topk, generator=rng))
        tokens.append(torch.randint(0, 3, (batch, width), generator=rng))
        first = topk * topk * (level - 1) + topk
        entry = (
            [list(range(-1, topk))]
            if level == 0
            else [sorted(torch.randperm(topk * topk, generator=rng)[:topk].tolist())]
        )
        parents.append(torch.tensor(entry).repeat(batch, 1) + (first if level else 0))
    lists, index, drafts = eagle_utils.organize_draft_results(scores, tokens, parents, nodes)
    called = []
    whole = plugin.build_tree
    plugin.build_tree = lambda *a, **k: (called.append("build"), whole(*a, **k))[1]
    lens = torch.tensor([3, 0, 6])
    mode = eagle_utils.TreeMaskMode.QLEN_ONLY
    _mask, _positions, retrieve, child, sibling, flat = eagle_utils.build_tree_kernel_efficient(
        torch.tensor([1, 2, 0]), lists, index, drafts, lens, int(lens.sum()), topk, levels, nodes, mode
    )
    assert called == ["build"]
    for b in range(batch):
        kept = index[b].tolist()
        above = [c // topk for c in kept]
        if any(e and int(lists[b, e]) not in kept for e in above):
            continue  # random scores need not keep a child's parent
        _expected, first_child, following = loop_tree(lists[b].tolist(), kept, topk)
        assert (child[b].tolist(), sibling[b].tolist()) == (first_child, following)
    target = torch.randint(0, 3, (batch, nodes), generator=rng)
    candidates = flat.view(batch, nodes)
    _predicts, accepted, count = eagle_utils.verify_tree_greedy_func(
        *outcome(batch, nodes, levels + 1), candidates, retrieve, child, sibling, target, topk
    )
    for b in range(batch):
        path, _ = walk(child[b].tolist(), sibling[b].tolist(), lambda p, c, t, b=b: candidates[b, c] == target[b, p])
        assert int(count[b]) == len(path) - 1
        assert accepted[b, : len(path)].tolist() == [b * nodes + n for n in path]
