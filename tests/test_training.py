"""Heads trained at toy size: the loss falls, interruptions change nothing, damage is named, the result drafts."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest
import torch

from specdec_kernels.__main__ import main
from specdec_kernels.engine import Engine, EngineConfig, TransformersModel
from specdec_kernels.engine.drafters.eagle import EagleDrafter
from specdec_kernels.engine.drafters.medusa import MedusaDrafter
from specdec_kernels.engine.heads import make_head
from specdec_kernels.training import (
    FeatureStore,
    HeadTrainer,
    TrainOptions,
    command,
    compute_features,
    evaluate_head,
)
from specdec_kernels.training.data import is_held_out, read_corpus
from specdec_kernels.training.evaluate import Acceptance
from specdec_kernels.training.heads import new_head
from specdec_kernels.training.losses import acceptance, law_loss
from specdec_kernels.training.measure import measure_head
from specdec_kernels.training.optimizer import Optimizer
from specdec_kernels.training.rollout import ChainAttention, rollout
from tests.test_engine_transformers import build

KINDS = ("eagle", "eagle3", "mtp", "medusa")
OPTIONS = TrainOptions(depths=3, num_steps=24, batch=4, lr=0.02, draft_vocab=60, dtype="float32")


class Bytes:
    """Tokens are bytes, folded into the tiny model's vocabulary."""

    def __call__(self, text: str) -> dict:
        return {"input_ids": [b % 96 for b in text.encode()]}

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return "".join(chr(32 + i) for i in ids)


@pytest.fixture(scope="module")
def model():
    found = TransformersModel(build("llama"), pack=False)
    found.tokenizer = Bytes()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for i in range(40):
        (folder / f"text{i}.py").write_text(f"def function_{i % 7}(x):\n    return x + {i}\n" * 12)
    return folder


@pytest.fixture(scope="module")
def corpus(model, folder):
    return read_corpus([folder], model.tokenizer, length=48, num_tokens=48 * 40, held_out_tokens=48 * 6)


@pytest.fixture(scope="module")
def store(model, corpus, tmp_path_factory):
    return compute_features(tmp_path_factory.mktemp("features"), model, corpus, [0, 1, 2], shard_chunks=8)


def trainer(model, store, folder, kind: str = "eagle3", noise: float = 0.0, **changes) -> HeadTrainer:
    """noise: added to a new head's matrices, in their own standard deviations."""
    options = TrainOptions(**{**OPTIONS.__dict__, "kind": kind, **changes})
    head, draw = new_head(model, options, store), torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in head.parameters():
            if weight.dim() > 1 and noise:
                weight += noise * weight.std() * torch.randn(weight.shape, generator=draw)
    return HeadTrainer(model, head, store, options, folder)


def test_documents_are_split_by_name_for_good(corpus, model, folder):
    """And held-out chunks come from as many of them as there are."""
    assert corpus.train.shape == (40, 48)
    assert corpus.held_out.shape[1] == 48
    assert all(is_held_out(name) for name in corpus.held_out_names)
    assert not any(is_held_out(name) for name in corpus.train_names)
    again = read_corpus([folder], model.tokenizer, length=48, num_tokens=48 * 4, held_out_tokens=48 * 3)
    assert len(again.held_out_names) == min(3, sum(is_held_out(f"{folder.name}/text{i}.py") for i in range(40)))


def test_features_are_the_targets_states(model, store, corpus):
    model.module.set_attn_implementation("eager")
    with torch.inference_mode():
        wanted = model.module(corpus.train[9:10].long(), use_cache=False, output_hidden_states=True)
    model.module.set_attn_implementation("specdec_kernels")
    tokens, middle, last, lse, best = store.chunk("train", 9, ("tokens", "state.1", "state.3", "lse", "best"))
    assert torch.equal(tokens, corpus.train[9])
    assert torch.allclose(middle, wanted.hidden_states[1][0], atol=1e-3)
    assert torch.allclose(last, wanted.hidden_states[3][0], atol=1e-3)
    assert torch.allclose(lse, wanted.logits[0].logsumexp(-1), atol=1e-3)
    assert (best == wanted.logits[0].argmax(-1)).float().mean() > 0.95


