"""vLLM plug-in: the V2 runner's sampler, kernels by name, statistics; signatures of a version that is not installed."""

from __future__ import annotations

import ast
import sys
import types
import zipfile
from pathlib import Path

import pytest
import torch

from specdec_kernels.engine.metrics import EngineCounters
from specdec_kernels.integrations import vllm, vllm_kernels, vllm_stats, vllm_v2
from specdec_kernels.integrations._hooks import Hook
from tests.test_integration_vllm import chi_square

ROOT = Path(__file__).parents[1]

# ---- runner V2


def batch_v2(counts, vocab, ids, draft_logits=None, temperature=1.0, slots=None, target=None):
    """What vLLM's V2 sampler hands on: every request's rows in order, its drafts' tokens one row behind."""
    requests = len(counts)
    slots = list(range(requests)) if slots is None else slots
    sizes = [count + 1 for count in counts]
    total, steps = sum(sizes), max(counts)
    rows = [(b, i) for b, size in enumerate(sizes) for i in range(size)]
    queue = iter(ids)
    temperature = [temperature] * requests if isinstance(temperature, float) else temperature
    heat = torch.full((max(slots) + 1,), -1.0)
    heat[slots] = torch.tensor(temperature)
    return {
        "target_logits": torch.zeros(total, vocab) if target is None else target, "draft_logits": draft_logits,
        "draft_sampled": torch.tensor([next(queue) if i else 0 for _, i in rows]),
        "cu_num_logits": torch.tensor([0, *sizes]).cumsum(0).int(),
        "pos": torch.tensor([10 * b + i for b, i in rows]), "idx_mapping": torch.tensor(slots).int(),
        "expanded_idx_mapping": torch.tensor([slots[b] for b, _ in rows]).int(),
        "expanded_local_pos": torch.tensor([i for _, i in rows]).int(), "temperature": heat,
        "seed": torch.arange(max(slots) + 1) * 7 + 1, "num_speculative_steps": steps,
    }  # fmt: skip


def test_v2_greedy_is_the_longest_right_prefix():
    target = torch.zeros(7, 11)
    target[torch.arange(7), torch.arange(3, 10)] = 5.0
    given = batch_v2([2, 0, 2], 11, [3, 9, 7, 8], temperature=[0.0, 0.0, 0.0], slots=[4, 1, 0], target=target)
    sampled, count = vllm_v2.rejection_sample(**given)
    assert sampled.tolist() == [[3, 4, -1], [6, -1, -1], [7, 8, 9]]
    assert (count.tolist(), sampled.dtype, count.dtype) == ([2, 1, 3], torch.int64, torch.int32)
    given["draft_sampled"][1] = -1  # never drafted
    assert vllm_v2.rejection_sample(**given)[0][0].tolist() == [3, -1, -1]


@pytest.mark.parametrize("kind", ["drawn", "drawn, block", "fixed"])
def test_v2_law_of_two_tokens(kind):
    """Two temperatures in one batch, drafts drawn at each from logits stored before temperature. Target rows do not
    depend on what was drafted; where one token came, the next is drawn from the second row."""
    torch.manual_seed(3)
    rounds, vocab, heats = 12000, 5, (1.0, 0.5)
    rows, draft = torch.randn(3, vocab) * 1.5, torch.randn(2, vocab)
    requests = 2 * rounds
    heat = torch.tensor([heats[b % 2] for b in range(requests)])
    if kind == "fixed":
        ids = rows[:2].argmax(1).repeat(requests)
    else:
        laws = torch.stack([(draft / h).softmax(-1) for h in heats])  # [2 heats, 2 places, V]
        ids = torch.multinomial(laws.repeat(rounds, 1, 1).flatten(0, 1), 1).flatten()
    target = (rows[None] / heat[:, None, None]).flatten(0, 1)
    given = batch_v2(
        [2] * requests, vocab, ids.tolist(), None if kind == "fixed" else draft.expand(requests, 2, vocab),
        heat.tolist(), target=target,
    )  # fmt: skip
    sampled, count = vllm_v2.rejection_sample(**given, use_block_verification=kind == "drawn, block")
    assert set(count.tolist()) == {1, 2, 3}
    for which, h in enumerate(heats):
        mine = sampled[which::2]
        first, second = (rows[:2] / h).softmax(-1).double()
        following = torch.where(mine[:, 1] >= 0, mine[:, 1], torch.multinomial(second, rounds, replacement=True))
        seen = torch.bincount(mine[:, 0] * vocab + following, minlength=vocab * vocab)
        law = torch.outer(first, second).flatten()
        assert chi_square(seen, law) > 1e-9
        assert chi_square(seen, 0.9 * law + 0.1 * law.roll(4)) < 1e-9  # control
    again, _ = vllm_v2.rejection_sample(**given, use_block_verification=kind == "drawn, block")
    assert torch.equal(again, sampled)  # keyed by seed and position


