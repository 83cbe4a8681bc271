"""`generate(custom_generate=specdec_generate(...))` against transformers' own loop."""

from __future__ import annotations

import collections
import copy

import pytest
import torch

from specdec_kernels.engine import Draft, TransformersModel
from specdec_kernels.engine.drafters.draft_model import DraftModelDrafter
from specdec_kernels.engine.drafters.eagle import EagleDrafter
from specdec_kernels.engine.drafters.medusa import MedusaDrafter
from specdec_kernels.integrations.transformers import _filters, specdec_generate
from tests.head_models import KINDS, MEDUSA_TREE, random_head

transformers = pytest.importorskip("transformers")

VOCAB = 97


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=256,
        eos_token_id=96, pad_token_id=95, bos_token_id=1,
    )  # fmt: skip
    module = transformers.LlamaForCausalLM(config).eval()
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4.0)
    return module


def prompts(count: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Ragged prompts with a repeated part, padded on the left: (input_ids, attention_mask)."""
    rng = torch.Generator().manual_seed(seed)
    texts = [
        torch.randint(2, 90, (int(n),), generator=rng).repeat(3) for n in torch.randint(2, 8, (count,), generator=rng)
    ]
    width = max(map(len, texts))
    ids = torch.full((count, width), 95)
    for row, text in enumerate(texts):
        ids[row, width - len(text) :] = text
    return ids, (ids != 95).long()


@pytest.mark.parametrize("drafter", ["none", "ngram", "self"])
def test_greedy_ragged_batches_give_the_same_ids(model, drafter, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ids, mask = prompts(20)
    before = (model.config._attn_implementation, [p.requires_grad for p in model.parameters()])
    for first in range(0, 20, 4):
        part = {"input_ids": ids[first : first + 4], "attention_mask": mask[first : first + 4], "max_new_tokens": 24}
        theirs = model.generate(**part, do_sample=False)
        ours = model.generate(**part, do_sample=False, custom_generate=specdec_generate(drafter))
        assert torch.equal(ours, theirs)
    assert (model.config._attn_implementation, [p.requires_grad for p in model.parameters()]) == before
    assert torch.equal(model.generate(**part, do_sample=False), theirs)  # its own loop still works


def counting(kind: str, model):
    """(A drafter, the number of drafts of each of its calls). With random weights drafts are mostly wrong; for sampled
    requests they are drawn."""
    target = TransformersModel(copy.deepcopy(model), name="copy", pack=False)
    if kind == "draft_model":
        drafter = DraftModelDrafter(target, num_drafts=3)  # the target itself
    elif kind == "medusa":
        drafter = MedusaDrafter(random_head(kind, target), paths=MEDUSA_TREE)
    else:
        drafter = EagleDrafter(random_head(kind, target), top_k=3, depth=3, num_nodes=8)
    propose, sizes = drafter.propose, []

    def counted(*arguments):
        drafts = propose(*arguments)
        sizes.append(sum(map(len, drafts)))
        return drafts

    drafter.propose = counted
    return drafter, sizes


@pytest.mark.parametrize("count", [4, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_ids_are_the_same_with_every_drafter(model, kind, count):
    ids, mask = prompts(count, seed=9)
    for first in range(0, count, 4):
        part = {"input_ids": ids[first : first + 4], "attention_mask": mask[first : first + 4], "max_new_tokens": 12}
        theirs = model.generate(**part, do_sample=False)
        drafter, sizes = counting(kind, model)
        ours = model.generate(**part, do_sample=False, custom_generate=specdec_generate(drafter, num_drafts=8))
        assert torch.equal(ours, theirs)
        assert sum(sizes) > 20


class Wrong:
    """Drafts that are right for a step, then wrong: both ends of a step are exercised."""

    name = "wrong"

    def propose(self, states, limits, context):
        return [Draft((s.tokens[-1], (s.tokens[-1] + 1) % VOCAB), (0, 0)) if m.nodes >= 2 else Draft() for s, m in zip(states, limits)]  # fmt: skip  # noqa: E501


class Likely:
    """The same two siblings whenever there is room."""

    name = "likely"

    def __init__(self, tokens):
        self.tokens, self.sizes = tuple(tokens), []

    def propose(self, states, limits, context):
        drafts = [Draft(self.tokens, (0, 0)) if m.nodes >= 2 and m.depth else Draft() for m in limits]
        self.sizes.append(sum(map(len, drafts)))
        return drafts


PROCESSORS = {
    "repetition": {"repetition_penalty": 1.7},
    "repetition and more": {"repetition_penalty": 1.7, "no_repeat_ngram_size": 3},
    "ngrams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[49], [41, 65]]},
    "least length": {"min_new_tokens": 20, "eos_token_id": list(range(40, 97))},
    "forced end": {"forced_eos_token_id": 96, "max_new_tokens": 6},
    "suppressed": {"suppress_tokens": list(range(2, 60))},
}


@pytest.mark.parametrize("name", list(PROCESSORS))
@pytest.mark.parametrize("drafter", ["ngram", "wrong"])
def test_processors_see_every_nodes_own_text(model, name, drafter):
    ids, mask = prompts(4, seed=3)
    options = {"max_new_tokens": 24, "do_sample": False} | PROCESSORS[name]
    row = {"input_ids": ids[:1, mask[0].argmax() :]}
    for part in ({"input_ids": ids, "attention_mask": mask}, row):  # padding counts as text in theirs
        theirs = model.generate(**part, **options)
        chosen = Wrong() if drafter == "wrong" else drafter
        ours = model.generate(**part, **options, custom_generate=specdec_generate(chosen))
        assert torch.equal(ours, theirs)
    plain = model.generate(**row, max_new_tokens=24, do_sample=False)
    assert plain.shape != theirs.shape or not torch.equal(plain, theirs), "the option changes nothing here"


def test_own_processors_and_criteria_are_honoured(model):
    """A processor that depends on the whole text, and a criterion on its last two tokens."""

    class Sum(transformers.LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores = scores.clone()
            scores[:, int(input_ids.sum()) % 90] += 30.0
            return scores

    class Pair(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return (input_ids[:, -2:].sum(-1) % 3) == 0

    ids, mask = prompts(1, seed=5)
    options = {
        "input_ids": ids, "attention_mask": mask, "do_sample": False, "max_new_tokens": 30,
        "logits_processor": transformers.LogitsProcessorList([Sum()]),
    }  # fmt: skip
    for criteria in (None, transformers.StoppingCriteriaList([Pair()])):
        theirs = model.generate(**options, stopping_criteria=criteria)
        ours = model.generate(**options, stopping_criteria=criteria, custom_generate=specdec_generate(Wrong()))
        assert torch.equal(ours, theirs)
    assert ours.shape[1] < ids.shape[1] + 30


SAMPLED = {
    "filters": {"temperature": 0.7, "top_k": 12, "top_p": 0.9},
    "min-p behind top-p": {"temperature": 1.3, "top_p": 0.95, "min_p": 0.05},
    "typical": {"temperature": 1.0, "typical_p": 0.8, "top_k": 0},
}


@pytest.mark.parametrize(
    ("name", "drafter"),
    [pytest.param(name, "fixed", marks=[pytest.mark.long] * (name == "min-p behind top-p")) for name in SAMPLED]
    + [pytest.param("filters", kind, marks=pytest.mark.long) for kind in KINDS],
)
@pytest.mark.timeout(600)
def test_the_sampled_law_of_two_tokens(model, name, drafter):
    """Chi-square of the second and third new token, jointly, against transformers' own processed laws. The first is
    drawn with the prompt's last row: drafts are made from the second on."""
    from specdec_kernels.integrations import transformers as ours

    ids = torch.tensor([[7, 8, 9, 7, 8]])
    options = {"do_sample": True, "max_new_tokens": 3, **SAMPLED[name]}
    processors = model._get_logits_processor(
        model._prepare_generation_config(None, **options)[0], input_ids_seq_length=5, device="cpu", model_kwargs={}
    )
    assert (ours._filters(list(processors)) is None) == (name != "filters")
    texts, mass = ids, torch.ones(1, dtype=torch.float64)
    for _ in range(3):
        with torch.inference_mode():
            rows = model(texts).logits[:, -1].float()
        laws = processors(texts, rows).softmax(-1).double()
        parent, token = laws.nonzero(as_tuple=True)
        texts, mass = torch.cat([texts[parent], token[:, None]], 1), mass[parent] * laws[parent, token]
    expected: collections.Counter = collections.Counter()
    for pair, p in zip(texts[:, 6:].tolist(), mass.tolist()):
        expected[tuple(pair)] += p
    torch.manual_seed(11)
    count = 1500 if drafter == "fixed" else 3000
    seen: collections.Counter = collections.Counter()
    if drafter == "fixed":
        second = torch.zeros(VOCAB, dtype=torch.float64).index_add_(0, texts[:, 6], mass)
        chosen = Likely(second.topk(2).indices.tolist())
        sizes = chosen.sizes
    else:
        chosen, sizes = counting(drafter, model)
    for _ in range(count // 250):
        out = model.generate(ids.repeat(250, 1), **options, custom_generate=specdec_generate(chosen, num_drafts=8))
        seen.update(tuple(pair) for pair in out[:, 6:].tolist())
    assert sum(sizes) >= count / 8
    assert chi_square(seen, expected, count) > 1e-9
    assert set(seen) <= set(expected)
    sharper = {pair: p**2 for pair, p in expected.items()}
    control = {pair: p / sum(sharper.values()) for pair, p in sharper.items()}
    assert chi_square(seen, control, count) < 1e-9  # another law is told apart


def chi_square(seen, expected, count: int) -> float:
    """p-value over cells that expect at least 5: thin ones are merged by falling mass, however many there are."""
    from scipy.stats import chi2

    groups: list[list[float]] = []  # expected, seen
    full = True
    for cell, p in sorted(expected.items(), key=lambda item: (-item[1], item[0])):
        if full:
            groups.append([0.0, 0.0])
        groups[-1][0] += p * count
        groups[-1][1] += seen[cell]
        full = groups[-1][0] >= 5
    if not full and len(groups) > 1:
        rest = groups.pop()
        groups[-1] = [a + b for a, b in zip(groups[-1], rest)]
    assert len(groups) > 2, "too few draws to tell laws apart"
    return float(chi2.sf(sum((b - a) ** 2 / a for a, b in groups), len(groups) - 1))


def test_torchs_seed_reproduces_a_run(model):
    ids, mask = prompts(3)
    options = {"input_ids": ids, "attention_mask": mask, "do_sample": True, "max_new_tokens": 12, "top_k": 0}
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(model.generate(**options, custom_generate=specdec_generate("ngram")))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    several = model.generate(**options, num_return_sequences=2, custom_generate=specdec_generate("ngram"))
    assert len(several) == 6
    assert not torch.equal(several[0], several[1])


def test_the_streamer_gets_what_is_returned(model):
    class Kept(transformers.generation.streamers.BaseStreamer):
        def __init__(self):
            self.tokens, self.ended = [], False

        def put(self, value):
            self.tokens += value.reshape(-1).tolist()

        def end(self):
            self.ended = True

    ids, mask = prompts(1)
    kept = Kept()
    out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=9, return_dict_in_generate=True,
                         custom_generate=specdec_generate("ngram", streamer=kept))  # fmt: skip
    assert out.sequences[0].tolist() == kept.tokens  # the prompt first, as from `generate`
    assert kept.ended
    theirs = Kept()
    model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=9, streamer=theirs)
    assert kept.tokens == theirs.tokens


