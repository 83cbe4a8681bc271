"""sample and verify on vocabulary shards: torch.distributed on gloo gives what one process gives."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import specdec_kernels as sk
from specdec_kernels import _sharded
from tests.sampling_helpers import ints, sampling_tensors, tree_tensors
from tests.shard_ranks import split

INF, NAN = float("inf"), float("nan")
DTYPES, WIDE = (torch.float32, torch.bfloat16), 151_936
PARENTS = [-1, 0, 0, 1, 1, 2]


def rows(V: int, dtype: torch.dtype) -> tuple[torch.Tensor, sk.Sampling]:
    """A row a filter, faults and ties among them."""
    shapes = list(itertools.product((1.0, 0.6), (0, 1, 40), (1.0, 0.9), (0.0, 0.02)))
    R = len(shapes) + 6
    logits = torch.randn(R, V, generator=torch.Generator().manual_seed(V)) * 3
    logits[1::3] = logits[1::3].round()
    logits[0], logits[2, V - 2], logits[5, ::9], logits[8, V // 2 :] = -INF, NAN, INF, -INF
    odd = [(0.0, 0, 1.0, 0.0), (-1.0, 5, 0.5, 0.1), (2.0, 3, 0.2, 0.5), (1.0, V, 0.0, 1.0), (1.0, 0, NAN, 0.0)]
    temperature, top_k, top_p, min_p = zip(*shapes, *odd, (1e-3, 0, 0.5, 0.0), strict=True)
    numbers = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=range(-R, 0))
    keep = slice(None) if V < WIDE else slice(2, None, 5)
    numbers = {name: list(column)[keep] for name, column in numbers.items()}
    position = [2**33 + r for r in range(R)][keep]
    return logits[keep].to(dtype), sampling_tensors(len(position), **numbers, position=position)


def trees(V: int) -> tuple[torch.Tensor, torch.Tensor, sk.DraftTree, sk.Sampling]:
    """Trees whose drafts are often the target's own token; twins, ids that do not exist, a dead row, a NaN."""
    B, n = 8 if V < WIDE else 2, len(PARENTS)
    sampling = sampling_tensors(
        B, temperature=[1.0, 0.0, 0.7, 1.3, 1.0, 0.0, 0.7, 1.3][:B], top_p=[0.9, 1.0] * (B // 2), seed=range(B),
        position=range(B),
    )  # fmt: skip
    logits = torch.randn(B * n, V, generator=torch.Generator().manual_seed(1)) * 4
    logits[n], logits[2, V - 1] = -INF, NAN
    tree = tree_tensors([PARENTS] * B)
    own = sk.verify(logits, ints([0] * B * n), tree, sampling, method="coupled").output_token_ids[:, 0]
    ids = torch.randint(0, V, (B, n), generator=torch.Generator().manual_seed(2)).int()
    ids[0, 1], ids[:6, 2] = logits[0].argmax(), own[:6]
    if B == 2:
        return logits, ids.view(-1), tree, sampling
    ids[3, 1], ids[4, 1], ids[5, 1], ids[6, 1] = own[3], V + 4, -1, ids[6, 2]
    return logits, ids.view(-1), tree, sampling


def verifications(V: int, whole: bool) -> list[dict]:
    """Arguments of verify by every method (wide rows: of some, unless `whole`), drafts drawn near the target's law."""
    logits, ids, tree, sampling = trees(V)
    common = dict(tree=tree, sampling=sampling)
    exact = [dict(target_logits=logits, draft_token_ids=ids, method=m) for m in ("greedy", "coupled", "target_only")]
    near = torch.Generator().manual_seed(3)
    draft = logits.nan_to_num(0.0, 0.0, 0.0) + 0.5 * torch.randn(logits.shape, generator=near)
    parent = (torch.arange(len(ids)) // len(PARENTS) * len(PARENTS)).int() + tree.parents.clamp_min(0)
    hot = draft.log_softmax(1) - torch.empty_like(draft).exponential_(generator=near).log()
    best = hot.topk(2, 1).indices.int()  # two draws without replacement: the first and the second child
    drawn = best[parent.long(), (torch.arange(len(ids)) % 2 == 0).long()]
    rows = torch.where(tree.parents >= 0, parent, -1)
    sampled = dict(target_logits=logits, draft_token_ids=drawn, draft_logits=draft, draft_rows=rows)
    line = tree_tensors([[-1, *range(len(PARENTS) - 1)]] * (len(tree.cu_nodes) - 1))
    chained = dict(tree=line, draft_token_ids=best[(torch.arange(len(ids)) - 1).clamp_min(0), 0])
    after = dict(draft_rows=torch.where(line.parents >= 0, torch.arange(len(ids)).int() - 1, -1))
    every = [*exact, sampled | dict(method="rejection"), sampled | chained | after | dict(method="block")]
    every += [dict(target_logits=logits, draft_token_ids=drawn, method="typical", epsilon=0.01, delta=0.01)]
    names = ("raw", "both", "processed")
    every = [common | one | dict(return_logprobs=names[i % 3]) for i, one in enumerate(every)]
    return every if whole or V < WIDE else every[1:4:2]


def answers(start: int, end: int | None, V: int, group, whole: bool = True) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for dtype in DTYPES[V >= WIDE :]:
        logits, sampling = rows(V, dtype)
        found += sk.sample_sharded(
            logits[:, start:end], sampling, vocab_start=start, group=group, return_logprobs="both"
        )
    for arguments in verifications(V, whole):
        mine = {k: v[:, start:end] if k.endswith("_logits") else v for k, v in arguments.items()}
        out = sk.verify_sharded(**mine, vocab_start=start, group=group, max_siblings=2)
        found += [x for x in out if x is not None]
    return found


def expected(V: int, whole: bool = True) -> list[torch.Tensor]:
    right: list[torch.Tensor] = []
    for dtype in DTYPES[V >= WIDE :]:
        right += sk.sample(*rows(V, dtype), return_logprobs="both")
    for arguments in verifications(V, whole):
        out = sk.verify(**arguments)
        assert int(out.num_emitted.max()) > 1 or arguments["method"] == "target_only", arguments["method"]
        right += [x for x in out if x is not None]
    return right


def same(found: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert len(found) == len(right)
    for index, (a, b) in enumerate(zip(found, right, strict=True)):
        wrong = (a != b).nonzero().tolist()
        assert not wrong, (index, wrong[:5])


@pytest.mark.parametrize("V", [5, 1000])
def test_one_shard_is_the_op(V: int):
    same(answers(0, None, V, None), expected(V))


def rank_main(rank: int, world: int, whole: bool, folder: str) -> None:
    torch.set_num_threads(1)
    if not dist.is_initialized():
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    try:
        for V in (131, WIDE):
            begin = split(V, world)
            found = answers(begin[rank], begin[rank + 1], V, dist.group.WORLD, whole)
            torch.save(found, f"{folder}/{V}-{rank}.pt")
    finally:
        dist.destroy_process_group()


def expect_one_process(folder: Path, world: int, whole: bool) -> None:
    for V in (131, WIDE):
        right = expected(V, whole)
        for rank in range(world):
            same(torch.load(folder / f"{V}-{rank}.pt"), right)


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("world", "whole"), [(3, False), pytest.param(2, True, marks=LONG), pytest.param(3, True, marks=LONG)]
)
def test_ranks_give_what_one_process_gives(world: int, whole: bool, tmp_path: Path):
    """Every rank's tokens, flags and log-probabilities, bit for bit; shards of a real vocabulary and of 131 ids."""
    mp.spawn(rank_main, (world, whole, str(tmp_path)), nprocs=world)
    expect_one_process(tmp_path, world, whole)


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 3])
def test_torchrun(world: int, tmp_path: Path):
    (tmp_path / "rank.py").write_text(
        "import sys; from tests import test_sampling_sharded as t; import torch.distributed as d\n"
        "d.init_process_group('gloo')\nt.rank_main(d.get_rank(), d.get_world_size(), False, sys.argv[1])\n"
    )
    root = str(Path(__file__).parents[1])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    done = subprocess.run(
        [*launcher, str(tmp_path / "rank.py"), str(tmp_path)], capture_output=True, text=True, cwd=root,
        env=os.environ | {"PYTHONPATH": root, "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    expect_one_process(tmp_path, world, False)


def test_control_a_shard_read_as_the_whole_row_differs():
    """Ranks that do not reduce draw from their own columns alone."""
    logits, sampling = rows(1000, torch.float32)
    whole = sk.sample(logits, sampling).token_ids
    alone = sk.sample_sharded(logits[:, :480], sampling, vocab_start=0, group=None).token_ids
    assert (alone != whole).float().mean() > 0.3


def test_bytes_that_cross_ranks(monkeypatch: pytest.MonkeyPatch):
    """At most 64 bytes a row where nothing is filtered; a histogram of 8 KiB for each of top-k and top-p."""
    spent = 0

    def count(self, tensor, op):
        nonlocal spent
        spent += tensor.numel() * tensor.element_size()
        return tensor

    monkeypatch.setattr(_sharded.Shards, "reduce", count)
    R, logits = 32, torch.randn(32, 100)
    for filters, least, most in (({}, 24, 40), ({"top_k": 5}, 8192, 8300), ({"top_k": 5, "top_p": 0.5}, 16384, 16600)):
        spent = 0
        sk.sample_sharded(logits, sk.Sampling.of(R, **filters), vocab_start=0, group=None)
        assert least <= spent / R <= most, (filters, spent / R)


def test_arguments():
    logits, sampling = rows(64, torch.float32)
    with pytest.raises(ValueError, match="sample_sharded: vocab_start: expected a multiple of 32, got 8"):
        sk.sample_sharded(logits, sampling, vocab_start=8, group=None)
