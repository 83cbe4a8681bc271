"""Room 6: a thin engine over the five rooms. Greedy output equals plain decoding; sampled output has its law."""

from specdec_kernels.engine.batch import Batch, KVCache, KVShape, TargetModel
from specdec_kernels.engine.checkpoint import load_model
from specdec_kernels.engine.config import EngineConfig
from specdec_kernels.engine.decoder import Engine
from specdec_kernels.engine.drafters import Draft, Drafter
from specdec_kernels.engine.metrics import EngineCounters, SpecCounters
from specdec_kernels.engine.model import TransformersModel
from specdec_kernels.engine.request import Event, Request, Result

__all__ = [
    "Batch",
    "Draft",
    "Drafter",
    "Engine",
    "EngineConfig",
    "EngineCounters",
    "Event",
    "KVCache",
    "KVShape",
    "Request",
    "Result",
    "SpecCounters",
    "TargetModel",
    "TransformersModel",
    "load_model",
]
