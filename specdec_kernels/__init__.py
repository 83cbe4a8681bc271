"""Speculative-decoding kernels as torch ops. Rooms: tree, attention, sampling, kv, batching; engine above them."""

from specdec_kernels._ops import SCHEMAS, Flag, supports, workspace_size

__version__ = "0.1.0"
__all__ = ["SCHEMAS", "Flag", "__version__", "supports", "workspace_size"]
