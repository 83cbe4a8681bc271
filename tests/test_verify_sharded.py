"""verify on vocabulary shards gives what verify gives one process, bit for bit, by every method and for any shards."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from specdec_kernels import _sharded, _sharded_draw
from tests.sampling_helpers import chain, floats, ints, sampling_tensors, tree_tensors
from tests.sampling_requests import random_request
from tests.shard_ranks import Ranks, split

INF, NAN = float("inf"), float("nan")
ALMOST_ONE = 1 - 2.0**-24
DRAWN = ("rejection", "block")
METHODS = ("rejection", "target_only", "block", "typical", "coupled", "greedy")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Ranks]:
    def make(world: int) -> Ranks:
        group = Ranks(world)
        monkeypatch.setattr(_sharded, "dist", group)
        return group

    return make


def batch(
    seed: int, vocab: int, method: str, requests: int, *, filters: bool = True, edits: bool = False, dtype=torch.float32
) -> dict:
    """Arguments of `verify`: random trees (chains for block), laws near each other, and every fault of data."""
    rng = random.Random(seed)
    made = [random_request(rng, vocab, rng.randint(1, 9), edits=edits) for _ in range(requests)]
    for request in made:
        if method == "block" and rng.random() < 0.9:
            last = len(request.parents) - 1
            request.parents, request.draft_of = chain(last), [-1, *range(last)]
            if rng.random() < 0.2:
                request.draft_of = [-1] * (last + 1)
    offsets = np.cumsum([0] + [len(r.logits) for r in made])
    rows = [row + at if row >= 0 else -1 for r, at in zip(made, offsets, strict=False) for row in r.draft_of]
    logits, draft = (floats(np.concatenate([getattr(r, name) for r in made])) for name in ("logits", "draft_logits"))
    ids = [token for r in made for token in r.token_ids]
    N = len(ids)
    for _ in range(max(1, requests // 4)):  # faults of the data
        n = rng.randrange(N)
        fault = rng.randrange(9)
        if fault < 3:
            (logits if fault else draft)[n, rng.randrange(vocab)] = NAN
        elif fault < 5:
            (logits if fault == 3 else draft)[n, ::5] = INF
        elif fault == 5:
            (logits if rng.random() < 0.5 else draft)[n] = -INF
        elif fault == 6:
            ids[n] = rng.choice([vocab, vocab + 70000, -5])
        elif fault == 7:
            ids[n] = ids[max(n - 1, 0)]  # often a twin
        else:
            rows[n] = rng.choice([-1, N, -9, rows[n - 1] if n not in offsets else -1])  # a row is one request's
    tree = tree_tensors([list(r.parents) for r in made])
    if rng.random() < 0.3:
        tree.next_sibling[rng.randrange(N)] = rng.randrange(-2, 9)
    shapes = [r.parameters for r in made]
    off = dict(top_k=0, top_p=1.0, min_p=0.0)
    numbers = {name: [getattr(p, name) if filters else off[name] for p in shapes] for name in off}
    heat = [rng.choice([p.temperature] * 8 + [-1.0, NAN, 1e-3]) if filters else 1.0 for p in shapes]
    options: dict[str, Any] = {"method": method, "return_logprobs": rng.choice(["raw", "processed", "both"])}
    if method in DRAWN:
        options |= dict(draft_logits=draft.to(dtype), draft_rows=ints(rows))
        if rng.random() < 0.5:
            cold = sampling_tensors(requests, temperature=[rng.choice([0.8, 1.0, 0.0]) for _ in made],
                                    top_k=[rng.choice([0, 4]) for _ in made])  # fmt: skip
            options["draft_sampling"] = cold
    if rng.random() < 0.3:
        options["uniforms"] = floats([rng.choice([rng.random(), 0.0, ALMOST_ONE]) for _ in ids], dtype=torch.float64)
    sampling = sampling_tensors(
        requests, temperature=heat, **numbers, seed=[r.seed for r in made], position=[r.position for r in made],
        step=[r.step for r in made],
    )  # fmt: skip
    if edits:
        entries = [[*sorted(row.items()), *sorted(row.items())[:1]] for r in made for row in r.bias]  # one id twice
        cu = ints(np.cumsum([0] + [len(row) for row in entries]))
        flat = [entry for row in entries for entry in row]
        options["bias"] = (cu, ints([token for token, _ in flat]), floats([value for _, value in flat]))
        options["allowed"] = torch.as_tensor(np.concatenate([r.allowed for r in made]))
        options["vocab_size"] = max(2, vocab - rng.choice([0, 3, 40]))
    return dict(target_logits=logits.to(dtype), draft_token_ids=ints(ids), tree=tree, sampling=sampling) | options


def reduced(seed: int, vocab: int, method: str, requests: int, **more: Any) -> dict:
    """The same with drafts from a third of the vocabulary; two columns without an id, one id with two columns."""
    arguments, draws = batch(seed, vocab, method, requests, **more), torch.Generator().manual_seed(seed)
    ids = torch.randperm(vocab, generator=draws)[: vocab // 3].sort().values
    arguments["draft_logits"] = arguments["draft_logits"][:, ids]
    ids[3], ids[9], ids[5] = vocab + 5, -2, ids[4]
    arguments["d2t"] = (ids - torch.arange(len(ids))).int()
    row = arguments["draft_rows"].long()
    likely = arguments["draft_logits"].float()[row.clamp(0, len(arguments["draft_logits"]) - 1)].topk(3).indices
    some = ids[likely[torch.arange(len(row)), torch.randint(0, 3, row.shape, generator=draws)]].int()
    keep = (row < 0) | (torch.rand(some.shape, generator=draws) < 0.2)
    arguments["draft_token_ids"] = torch.where(keep, arguments["draft_token_ids"], some)
    return arguments


def shard_of(arguments: dict, begin: int, end: int) -> dict:
    """What the rank with columns [begin, end) is given."""
    columns = {"target_logits": slice(begin, end), "allowed": slice(begin // 32, -(-end // 32))}
    if "d2t" not in arguments:
        columns["draft_logits"] = slice(begin, end)
    return arguments | {name: arguments[name][:, part] for name, part in columns.items() if name in arguments}


def on_shards(group: Ranks, arguments: dict, **more: Any) -> list[Any]:
    """verify_sharded on every rank of `group`."""
    begin = split(arguments["target_logits"].shape[1], group.world)

    def work(rank: int) -> Any:
        mine = shard_of(arguments, begin[rank], begin[rank + 1])
        return sk.verify_sharded(**mine, vocab_start=begin[rank], group=group, **more)

    return group.run(work)


def assert_same(found: Sequence[Any], right: Sequence[Any], what: Any) -> None:
    for a, b, name in zip(found, right, sk.sampling.Verified._fields, strict=True):
        if b is not None:
            wrong = (a != b).nonzero().tolist()
            assert not wrong, (what, name, wrong[:5], a[wrong[0][0]], b[wrong[0][0]])


def check(group: Ranks, arguments: dict, what: Any, **more: Any) -> Any:
    right = sk.verify(**arguments)
    for rank, found in enumerate(on_shards(group, arguments, **more)):
        assert_same(found, right, (what, rank))
    return right


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("method", METHODS)
def test_shards_give_what_one_process_gives(method, world, ranks):
    """Chains and trees, filters, drafts drawn and deterministic, faults; the second vocabulary has cut blocks."""
    group, drafts = ranks(world), 0
    for seed, vocab in enumerate([37 if world == 1 else 97, 1500]):
        right = check(group, batch(seed + 10 * world, vocab, method, 12), (method, seed, vocab))
        drafts += int((right.num_emitted - 1).sum())
    assert drafts > (3 if method in DRAWN else -1)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("method", METHODS)
def test_edited_rows_on_shards(method, world, ranks):
    """Masks and biases of every node; a vocabulary that ends before the last shard does, or before it begins."""
    for seed, vocab in ((0, 97 if world == 3 else 37), (2, 1500)):
        check(ranks(world), batch(seed + world, vocab, method, 12, edits=True), (method, seed, vocab))
    few = batch(5, 97, method, 6, edits=True) | dict(vocab_size=50)
    check(ranks(world), few, (method, "few ids"))


@pytest.mark.parametrize("edits", [False, True], ids=["plain", "edited"])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("method", DRAWN)
def test_reduced_draft_vocabulary_on_shards(method, world, edits, ranks):
    drafts = 0
    for seed, vocab in ((0, 97), (1, 1500)):
        right = check(ranks(world), reduced(seed, vocab, method, 12, edits=edits), (method, seed, vocab))
        drafts += int((right.num_emitted - 1).clamp_min(0).sum())
    assert drafts > 1


@pytest.mark.parametrize("world", [1, 3])
def test_sample_from_edited_rows_on_shards(world, ranks):
    arguments = batch(3, 1500, "greedy", 12, edits=True)
    R, group, begin = len(arguments["target_logits"]), ranks(world), split(1500, world)
    sampling = sampling_tensors(
        R, temperature=[(1.0, 0.0, 0.6)[r % 3] for r in range(R)], top_p=[(1.0, 0.8)[r % 2] for r in range(R)],
        seed=range(R),
    )  # fmt: skip
    edits = {name: arguments[name] for name in ("allowed", "bias", "vocab_size")}
    for wanted in ("raw", "processed", "both"):
        right = sk.sample(arguments["target_logits"], sampling, return_logprobs=wanted, **edits)

        def work(rank: int, wanted: str = wanted) -> Any:
            mine = shard_of(arguments, begin[rank], begin[rank + 1])
            own = edits | dict(allowed=mine["allowed"], vocab_start=begin[rank], group=group)
            return sk.sample_sharded(mine["target_logits"], sampling, return_logprobs=wanted, **own)

        for found in group.run(work):
            for a, b in zip(found, right, strict=True):
                assert torch.equal(a, b), (world, wanted)


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_many_batches_on_shards(method, ranks):
    """Every world, many vocabularies, both half precisions."""
    flags = 0
    for seed in range(60):
        rng = random.Random(seed)
        vocab = rng.choice([5, 33, 97, 131, 1025, 1500, 2049, 5000])
        world = rng.randint(1, max(1, min(4, vocab // 32)))  # no shard is empty
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
        make = reduced if method in DRAWN and seed % 3 == 0 and vocab > 90 else batch
        made = make(seed, vocab, method, 16, edits=seed % 2 == 0 and vocab > 90, dtype=dtype)
        right = check(ranks(world), made, (method, seed, vocab, world))
        flags |= int(np.bitwise_or.reduce(right.flags.numpy()))
    every = sk.Flag.NAN_LOGIT | sk.Flag.DEAD_ROW | sk.Flag.INF_LOGIT | sk.Flag.TOKEN_RANGE | sk.Flag.TREE
    assert flags & every == every, flags


def thin(vocab: int, requests: int, shift: float) -> dict:
    """Chains of one draft that is rejected, from a draft law close to the target: little is left, races end late."""
    draws = torch.Generator().manual_seed(vocab)
    logits = torch.randn(2 * requests, vocab, generator=draws) * 2
    draft = logits[::2] + shift * torch.randn(requests, vocab, generator=draws)
    ids = torch.stack([torch.zeros(requests).int(), (draft - logits[::2]).argmax(1).int()], 1)
    return dict(
        target_logits=logits, draft_token_ids=ids.flatten(), tree=tree_tensors([[-1, 0]] * requests),
        sampling=sampling_tensors(requests, seed=range(requests)), draft_logits=draft,
        draft_rows=ints([row for r in range(requests) for row in (-1, r)]),
        uniforms=torch.full((2 * requests,), ALMOST_ONE), method="rejection",
    )  # fmt: skip


@pytest.mark.parametrize("world", [2, 3])
def test_races_that_nobody_decides(world, ranks, monkeypatch):
    """Where the race is undecided on every rank all of them draw token by token, where nothing is left from the row."""
    levels: list[torch.Tensor] = []
    race = _sharded_draw.race

    def noted(*args: Any) -> Any:
        best = race(*args)
        levels.append(best[0][0] > -INF)
        return best

    monkeypatch.setattr(_sharded_draw, "race", noted)
    right = check(ranks(world), thin(1500, 24, 0.05), "thin", max_siblings=1)
    assert int(right.num_emitted.max()) == 1
    decided = torch.stack(levels).any(0)
    assert 0 < int(decided.sum()) < 24
    same = thin(1500, 4, 0.0)
    right = check(ranks(world), same, "nothing left", max_siblings=1)
    assert (right.flags == sk.Flag.ZERO_RESIDUAL).all() or int(right.num_emitted.max()) == 2


def test_control_a_cut_block_needs_the_bounds_of_both_ranks(ranks, monkeypatch):
    """With its own half's bounds a rank draws other tokens: the exchange is what makes the shards agree."""
    arguments = thin(1100, 64, 0.6)
    right = sk.verify(**arguments)
    assert_same(on_shards(ranks(2), arguments)[0], right, "exchanged")
    monkeypatch.setattr(_sharded.Shards, "starts", lambda self, start, device: torch.zeros(1, dtype=torch.long))
    alone = on_shards(ranks(2), arguments)[0]
    assert (alone.output_token_ids != right.output_token_ids).any(1).float().mean() > 0.05


