"""Asking the drafters of a step's requests, and giving up those that fail."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from specdec_kernels.engine.config import EngineConfig
from specdec_kernels.engine.drafters import Draft, DraftContext, Drafter, DrafterTable, Limit
from specdec_kernels.engine.metrics import EngineCounters
from specdec_kernels.engine.request import RequestState
from specdec_kernels.engine.scheduler import Scheduler

logger = logging.getLogger("specdec_kernels")

STRIKES = 3  # faulty or late drafts after which a drafter is given up


class Drafting:
    """The drafters of an engine's requests; `default` is the engine's own, `states` are all its requests, by id."""

    def __init__(
        self,
        table: DrafterTable,
        default: Drafter,
        context: DraftContext,
        scheduler: Scheduler,
        states: Mapping[int, RequestState],
        metrics: EngineCounters,
        config: EngineConfig,
    ):
        self.table, self.default, self.context, self.metrics = table, default, context, metrics
        self._scheduler, self._states, self._timeout_s = scheduler, states, config.draft_timeout_s
        self._late: dict[int, int] = {}  # by drafter, if it was late: times in a row

    def ask(self, states: Sequence[RequestState], limits: Sequence[Limit]) -> list[Draft]:
        """Ask each request's drafter; one that raises, answers nonsense or is always late is given up, and counted."""
        drafts = [Draft()] * len(states)
        for drafter in {id(state.drafter): state.drafter for state in states}.values():
            rows = [i for i, s in enumerate(states) if s.drafter is drafter and limits[i].depth > 0]
            if not rows:
                continue
            start = time.perf_counter()
            try:
                proposed = drafter.propose([states[i] for i in rows], [limits[i] for i in rows], self.context)
                for i, draft in zip(rows, [d.checked(limits[i]) for i, d in zip(rows, proposed, strict=True)]):
                    drafts[i] = draft
            except Exception as error:
                self.give_up([states[i] for i in rows], f"{error!r}")
                continue
            limit, seconds = self._timeout_s, time.perf_counter() - start
            if limit is None or seconds <= limit:
                self._late.pop(id(drafter), None)
                continue
            self._late[id(drafter)] = self._late.get(id(drafter), 0) + 1
            if self._late[id(drafter)] >= STRIKES:
                self.give_up([states[i] for i in rows], f"took {seconds:.3f} s, allowed {limit} s")
        return drafts

    def between_steps(self, seconds: float, lock: AbstractContextManager) -> None:
        """Give every drafter that wants it its turn behind a step that took `seconds`. lock: for what is changed."""
        for drafter in self.table.attached:
            if hasattr(drafter, "between_steps"):
                try:
                    drafter.between_steps(seconds)
                except Exception as error:
                    with lock:
                        self.give_up([s for s in self._states.values() if s.drafter is drafter], f"{error!r}")

    def give_up(self, states: Sequence[RequestState], why: str) -> None:
        """The requests, all of one drafter, go on without drafts."""
        if not states:
            return
        drafter = states[0].drafter
        logger.warning("drafter %s failed (%s); its requests go on without drafts", drafter.name, why)
        for state in states:
            state.drafter = self.table.get("none")
            self._scheduler.release_drafts(state)
            state.stats.drafter_failures += 1
            self.metrics.drafter_failures += 1
        self.left(drafter)

    def left(self, drafter: Drafter) -> None:
        """A request does without this drafter from now on; with its last one it is forgotten."""
        if id(drafter) not in self._late or drafter is self.default:
            return
        if not any(state.drafter is drafter for state in list(self._states.values())):
            del self._late[id(drafter)]