def test_a_chain_of_the_rollout_sees_its_context_and_itself(model, store):
    """Training's one pass over all rows equals feeding one chain row by row."""
    head = new_head(model, OPTIONS, store)
    torch.manual_seed(1)
    tokens, features = torch.randint(0, 96, (1, 12)), torch.randn(1, 12, 3 * 128)
    row, outputs = 6, rollout(head, tokens, features, 3)
    states = head.fuse(features)[:, : row + 1]
    for step in range(3):
        length = row + 1 + step
        whole = head(tokens[:, 1 : length + 1], states, torch.arange(length)[None], ChainAttention())
        assert torch.allclose(whole[0, -1], outputs[step][0, row], atol=1e-5), step
        states = torch.cat([states, whole[:, -1:]], 1)


@pytest.mark.parametrize("loss", ["kl", "lk"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_lowers_the_loss_and_raises_acceptance(kind: str, loss: str, model, store, tmp_path):
    """From random weights: the tiny target's law is so flat that the linear start is as good as it gets."""
    options = TrainOptions(**{**OPTIONS.__dict__, "kind": kind, "loss": loss, "num_steps": 48, "rows": 12})
    head = new_head(model, options, store)
    fresh = evaluate_head(head, store, model, 3)
    torch.manual_seed(3)
    for weight in head.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    run = HeadTrainer(model, head, store, options, tmp_path)
    before = evaluate_head(run.head, store, model, 3)
    assert before.sampled[0][0] < fresh.sampled[0][0] - 0.02  # the linear start is worth something
    assert run.run()
    after = evaluate_head(run.head, store, model, 3)
    ends = [sum(torch.tensor(part).exp()) if loss == "lk" else sum(part) for part in (run.losses[-4:], run.losses[:4])]
    assert ends[0] < 0.95 * ends[1]
    assert after.sampled[0][0] > before.sampled[0][0] + 0.02
    for value, low, high in [*after.sampled, *after.greedy, after.tokens]:
        assert low <= value <= high


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "medusa"])
def test_an_interrupted_run_has_the_same_loss_curve(kind: str, model, store, tmp_path):
    whole = trainer(model, store, tmp_path / "whole", kind)
    assert whole.run()
    for stop in (5, 11, None):
        part = trainer(model, store, tmp_path / "parts", kind)
        if stop != 5:
            part.resume()
        assert part.run(until=stop) == (stop is None)
    assert part.losses == whole.losses
    for name, value in whole.masters.items():
        assert torch.equal(value, part.masters[name]), name
    other = trainer(model, store, tmp_path / "parts", kind, lr=0.01)
    with pytest.raises(ValueError, match=r"HeadTrainer: resume: expected a run with lr 0.01, got 0.02"):
        other.resume()
    checkpoint = tmp_path / "parts" / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-50])
    with pytest.raises(ValueError, match=r"resume: expected an intact checkpoint\.safetensors"):
        part.resume()
    with pytest.raises(FileNotFoundError, match="resume: expected"):
        trainer(model, store, tmp_path / "nothing", kind).resume()


def test_masters_keep_what_bfloat16_would_lose(model, store, tmp_path):
    run = trainer(model, store, tmp_path, dtype="bfloat16", lr=1e-4)
    run.run(until=6)
    name, weight = next((n, p) for n, p in run.head.named_parameters() if p.dim() > 1)
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight, run.masters[name].bfloat16())
    assert not torch.equal(weight.float(), run.masters[name])


