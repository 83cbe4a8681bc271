"""The one table of op schemas, their registration, and the choice of a backend.

Every op is an out-variant: inputs, then scalars, then mutable outputs, returning nothing. Namespace
`specdec` is served by C++ (CPU, CUDA), `specdec_triton` by Triton from the same table; tests add
`specdec_emulated` and `specdec_ptx`, the CUDA sources running on the CPU.
"""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import logging
import numbers
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from specdec_kernels._compile import constant_result

logger = logging.getLogger("specdec_kernels")

_SAMPLING = (
    "Tensor temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p, Tensor seed, Tensor position, Tensor? step"
)
_DRAFT_SAMPLING = "Tensor? draft_temperature, Tensor? draft_top_k, Tensor? draft_top_p, Tensor? draft_min_p"
_ROW_EDITS = "Tensor? allowed, Tensor? bias_cu, Tensor? bias_ids, Tensor? bias_values"
_KV = "Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor context_lens"

# Shapes and meanings: docs/ops.md. Order of arguments is the contract shared by every backend.
SCHEMAS: dict[str, str] = {
    # ---- tree
    "build_tree": "(Tensor parents, Tensor cu_nodes, Tensor context_lens, int max_nodes, int max_depth, "
    "Tensor(a!) parents_out, Tensor(b!) tree_mask, Tensor(c!) depths, Tensor(d!) positions, "
    "Tensor(e!) first_child, Tensor(f!) next_sibling, Tensor(g!) flags) -> ()",
    "chain_tree": "(Tensor num_drafts, Tensor context_lens, int max_nodes, "
    "Tensor(a!) parents_out, Tensor(b!) cu_nodes, Tensor(c!) tree_mask, Tensor(d!) depths, Tensor(e!) positions, "
    "Tensor(f!) first_child, Tensor(g!) next_sibling, Tensor(h!) flags) -> ()",
    "expand_tree": "(Tensor scores, Tensor child_log_probs, int k, "
    "Tensor(a!) child_scores, Tensor(b!) beam, Tensor(c!) beam_scores) -> ()",
    "rerank_tree": "(Tensor scores, Tensor parents, Tensor cu_candidates, Tensor num_nodes, bool sampled, "
    "Tensor(a!)? workspace, Tensor(b!) selected, Tensor(c!) parents_out, Tensor(d!) cu_nodes, Tensor(e!) flags) -> ()",
    "pack_mask": "(Tensor mask, Tensor(a!) words) -> ()",
    "unpack_mask": "(Tensor words, Tensor(a!) mask) -> ()",
    "tree_from_mask": "(Tensor tree_mask, Tensor cu_nodes, int max_nodes, Tensor(a!) parents) -> ()",
    # ---- attention
    "tree_attention": f"(Tensor q, {_KV}, Tensor cu_nodes, Tensor? tree_mask, "
    "Tensor? query_start, Tensor? causal, Tensor? positions, Tensor? request_order, Tensor? sinks, "
    "Tensor? k_scale, Tensor? v_scale, Tensor? plan, int max_nodes, float softmax_scale, float softcap, "
    "int window, str kv_layout, int num_splits, bool batch_invariant, "
    "Tensor(a!)? workspace, Tensor(b!) out, Tensor(c!)? lse) -> ()",
    "plan_tree_attention": "(Tensor context_lens, Tensor cu_nodes, Tensor? request_order, int num_q_heads, "
    "int num_kv_heads, int head_dim, int max_nodes, int window, int num_workers, bool batch_invariant, "
    "Tensor(a!) plan) -> ()",
    "write_kv": "(Tensor k, Tensor v, Tensor slot_mapping, Tensor? k_scale, Tensor? v_scale, str kv_layout, "
    "Tensor(a!) k_cache, Tensor(b!) v_cache) -> ()",
    "slot_mapping": "(Tensor page_table, Tensor context_lens, Tensor cu_nodes, int page_size, Tensor(a!) slots) -> ()",
    "merge_attention": "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor? sinks, "
    "Tensor(a!) out, Tensor(b!)? lse) -> ()",
    # ---- sampling
    "verify": "(Tensor target_logits, Tensor draft_token_ids, Tensor cu_nodes, Tensor parents, Tensor first_child, "
    f"Tensor next_sibling, Tensor? tree_flags, {_SAMPLING}, Tensor? draft_logits, Tensor? draft_rows, "
    f"{_DRAFT_SAMPLING}, Tensor? draft_log_probs, Tensor? draft_lse, Tensor? d2t, Tensor? t2d, {_ROW_EDITS}, "
    "Tensor? uniforms, Tensor? request_order, Tensor? tile_stats, str method, int vocab_size, int max_nodes, "
    "int max_depth, str return_logprobs, float epsilon, float delta, str form, Tensor(a!)? workspace, "
    "Tensor(b!) output_token_ids, Tensor(c!) num_emitted, Tensor(d!) accepted_nodes, Tensor(e!) flags, "
    "Tensor(f!)? logprobs) -> ()",
    "sample": f"(Tensor logits, {_SAMPLING}, Tensor? row_requests, Tensor? row_positions, {_ROW_EDITS}, "
    "int vocab_size, str return_logprobs, Tensor(a!) token_ids, Tensor(b!) flags, Tensor(c!)? logprobs) -> ()",
    "draft_topk": "(Tensor logits, Tensor? d2t, int k, float temperature, int vocab_size, "
    "Tensor(a!) token_ids, Tensor(b!) log_probs, Tensor(c!) lse) -> ()",
    "draft_sample": f"(Tensor logits, {_SAMPLING}, Tensor row_requests, Tensor row_positions, Tensor? row_paths, "
    "Tensor? d2t, int k, bool coupled, int vocab_size, "
    "Tensor(a!) token_ids, Tensor(b!) log_probs, Tensor(c!) lse) -> ()",
    "row_stats": "(Tensor logits, Tensor? temperature, Tensor? row_requests, Tensor? allowed, int vocab_start, "
    "int vocab_size, Tensor(a!) max, Tensor(b!) log_sum, Tensor(c!) argmax, Tensor(d!) flags) -> ()",
    "filter_rows": f"(Tensor logits, {_SAMPLING}, Tensor? row_requests, {_ROW_EDITS}, int vocab_size, "
    "Tensor(a!) threshold, Tensor(b!) tie_budget, Tensor(c!) max, Tensor(d!) log_sum, Tensor(e!) flags) -> ()",
    "residual_log_weights": "(Tensor target_log_probs, Tensor draft_log_probs, Tensor log_scale, Tensor(a!) out) -> ()",
    "verify_probs": "(Tensor target_probs, Tensor? draft_probs, Tensor draft_token_ids, Tensor cu_nodes, "
    "Tensor first_child, Tensor next_sibling, Tensor uniforms, Tensor final_uniforms, str method, int max_depth, "
    "Tensor(a!) output_token_ids, Tensor(b!) num_emitted, Tensor(c!) accepted_nodes, Tensor(d!) flags) -> ()",
    "truncate": "(Tensor limit, Tensor(a!) output_token_ids, Tensor(b!) num_emitted, Tensor(c!) accepted_nodes) -> ()",
    "gather_accepted": "(Tensor x, Tensor cu_nodes, Tensor accepted_nodes, Tensor num_emitted, "
    "Tensor(a!) out, Tensor(b!) cu_out) -> ()",
    "prepare_next": "(Tensor output_token_ids, Tensor num_emitted, Tensor context_lens, Tensor page_table, "
    "int page_size, int position_offset, Tensor(a!) root_token_ids, Tensor(b!) token_ids, "
    "Tensor(c!) positions, Tensor(d!) slots, Tensor(e!) cu_tokens) -> ()",
    # ---- kv
    "commit_kv": "(Tensor page_table, Tensor context_lens, Tensor cu_nodes, Tensor accepted_nodes, "
    "Tensor num_emitted, Tensor? request_order, str kv_layout, "
    "Tensor(a!)[] k_caches, Tensor(b!)[] v_caches) -> ()",
    "advance": "(Tensor num_emitted, Tensor(a!) context_lens) -> ()",
    "copy_pages": "(Tensor src, Tensor dst, Tensor(a!)[] k_caches, Tensor(b!)[] v_caches) -> ()",
    # ---- batching
    "plan_buckets": "(Tensor num_nodes, int[] bucket_sizes, "
    "Tensor(a!) order, Tensor(b!) bucket_offsets, Tensor(c!) cu_nodes) -> ()",
    "pack_rows": "(Tensor x, Tensor cu, Tensor(a!) out) -> ()",
    "unpack_rows": "(Tensor x, Tensor cu, Tensor(a!) out) -> ()",
    "padding_stats": "(Tensor num_nodes, Tensor order, Tensor bucket_offsets, int[] bucket_sizes, int tile_rows, "
    "int group_size, Tensor(a!) stats) -> ()",
}


