"""Ranks of a process group as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class Ranks:
    """Stands for torch.distributed in specdec_kernels/_sharded.py; counts the bytes a rank hands to collectives."""

    ReduceOp = dist.ReduceOp

    def __init__(self, world: int):
        self.world, self.sent = world, [0] * world
        self.barrier, self.mine = threading.Barrier(world), threading.local()
        self.given: list[Any] = [None] * world

    def get_rank(self, group: Any) -> int:
        return self.mine.rank

    def get_world_size(self, group: Any) -> int:
        return self.world

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        rank = self.mine.rank
        self.sent[rank] += tensor.numel() * tensor.element_size()
        self.given[rank] = tensor.clone()
        self.barrier.wait(60)
        every = torch.stack(self.given)
        self.barrier.wait(60)
        return every

    def all_reduce(self, tensor: torch.Tensor, op: Any, group: Any) -> None:
        every = self._gather(tensor)
        if op == dist.ReduceOp.SUM:
            tensor.copy_(every.sum(0))
        else:
            tensor.copy_(every.amax(0) if op == dist.ReduceOp.MAX else every.amin(0))

    def all_gather(self, out: list[torch.Tensor], tensor: torch.Tensor, group: Any) -> None:
        for place, value in zip(out, self._gather(tensor), strict=True):
            place.copy_(value)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """work(rank) of every rank."""
        found: list[Any] = [None] * self.world

        def one(rank: int) -> None:
            self.mine.rank = rank
            try:
                found[rank] = work(rank)
            except BaseException as error:
                found[rank] = error
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        broken = [error for error in found if isinstance(error, BaseException)]
        for error in sorted(broken, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return found


def split(V: int, world: int) -> list[int]:
    """Where shards begin, and the end: multiples of 32."""
    return [V * r // world // 32 * 32 for r in range(world)] + [V]