def test_a_head_trained_on_the_targets_own_text_drafts_better(model, corpus, tmp_path):
    """Through on-policy data, export, import and the engine; greedy text unchanged. From a spoilt head: a new one is
    as good as this target allows already (Medusa's even stays as it was). Judged by the overlap of the laws on held-out
    text; four short texts in the engine count some fifty steps, too few to tell two good heads apart."""
    own = compute_features(tmp_path / "own", model, corpus, [0, 1, 2], prompt_tokens=12)
    tokens, best = own.chunk("train", 5, ("tokens", "best"))
    assert torch.equal(tokens[:12], corpus.train[5][:12])
    assert (tokens[12:] == best[11:-1]).float().mean() > 0.9
    prompts = [chunk[:12].tolist() for chunk in corpus.held_out[:4]]
    plain = [r.token_ids for r in Engine(model, "none").generate(prompts, max_tokens=36)]
    for kind in ("eagle3", "medusa"):
        run, lengths = trainer(model, own, tmp_path / kind, kind, noise=1.0, num_steps=80), []
        shares = []
        for name in ("fresh", "trained"):
            folder = run.export(tmp_path / kind / name)
            drafter = MedusaDrafter(folder) if kind == "medusa" else EagleDrafter(folder, top_k=2, depth=3, num_nodes=8)
            engine = Engine(model, drafter, EngineConfig(page_size=4, num_pages=256, check=True))
            assert [r.token_ids for r in engine.generate(prompts, max_tokens=36)] == plain
            assert engine.metrics.drafter_failures == 0
            lengths.append(engine.metrics.mean_accepted_length)
            shares.append([value for value, _, _ in evaluate_head(run.head, own, model, 3).sampled])
            run.run()
        assert lengths[1] > 2.0, (kind, lengths)  # of 4; a head that is read wrongly hardly ever drafts right
        assert sum(shares[1]) > sum(shares[0]) + 0.1, (kind, shares)


def test_prompts_of_several_lengths_take_turns(model, corpus, tmp_path):
    """Shard by shard: real text up to the prompt's end, the target's own behind it."""
    own = compute_features(tmp_path, model, corpus, [0, 1, 2], shard_chunks=8, prompt_tokens=[12, 40], train_chunks=24)
    for index, kept in ((3, 12), (9, 40), (17, 12)):
        tokens, best = own.chunk("train", index, ("tokens", "best"))
        assert torch.equal(tokens[:kept], corpus.train[index][:kept])
        assert (tokens[kept:] == best[kept - 1 : -1]).float().mean() > 0.9
    assert own.meta["prompt_tokens"] == [12, 40]
    with pytest.raises(ValueError, match=r"expected features with prompt_tokens 12, got \[12, 40\]"):
        compute_features(tmp_path, model, corpus, [0, 1, 2], shard_chunks=8, prompt_tokens=12)
    with pytest.raises(ValueError, match=r"prompt_tokens: expected 1\.\.48 tokens of a chunk, got \[12, 49\]"):
        compute_features(tmp_path / "other", model, corpus, [0], prompt_tokens=[12, 49])


@pytest.mark.parametrize("kind", ["mtp", "medusa"])
def test_training_can_begin_at_a_head(kind: str, model, store, tmp_path):
    """With its weights, shape and draft vocabulary, whatever the options say of these; and resume from there."""
    first = trainer(model, store, tmp_path / "first", kind, num_steps=12, intermediate=40)
    first.run()
    folder = str(first.export(tmp_path / "head", with_embedding=False))
    second = trainer(model, store, tmp_path / "second", kind, begin=folder, num_steps=8, draft_vocab=30)
    assert second.head.config == first.head.config
    assert torch.equal(second.head.draft_ids, first.head.draft_ids)
    for name, value in first.masters.items():
        assert torch.allclose(second.masters[name], value, atol=1e-6), name
    assert second.run(until=3) is False
    again = trainer(model, store, tmp_path / "second", kind, begin=folder, num_steps=8, draft_vocab=30)
    again.resume()
    assert second.run()
    assert again.run()
    assert again.losses == second.losses
    fresh = trainer(model, store, tmp_path / "fresh", kind, num_steps=8)
    assert sum(second.losses) < sum(fresh.losses[:1]) * len(second.losses)
    with pytest.raises(ValueError, match=f"new_head: begin: expected a head of kind eagle3, got {kind}"):
        trainer(model, store, tmp_path / "third", begin=folder)