@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize(("dtype", "world"), [(torch.float32, 2), (torch.float32, 3), (torch.bfloat16, 3)])
def test_bytes_that_cross_ranks(dtype, world, gamma, ranks):
    """At most 64 bytes a row of logits unfiltered; 8 KiB of histograms for top-k and for top-p."""
    B, V = 4, 1500
    N, draws = B * (gamma + 1), torch.Generator().manual_seed(0)
    logits, draft = (torch.randn(n, V, generator=draws).to(dtype) for n in (N, B * gamma))
    arguments = dict(target_logits=logits, draft_token_ids=torch.zeros(N).int(), tree=tree_tensors([chain(gamma)] * B))
    for method in METHODS:
        drawn = dict(draft_logits=draft) if method in DRAWN else {}
        rows = N + len(draft) * (method in DRAWN)
        spent = []
        for filters in ({}, {"top_k": [5] * B}, {"top_k": [5] * B, "top_p": [0.5] * B}):
            group = ranks(world)
            shaped = arguments | drawn | dict(sampling=sampling_tensors(B, **filters), method=method)
            on_shards(group, shaped, max_siblings=1)
            assert len(set(group.sent)) == 1
            spent.append(group.sent[0] / rows)
        assert 16 < spent[0] <= 64, (method, spent)
        if method != "greedy":
            for number in (1, 2):
                assert 8192 < spent[number] - spent[number - 1] < 8300, (method, spent)