@pytest.mark.parametrize("skip_prompt", [True, False])
def test_a_text_streamer_shows_what_generate_shows(model, skip_prompt, capsys):
    class Words:
        def decode(self, ids, **_):
            return "".join(f"{i} " for i in ids)

    ids, mask = prompts(1)
    part = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 9}
    shown = []
    for ours in (False, True):
        streamer = transformers.TextStreamer(Words(), skip_prompt=skip_prompt)
        options = {"custom_generate": specdec_generate("ngram", streamer=streamer)} if ours else {"streamer": streamer}
        out = model.generate(ids, **part, **options)
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert shown[1].split() == [str(i) for i in out[0, ids.shape[1] if skip_prompt else 0 :].tolist()]


def test_what_a_processor_raises_is_what_the_call_raises(model):
    class Raising(transformers.LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] > ids.shape[1] + 3:
                raise KeyError("no such table")
            return scores

    ids, mask = prompts(2)
    own = transformers.LogitsProcessorList([Raising()])
    for options in ({}, {"custom_generate": specdec_generate("ngram")}):
        with pytest.raises(KeyError, match="no such table"):
            model.generate(ids, attention_mask=mask, max_new_tokens=9, logits_processor=own, **options)


def test_a_drafter_with_kv_of_its_own_drafts_to_the_end(model):
    """A draft model as large as the target: the pages held the target's text alone, so that drafting ended early."""
    ids, mask = prompts(2)
    drafter, sizes = counting("draft_model", model)
    part = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 100}
    theirs = model.generate(ids, **part)
    assert torch.equal(model.generate(ids, **part, custom_generate=specdec_generate(drafter, num_drafts=3)), theirs)
    assert min(sizes[:-3]) > 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_beams": 2}, NotImplementedError, "num_beams=2"),
        ({"return_dict_in_generate": True, "output_scores": True}, NotImplementedError, "output_scores"),
        ({"prefix_allowed_tokens_fn": lambda row, ids: [3]}, NotImplementedError, "prefix_allowed_tokens_fn"),
    ],
)
def test_what_is_not_there_is_named(model, options, error, message):
    ids, mask = prompts(2)
    with pytest.raises(error, match=f"specdec_generate: .*{message}"):
        model.generate(ids, attention_mask=mask, max_new_tokens=4, custom_generate=specdec_generate(), **options)
    theirs = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert torch.equal(theirs, model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False,
                                              custom_generate=specdec_generate()))  # fmt: skip