def test_damaged_and_foreign_features_are_named(model, store, corpus, tmp_path):
    folder = tmp_path / "features"
    compute_features(folder, model, corpus, [0, 1, 2], shard_chunks=8)
    shard = folder / "train" / "shard-00001.safetensors"
    content = shard.read_bytes()
    for damaged in (content[:-10], content[:-10] + bytes([content[-10] ^ 1]) + content[-9:]):
        shard.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"FeatureStore: shard-00001.safetensors: expected the digest"):
            FeatureStore(folder).chunk("train", 9, ["tokens"])
    shard.unlink()
    shard.with_suffix(".sha256").unlink()
    again = compute_features(folder, model, corpus, [0, 1, 2], shard_chunks=8)  # only what is missing
    assert torch.equal(again.chunk("train", 9, ["state.1"])[0], store.chunk("train", 9, ["state.1"])[0])
    with pytest.raises(ValueError, match=r"compute_features: .*expected features with layers \[0, 3\]"):
        compute_features(folder, model, corpus, [0], shard_chunks=8)
    other = TransformersModel(build("qwen3 (query norms)"), pack=False)
    with pytest.raises(ValueError, match=r"FeatureStore: .*expected features of 'model' .fingerprint"):
        trainer(other, store, tmp_path / "run")
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "vocab_size": 50}))
    with pytest.raises(ValueError, match="vocab_size 97"):
        FeatureStore(folder).expect_target(model)
    with pytest.raises(FileNotFoundError, match=r"expected features with a meta\.json"):
        FeatureStore(tmp_path / "nowhere")
    head = new_head(model, OPTIONS, store)
    with pytest.raises(ValueError, match=r"check_d2t: d2t: expected targets in 0\.\.96"):
        make_head(head.config, head.d2t + 60)
    with pytest.raises(ValueError, match="read_corpus: sources: expected a folder"):
        read_corpus([tmp_path / "nowhere"], model.tokenizer, length=8, num_tokens=8, held_out_tokens=8)
    with pytest.raises(ValueError, match="TrainOptions: loss: expected one of"):
        trainer(model, store, tmp_path / "run", loss="mse")


def test_losses_by_hand():
    teacher = torch.tensor([[0.5, 0.2, 0.1]]).log()  # 0.2 lies outside the draft vocabulary
    logits = torch.tensor([[0.25, 0.5, 0.25]]).log()
    assert acceptance(teacher, logits).item() == pytest.approx(0.25 + 0.2 + 0.1)
    assert law_loss("lk", teacher, logits).item() == pytest.approx(-torch.tensor(0.55).log().item())
    wanted = 0.5 * torch.tensor(2.0).log() + 0.2 * torch.tensor(0.4).log() + 0.1 * torch.tensor(0.4).log()
    assert law_loss("kl", teacher, logits).item() == pytest.approx(wanted.item())


def test_a_head_is_measured_in_the_engine(model, store, corpus):
    """Tokens a step by hand from the texts, and a prediction that is the costs' own."""
    head = new_head(model, OPTIONS, store)
    prompts = [chunk[:12].tolist() for chunk in corpus.held_out[:3]]
    found = measure_head(model, lambda: EagleDrafter(head, top_k=2, depth=3, num_nodes=5), prompts, 24)
    engine = Engine(model, EagleDrafter(head, top_k=2, depth=3, num_nodes=5), EngineConfig(num_pages=64, max_batch=1))
    stats = [r.stats for r in engine.generate(prompts, max_tokens=24, ignore_eos=True)]
    assert found.tokens == pytest.approx(sum(s.emitted - 1 for s in stats) / sum(s.steps - 1 for s in stats))
    assert len(found.speedups) == 3
    assert min(found.speedups) <= found.measured <= max(found.speedups)
    assert found.drafts <= 5
    assert found.levels <= 3
    step = found.costs.seconds(found.drafts, found.levels, context=found.context)
    assert found.predicted == pytest.approx(found.tokens * found.costs.seconds(0, 0, context=found.context) / step)
    assert f"{found.tokens:.2f} tokens a step" in found.lines()[0]


