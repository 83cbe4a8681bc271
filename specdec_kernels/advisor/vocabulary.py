"""A tokenizer reduced to what speculation depends on: which bytes every id stands for, and which ids are special.

Sources: `tokenizers` and fast `transformers` tokenizers, tokenizer.json files and model directories, GGUF files, and
plain maps of ids to bytes. Token strings are undone to bytes first (GPT-2's byte alphabet, SentencePiece's U+2581 and
<0xNN>), so that two spellings of one token compare equal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROLES = ("bos", "eos", "pad", "unk")
Encode = Callable[[bytes], list[int]]


@dataclass
class Vocabulary:
    """tokens[id]: the bytes of an id, None where the id names no token (a hole, or padding).

    width: columns of the model's head, at least len(tokens). special: role -> id. added: ids that are matched as a
    whole and not built by merges (added and control tokens); None where the source does not say. normalizer,
    pre_tokenizer: a canonical description, "" for none, None where the source does not say. encode: bytes -> ids
    without any special token, or None.
    """

    name: str
    tokens: list[bytes | None]
    width: int
    special: dict[str, int] = field(default_factory=dict)
    added: frozenset[int] | None = None
    normalizer: str | None = None
    pre_tokenizer: str | None = None
    encode: Encode | None = None

    def __post_init__(self) -> None:
        while self.tokens and self.tokens[-1] is None:
            self.tokens.pop()
        if not self.tokens:
            raise ValueError(f"check_tokenizers: {self.name}: expected at least one token, got an empty vocabulary")
        if self.width < len(self.tokens):
            raise ValueError(
                f"check_tokenizers: width of {self.name}: expected at least {len(self.tokens)} (its tokens), "
                f"got {self.width}"
            )

    def bytes_of(self, token_ids: list[int]) -> bytes:
        """The bytes that `token_ids` spell; ValueError on an id without a token."""
        return b"".join(self.token(token_id) for token_id in token_ids)

    def token(self, token_id: int) -> bytes:
        """The bytes of one id; ValueError where it names no token."""
        token = self.tokens[token_id] if 0 <= token_id < len(self.tokens) else None
        if token is None:
            raise ValueError(f"convert_drafts: token_ids: expected ids of {self.name}, got {token_id}")
        return token


def _gpt2_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in of each byte, inverted, as a table for str.translate (result: latin-1)."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [b for b in range(256) if b not in kept]
    return {b: chr(b) for b in kept} | {256 + i: chr(b) for i, b in enumerate(moved)}


_ALPHABET = _gpt2_alphabet()


def token_bytes(token: str, convention: str) -> bytes:
    """Bytes of a token string. convention: "byte_level", "sentencepiece" or "plain"."""
    if convention == "byte_level":
        try:
            return token.translate(_ALPHABET).encode("latin-1")
        except UnicodeEncodeError:  # not of the alphabet: a token added as literal text
            return token.encode()
    if convention == "sentencepiece":
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()
    return token.encode()


def longest_match(tokens: list[bytes | None], excluded: frozenset[int] = frozenset()) -> Encode:
    """An encoder for plain maps, which have no merges: the longest token first; ValueError on bytes no token covers."""
    ids: dict[bytes, int] = {}
    for token_id, token in enumerate(tokens):
        if token and token_id not in excluded:
            ids.setdefault(token, token_id)
    longest = max(map(len, ids), default=0)

    def encode(text: bytes) -> list[int]:
        out, at = [], 0
        while at < len(text):
            for size in range(min(longest, len(text) - at), 0, -1):
                if (found := ids.get(text[at : at + size])) is not None:
                    break
            else:
                raise ValueError(f"convert_drafts: text: expected bytes that some token covers, got {text[at:][:8]!r}")
            out.append(found)
            at += size
        return out

    return encode


def from_map(
    tokens: Mapping[int, bytes | str | None],
    *,
    name: str = "map",
    width: int | None = None,
    special: Mapping[str, int] | None = None,
) -> Vocabulary:
    """A plain map id -> bytes (or text). `special`: role -> id; those ids are never produced by `encode`."""
    bad = next((key for key in tokens if not isinstance(key, int) or isinstance(key, bool) or key < 0), None)
    if bad is not None:
        raise ValueError(f"check_tokenizers: {name}: expected non-negative integer ids, got {bad!r}")
    listed: list[bytes | None] = [None] * (max(tokens, default=-1) + 1)
    for token_id, token in tokens.items():
        listed[token_id] = token.encode() if isinstance(token, str) else token
    roles = dict(special or {})
    encode = longest_match(listed, frozenset(roles.values()))
    return Vocabulary(name, listed, len(listed) if width is None else width, roles, encode=encode)


def _convention(state: dict[str, Any]) -> str:
    """Which spelling a tokenizer.json uses, read off its decoder (older files: its pre-tokenizer)."""
    text = json.dumps([state.get("decoder"), state.get("pre_tokenizer")])
    if '"ByteLevel"' in text:
        return "byte_level"
    if '"Metaspace"' in text or '"ByteFallback"' in text or "\\u2581" in text:
        return "sentencepiece"
    return "plain"


def _canonical(part: Any) -> str:
    return json.dumps(part, sort_keys=True) if part else ""


def from_tokenizers(
    tokenizer: Any, *, name: str = "tokenizer", width: int | None = None, special: Mapping[str, int] | None = None
) -> Vocabulary:
    """A `tokenizers.Tokenizer`."""
    state = json.loads(tokenizer.to_str())
    convention = _convention(state)
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    tokens: list[bytes | None] = [None] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        tokens[token_id] = token_bytes(token, convention)
    for entry in state.get("added_tokens") or []:  # added tokens are literal text in every convention
        tokens[entry["id"]] = entry["content"].encode()

    def encode(text: bytes) -> list[int]:
        return list(tokenizer.encode(text.decode(), add_special_tokens=False).ids)

    return Vocabulary(
        name,
        tokens,
        len(tokens) if width is None else width,
        dict(special or {}),
        frozenset(entry["id"] for entry in state.get("added_tokens") or []),
        _canonical(state.get("normalizer")),
        _canonical(state.get("pre_tokenizer")),
        encode,
    )


def from_transformers(tokenizer: Any, *, name: str | None = None, width: int | None = None) -> Vocabulary:
    """A fast `transformers` tokenizer; one without a `tokenizers` back end raises TypeError."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise TypeError(
            "check_tokenizers: tokenizer: expected a fast tokenizer (with a `tokenizers` back end), "
            f"got {type(tokenizer).__name__}"
        )
    ids = {role: getattr(tokenizer, f"{role}_token_id", None) for role in ROLES}
    special = {role: token_id for role, token_id in ids.items() if token_id is not None}
    return from_tokenizers(backend, name=name or type(tokenizer).__name__, width=width, special=special)