class Flag(enum.IntFlag):
    """Bits of the `flags` tensors: data faults seen on the device (csrc/common/flags.h, docs/numerics.md)."""

    NAN_LOGIT = 1
    DEAD_ROW = 2
    INF_LOGIT = 4
    TOKEN_RANGE = 8
    DRAFT_MASS = 16
    ZERO_RESIDUAL = 32
    TREE = 64
    PARAMETER = 128
    SIBLINGS = 256
    INDEX = 512


BACKENDS = ("native", "triton")
_NAMESPACES = {"native": "specdec", "triton": "specdec_triton"}
_libraries: list[torch.library.Library] = []
_PACKAGE = Path(__file__).parent


def define_namespace(namespace: str) -> torch.library.Library:
    """Define every op of the table in `namespace`, each with a no-op fake (outputs belong to the caller)."""
    library = torch.library.Library(namespace, "FRAGMENT")
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
        torch.library.register_fake(f"{namespace}::{name}", _fake(name), lib=library)
    _libraries.append(library)  # a Library undefines its ops when it is collected
    return library


def _fake(op: str) -> Callable[..., None]:
    """A fake that does nothing. PyTorch takes it for real calls as well where any argument lies on "meta": such a call
    must not pass in silence when the others lie elsewhere."""

    def fake(*args: Any, **kwargs: Any) -> None:
        given = [(str(i), x) for i, x in enumerate(args)] + list(kwargs.items())
        devices = {x.device.type for _, x in given if type(x) is torch.Tensor}
        if "meta" in devices and len(devices) > 1:
            name = next(name for name, x in given if type(x) is torch.Tensor and x.device.type == "meta")
            name = tensor_arguments(op)[0][int(name)] if name.isdigit() else name
            raise ValueError(f"{op}: {name}: expected device {min(devices - {'meta'})}, got meta")

    return fake


