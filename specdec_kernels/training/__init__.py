"""Room 7b: draft heads trained on a target's own hidden states. See docs/training.md."""

from specdec_kernels.training.data import Corpus, read_corpus
from specdec_kernels.training.evaluate import Acceptance, evaluate_head
from specdec_kernels.training.features import FeatureStore, compute_features
from specdec_kernels.training.heads import HeadTrainer, TrainOptions
from specdec_kernels.training.online import OnlineCounters, OnlineDrafter, OnlineOptions

__all__ = [
    "Acceptance",
    "Corpus",
    "FeatureStore",
    "HeadTrainer",
    "OnlineCounters",
    "OnlineDrafter",
    "OnlineOptions",
    "TrainOptions",
    "compute_features",
    "evaluate_head",
    "read_corpus",
]
