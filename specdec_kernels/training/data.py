"""Text for training: folders of source code and prose, split by document, cut into chunks of equal length."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

SUFFIXES = (".py", ".rst", ".rst.txt", ".txt", ".md")
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "pydoc_data"}
_HELD_OUT = 16  # one document in so many is never trained on
_MOST_CHARS = 200_000  # of one document, so that no single one dominates


def named_sources() -> dict[str, list[Path]]:
    """Texts that a machine may have: "stdlib", the standard library's source; "pydoc", the Python documentation's (on
    Debian the package python3.11-doc)."""
    shares = dict.fromkeys((Path(sysconfig.get_path("data")) / "share", Path("/usr/share")))
    found = [path for share in shares for path in sorted(share.glob("doc/python3*/html/_sources"))]
    return {"stdlib": [Path(sysconfig.get_path("stdlib"))], "pydoc": found[:1]}


class Corpus(NamedTuple):
    """`train` and `held_out`: int32 [chunks, length] token ids; `train_names`, `held_out_names`: their documents."""

    train: torch.Tensor
    held_out: torch.Tensor
    train_names: list[str]
    held_out_names: list[str]


def is_held_out(name: str) -> bool:
    """Whether the document of this name (relative to its folder) is kept for evaluation: by its hash, for good."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % _HELD_OUT == 0


def read_corpus(
    sources: Sequence[str | Path], tokenizer: Any, *, length: int, num_tokens: int, held_out_tokens: int, seed: int = 0
) -> Corpus:
    """Chunks of `length` tokens from the documents under `sources` (folders, or names of `named_sources`), in a random
    order that depends on `seed` alone; documents shorter than a chunk are left out. Held-out chunks come from as many
    documents as there are: one of each, then a second of each, and so on. ValueError if a source is missing or gives no
    chunk."""
    documents = []
    for source in sources:
        for root in _folders(source):
            for path in sorted(root.rglob("*")):
                if (
                    path.name.endswith(SUFFIXES)
                    and not _LEFT_OUT & set(path.relative_to(root).parts)
                    and path.is_file()
                ):
                    documents.append((f"{source if str(source) in named_sources() else root.name}/"
                                      f"{path.relative_to(root).as_posix()}", path))  # fmt: skip
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed)).tolist()
    train: dict[str, torch.Tensor] = {}  # chunks [n, length] of each document
    held_out: dict[str, torch.Tensor] = {}
    draw = torch.Generator().manual_seed(seed + 2)
    for index in order:
        name, path = documents[index]
        kept = is_held_out(name)
        if not kept and sum(map(len, train.values())) * length >= num_tokens:
            continue
        try:
            text = path.read_text(encoding="utf-8")[:_MOST_CHARS]
        except UnicodeDecodeError:
            continue
        ids = torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int32)
        chunks = ids[: len(ids) // length * length].view(-1, length)
        if len(chunks) and kept:
            held_out[name] = chunks[torch.randperm(len(chunks), generator=draw)]
        elif len(chunks):
            train[name] = chunks
    for found, what in ((train, "training"), (held_out, "held-out")):
        if not found:
            raise ValueError(
                f"read_corpus: sources: expected {what} documents of at least {length} tokens, got none in "
                f"{[str(s) for s in sources]} ({len(documents)} documents)"
            )
    turns = [(turn, name) for name, chunks in held_out.items() for turn in range(len(chunks))]
    turns = sorted(turns, key=lambda place: place[0])[: max(1, held_out_tokens // length)]  # stable within a turn

    def mixed(chunks: torch.Tensor) -> torch.Tensor:
        return chunks[torch.randperm(len(chunks), generator=torch.Generator().manual_seed(seed + 1))]

    return Corpus(
        mixed(torch.cat(list(train.values())))[: max(1, num_tokens // length)],
        mixed(torch.stack([held_out[name][turn] for turn, name in turns])),
        sorted(train),
        sorted({name for _, name in turns}),
    )


def _folders(source: str | Path) -> list[Path]:
    known = named_sources()
    folders = known.get(str(source), [Path(source)])
    if not folders or not all(folder.is_dir() for folder in folders):
        hint = " (apt-get install python3.11-doc)" if str(source) == "pydoc" else ""
        raise ValueError(
            f"read_corpus: sources: expected a folder or one of {sorted(known)}, got {str(source)!r}{hint}"
        )
    return folders