@functools.cache
def tensor_arguments(op: str) -> tuple[tuple[str, ...], tuple[tuple[int, bool], ...]]:
    """(Names of all arguments in order; place, and whether None will do, of those that are tensors)"""
    declared = [a.split() for a in SCHEMAS[op].strip()[1:].split(") -> ()")[0].split(", ")]
    tensors = [(i, kind.endswith("?")) for i, (kind, _) in enumerate(declared) if kind.startswith("Tensor")]
    return tuple(name for _, name in declared), tuple(tensors)


def _check_tensors(op: str, device: torch.device, args: Sequence[Any]) -> None:
    names, places = tensor_arguments(op)
    on_cpu = device.type == "cpu"
    for place, optional in places:
        value = args[place]
        if value is None:
            if not optional:
                raise TypeError(f"{op}: {names[place]}: expected a tensor, got None")
        elif on_cpu and type(value) is torch.Tensor and value.is_cpu:
            continue  # the common case, without making two devices to compare
        else:
            for x in value if isinstance(value, (list, tuple)) else [value]:
                if x is not None and x.device != device:
                    raise ValueError(f"{op}: {names[place]}: expected device {device}, got {x.device}")


def _load_native() -> dict[str, str]:
    """Load the compiled op libraries; returns {"cpu"|"cuda": path or the reason why it is absent}."""
    found: dict[str, str] = {}
    wanted = {"_cpu": "cpu", "_cuda": "cuda", "_cuda_sm90": "cuda_sm90"}
    for stem, label in wanted.items():
        paths = sorted(_PACKAGE.glob(stem + ".*so"))
        if not paths:
            found[label] = "not compiled in this build"
        elif label != "cpu" and torch.version.cuda is None:
            found[label] = f"compiled ({paths[0].name}), not loaded: this torch has no CUDA"
        else:
            try:
                torch.ops.load_library(str(paths[0]))
                found[label] = paths[0].name
            except OSError as error:
                found[label] = (
                    f"{paths[0].name} does not load into torch {torch.__version__} "
                    f"(built for the stable ABI of torch >= 2.11): {error}"
                )
                logger.warning("specdec_kernels: %s", found[label])
    return found