def test_arguments(ranks):
    arguments = batch(0, 64, "rejection", 2)
    shard = dict(vocab_start=0, group=None)
    with pytest.raises(ValueError, match="verify_sharded: method: expected one of"):
        sk.verify_sharded(**(arguments | dict(method="other")), **shard)
    with pytest.raises(ValueError, match="verify_sharded: draft_logits: expected 64 columns as target_logits, got 63"):
        sk.verify_sharded(**(arguments | dict(draft_logits=arguments["draft_logits"][:, 1:])), **shard)
    words = torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"verify_sharded: allowed: expected this shard's words \[\d+, 2\], got"):
        sk.verify_sharded(**(arguments | dict(allowed=words)), **shard)
    with pytest.raises(ValueError, match="verify_sharded: vocab_start: expected a multiple of 32, got 8"):
        sk.verify_sharded(**arguments, vocab_start=8, group=None)
    with pytest.raises(ValueError, match="verify_sharded: draft_logits: expected the rows that draft_rows points into"):
        sk.verify_sharded(**(arguments | dict(draft_logits=None)), **shard)
    crowded = arguments | dict(tree=tree_tensors([[-1, 0, 0, 0]]), method="target_only", return_logprobs=None)
    crowded |= dict(target_logits=torch.zeros(4, 64), draft_token_ids=ints([0, 1, 2, 3]), uniforms=None)
    crowded |= dict(draft_logits=None, draft_rows=None, draft_sampling=None, sampling=sampling_tensors(1))
    assert int(sk.verify_sharded(**crowded, **shard, max_siblings=2).flags) == sk.Flag.TREE
    assert int(sk.verify_sharded(**crowded, **shard).flags) == 0