def test_v2_emits_what_the_drafts_rows_do_not_have():
    """Draft rows narrower than the target's: an id behind them has no draft, but the target may say it."""
    target = torch.zeros(5, 11)
    target[torch.arange(5), torch.tensor([3, 10, 4, 9, 8])] = 50.0
    narrow = torch.zeros(2, 2, 8)
    given = batch_v2([2, 1], 11, [3, 7, 5], draft_logits=narrow, temperature=[1.0, 0.0], target=target)
    sampled, _ = vllm_v2.rejection_sample(**given)
    assert sampled.tolist() == [[3, 10, -1], [9, -1, -1]]


def test_seeds_are_those_of_the_requests_own_generators():
    own = torch.Generator().manual_seed(7)
    metadata = types.SimpleNamespace(
        generators={1: own, 5: torch.Generator()}, temperature=None, all_greedy=True, top_k=None, top_p=None
    )
    torch.manual_seed(3)
    first = vllm.sampling_of(metadata, 3, torch.device("cpu")).seed
    torch.manual_seed(4)
    second = vllm.sampling_of(metadata, 3, torch.device("cpu")).seed
    wanted = [int(torch.randint(2**62, (1,), generator=g)) for g in [torch.Generator().manual_seed(7)] for _ in "ab"]
    assert [int(first[1]), int(second[1])] == wanted
    assert (first != second).all()
    assert first.dtype == torch.int64


def test_v2_leaves_to_vllm_what_it_does_not_say(monkeypatch):
    monkeypatch.setattr(vllm_v2.rejection_sample, "replaced", lambda *a, **k: "vLLM's", raising=False)
    given = batch_v2([1], 4, [2])
    for change in ({"synthetic_conditional_rates": torch.ones(1)}, {"contexts": torch.ones(1)}, {"fly_window_size": 2}):
        assert vllm_v2.rejection_sample(**given, **change) == "vLLM's"
    assert vllm_v2.rejection_sample(**given, contexts=None, fly_window_size=0) != "vLLM's"


# ---- kernels by name


