"""Drafters: who proposes the tokens that the target verifies. Any object with the `Drafter` protocol serves."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from specdec_kernels.engine.batch import KVCache, TargetModel
    from specdec_kernels.engine.pages import Arena
    from specdec_kernels.engine.request import RequestState


@dataclass(frozen=True)
class Draft:
    """Proposed tokens as a tree. Draft i is tree node i + 1; `parents[i]` is its parent's node (0: the root).

    Parents come before children; siblings are tried in the order given. `logits` float [R, Vd], when the tokens were
    drawn at random (siblings without replacement): row `rows[i]` is the law draft i was drawn from, before temperature
    and filters, which are the request's (`rows` None: row i); None: the tokens are the drafter's fixed choice. `d2t`
    int32 [Vd]: column c is the target's id c + d2t[c] (None: c).
    """

    token_ids: Sequence[int] = ()
    parents: Sequence[int] = ()
    logits: torch.Tensor | None = None
    rows: Sequence[int] | None = None
    d2t: torch.Tensor | None = None

    @staticmethod
    def chain(token_ids: Sequence[int], logits: torch.Tensor | None = None) -> Draft:
        return Draft(tuple(token_ids), tuple(range(len(token_ids))), logits)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        return all(parent == i for i, parent in enumerate(self.parents))

    @property
    def depth(self) -> int:
        return len(self.depth_counts())

    def depth_counts(self) -> list[int]:
        """Number of drafts at depth 1, 2, ..."""
        depths = [0]
        counts: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1)
            if len(counts) < depths[-1]:
                counts.append(0)
            counts[depths[-1] - 1] += 1
        return counts

    def checked(self, limit: Limit) -> Draft:
        """This draft; ValueError if it is malformed or larger than allowed."""
        if len(self.token_ids) != len(self.parents):
            raise ValueError(f"Draft: parents: expected {len(self.token_ids)} entries, got {len(self.parents)}")
        for i, parent in enumerate(self.parents):
            if not 0 <= parent <= i:
                raise ValueError(f"Draft: parents: expected an earlier node for draft {i}, got {parent}")
        if not all(isinstance(t, int) and -(2**31) <= t < 2**31 for t in self.token_ids):
            raise ValueError(f"Draft: token_ids: expected 32-bit ints, got {list(self.token_ids)}")
        if self.logits is not None:
            rows = range(len(self)) if self.rows is None else self.rows
            whole = self.rows is not None or self.logits.shape[0] == len(self)
            if self.logits.dim() != 2 or not whole or len(rows) != len(self):
                raise ValueError(f"Draft: logits: expected [{len(self)}, V], got {list(self.logits.shape)}")
            if any(not 0 <= row < self.logits.shape[0] for row in rows):
                raise ValueError(f"Draft: rows: expected rows of {self.logits.shape[0]} laws, got {list(rows)}")
        if len(self) > limit.nodes or self.depth > limit.depth:
            raise ValueError(f"Draft: expected at most {limit}, got {len(self)} nodes of depth {self.depth}")
        return self


class Limit(NamedTuple):
    """Most draft nodes and greatest depth that a request may be given in this step."""

    nodes: int
    depth: int


class DraftContext(NamedTuple):
    """What a drafter may use besides the requests' own text: the target, and its cache, in which each request owns the
    slots `context_len ... context_len + nodes` of this step (their content is overwritten by the verification); and,
    for a drafter with a `kv_shape`, its own cache and the arena that gives out its pages."""

    model: TargetModel
    cache: KVCache
    draft_cache: KVCache | None = None
    arena: Arena | None = None


class Seen(NamedTuple):
    """Rows of a forward pass that have become a request's text: those at text positions `first`, `first + 1`, ... are
    `rows` of the packed batch. The token behind the last of them is known already."""

    state: RequestState
    first: int
    rows: Sequence[int]


class Drafter(Protocol):
    """`propose` returns one Draft per request, each within its limit; an empty Draft means plain decoding. It must not
    change the requests (notes go into `state.drafter_state`). If it raises, its requests go on without drafts.

    Optional attributes. max_context: longest text it can read. kv_shape (`KVShape`): it has KV of its own, in pages
    that it takes from `context.arena` as the draft tenant into `state.draft_pages`; the engine may take these back
    between steps, all of a request's at once. lookahead: tokens beyond a page that rows it keeps in the target's pages
    depend on (1 for EAGLE-type heads). version: of its weights.

    Optional methods. attach(model): called once before anything else; ValueError if it cannot serve that target.
    observe(seen: list of `Seen`, hidden: `HiddenStates`, context): called after every step for requests that go on,
    with the target's states at the layers of its attribute `hidden_layers`. weights_changed(model): the target's
    weights were changed; what it noted of requests is gone already. between_steps(seconds): called behind every step,
    outside of inference mode, with what the step took: the place to learn, and the only one to change `version`. The
    last two are for drafters with an `attach`.
    """

    name: str

    def propose(
        self, states: Sequence[RequestState], limits: Sequence[Limit], context: DraftContext
    ) -> Sequence[Draft]: ...


class NoDrafter:
    """Plain decoding: one token a step."""

    name = "none"

    def propose(self, states: Sequence[Any], limits: Sequence[Limit], context: DraftContext) -> list[Draft]:
        return [Draft()] * len(states)


@dataclass
class DrafterTable:
    """Drafters by name, made on first use and then shared by all requests of an engine; and the objects that requests
    bring, as long as somebody holds them."""

    model: TargetModel | None = None
    made: dict[str, Drafter] = field(default_factory=lambda: {"none": NoDrafter()})
    _known: dict[int, Callable[[], Drafter | None]] = field(default_factory=dict)  # by id

    @property
    def attached(self) -> list[Drafter]:
        """Those whose `attach` was called."""
        return [drafter for known in list(self._known.values()) if (drafter := known()) is not None]

    def get(self, drafter: str | Drafter | None) -> Drafter:
        if drafter is None:
            return self.made["none"]
        if not isinstance(drafter, str):
            if not callable(getattr(drafter, "propose", None)):
                raise TypeError(f"Engine: drafter: expected a name or a Drafter, got {type(drafter).__name__}")
            if not isinstance(getattr(drafter, "name", None), str):  # metrics count by it
                raise TypeError(
                    f"Engine: drafter: expected an attribute name (str), got {type(drafter).__name__} without"
                )
            return self._attach(drafter)
        if drafter not in self.made:
            self.made[drafter] = self._attach(FACTORIES[check_name(drafter)]())
        return self.made[drafter]

    def _attach(self, drafter: Drafter) -> Drafter:
        if hasattr(drafter, "attach") and self.model is not None and id(drafter) not in self._known:
            drafter.attach(self.model)
            key, known = id(drafter), self._known
            try:
                known[key] = weakref.ref(drafter, lambda _: known.pop(key, None))
            except TypeError:  # made of slots: held for good
                known[key] = lambda: drafter
        return drafter


def check_name(drafter: str) -> str:
    """The name of a drafter; ValueError if there is none of this name. For commands, before they load a model."""
    if drafter != "none" and drafter not in FACTORIES:
        raise ValueError(f"Engine: drafter: expected one of {sorted({'none', *FACTORIES})}, got {drafter!r}")
    return drafter


def _ngram() -> Drafter:
    from specdec_kernels.engine.drafters.ngram import NgramDrafter

    return NgramDrafter()


def _self() -> Drafter:
    from specdec_kernels.engine.drafters.self_draft import SelfDrafter

    return SelfDrafter()


def _head(kind: str) -> Callable[[], Drafter]:
    def make() -> Drafter:
        from specdec_kernels.engine.drafters.eagle import EagleDrafter
        from specdec_kernels.engine.drafters.medusa import MedusaDrafter

        return MedusaDrafter() if kind == "medusa" else EagleDrafter(kind=kind)

    return make


FACTORIES: dict[str, Callable[[], Drafter]] = {
    "ngram": _ngram,
    "self": _self,
    **{kind: _head(kind) for kind in ("medusa", "eagle", "eagle3", "mtp")},
}
