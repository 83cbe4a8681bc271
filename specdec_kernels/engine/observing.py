"""Hidden states for drafters that read them: which are wanted of a step, and which of its rows became text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from specdec_kernels.engine.batch import HiddenStates
from specdec_kernels.engine.drafters import DraftContext, Seen
from specdec_kernels.engine.pack import Chunk, Packed
from specdec_kernels.engine.request import RequestState


def wanted_states(states: Iterable[RequestState]) -> HiddenStates | None:
    """What the drafters of these requests want to see of the coming forward pass; None: nothing."""
    layers = {layer for state in states for layer in getattr(state.drafter, "hidden_layers", ())}
    return HiddenStates(layers) if layers else None


def committed_rows(packed: Packed, chunks: Sequence[Chunk], accepted_nodes: torch.Tensor | None) -> list[Seen]:
    """The rows of a step that are text now, of requests that go on and whose drafter wants to know.

    Called when the step's tokens have been appended. accepted_nodes: int32 [V, max_depth + 1] as `verify` gave it.
    """
    seen = []
    offset = 0
    num_rooted = sum(chunk.last for chunk in chunks)
    accepted = [] if accepted_nodes is None else accepted_nodes.tolist()
    roots = packed.root_lens.tolist()
    for b, (state, draft) in enumerate(zip(packed.states, packed.drafts)):
        if b == len(packed.states) - num_rooted:
            break
        if _observed(state):
            nodes = accepted[b][: state.context_len - roots[b]]
            seen.append(Seen(state, roots[b], [offset + node for node in nodes]))
        offset += len(draft) + 1
    for state, size, _ in sorted(chunks, key=lambda chunk: not chunk.last):  # as they were packed
        if _observed(state):
            seen.append(Seen(state, state.context_len - size, range(offset, offset + size)))
        offset += size
    return seen


def show(
    seen: Sequence[Seen],
    hidden: HiddenStates,
    context: DraftContext,
    give_up: Callable[[Sequence[RequestState], str], None],
) -> None:
    """Show each drafter its requests' rows; one that raises is given up for them."""
    for drafter in {id(item.state.drafter): item.state.drafter for item in seen}.values():
        mine = [item for item in seen if item.state.drafter is drafter]
        try:
            drafter.observe(mine, hidden, context)
        except Exception as error:
            give_up([item.state for item in mine], f"{error!r}")


def _observed(state: RequestState) -> bool:
    return state.finish_reason is None and hasattr(state.drafter, "observe")
