"""truncate, gather_accepted, prepare_next: one step's outcome becomes the next step's inputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from python_ref import kv as ref
from specdec_kernels import _ops
from specdec_kernels._handover import gather_accepted, prepare_next, truncate
from tests.conftest import poisoned
from tests.fuzz import fuzz


class Outcome(NamedTuple):
    """The part of `Verified` that the hand-over reads."""

    output_token_ids: torch.Tensor
    num_emitted: torch.Tensor
    accepted_nodes: torch.Tensor


def ints(values: Any, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@st.composite
def outcomes(draw: Any) -> dict[str, Any]:
    requests, width = draw(st.integers(0, 4)), draw(st.integers(1, 5))
    nodes = [draw(st.integers(0, 7)) for _ in range(requests)]
    tokens, emitted, accepted = [], [], []
    for count in nodes:
        length = draw(st.integers(0, min(count, width)))
        path = [0, *sorted(draw(st.sets(st.integers(1, 6), min_size=length, max_size=length)))][:length]
        emitted.append(draw(st.sampled_from([length, length, length, -2, 50])))
        accepted.append(path + [-1] * (width - length))
        tokens.append([draw(st.integers(0, 99)) for _ in range(length)] + [-1] * (width - length))
    return {
        "width": width, "output_token_ids": tokens, "num_emitted": emitted, "accepted_nodes": accepted,
        "cu_nodes": [0, *np.cumsum(nodes).tolist()], "limit": [draw(st.integers(-1, 6)) for _ in nodes],
        "context_lens": [draw(st.integers(0, 9)) for _ in nodes], "roots": [draw(st.integers(0, 99)) for _ in nodes],
        "page_table": [[draw(st.integers(-1, 30)) for _ in range(3)] for _ in nodes],
        "total": draw(st.integers(0, requests * width + 2)), "offset": draw(st.integers(0, 1)),
    }  # fmt: skip


def outcome(example: dict[str, Any], device: str) -> Outcome:
    shape = (len(example["num_emitted"]), example["width"])
    return Outcome(
        ints(example["output_token_ids"], device).view(shape), ints(example["num_emitted"], device),
        ints(example["accepted_nodes"], device).view(shape),
    )  # fmt: skip


def check_truncate(backend: Any, example: dict[str, Any]) -> None:
    backend.require("truncate")
    verified, limit = outcome(example, backend.device), ints(example["limit"], backend.device)
    tokens, emitted, nodes = ref.truncate(
        example["limit"], example["output_token_ids"], example["num_emitted"], example["accepted_nodes"]
    )
    assert truncate(verified, limit, **backend.kwargs) is verified
    assert verified.output_token_ids.tolist() == tokens
    assert verified.num_emitted.tolist() == emitted
    assert verified.accepted_nodes.tolist() == nodes
    assert limit.tolist() == example["limit"]


def check_gather(backend: Any, example: dict[str, Any]) -> None:
    backend.require("gather_accepted")
    verified = outcome(example, backend.device)
    cu = ints(example["cu_nodes"], backend.device)
    wide = torch.randn(example["cu_nodes"][-1], 12, device=backend.device)
    for x in (wide[:, :7], wide.bfloat16(), wide[:, 3:8].contiguous().long()):
        args = (cu, verified.accepted_nodes, verified.num_emitted)
        got = gather_accepted(x, *args, total=example["total"], **backend.kwargs)
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
        rows, offsets = ref.gather_accepted(
            x.contiguous().view(bits).cpu().numpy(), example["cu_nodes"], example["accepted_nodes"],
            example["num_emitted"], example["total"],
        )  # fmt: skip
        assert got.cu_rows.tolist() == offsets
        assert np.array_equal(got.rows.view(bits).cpu().numpy(), rows)


def check_prepare(backend: Any, example: dict[str, Any]) -> None:
    backend.require("prepare_next")
    verified, roots = outcome(example, backend.device), ints(example["roots"], backend.device)
    requests = len(example["num_emitted"])
    got = prepare_next(
        verified, ints(example["context_lens"], backend.device),
        ints(example["page_table"], backend.device).view(requests, 3), page_size=4, total=example["total"],
        position_offset=example["offset"], root_token_ids=roots, **backend.kwargs,
    )  # fmt: skip
    want = ref.prepare_next(
        example["output_token_ids"], example["num_emitted"], example["context_lens"], example["page_table"], 4,
        example["offset"], example["roots"], example["total"],
    )  # fmt: skip
    assert got.root_token_ids is roots
    for name, value in want.items():
        assert getattr(got, name).tolist() == value, name


test_truncate_fuzz, test_truncate_fuzz_long = fuzz(outcomes(), check_truncate, 60)
test_gather_fuzz, test_gather_fuzz_long = fuzz(outcomes(), check_gather, 60)
test_prepare_fuzz, test_prepare_fuzz_long = fuzz(outcomes(), check_prepare, 60)


def test_rows_and_tokens_pair_up(backend: Any):
    """Row i of gather_accepted is the state that predicted token i of prepare_next, cut at the same total."""
    backend.require("prepare_next")
    verified = Outcome(ints([[7, 8, 9], [4, -1, -1]]), ints([3, 1]), ints([[0, 2, 3], [0, -1, -1]]))
    states = torch.arange(6.0).view(6, 1)
    for total in (4, 3):
        rows = gather_accepted(states, ints([0, 4, 6]), verified.accepted_nodes, verified.num_emitted, total=total)
        following = prepare_next(verified, ints([10, 5]), ints([[0, 1, 2, 3]] * 2), page_size=4, total=total)
        assert rows.rows.flatten().tolist() == [0, 2, 3, 4][:total]
        assert following.token_ids.tolist() == [7, 8, 9, 4][:total]
        assert following.positions.tolist() == [10, 11, 12, 5][:total]
        assert rows.cu_rows.tolist() == following.cu_tokens.tolist() == [0, 3, total]
        assert following.root_token_ids.tolist() == [9, 4]


def test_cut_step_commits_only_what_was_kept():
    """EOS as the second of four tokens: later nodes leave the path, so they are never committed (BT-01, op level)."""
    verified = Outcome(ints([[11, 2, 13, 14]]), ints([4]), ints([[0, 1, 3, 4]]))
    truncate(verified, ints([2]))
    assert verified.output_token_ids.tolist() == [[11, 2, -1, -1]]
    assert verified.accepted_nodes.tolist() == [[0, 1, -1, -1]]
    assert verified.num_emitted.tolist() == [2]


def test_outputs_are_overwritten_whole(backend: Any):
    backend.require("prepare_next")
    verified = Outcome(ints([[7, 8, 9]]), ints([2]), ints([[0, 2, -1]]))
    outs = [poisoned(n, dtype=torch.int32, device=backend.device) for n in (1, 5, 5, 5, 2)]
    args = [t.to(backend.device) for t in (*verified[:2], ints([3]), ints([[0, 1]]))]
    _ops.call("prepare_next", backend.selector, torch.device(backend.device), *args, 4, 0, *outs)
    assert [t.tolist() for t in outs] == [[8], [7, 8, -1, -1, -1], [3, 4, 0, 0, 0], [3, 4, -1, -1, -1], [0, 2]]


def test_bad_input_is_named():
    verified = Outcome(ints([[7, 8]]), ints([2]), ints([[0, 1]]))
    with pytest.raises(TypeError, match=r"^truncate: verified.num_emitted: expected int32, got int64"):
        truncate(verified._replace(num_emitted=verified.num_emitted.long()), ints([1]))
    with pytest.raises(ValueError, match=r"^truncate: output_token_ids: expected shape \[2, \*\], got \[1, 2\]"):
        truncate(verified, ints([1, 1]))
    with pytest.raises(TypeError, match=r"^gather_accepted: x: expected a tensor \[N, H\]"):
        gather_accepted(torch.zeros(3), ints([0, 3]), verified.accepted_nodes, verified.num_emitted)
    with pytest.raises(ValueError, match=r"^prepare_next: page_size: expected a value in \[1, 2147483647\], got 0"):
        prepare_next(verified, ints([1]), ints([[0]]), page_size=0)