def _first_call(op: str) -> Callable[..., None]:
    """What `torch.ops.specdec_triton.<op>` runs until its room is imported, which a call on CUDA tensors does."""

    def first(*args: Any, **kwargs: Any) -> None:
        devices = {x.device.type for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)}
        if devices == {"cuda"}:
            _namespace(op, "triton", "cuda")  # imports the room, or says that this build has none
            return getattr(torch.ops.specdec_triton, op).default(*args, **kwargs)
        got = f"got {', '.join(sorted(devices - {'cuda'}))} (torch.ops.specdec.{op} serves them)"
        raise NotImplementedError(f"{op}: backend: Triton kernels take CUDA tensors, {got}")

    return first


define_namespace("specdec")
_triton_ops = define_namespace("specdec_triton")
for _op in SCHEMAS:
    _triton_ops.impl(_op, _first_call(_op), "CompositeExplicitAutograd")
NATIVE = _load_native()


@functools.cache
def _triton_room(op: str) -> str | None:
    """Import the Triton room that implements `op`; None if Triton or the op is missing."""
    try:
        return importlib.import_module("specdec_kernels._triton").load(op)
    except ImportError:
        return None


def supports(op: str, backend: str = "native", device: str = "cpu") -> bool:
    """Whether `op` runs on `device` ("cpu", "cuda") with `backend` ("native", "triton") in this build."""
    if op not in SCHEMAS:
        raise ValueError(f"supports: op: expected one of {sorted(SCHEMAS)}, got {op!r}")
    if backend == "triton" and (device == "cpu" or _triton_room(op) is None):
        return False
    qualified = f"{_NAMESPACES.get(backend, backend)}::{op}"
    return torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "Meta" if device == "meta" else device.upper())


@constant_result
def _namespace(op: str, backend: str | None, device: str) -> str:
    """The namespace that serves (op, backend, device); raises NotImplementedError naming what exists."""
    choice = backend or _BACKEND
    if choice is not None and choice not in _NAMESPACES:
        name = "backend" if backend else "SPECDEC_BACKEND"
        raise ValueError(f"{op}: {name}: expected one of {sorted(_NAMESPACES)}, got {choice!r}")
    for candidate in [choice] if choice else BACKENDS:
        if device == "meta" or supports(op, candidate, device):
            return _NAMESPACES[candidate]
    have = [f"{b} on {d}" for b in BACKENDS for d in ("cpu", "cuda") if supports(op, b, d)]
    raise NotImplementedError(
        f"{op}: backend: {choice or 'auto'} on {device} is not built; this build has: {', '.join(have) or 'none'} "
        "(python -m specdec_kernels info shows why)"
    )


def covers(archs: str, major: int, minor: int) -> bool:
    """Whether code for `archs`, as "8.0;9.0a;12.0+PTX", runs on a GPU of this compute capability: binaries run on later
    GPUs of their major version, those of an "a" on its own alone, PTX on all later ones. Unknown words cover all."""
    for arch in archs.replace(" ", ";").split(";"):
        found = re.fullmatch(r"(\d+)\.(\d)(a?)(\+PTX)?", arch)
        if found is None:
            return True
        built = (int(found[1]), int(found[2]))
        if built == (major, minor) or (not found[3] and built <= (major, minor) and (found[4] or built[0] == major)):
            return True
    return False


def _expect_architecture(op: str) -> None:
    """NotImplementedError if this build's CUDA code does not run on the current GPU."""
    try:
        archs = str(importlib.import_module("specdec_kernels._C").build_info()["cuda_archs"])
    except ImportError:  # made for another Python: the driver will say it in its words
        return
    major, minor = torch.cuda.get_device_capability()
    if archs and not covers(archs, major, minor):
        raise NotImplementedError(
            f"{op}: backend: native on cuda has code for {archs}, this GPU is sm_{major}{minor} "
            f'(TORCH_CUDA_ARCH_LIST="{major}.{minor}" pip install --no-build-isolation . in the source folder, or '
            "backend='triton')"
        )


@functools.cache
def _resolve(op: str, backend: str | None, device: str) -> Any:
    if device == "cuda" and _namespace(op, backend, device) == "specdec":
        _expect_architecture(op)
    return getattr(getattr(torch.ops, _namespace(op, backend, device)), op).default


def call(op: str, backend: str | None, device: torch.device, *args: Any) -> None:
    """Run `op` on the chosen backend. An explicit backend never falls back to another."""
    if torch.compiler.is_compiling():  # the cache is opaque to Dynamo, the name of the op is not
        return getattr(getattr(torch.ops, _namespace(op, backend, device.type)), op).default(*args)
    run = _resolve(op, backend, device.type)
    _check_tensors(op, device, args)
    if _LOG:
        logger.info("%s(%s)", op, ", ".join(map(_brief, args)))
    if _NVTX and device.type == "cuda":
        with torch.cuda.nvtx.range(f"specdec::{op}"):
            return run(*args)
    return run(*args)