def test_expand_writes_into_the_tensor_it_gets():
    out = torch.full((5,), -7.0)
    vllm_kernels.expand(out, torch.tensor([2.0, 9.0, 0.0]), torch.tensor([2, 2, 5]).int(), 0, 1, 128)
    assert out.tolist() == [2.0, 2.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("drawn", [True, False])
def test_accepted_and_recovered_tokens_are_the_loops(drawn):
    rng = torch.Generator().manual_seed(0)
    counts, vocab, width = [2, 0, 3, 1, 3], 6, 4
    cu, total = torch.tensor(counts).cumsum(0).int(), sum(counts)
    ids = torch.randint(0, vocab, (total,), generator=rng).int()
    ids[3] = -1
    p, q = (torch.randn(total, vocab, generator=rng).softmax(-1) for _ in range(2))
    p[0, ids[0]] = 0
    q[4] = p[4]  # a residual without mass
    coins = torch.rand(total, generator=rng, dtype=torch.float64)
    coins[0], coins[1], coins[2] = 0.0, 0.01, 0.01
    inv_q = torch.rand(len(counts), vocab, generator=rng) + 0.1
    recovered = torch.empty(total, dtype=torch.int32)
    vllm_kernels.recover(recovered, cu, ids, q if drawn else None, p, inv_q, vocab, NO_DRAFT_PROBS=not drawn)
    out = torch.full((5, width), -1, dtype=torch.int32)
    bonus, greedy = torch.arange(20, 25)[:, None], torch.tensor([False, False, False, True, False])
    vllm_kernels.accept_drafts(
        out, cu, ids, q if drawn else None, p, bonus, recovered, coins, greedy, 3, vocab, None, not drawn, False
    )
    token = 0
    for b, count in enumerate(counts):
        expected, open_ = [], True
        for t in range(token, token + count):
            left = p[t].double()
            if drawn:
                left = (left - q[t].double()).clamp(min=0)
            elif ids[t] >= 0:
                left[ids[t]] = 0
            left = left if bool((left > 0).any()) else p[t].double()
            assert int(recovered[t]) == int((left * inv_q[b].double()).argmax())
            law = float(q[t, ids[t]]) if drawn else 1.0
            if open_:
                open_ = bool(ids[t] >= 0) and float(coins[t]) * law < float(p[t, ids[t]])
                expected.append(int(ids[t]) if open_ else int(recovered[t]))
        expected += [20 + b] if open_ else []
        token += count
        assert out[b].tolist() == ([] if greedy[b] else expected) + [-1] * (width - (not greedy[b]) * len(expected))


def test_override_registers_by_name_or_says_what_moved(monkeypatch, caplog):
    given: dict[str, object] = {}
    sampler = types.ModuleType("vllm.v1.sample.rejection_sampler")
    dispatcher = types.ModuleType("vllm.triton_utils.dispatcher")
    dispatcher.register_kernels = lambda overrides: given.update(overrides)
    for name in vllm_kernels.KERNELS:
        setattr(sampler, name.rsplit(".", 1)[1], None)
    root = types.ModuleType("vllm")
    root.__version__ = "0.32.0"
    for module in (root, sampler, dispatcher):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("vllm.v1", "vllm.v1.sample", "vllm.triton_utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert vllm_kernels.override_kernels()
    assert given == vllm_kernels.KERNELS
    del sampler.expand_kernel
    given.clear()
    assert not vllm_kernels.override_kernels()
    assert not given
    assert "expand_kernel: not there" in caplog.records[-1].getMessage()


# ---- statistics


def record(drafts, accepted_per_pos, drafted_per_pos):
    spec = types.SimpleNamespace(
        num_drafts=drafts, num_draft_tokens=sum(drafted_per_pos), num_accepted_tokens=sum(accepted_per_pos),
        num_accepted_tokens_per_pos=accepted_per_pos, num_draft_tokens_per_pos=drafted_per_pos,
    )  # fmt: skip
    prefix = types.SimpleNamespace(queries=8, hits=3)
    scheduler = types.SimpleNamespace(prefix_cache_stats=prefix, spec_decoding_stats=spec)
    return scheduler, types.SimpleNamespace(num_generation_tokens=5, num_prompt_tokens=8, num_preempted_reqs=1)


def test_rates_are_weighted_by_tokens():
    """Two steps: 1 of 4 drafts accepted once, 9 of 9 in nine short chains. Weighted by tokens 10 of 13, not the mean of
    a quarter and one; a position is divided by the drafts made there."""
    counted = EngineCounters()
    counted.merge(vllm_stats.counters_of(*record(1, [1, 0, 0, 0], [1, 1, 1, 1])))
    counted.merge(vllm_stats.counters_of(*record(9, [9, 0, 0, 0], [9, 0, 0, 0])))
    counted.merge(vllm_stats.counters_of(None, None))
    assert counted.acceptance_per_draft == 10 / 13
    assert counted.acceptance_at == [1.0, 0.0, 0.0, 0.0]
    assert (counted.verify_slots, counted.emitted, counted.prefill_tokens) == (23, 10, 16)
    assert (counted.prefix_queries, counted.prefix_hits, counted.preemptions) == (16, 6, 2)
    line = vllm_stats.summary(counted)
    assert line.startswith("speculation: 2.00 tokens a step with drafts, accepted 10 of 13 drafts (0.769)")
    assert line.endswith("useful share of verified rows 0.870")
    assert vllm_stats.summary(EngineCounters()) == ""


def test_a_moved_statistic_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    vllm_stats.stat_logger.cache_clear()
    with pytest.raises(ImportError, match="specdec_kernels: no statistics of vLLM, tested with"):
        vllm_stats.SpecStatLogger  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        vllm_stats.other  # noqa: B018


# ---- another version, read and not run

WHEELS = ROOT / ".venv" / "wheels"
VERSION = "0.33.0"


def parameters_in(wheel: zipfile.ZipFile, hook: Hook) -> tuple[str, ...]:
    """Parameters of a function, a method (`Class.method`) or a dataclass, read from its source."""
    tree = ast.parse(wheel.read(hook.module.replace(".", "/") + ".py"))
    *classes, last = hook.name.split(".")
    body = tree.body
    for name in classes:
        body = next(n for n in body if isinstance(n, ast.ClassDef) and n.name == name).body
    for node in body:
        if isinstance(node, ast.ImportFrom) and last in [alias.name for alias in node.names]:
            return parameters_in(wheel, Hook(str(node.module), last, ()))
        if isinstance(node, ast.FunctionDef) and node.name == last:
            return tuple(a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))
        if isinstance(node, ast.ClassDef) and node.name == last:
            return tuple(n.target.id for n in node.body if isinstance(n, ast.AnnAssign))  # type: ignore[union-attr]
    raise AttributeError(f"{hook.path}: not there")


@pytest.mark.parametrize("part", ["V1", "V2", "kernels", "statistics"])
def test_signatures_of_the_next_version(part):
    """`make wheel-vllm` fetches the wheel; nothing of it is run."""
    found = sorted(WHEELS.glob(f"vllm-{VERSION}-*.whl"))
    if not found:
        pytest.skip(f"no wheel of vLLM {VERSION} here (make wheel-vllm)")
    hooks = {"V1": vllm.HOOKS, "V2": vllm_v2.HOOKS, "kernels": vllm_kernels.HOOKS, "statistics": vllm_stats.HOOKS}[part]
    with zipfile.ZipFile(found[0]) as wheel:
        for hook in hooks:
            assert parameters_in(wheel, hook)[: len(hook.parameters)] == hook.parameters, hook.path
        if part == "kernels":
            for name in vllm_kernels.KERNELS:
                assert parameters_in(wheel, Hook(*name.rsplit(".", 1), ()))
