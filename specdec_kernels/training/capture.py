"""The target's states of committed text, as an engine's steps give them: chunks to learn from, and a ring of them.

a step's rows      r0 r1 x  r2 | ...       x: a rejected draft; only rows that became text are seen
a request's run    ... r0 r1 r2            position by position, from its first output on
chunks             |--- length ---|--- length ---|   (the rest waits for more)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.engine.batch import HiddenStates
from specdec_kernels.engine.drafters import Seen

Chunk = dict[str, Tensor]  # tokens int64 [length]; state.<layer> [length, H]; later lse, best: as in a feature store


@dataclass
class _Run:
    """Text of one request being captured: positions `first` ... `end - 1`."""

    state: Any
    first: int
    length: int = 0
    parts: dict[str, list[Tensor]] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.first + self.length


class Capture:
    """`fresh`: whole chunks nobody has seen yet, at most `waiting`; `ring`: the latest `chunks` to learn from. A fresh
    chunk that waits too long goes into the ring as it is. `tokens`: positions captured; `untested`: such chunks."""

    def __init__(self, layers: Sequence[int], *, length: int, waiting: int, chunks: int):
        self.layers, self.length, self.waiting = layers, length, waiting
        self.fresh: deque[Chunk] = deque()
        self.ring: deque[Chunk] = deque(maxlen=chunks)
        self.tokens = self.untested = 0
        self._runs: dict[int, _Run] = {}

    def __len__(self) -> int:
        """Requests whose text is being captured, and chunks held."""
        return len(self._runs) + len(self.fresh) + len(self.ring)

    def add(self, item: Seen, hidden: HiddenStates) -> None:
        """Copy those rows that continue the request's run: what the target wrote, not what it was given."""
        state, first, rows = item
        run = self._runs.get(state.id)
        if run is None or first > run.end:  # nothing yet, or a gap (cached, or not shown): begin here
            run = self._runs[state.id] = _Run(state, max(first, state.num_prompt - 1))
        rows = list(rows)[max(0, run.end - first) :]  # text that is computed again is known already
        if not rows:
            return
        index = torch.tensor(rows, device=hidden.states[self.layers[0]].device)
        for layer in self.layers:
            run.parts.setdefault(f"state.{layer}", []).append(hidden.states[layer][index])
        run.length += len(rows)
        self.tokens += len(rows)
        if run.length >= self.length:
            self._cut(run)

    def forget_finished(self) -> None:
        """Drop the rest of texts that have ended."""
        for key in [key for key, run in self._runs.items() if run.state.finish_reason is not None]:
            del self._runs[key]

    def clear(self) -> None:
        for held in (self._runs, self.fresh, self.ring):
            held.clear()

    def _cut(self, run: _Run) -> None:
        """Whole chunks of a run; the rest stays."""
        size = self.length
        whole = {name: torch.cat(parts) for name, parts in run.parts.items()}
        for start in range(0, run.length - size + 1, size):
            ids = run.state.tokens[run.first + start : run.first + start + size]
            states = {name: value[start : start + size].clone() for name, value in whole.items()}
            self.fresh.append({"tokens": torch.tensor(ids), **states})
            if len(self.fresh) > self.waiting:
                self.ring.append(self.fresh.popleft())
                self.untested += 1
        done = run.length // size * size
        run.first, run.length = run.first + done, run.length - done
        run.parts = {name: [value[done:].clone()] for name, value in whole.items()}
