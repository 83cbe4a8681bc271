"""`specdec_generate` on a model that transformers split over ranks by its own plan: the tokens of one process."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from specdec_kernels.engine import EngineConfig, verification
from specdec_kernels.engine.drafters.self_draft import SelfDrafter
from specdec_kernels.engine.parallel import Parallel, expect_alike
from specdec_kernels.engine.policy import FixedDrafts, GoodputPolicy
from specdec_kernels.integrations.transformers import specdec_generate
from specdec_kernels.integrations.transformers_attention import register_attention

transformers = pytest.importorskip("transformers")

VOCAB, WORLD = 192, 2
GATHERED = "gathered rows"
PLANS = {GATHERED: None, "vocabulary shards": {"lm_head": "colwise"}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=256, eos_token_id=191, pad_token_id=190,
        bos_token_id=1,
    )  # fmt: skip
    module = transformers.LlamaForCausalLM(config)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4.0)
    folder = tmp_path_factory.mktemp("llama")
    module.save_pretrained(folder)
    return folder


def answers(model, manual_seed: int) -> list[torch.Tensor]:
    """Texts of four ragged prompts, by drafter: greedy (and with a penalty, which edits rows), sampled; first, where
    the model gives whole rows, under transformers' own loop with our attention."""
    rng = torch.Generator().manual_seed(1)
    ids = torch.full((4, 18), 190)
    for row, size in enumerate((2, 6, 3, 5)):
        ids[row, 18 - 3 * size :] = torch.randint(2, 180, (size,), generator=rng).repeat(3)
    common = {"input_ids": ids, "attention_mask": (ids != 190).long(), "max_new_tokens": 14}
    found = []
    torch.manual_seed(manual_seed)
    for drafter in ("ngram", SelfDrafter(layers=(0,))):
        for law in (
            {"do_sample": False},
            {"do_sample": False, "repetition_penalty": 1.7},
            {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 0.9},
        ):
            found.append(model.generate(**common, **law, custom_generate=specdec_generate(drafter, num_drafts=4)))
    if model.tp_plan.get("lm_head") != "colwise":
        model.set_attn_implementation(register_attention())
        found.append(model.generate(**common, do_sample=False))
    return found


def rank_main(rank: int, folder: str, checkpoint: str) -> None:
    """One rank's answers and the rules verified on shards, in files. Rank 1 has another seed: it must not matter."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    on_shards = verification.verify_sharded
    for plan, change in PLANS.items():
        config = transformers.distributed.DistributedConfig(tp_size=WORLD, tp_plan=change)
        model = transformers.LlamaForCausalLM.from_pretrained(checkpoint, distributed_config=config).eval()
        rules: list[str] = []
        verification.verify_sharded = lambda *a, rules=rules, **k: (rules.append(k["method"]), on_shards(*a, **k))[1]
        torch.save([answers(model, 3 + rank), rules], f"{folder}/{plan}-{rank}.pt")
    dist.barrier()


def expect_the_tokens_of_one_process(folder: Path, checkpoint: Path) -> None:
    right = answers(transformers.LlamaForCausalLM.from_pretrained(checkpoint).eval(), 3)
    assert len({tuple(x.flatten().tolist()) for x in right}) >= 4  # laws differ
    for plan, rank in itertools.product(PLANS, range(WORLD)):
        found, rules = torch.load(folder / f"{plan}-{rank}.pt")
        assert len(found) == len(right) - (plan != GATHERED)
        for index, (ours, one) in enumerate(zip(found, right)):
            assert torch.equal(ours, one), (plan, rank, index)
        assert set(rules) == ({"greedy", "target_only", "rejection"} if plan != GATHERED else set())


def test_two_ranks_give_the_tokens_of_one_process(checkpoint, tmp_path):
    """Forked: transformers is imported once. `torchrun` itself is in the long suite."""
    mp.start_processes(rank_main, (str(tmp_path), str(checkpoint)), nprocs=WORLD, start_method="fork")
    expect_the_tokens_of_one_process(tmp_path, checkpoint)


@pytest.mark.long
def test_torchrun(checkpoint, tmp_path):
    (tmp_path / "rank.py").write_text(
        "import sys; from tests import test_integration_tensor_parallel as t; import torch.distributed as d\n"
        "d.init_process_group('gloo')\nt.rank_main(d.get_rank(), *sys.argv[1:])\n"
    )
    root = str(Path(__file__).parents[1])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
    done = subprocess.run(
        [*launcher, str(tmp_path / "rank.py"), str(tmp_path), str(checkpoint)], capture_output=True, text=True,
        cwd=root, env=os.environ | {"PYTHONPATH": root, "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    expect_the_tokens_of_one_process(tmp_path, checkpoint)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": GoodputPolicy.__new__(GoodputPolicy)}, "policy: expected FixedDrafts"),
        ({"config": EngineConfig(draft_timeout_s=0.5)}, "draft_timeout_s: expected None"),
        ({"config": EngineConfig(graph_sizes=(8,))}, "graph_sizes: expected none"),
        ({"drafter": SelfDrafter()}, r"drafter: expected SelfDrafter\(layers=...\)"),
    ],
)
def test_what_clocks_decide_is_refused(change, message):
    given = {"policy": FixedDrafts(3), "drafter": SelfDrafter(layers=(0, 1)), "config": EngineConfig()}
    expect_alike(**given)
    with pytest.raises(ValueError, match=f"Engine: {message} under tensor parallelism"):
        expect_alike(**given | change)


@pytest.mark.parametrize(
    ("change", "kv_heads", "message"),
    [
        ({}, 3, "expected KV heads in 2 equal parts, got 3 heads"),
        ({"style": "colwise", "rows": 96}, 4, "expected a vocabulary of 2 equal parts of whole 32 ids, got 96 ids"),
        ({"style": "rowwise"}, 4, "expected an lm_head split by column, got 'rowwise'"),
        ({"pp_size": 2}, 4, "expected tensor parallelism, got pp_size > 1"),
    ],
)
def test_splits_that_do_not_fit_are_refused(change, kv_heads, message, tmp_path, monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    given = {"style": "colwise_gather_output", "rows": 128, "pp_size": 1} | change
    head = torch.nn.Linear(1, given["rows"], bias=False)
    sizes = types.SimpleNamespace(pp_size=given["pp_size"], dp_size=1, ep_size=1)
    module = types.SimpleNamespace(
        config=types.SimpleNamespace(distributed_config=sizes),
        _mesh_manager=types.SimpleNamespace(get_mesh=lambda name: types.SimpleNamespace(get_group=lambda: None)),
        tp_plan={"model.layers.*.self_attn.k_proj": "colwise", "lm_head": given["style"]},
        get_output_embeddings=lambda: head, named_modules=lambda: [("lm_head", head)],
    )  # fmt: skip
    with pytest.raises((ValueError, NotImplementedError), match=message):
        Parallel.of(module, kv_heads, "model")
    given = Parallel.of(types.SimpleNamespace(config=types.SimpleNamespace()), 4, "model")
    assert given is None