def from_gguf(path: str | Path, *, width: int | None = None) -> Vocabulary:
    """The vocabulary inside a GGUF file (needs the `gguf` package). It cannot encode: the merges are not replayed."""
    from gguf import GGUFReader

    fields = GGUFReader(path).fields

    def value(key: str) -> Any:
        found = fields.get(f"tokenizer.ggml.{key}")
        return None if found is None else found.contents()

    listed = fields.get("tokenizer.ggml.tokens")
    if listed is None:
        raise ValueError(f"check_tokenizers: {Path(path).name}: expected tokenizer.ggml.tokens, got a file without it")
    convention = {"gpt2": "byte_level", "llama": "sentencepiece"}.get(value("model"), "plain")
    kinds = value("token_type") or [1] * len(listed.data)
    control, user, unused = 3, 4, 5
    tokens: list[bytes | None] = []
    for at, kind in zip(listed.data, kinds):
        text = bytes(listed.parts[at]).decode("utf-8", "surrogateescape")
        literal = kind in (control, user)
        tokens.append(None if kind == unused else token_bytes(text, "plain" if literal else convention))
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {role: value(f"{key}_token_id") for role, key in names.items()}
    return Vocabulary(
        Path(path).name,
        tokens,
        len(listed.data) if width is None else width,
        {role: int(token_id) for role, token_id in ids.items() if token_id is not None},
        frozenset(i for i, kind in enumerate(kinds) if kind in (control, user)),
    )


def _from_directory(path: Path, width: int | None) -> Vocabulary:
    from tokenizers import Tokenizer

    def read(file: str) -> dict[str, Any]:
        return json.loads((path / file).read_text()) if (path / file).exists() else {}

    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    config, model = read("tokenizer_config.json"), read("config.json")
    special = {}
    for role in ROLES:
        entry = config.get(f"{role}_token")
        text = entry.get("content") if isinstance(entry, dict) else entry
        token_id = tokenizer.token_to_id(text) if text else None
        if token_id is not None:
            special[role] = token_id
    if width is None:
        width = model.get("vocab_size") or (model.get("text_config") or {}).get("vocab_size")
    return from_tokenizers(tokenizer, name=path.name, width=width, special=special)


def load_vocabulary(source: Any, *, width: int | None = None) -> Vocabulary:
    """Whatever holds a vocabulary: a Vocabulary, a map, a tokenizer object, or a path (see the module's first lines).

    A directory needs tokenizer.json; its config.json gives the head's width. A .json file is a tokenizer.json or a map
    {"0": "token", ...}. Errors: TypeError for an unknown object, ValueError for a file without a vocabulary.
    """
    if isinstance(source, Vocabulary):
        return source
    if isinstance(source, Mapping):
        return from_map(source, width=width)
    if hasattr(source, "backend_tokenizer"):
        return from_transformers(source, width=width)
    if hasattr(source, "to_str") and hasattr(source, "get_vocab"):
        return from_tokenizers(source, width=width)
    if not isinstance(source, (str, Path)):
        raise TypeError(
            "check_tokenizers: tokenizer: expected a tokenizer, a map of ids to bytes or a path, "
            f"got {type(source).__name__}"
        )
    path = Path(source)
    if path.is_dir() and (path / "tokenizer.json").exists():
        return _from_directory(path, width)
    if path.suffix == ".gguf" and path.exists():
        return from_gguf(path, width=width)
    if path.suffix == ".json" and path.exists():
        try:
            state = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"check_tokenizers: {path.name}: expected JSON, got {error}") from None
        if isinstance(state, dict) and "model" in state:
            from tokenizers import Tokenizer

            return from_tokenizers(Tokenizer.from_str(json.dumps(state)), name=path.name, width=width)
        if isinstance(state, dict) and state and all(key.isdigit() for key in state):
            return from_map({int(key): token for key, token in state.items()}, name=path.name, width=width)
    raise ValueError(
        "check_tokenizers: path: expected a directory with tokenizer.json, a tokenizer.json, a .gguf file or a .json "
        f"map of ids to tokens, got {path.name}"
    )
