"""Small things that engine tests share: a byte tokenizer, a model of a fixed law, a grammar, a run to the end."""

from __future__ import annotations

import torch

from python_ref.decoder import ToyTarget
from specdec_kernels.engine import Engine, Request, Result
from tests.toy_model import ToyModel


class Bytes:
    """One id a byte; a character of several bytes is whole only with all of them."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode(errors="replace")


class ScriptModel(ToyModel):
    """The next token is `following[last token]` (default: last + 1); the rows of the toy model are written beside."""

    def __init__(self, following: dict[int, int], vocab: int = 32, **options):
        super().__init__(ToyTarget(vocab), **options)
        self.following = following

    def forward(self, batch, cache, layers=None):
        logits = super().forward(batch, cache, layers)
        tokens = batch.token_ids if batch.logit_rows is None else batch.token_ids[batch.logit_rows]
        wanted = [self.following.get(t, (t + 1) % self.vocab_size) for t in tokens.tolist()]
        return torch.zeros_like(logits).scatter_(1, torch.tensor(wanted)[:, None], 5.0)


class RowModel(ToyModel):
    """Logits behind token t are `rows[t]` (or the one row there is), whatever came before."""

    def __init__(self, rows, **options):
        self.rows = torch.as_tensor(rows, dtype=torch.float32)
        super().__init__(ToyTarget(self.rows.shape[-1]), **options)

    def forward(self, batch, cache, layers=None):
        super().forward(batch, cache, layers)
        tokens = batch.token_ids if batch.logit_rows is None else batch.token_ids[batch.logit_rows]
        return self.rows[tokens].clone() if self.rows.dim() == 2 else self.rows.repeat(len(tokens), 1)


class Follows:
    """A grammar: `table[t]` may come behind token t, `first` at the start; it ends behind `end`."""

    def __init__(self, first: set[int], table: dict[int, set[int]], end: int | None = None):
        self.first, self.table, self.end = first, table, end
        self.read: list[int] = []

    def _allowed(self) -> set[int]:
        assert not self.ended  # nobody asks behind the end
        return self.table.get(self.read[-1], set()) if self.read else self.first

    def fill_allowed(self, row: torch.Tensor) -> None:
        assert not row.any()
        for token in self._allowed():
            bit = 1 << token % 32
            row[token // 32] |= bit - (1 << 32) if bit == 1 << 31 else bit

    def accept(self, token_id: int) -> bool:
        if token_id not in self._allowed():
            return False
        self.read.append(token_id)
        return True

    def rollback(self, count: int) -> None:
        del self.read[len(self.read) - count :]

    @property
    def ended(self) -> bool:
        return bool(self.read) and self.read[-1] == self.end


def finish(engine: Engine, *requests: Request) -> list[Result]:
    """Run requests to their end; their results in order (one for each sample)."""
    first = [engine.add(request) for request in requests]
    wanted = [start + i for start, request in zip(first, requests) for i in range(request.n)]
    found: dict[int, Result] = {}
    while engine.has_work:
        found.update({e.request_id: e.result for e in engine.step() if e.result})
    return [found[i] for i in wanted]