def _flag(name: str) -> bool:
    """Whether an environment variable is on: anything but empty, 0, false, no and off."""
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")


# Read once, when the package is imported (docs/troubleshooting.md): a call does not look at the environment.
_BACKEND = os.environ.get("SPECDEC_BACKEND") or None
_LOG, _NVTX = _flag("SPECDEC_LOG"), _flag("SPECDEC_NVTX")
if _LOG and not logger.handlers:
    logging.basicConfig(level=logging.INFO)


def checking() -> bool:
    """SPECDEC_CHECK=1: validate device values on the host and raise (debugging; synchronises)."""
    return _flag("SPECDEC_CHECK")


_WORKSPACES: dict[str, Callable[..., int]] = {}


def register_workspace(op: str, size: Callable[..., int]) -> None:
    """Give `op` a workspace: `size(**bounds)` in bytes. Called by the room that owns the op."""
    _WORKSPACES[op] = size


def workspace_bounds(op: str) -> dict[str, bool]:
    """The bounds that `workspace_size` takes of `op`, in order, and whether each must be given; {}: no workspace."""
    taken = inspect.signature(_WORKSPACES[op]).parameters if op in _WORKSPACES else {}
    return {name: bound.default is bound.empty for name, bound in taken.items()}


def workspace_size(op: str, **bounds: int) -> int:
    """Bytes of workspace `op` may ask for within `bounds` (0: it needs none). Zero it once; calls leave it zeroed.

    Bounds: "tree_attention": batch, max_nodes, num_q_heads, num_kv_heads, head_dim, and if they are not the default
    v_dim, num_splits, num_workers; "verify": requests, nodes; "rerank_tree": requests, candidates; in docs/ops.md for
    every op that has one. A workspace is never shared between streams. ValueError for unknown ops and bounds.
    """
    if op not in SCHEMAS:
        raise ValueError(f"workspace_size: op: expected one of {sorted(SCHEMAS)}, got {op!r}")
    if op not in _WORKSPACES:
        return 0
    taken = workspace_bounds(op)
    if not bounds.keys() <= taken.keys() or any(needed and name not in bounds for name, needed in taken.items()):
        words = ", ".join(name if needed else f"[{name}]" for name, needed in taken.items())
        raise ValueError(f"workspace_size: bounds: expected {words} for {op}, got {', '.join(bounds) or 'none'}")
    return _WORKSPACES[op](**bounds)


def register_backend(name: str, namespace: str) -> None:
    """Make `backend=name` reach the ops of `namespace` (the tests' emulated backends)."""
    _NAMESPACES[name] = namespace
    _resolve.cache_clear()


def _brief(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)


# ---- host checks shared by the public functions (values are checked in C++, before anything is written)


def expect_tensor(
    op: str, argument: str, value: Any, dtype: torch.dtype | tuple[torch.dtype, ...], ndim: int
) -> torch.Tensor:
    """Raise TypeError/ValueError unless `value` is a tensor of one of `dtype` with `ndim` dimensions."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{op}: {argument}: expected a tensor, got {type(value).__name__}")
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if value.dtype not in dtypes:
        names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{op}: {argument}: expected {names}, got {str(value.dtype).removeprefix('torch.')}")
    if value.dim() != ndim:
        raise ValueError(f"{op}: {argument}: expected {ndim} dimensions, got shape {list(value.shape)}")
    return value


def expect(op: str, argument: str, condition: bool, expected: str, got: Any) -> None:
    """Raise ValueError `op: argument: expected X, got Y` unless `condition`."""
    if not condition:
        raise ValueError(f"{op}: {argument}: expected {expected}, got {got}")


def expect_int(op: str, argument: str, value: Any, least: int, expected: str, most: int | None = None) -> None:
    """Raise TypeError unless `value` is a host integer, ValueError unless it lies in [least, most]."""
    if not isinstance(value, int) and not isinstance(value, (torch.SymInt, numbers.Integral)):
        got = "a tensor" if isinstance(value, torch.Tensor) else repr(value)  # whose value is not read
        raise TypeError(f"{op}: {argument}: expected an int, got {got}")
    if value < least or (most is not None and value > most):  # type: ignore[operator]
        raise ValueError(f"{op}: {argument}: expected {expected}, got {value}")
