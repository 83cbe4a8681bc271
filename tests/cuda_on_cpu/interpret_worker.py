"""A process with TRITON_INTERPRET=1: reads (op, args) pickles from stdin, runs the Triton twin, answers on stdout.

Triton's interpreter keeps bfloat16 as raw 16-bit integers and computes with them, silently wrong. Here tl.dot converts
its operands to float32 first (what the tensor core does: exact products, float32 sums), float32 is rounded to the
nearest bfloat16 as in compiled code (the interpreter cuts), and every other arithmetic on bfloat16 is refused: kernels
must convert to float32 anyway.

The interpreter also patches triton.language again at every call of a device function; here it does so once a function.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from typing import Any

import numpy as np

assert os.environ.get("TRITON_INTERPRET") == "1"


def guard_bfloat16() -> None:
    """Make the interpreter right for bfloat16 tl.dot and refuse it elsewhere."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def is_bf16(handle: Any) -> bool:
        return handle.dtype.scalar == tl.bfloat16

    def as_float32(handle: Any) -> Any:
        if is_bf16(handle):
            return (handle.data.astype(np.uint32) << 16).view(np.float32)
        return handle.data

    plain_dot = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if not (is_bf16(a) or is_bf16(b)):
            return plain_dot(self, a, b, d, *rest)
        product = np.matmul(as_float32(a), as_float32(b), dtype=np.float32)
        return TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    plain_cast = InterpreterBuilder.cast_impl

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
            return plain_cast(self, src, dst_type)
        bits = src.data.astype(np.float32).view(np.uint32)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        kept = np.where(np.isnan(src.data), bits >> 16 | 0x40, nearest)
        return TensorHandle(kept.astype(np.uint16), dst_type.scalar)

    def refusing(name: str) -> Any:
        plain = getattr(InterpreterBuilder, name)

        def checked(self: Any, *operands: Any) -> Any:
            if any(hasattr(one, "dtype") and is_bf16(one) for one in operands):
                raise TypeError("bfloat16 arithmetic is wrong in Triton's interpreter: convert to float32 first")
            return plain(self, *operands)

        return checked

    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.cast_impl = cast_impl
    for name in ("binary_op", "unary_op"):
        setattr(InterpreterBuilder, name, refusing(name))


def patch_language_once() -> None:
    """Device functions find triton.language patched already: nothing else than kernels runs in this process."""
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_lang(function: Any) -> Any:
        if function not in patched:
            patched.add(function)
            patch(function)
        return interpreter._LangPatchScope()  # with nothing to restore

    interpreter._patch_lang = patch_lang


def main() -> None:
    reader, writer = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # kernels may print; the pipe is ours alone
    guard_bfloat16()
    patch_language_once()
    from tests.cuda_on_cpu.triton_backends import named_tensors, portable, restored

    rooms = importlib.import_module("specdec_kernels._triton").OPS
    while True:
        try:
            op, args = restored(pickle.load(reader))
        except EOFError:
            return
        failure = None
        try:
            getattr(importlib.import_module(f"specdec_kernels._triton.{rooms[op]}"), f"impl_{op}")(*args)
        except Exception as error:
            failure = error if isinstance(error, (ValueError, TypeError)) else RuntimeError(f"{op}: {error!r}")
        pickle.dump((failure, portable([tensor for _, tensor, _ in named_tensors(op, args)])), writer)
        writer.flush()


if __name__ == "__main__":
    main()