def test_bad_arguments_are_named():
    """As verify and sample do: nothing is spread over the rows that does not have one for each."""
    tree, logits, ids = tree_tensors([[-1, 0], [-1, 0]]), torch.zeros(4, 64), ints([0, 1, 0, 1])
    good, shard = sampling_tensors(2), dict(vocab_start=0, group=None)

    def run(sampling=good, tree=tree, **more: Any) -> Any:
        return sk.verify_sharded(logits, ids, tree, sampling, method="rejection", **shard, **more)

    assert run().num_emitted.tolist() == sk.verify(logits, ids, tree, good, method="rejection").num_emitted.tolist()
    for wrong, error, message in (
        ({"sampling": {"temperature": 1.0}}, TypeError, "sampling: expected a Sampling, got dict"),
        ({"sampling": sk.Sampling(torch.ones(2))}, TypeError, "seed: expected a tensor, got NoneType"),
        ({"sampling": sampling_tensors(3)}, ValueError, "tree: expected 3 requests as in sampling, got 2"),
        ({"sampling": sk.Sampling(**vars(good) | {"top_p": torch.ones(1)})}, ValueError,
         r"top_p: expected shape \[2\], got \[1\]"),
        ({"tree": [-1, 0]}, TypeError, r"tree: expected a DraftTree .*, got list"),
        ({"tree": tree_tensors([[-1, 0], [-1]])}, ValueError, "tree: expected 4 entries, got 3"),
        ({"draft_sampling": 1.0}, TypeError, "draft_sampling: expected a Sampling, got float"),
        ({"draft_sampling": sk.Sampling(torch.ones(1))}, ValueError,
         "draft_sampling temperature: expected 2 entries, got 1"),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^verify_sharded: {message}"):
            run(**wrong)
    for sampling, error, message in (
        (1.0, TypeError, "sampling: expected a Sampling, got float"),
        (sk.Sampling(torch.ones(4)), TypeError, "seed: expected a tensor, got NoneType"),
        (sk.Sampling(**vars(sampling_tensors(4)) | {"top_k": ints([1])}), ValueError,
         r"top_k: expected shape \[4\], got \[1\]"),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^sample_sharded: {message}"):
            sk.sample_sharded(logits, sampling, **shard)


def test_no_constant_is_copied_to_the_device(monkeypatch: pytest.MonkeyPatch):
    """`torch.tensor(number, device=...)` waits for the stream and may not be captured: no method makes one."""
    calls = [batch(3, 97, method, 4, edits=True) for method in METHODS]
    monkeypatch.setattr(torch, "tensor", lambda *args, **kwargs: pytest.fail("a tensor made of host values"))
    for arguments in calls:
        sk.verify_sharded(**arguments, vocab_start=0, group=None)