def test_the_optimizer_steps_in_units_of_the_inputs(model):
    """A matrix whose inputs are a thousand times larger gets steps a thousand times smaller, bias of size for size;
    vectors are clipped together with everything else."""
    torch.manual_seed(0)
    start, grad = torch.randn(6, 9), torch.randn(6, 9)
    scale = torch.logspace(-1, 2, 9)
    masters = {"plain": start.clone(), "scaled": start / scale, "vector": torch.zeros(4)}
    optimizer = Optimizer(masters, {"scaled": scale}, weight_decay=0.1)
    for step in range(3):
        optimizer.update({"plain": grad, "scaled": grad * scale, "vector": torch.ones(4)}, 0.02, step)
    assert torch.allclose(masters["scaled"] * scale, masters["plain"], atol=1e-5)
    moved = masters["plain"] - start * (1 - 0.02 * 0.1) ** 3
    assert torch.linalg.svdvals(moved / 0.06).min() > 0.5  # all directions alike
    assert torch.linalg.svdvals(moved / 0.06).max() < 1.4
    assert torch.allclose(masters["vector"], torch.full((4,), -3 * 0.02 / 30), rtol=1e-3)
    with pytest.raises(ValueError, match="gradient: expected finite values at step 7"):
        optimizer.update({"plain": grad * torch.nan}, 0.02, 7)


def test_the_best_head_on_held_out_text_is_kept(model, store, tmp_path, monkeypatch):
    """Training that gets worse again: what is exported is the head of the best evaluation, across an interruption."""
    scores = {8: 1.5, 16: 2.5, 24: 2.0}
    run, options = trainer(model, store, tmp_path), Namespace(
        out=tmp_path, evaluate_every=8, resume=True, minutes=None, checkpoint_minutes=1.0,
        no_embedding=True, kind="eagle3",
    )  # fmt: skip

    def evaluate(head, *rest):
        value = scores[run.step]
        return Acceptance([(0.5, 0.4, 0.6)], [(0.5, 0.4, 0.6)], [9], (value, value, value))

    monkeypatch.setattr(command, "evaluate_head", evaluate)
    exported = []
    monkeypatch.setattr(HeadTrainer, "export", lambda self, folder, **_: exported.append(self.step))
    assert command.train(run, model, options, 8)
    assert exported == [8, 16]
    assert [entry["step"] for entry in json.loads((tmp_path / "evaluations.json").read_text())] == [8, 16, 24]


def test_the_command_trains_resumes_and_exports(model, tmp_path, monkeypatch, capsys):
    """`train-head` as a user runs it: stopped by its time limit, refused without --resume, then finished."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(40):
        (texts / f"text{i}.md").write_text(f"Line {i}: the quick brown fox jumps over {i} dogs.\n" * 10)
    monkeypatch.setattr("specdec_kernels.training.command.load_model", lambda *a, **k: model)
    arguments = [
        "train-head", "--data", str(texts), "--out", str(tmp_path / "run"), "--tokens", "1440", "--length", "48",
        "--held-out-tokens", "96", "--epochs", "2", "--depths", "2", "--draft-vocab", "50", "--dtype", "float32",
    ]  # fmt: skip
    assert main([*arguments, "--minutes", "0"]) == 0
    assert "stopped at step 0 of 14" in capsys.readouterr().out
    assert main(arguments) == 2
    assert "or --resume" in capsys.readouterr().err
    assert main([*arguments, "--resume"]) == 0
    assert "finished" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "run" / "losses.json").read_text())) == 14
    card = (tmp_path / "run" / "head" / "README.md").read_text()
    assert "held-out documents: texts/text" in card
    assert "predicted from those tokens" in card
    assert "the best of 3 held-out evaluations" in card
    Engine(model, EagleDrafter(tmp_path / "run" / "head"))
