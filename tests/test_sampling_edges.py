"""The edge table of docs/numerics.md: flags, parameters at their ends, broken trees, strides, inputs untouched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from tests.conftest import Backend
from tests.sampling_helpers import (
    assert_law,
    bit_rows,
    chain,
    emitted,
    floats,
    ints,
    log,
    one,
    path,
    sampling_tensors,
    tree_tensors,
    verify,
    verify_is_built,  # noqa: F401
)
from tests.sampling_trials import first_counts, trials

METHODS = ["greedy", "rejection", "target_only", "block", "coupled", "typical"]
LAW = [0.4, 0.3, 0.2, 0.1]


@pytest.mark.parametrize(
    ("filters", "right"),
    [
        ({"top_k": 0}, LAW),
        ({"top_k": -1}, LAW),
        ({"top_k": 4}, LAW),
        ({"top_k": 2**31 - 1}, LAW),
        ({"top_p": 1.0}, LAW),
        ({"top_p": 1.5}, LAW),
        ({"top_p": 0.0}, [1, 0, 0, 0]),
        ({"top_p": -1.0}, [1, 0, 0, 0]),
        ({"top_p": 1e-30}, [1, 0, 0, 0]),
        ({"min_p": 0.0}, LAW),
        ({"min_p": -1.0}, LAW),
        ({"min_p": 1.0}, [1, 0, 0, 0]),
        ({"top_k": 1}, [1, 0, 0, 0]),
        ({"temperature": 1e-5}, [1, 0, 0, 0]),
        ({"temperature": 1.0001e-5}, [1, 0, 0, 0]),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_parameters_off_and_at_their_ends(filters, right, dtype, backend: Backend):
    rows = np.array([[2.0, 1.75, 1.25, 0.5]])  # exact in every format
    law = np.array(right, dtype=float) if 1 in right else np.exp(rows[0]) / np.exp(rows[0]).sum()
    out = trials(backend, rows, [0], [-1], method="rejection", sampling=filters, dtype=dtype)
    assert_law(first_counts(out, 4), law)


def test_min_p_one_keeps_all_ties_of_the_maximum(backend: Backend):
    out = trials(backend, [[1.0, 3, 3, 2, 3]], [0], [-1], method="rejection", sampling={"min_p": 1.0})
    assert_law(first_counts(out, 5), [0, 1 / 3, 1 / 3, 0, 1 / 3])
    out = trials(backend, [[1.0, 3, 3, 2, 3]], [0], [-1], method="rejection", sampling={"min_p": 1.0, "top_k": 2})
    assert_law(first_counts(out, 5), [0, 0.5, 0.5, 0, 0])
    out = trials(backend, [[1.0, 3, 3, 2, 3]], [0], [-1], method="rejection", sampling={"top_p": 0.0})
    assert_law(first_counts(out, 5), [0, 1, 0, 0, 0])


def test_infinite_logits_are_uniform_among_themselves(backend: Backend):
    out = trials(backend, [[0.0, np.inf, 5, np.inf]], [0], [-1], method="rejection")
    assert_law(first_counts(out, 4), [0, 0.5, 0, 0.5])
    assert (out.flags == sk.Flag.INF_LOGIT).all()
    out = trials(backend, [[0.0, np.inf, 5, np.inf]], [0], [-1], method="greedy")
    assert first_counts(out, 4)[1] == first_counts(out, 4).sum()


def test_nan_logits_have_no_mass(backend: Backend):
    out = trials(backend, [[*log([0.5, 0.3]), np.nan, *log([0.2])]], [0], [-1], method="rejection")
    assert_law(first_counts(out, 4), [0.5, 0.3, 0, 0.2])
    assert (out.flags == sk.Flag.NAN_LOGIT).all()


def test_empty_residual_falls_back_to_the_target(backend: Backend):
    """p = q and the drafted id has no mass in either: rejected, nothing is left of max(p - q, 0), p is sampled."""
    p = [0.5, 0.3, 0.2, 0.0]
    out = trials(backend, log([p, p]), [0, 3], chain(1), method="rejection", draft=log([p]))
    assert_law(first_counts(out, 4), p)
    assert (out.flags == sk.Flag.ZERO_RESIDUAL | sk.Flag.DRAFT_MASS).all()


@pytest.mark.parametrize("method", ["rejection", "target_only"])
def test_duplicate_siblings_add_nothing_and_are_flagged(method, backend: Backend):
    p = [0.3, 0.5, 0.2]
    out = trials(backend, log([p] * 3), [0, 0, 0], [-1, 0, 0], method=method)
    assert_law(first_counts(out, 3), p)
    rejected = out.num_emitted == 1
    assert (out.flags[rejected] == sk.Flag.SIBLINGS).all()


def test_siblings_of_two_kinds_are_flagged(backend: Backend):
    out = one(
        backend, log([LAW] * 3), [0, 1, 2], [-1, 0, 0], method="rejection", draft_logits=floats(log([LAW])),
        draft_rows=ints([-1, 0, -1]), uniforms=torch.full((3,), 1 - 2.0**-24),
    )  # fmt: skip
    assert int(out.flags) & sk.Flag.SIBLINGS
    assert 0 <= emitted(out)[0] < 4


@pytest.mark.parametrize("method", ["greedy", "rejection", "target_only", "coupled"])
def test_more_than_32_siblings(method, backend: Backend):
    """40 siblings of mass .01, the rest .6 over 60 ids: no rejected sibling is emitted, the last ids get their mass."""
    p = np.array([0.01] * 40 + [0.6 / 60] * 60)
    parents = [-1] + [0] * 40
    count = 2000
    out = trials(backend, log([p] * 41), [0, *range(40)], parents, method=method, count=count)
    first = out.output_token_ids[:, 0].cpu().numpy()
    rejected = (out.num_emitted == 1).cpu().numpy()
    if method != "greedy":
        assert (first[rejected] >= 40).all()
        assert_law(np.bincount(first, minlength=100), p)
        if method != "coupled":
            assert_law(np.bincount(first[rejected] >= 92, minlength=2), [52 / 60, 8 / 60])


@pytest.mark.parametrize("method", METHODS)
def test_flagged_tree_gives_the_root_sample_only(method, backend: Backend):
    tree = tree_tensors([chain(3)] * 3, backend.device)
    good = tree_tensors([chain(3)] * 3, backend.device)
    logits, ids = torch.randn(12, 9), ints([0, 1, 2, 3] * 3)
    sampling = sampling_tensors(3, backend.device)
    tree.flags[1] = sk.Flag.TREE
    tree.first_child[4:8] = ints([2, 1, -7, 2**30], backend.device)  # cycles and wild links of request 1
    tree.next_sibling[4:8] = ints([1, 0, 2**30, -9], backend.device)
    out = verify(backend, logits, ids, tree, sampling, method=method)
    right = verify(backend, logits, ids, good, sampling, method=method)
    assert path(out, 1) == [0]
    assert int(out.flags[1]) & sk.Flag.TREE
    for b in (0, 2):
        assert emitted(out, b) == emitted(right, b)


@pytest.mark.parametrize("method", METHODS)
def test_unflagged_cycles_and_wild_links_end(method, backend: Backend):
    """The walk is bounded and in range, whatever the links say."""
    for child, sibling in [([1, 2, 1, 3], [-1] * 4), ([1, -1, -1, -1], [-1, 2, 3, 1]), ([0, 0, 0, 0], [0, 1, 2, 3]),
                           ([99, 2, -5, 3], [7, 7, 7, 7])]:  # fmt: skip
        tree = tree_tensors([chain(3)], backend.device)
        tree.first_child[:] = ints(child, backend.device)
        tree.next_sibling[:] = ints(sibling, backend.device)
        out = verify(
            backend, torch.zeros(4, 5), ints([0, 0, 1, 2]), tree, sampling_tensors(1, backend.device), method=method
        )
        tokens = emitted(out)
        assert 1 <= len(tokens) <= 4
        assert all(0 <= token < 5 for token in tokens)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_views_of_padded_heads(method, dtype, backend: Backend):
    """Rows that are slices of wider ones equal dense rows."""
    wide, draft = torch.randn(6, 80).to(dtype), torch.randn(6, 90).to(dtype)
    ids, rows = ints([0, 1, 2, 0, 3, 4]), ints([-1, 0, 1, -1, 3, 4])
    found = []
    for logits, q in [(wide[:, 3:64], draft[:, 1:62]), (wide[:, 3:64].contiguous(), draft[:, 1:62].contiguous())]:
        options = {"draft_logits": q, "draft_rows": rows} if method in ("rejection", "block") else {}
        tree, sampling = tree_tensors([chain(2)] * 2, backend.device), sampling_tensors(2, backend.device)
        found.append(verify(backend, logits, ids, tree, sampling, method=method, **options))
    assert torch.equal(found[0].output_token_ids, found[1].output_token_ids)


def test_RS_10_rows_beyond_two_to_the_31_elements(backend: Backend):
    """Three rows 2^30 elements apart: the last starts at element 2^31. Untouched pages are never allocated."""
    if backend.device == "cpu" and backend.selector is not None:
        pytest.skip("one copy of the offset arithmetic is enough on emulated backends")
    try:
        store = torch.empty(2**31 + 64, dtype=torch.bfloat16, device=backend.device)
    except RuntimeError:
        pytest.skip("4 GiB of address space are not available")
    logits = store.as_strided((3, 40), (2**30, 1))
    logits.copy_(torch.randn(3, 40))
    dense = logits.clone()
    ids, rows = ints([0, 1, 2]), ints([-1, 2, 2])
    for method in ("greedy", "rejection"):
        found = []
        for rows_of in (logits, dense):
            options = {"draft_logits": rows_of, "draft_rows": rows} if method == "rejection" else {}
            found.append(
                verify(
                    backend, rows_of, ints([0, int(dense[0].argmax()), int(dense[1].argmax())]) if method == "greedy"
                    else ids, tree_tensors([chain(2)], backend.device), sampling_tensors(1, backend.device),
                    method=method, **options,
                )
            )  # fmt: skip
        assert emitted(found[0]) == emitted(found[1])
        if method == "greedy":
            assert emitted(found[0]) == dense.float().argmax(1).tolist()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("form", ["eager", "lazy"])
def test_inputs_are_untouched(method, form, backend: Backend):
    """ST-04: logits, draft logits, masks, biases, tables and parameters are bitwise what they were."""
    logits, draft = torch.randn(6, 50), torch.randn(6, 50)
    logits[1, 3], logits[4, 7], draft[2, 2] = np.nan, np.inf, np.nan
    tree = tree_tensors([chain(2)] * 2, backend.device)
    sampling = sampling_tensors(2, backend.device, top_k=9, top_p=0.8, min_p=0.01)
    options = {
        "allowed": bit_rows([list(range(0, 50, 2))] * 6, 50),
        "bias": (ints([0, 2, 2, 3, 3, 3, 3]), ints([1, 4, 7]), floats([1.0, -np.inf, 2])),
        "uniforms": torch.rand(6),
    }
    if method in ("rejection", "block"):
        options |= {"draft_logits": draft, "draft_rows": ints([-1, 0, 1, -1, 3, 4])}
    ids = ints([0, 1, 2, 0, 3, 4])
    inputs = {"logits": logits, "ids": ids, **{k: v for k, v in options.items() if isinstance(v, torch.Tensor)}}
    inputs |= {f"bias{i}": t for i, t in enumerate(options["bias"])}
    inputs |= {f"tree.{k}": v for k, v in tree._asdict().items() if isinstance(v, torch.Tensor)}
    inputs |= {f"sampling.{k}": v for k, v in vars(sampling).items() if isinstance(v, torch.Tensor)}
    placed = {name: value.to(backend.device) for name, value in inputs.items()}
    before = {name: value.clone() for name, value in placed.items()}
    verify(backend, placed["logits"], placed["ids"], tree, sampling, method=method, form=form, return_logprobs="both",
           **{k: placed.get(k, v) for k, v in options.items() if k != "bias"},
           bias=tuple(placed[f"bias{i}"] for i in range(3)))  # fmt: skip
    for name, value in placed.items():
        assert torch.equal(value.view(torch.uint8), before[name].view(torch.uint8)), name


BAD = {
    "method": dict(method="clamp"),
    "draft_rows": dict(method="rejection", draft_logits=torch.zeros(1, 5), draft_rows=ints([-1, 0, 0])),
    "draft_logits": dict(method="rejection", draft_rows=ints([-1, 0])),
    "uniforms": dict(method="rejection", uniforms=torch.rand(9)),
    "return_logprobs": dict(method="rejection", return_logprobs="all"),
    "vocab_size": dict(method="rejection", vocab_size=0),
    "allowed": dict(method="rejection", allowed=torch.zeros(2, 3, dtype=torch.int32)),
}


@pytest.mark.parametrize("argument", BAD)
def test_bad_arguments_are_named(argument, backend: Backend):
    tree, sampling = tree_tensors([chain(1)], backend.device), sampling_tensors(1, backend.device)
    with pytest.raises((ValueError, TypeError), match=rf"^verify: {argument}: expected .*, got "):
        verify(backend, torch.zeros(2, 5), ints([0, 1]), tree, sampling, **BAD[argument])


def test_the_wrong_one_of_several_lists_is_named():
    with pytest.raises(ValueError, match=r"^Sampling.of: top_p: expected 2 values, got 1"):
        sk.Sampling.of(2, temperature=[1.0, 0.5], top_p=[0.9])


def test_bad_tensors_are_named(backend: Backend):
    tree, sampling = tree_tensors([chain(1)], backend.device), sampling_tensors(1, backend.device)
    with pytest.raises(TypeError, match=r"^verify: draft_token_ids: expected int32, got int64"):
        verify(backend, torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), tree, sampling, method="greedy")
    with pytest.raises(TypeError, match=r"^verify: target_logits: expected .*, got int32"):
        verify(backend, torch.zeros(2, 5, dtype=torch.int32), ints([0, 1]), tree, sampling, method="greedy")
    with pytest.raises(ValueError, match=r"^verify: target_logits: expected"):
        verify(backend, torch.zeros(2, 10)[:, ::2], ints([0, 1]), tree, sampling, method="greedy")
    with pytest.raises(ValueError, match=r"^verify: \w+: expected"):
        verify(backend, torch.zeros(2, 5), ints([0]), tree, sampling, method="greedy")


def test_block_on_a_tree_is_a_fault_of_that_request(backend: Backend):
    tree = tree_tensors([[-1, 0, 0], [-1, 0, 1]], backend.device)
    sampling = sampling_tensors(2, backend.device)
    out = verify(backend, torch.zeros(6, 5), ints([0, 1, 2] * 2), tree, sampling, method="block")
    assert int(out.flags[0]) & sk.Flag.TREE
    assert int(out.flags[1]) == 0
    assert 0 <= emitted(out, 0)[-1] < 5


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"temperature": -1.0}, "temperature: expected a finite number >= 0, got -1.0"),
        ({"temperature": [1.0, np.nan]}, "temperature: expected a finite number >= 0, got nan"),
        ({"temperature": np.inf}, "temperature: expected a finite number >= 0, got inf"),
        ({"top_p": 0}, r"top_p: expected a number in \(0, 1\], got 0"),
        ({"top_p": [0.5, 2.0]}, r"top_p: expected a number in \(0, 1\], got 2.0"),
        ({"top_k": -5}, r"top_k: expected an int >= 0 \(0: off\), got -5"),
        ({"top_k": np.array([3, -1])}, r"top_k: expected an int >= 0 \(0: off\), got -1"),
        ({"min_p": 1.5}, r"min_p: expected a number in \[0, 1\], got 1.5"),
    ],
)
def test_host_numbers_outside_their_range_are_refused(numbers, message):
    with pytest.raises(ValueError, match=f"^Sampling.of: {message}$"):
        sk.Sampling.of(2, **numbers)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"temperature": "0.5"}, "temperature: expected a number, or one a request, got '0.5'"),
        ({"temperature": [1.0, "0.5"]}, "temperature: expected a number, got '0.5'"),
        ({"top_k": 5.5}, "top_k: expected an int, got 5.5"),
        ({"seed": [1, 2.5]}, "seed: expected an int, got 2.5"),
    ],
)
def test_host_values_that_are_no_numbers_are_refused(numbers, message):
    with pytest.raises(TypeError, match=f"^Sampling.of: {message}$"):
        sk.Sampling.of(2, **numbers)


def test_tensors_of_parameters_are_not_read():
    """On the device the same numbers are what they were: switched off, or a flag of their request."""
    made = sk.Sampling.of(2, temperature=torch.tensor([-1.0, 1.0]), top_p=torch.tensor([2.0, 0.0]), top_k=torch.tensor([-5, 0]))  # fmt: skip  # noqa: E501
    out = sk.sample(torch.tensor([[0.0, 3.0, 1.0]]).repeat(2, 1), made)
    assert out.flags.tolist() == [sk.Flag.PARAMETER, 0]
    assert out.token_ids.tolist() == [1, 1]
    with torch._subclasses.fake_tensor.FakeTensorMode():  # whoever reads a value raises
        sk.Sampling.of(2, temperature=torch.ones(2), seed=torch.arange(2))
    edges = sk.Sampling.of(3, temperature=[0, 1e-5, 2], top_k=range(3), top_p=1, min_p=np.float32(1), seed=2**62)
    assert edges.top_k.tolist() == [0, 1, 2]
    assert edges.seed.tolist() == [2**62] * 3
    assert edges.min_p.dtype == torch.float32


@pytest.mark.parametrize("k", [-1, 0, 1025])
def test_numbers_of_drafts_are_bounded(k, backend: Backend):
    logits, sampling = torch.zeros(1, 2000, device=backend.device), sampling_tensors(1, backend.device)
    place = {"row_requests": ints([0], backend.device), "row_positions": torch.zeros(1, dtype=torch.int64, device=backend.device)}  # fmt: skip  # noqa: E501
    with pytest.raises(ValueError, match=rf"^draft_topk: k: expected a value in \[1, 1024\], got {k}"):
        sk.draft_topk(logits, k, **backend.kwargs)
    with pytest.raises(ValueError, match=rf"^draft_sample: k: expected a value in \[1, 1024\], got {k}"):
        sk.draft_sample(logits, k, sampling, **place, **backend.kwargs)


def test_arguments_of_another_type_are_named():
    tree, sampling, logits, ids = tree_tensors([chain(1)]), sampling_tensors(1), torch.zeros(2, 5), ints([0, 1])
    with pytest.raises(TypeError, match=r"^verify: draft_sampling: expected a Sampling, got dict"):
        sk.verify(logits, ids, tree, sampling, method="rejection", draft_logits=logits[:1], draft_sampling={})
    shape = sk.Sampling(sampling.temperature, top_p=torch.ones(2))
    with pytest.raises(ValueError, match=r"^verify: draft_sampling top_p: expected 1 entries, got 2"):
        sk.verify(logits, ids, tree, sampling, method="rejection", draft_logits=logits[:1], draft_sampling=shape)
    with pytest.raises(TypeError, match=r"^verify_probs: tree: expected a DraftTree .*, got list"):
        sk.verify_probs(logits, ids, [-1, 0], logits[:, 0], logits[:1, 0], method="rejection")
    with pytest.raises(ValueError, match=r"^verify_probs: tree: expected 3 entries, got 2"):
        sk.verify_probs(torch.zeros(3, 5), ids, tree, logits[:, 0], logits[:1, 0], method="rejection")
    with pytest.raises(ValueError, match=r"^filter_rows: vocab_size: expected 1 to 5 ids, the logits' columns, got 6"):
        sk.filter_rows(logits[:1], sampling, vocab_size=6)