def test_bad_calls_are_named(model):
    ids, mask = prompts(2)
    with pytest.raises(ValueError, match="streamer: expected a batch of 1, got 2"):
        model.generate(ids, attention_mask=mask, custom_generate=specdec_generate(streamer=object()))
    with pytest.raises(ValueError, match="expected a token in every row, got none in row 1"):
        model.generate(ids, attention_mask=torch.tensor([[1] * ids.shape[1], [0] * ids.shape[1]]),
                       custom_generate=specdec_generate())  # fmt: skip
    model.train()
    try:
        with pytest.raises(ValueError, match=r"expected model.eval\(\)"):
            model.generate(ids, attention_mask=mask, custom_generate=specdec_generate())
    finally:
        model.eval()


def test_known_filters_are_ours_and_others_are_called():
    warp = [
        transformers.TemperatureLogitsWarper(0.5),
        transformers.TopKLogitsWarper(3),
        transformers.TopPLogitsWarper(0.9),
    ]
    assert _filters(warp) == {"temperature": 0.5, "top_k": 3, "top_p": 0.9}
    assert _filters(warp[::-1]) is None  # another order is another law
    assert _filters([*warp, transformers.MinPLogitsWarper(0.1)]) is None
    assert _filters([transformers.TopKLogitsWarper(3, min_tokens_to_keep=2)]) is None
    assert _filters([]) == {}
    counts = transformers.RepetitionPenaltyLogitsProcessor
    assert _filters([counts(1.5, torch.tensor([3]))], padding=3) == {"repetition_penalty": 1.5}
    assert _filters([counts(1.5)], padding=3) is None
    assert _filters([counts(1.5, 2)]) is None
