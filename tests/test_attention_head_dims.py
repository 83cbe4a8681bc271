"""The tensor-core kernels of tree_attention at the head dims that CI does not compile, source and PTX (long suite).

CI's library has head dim 64 (csrc/attention/attention_launch.cuh: SPECDEC_FEW_INSTANCES); one more is built here a head
dim. On a Hopper (`hopper`) a block may have 227 KB of shared memory, which head dim 256 needs for row tiles of 64, and
head dim 128 has the Hopper kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from specdec_kernels import _ops
from tests import cuda_on_cpu
from tests import test_attention_mask as mask
from tests.attention_suite import build, rng_of
from tests.attention_trees import bernoulli, chain, random_tree
from tests.conftest import Backend
from tests.cuda_on_cpu.library import Library

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
OPS = frozenset({"tree_attention", "plan_tree_attention"})
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(cuda_on_cpu.missing("ptx") is not None, reason="no g++ or no CUDA toolkit"),
]


class Built(NamedTuple):
    """One head dim's library, and the backends that run its two paths as on an sm_80 and on an sm_90."""

    dims: tuple[int, int]
    library: Library
    backends: dict[tuple[str, bool], Backend]


def backend_of(library: Library, path: str, hopper: bool) -> Backend:
    name = f"{library.namespace}_{path}_{'sm90' if hopper else 'sm80'}"
    front = _ops.define_namespace(f"specdec_{name}")
    for op in OPS:

        def run(*args: object, op: str = op) -> None:
            with library.configured(path=path, hopper=hopper):
                cuda_on_cpu.run_op(library, op, *args)

        front.impl(op, run, "CPU")
    _ops.register_backend(name, f"specdec_{name}")
    return Backend("emulated", "cpu", name)


@pytest.fixture(scope="module", params=[(80, 80), (96, 96), (128, 128), (192, 128), (256, 256)],
                ids=lambda dims: f"d{dims[0]}")  # fmt: skip
def built(request: pytest.FixtureRequest) -> Built:
    dims = request.param
    library = cuda_on_cpu.library("race", "80", defines=(f"SPECDEC_FEW_HEAD_DIM={dims[0]}",), ops=OPS)
    machines = [(path, hopper) for path in ("source", "ptx") for hopper in (False, True)]
    return Built(dims, library, {machine: backend_of(library, *machine) for machine in machines})


# Two heads a KV head: 10, 26, 60 and 120 packed rows, for row tiles of 16, 32, 64 and 128 where a head dim has them.
@pytest.mark.parametrize("nodes", [5, 13, 30, 60])
@pytest.mark.parametrize("hopper", [False, True], ids=["sm80", "sm90"])
@pytest.mark.parametrize("path", ["source", "ptx"])
def test_head_dim(built: Built, path: str, hopper: bool, nodes: int):
    """Who sees whom, then products over all dims, with a 16-bit and a float8 cache; more tiles than stages."""
    backend, rng = built.backends[path, hopper], rng_of("head dims", str(built.dims), nodes)
    common = {"dtype": BF16, "dims": built.dims, "heads": (2, 1), "max_nodes": nodes}
    trees = [bernoulli(nodes, rng, diagonal=False, empty_rows=True), chain(3)]
    taken = hopper and nodes == 60 and built.dims == (128, 128)
    for page_size in (16, 128) if taken else (16,):  # on pages of 128 two boxes of K and of V a tile by tensor maps
        copies = built.library.emulated_tensor_copies()
        mask.probe(build(trees, [330, 64], rng, page_size=page_size, **common), backend)
        assert (b"hopper_kernel" in built.library.emulated_last_kernel()) == taken
        assert (built.library.emulated_tensor_copies() > copies) == (page_size == 128)
    for kv_dtype in (None, E4M3):
        trees = [random_tree(nodes, rng), chain(2)]
        problem = build(trees, [200, 90], rng, kv_dtype=kv_dtype, softcap=20.0, window=90, **common)
        problem.check(*problem.run(backend))
        assert b"simt" not in built.library.emulated_last_kernel() or kv_dtype, "no tensor-core kernel ran"
