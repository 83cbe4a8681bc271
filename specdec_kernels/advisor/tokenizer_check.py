"""Can this draft's tokens be verified by that target? Every id is compared, not a sample text.

Four verdicts:
- compatible: every id below both vocabularies' ends stands for the same bytes, and they end together. Head widths may
  differ by padding.
- compatible on the first n ids: the same, but one vocabulary goes on. Usable: ids from n on are never proposed (or are
  rejected), which keeps verification lossless.
- needs conversion: ids mean different tokens, but every draft token is also a target token: a reduced vocabulary.
  Drafts go through a map (d2t) or through text (`convert_drafts`).
- incompatible: ids mean different tokens. Verification would stay lossless, but it judges other text than was drafted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specdec_kernels.advisor.vocabulary import ROLES, Vocabulary, load_vocabulary

COMPATIBLE = "compatible"
PREFIX = "compatible on the first n ids"
CONVERSION = "needs conversion"
INCOMPATIBLE = "incompatible"
EXIT_CODES = {COMPATIBLE: 0, PREFIX: 1, CONVERSION: 3, INCOMPATIBLE: 4}
WRONG_INPUT = 2


@dataclass(frozen=True)
class Difference:
    """One id that stands for different bytes; None: no such token on that side."""

    token_id: int
    target: bytes | None
    draft: bytes | None


@dataclass
class TokenizerReport:
    """verdict: one of the module's four. num_ids: how many leading ids may be proposed as they are (0: none).

    num_compared: ids below both vocabularies' ends; num_differing: those with other bytes. num_shared: distinct draft
    tokens that the target has under any id. flags: what differs beside the bytes and is worth a look (special ids by
    role, added tokens, normalizer, pre-tokenizer, widths). not_compared: what a source does not tell.
    """

    verdict: str
    num_ids: int
    num_compared: int
    num_differing: int
    num_shared: int
    target_size: int
    draft_size: int
    target_width: int
    draft_width: int
    first_differences: list[Difference] = field(default_factory=list)
    special_differences: dict[str, tuple[int | None, int | None]] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)

    @property
    def summary(self) -> str:
        """One line, for people."""
        if self.verdict == COMPATIBLE:
            return f"compatible: all {self.num_ids} ids stand for the same bytes"
        if self.verdict == PREFIX:
            return f"compatible on {self.num_ids} ids (target has {self.target_size}, draft {self.draft_size})"
        first = self.first_differences[0]
        line = f"{self.num_differing} of {self.num_compared} differ, first at {first.token_id}"
        if self.verdict == CONVERSION:
            return f"needs conversion: {line}; the target has all {self.num_shared} draft tokens under other ids"
        return f"incompatible, {line}: target {first.target!r}, draft {first.draft!r}"

    def to_json(self) -> dict[str, Any]:
        """Plain types; bytes as text, undecodable ones as \\xNN."""

        def text(token: bytes | None) -> str | None:
            return None if token is None else token.decode("utf-8", "backslashreplace")

        out = asdict(self) | {"summary": self.summary, "exit_code": EXIT_CODES[self.verdict]}
        out["first_differences"] = [
            {"token_id": d.token_id, "target": text(d.target), "draft": text(d.draft)} for d in self.first_differences
        ]
        return out


def _side_differences(target: Vocabulary, draft: Vocabulary, report: TokenizerReport) -> None:
    """Special ids, added tokens, normalizer, pre-tokenizer, widths: into `report`'s flags."""
    for role in ROLES:
        ours, theirs = target.special.get(role), draft.special.get(role)
        if ours != theirs and ours is not None and theirs is not None:
            report.special_differences[role] = (ours, theirs)
            report.flags.append(f"{role} id: target {ours}, draft {theirs}")
        elif ours != theirs:
            report.not_compared.append(f"{role} id (target {ours}, draft {theirs})")
    if target.added is None or draft.added is None:
        report.not_compared.append("added tokens")
    else:
        end = report.num_compared
        apart = sorted(i for i in target.added ^ draft.added if i < end and target.tokens[i] == draft.tokens[i])
        if apart:
            report.flags.append(f"added on one side only, same bytes: {len(apart)} ids, first {apart[0]}")
    for what in ("normalizer", "pre_tokenizer"):
        ours, theirs = getattr(target, what), getattr(draft, what)
        if ours is None or theirs is None:
            report.not_compared.append(what)
        elif ours != theirs:
            report.flags.append(f"{what} differs: the draft saw text cut in another way; target {ours}, draft {theirs}")
    if target.width != draft.width:
        end = min(report.target_size, report.draft_size)
        report.flags.append(
            f"head widths: target {target.width}, draft {draft.width}: columns from {end} on are no common token"
        )


def check_tokenizers(target: Any, draft: Any, *, num_examples: int = 5) -> TokenizerReport:
    """Compare two vocabularies in full (anything `load_vocabulary` takes). Linear in the number of ids.

    Ids whose bytes differ do not count against the pair where one side has no token there, or where both sides hold
    an added token: such ids are never built from text, so they are flagged instead.
    """
    ours, theirs = load_vocabulary(target), load_vocabulary(draft)
    a, b = ours.tokens, theirs.tokens
    end = min(len(a), len(b))
    differing = [] if a[:end] == b[:end] else [i for i in range(end) if a[i] != b[i]]
    added_a, added_b = ours.added or frozenset(), theirs.added or frozenset()
    hard = [i for i in differing if a[i] is not None and b[i] is not None and not (i in added_a and i in added_b)]
    shared = {token for token in b if token is not None}
    num_draft_tokens, all_ours = len(shared), {token for token in a if token is not None}
    shared &= all_ours

    if hard:
        reduced = len(shared) == num_draft_tokens < len(all_ours)
        verdict, num_ids = (CONVERSION if reduced else INCOMPATIBLE), 0
    else:
        first = differing[0] if differing else end
        behind = any(a[i] is not None and i not in added_a for i in range(first, len(a))) or any(
            b[i] is not None and i not in added_b for i in range(first, len(b))
        )
        if differing and not behind:  # only added tokens stand behind the first difference: cut there
            verdict, num_ids = PREFIX, first
        elif len(a) != len(b):
            verdict, num_ids = PREFIX, end
        else:
            verdict, num_ids = COMPATIBLE, end
        if num_ids == 0:
            verdict = INCOMPATIBLE

    report = TokenizerReport(
        verdict, num_ids, end, len(differing), len(shared), len(a), len(b), ours.width, theirs.width
    )
    report.first_differences = [Difference(i, a[i], b[i]) for i in (hard or differing)[:num_examples]]
    if differing and not hard:
        report.flags.append(f"added or missing tokens differ at {len(differing)} ids, first {differing[0]}")
    if verdict == INCOMPATIBLE and len(shared) == num_draft_tokens:
        report.flags.append("both hold the same tokens in another order: a d2t map over all ids would make them usable")
    _side_differences(ours, theirs, report)
    return report


def _encode_exactly(target: Vocabulary, text: bytes) -> list[int]:
    """Target ids that spell exactly `text`. Some encoders put a space in front, so a second try is anchored."""
    if target.encode is None:
        raise ValueError(
            f"convert_drafts: target: expected a tokenizer that can encode, got {target.name} (a vocabulary only)"
        )
    ids = target.encode(text)
    if target.bytes_of(ids) == text:
        return ids
    anchor, anchored = target.encode(b"\n"), target.encode(b"\n" + text)
    ids = anchored[len(anchor) :]
    if anchored[: len(anchor)] == anchor and target.bytes_of(ids) == text:
        return ids
    raise ValueError(f"convert_drafts: text: expected {target.name} to spell {text[:32]!r} exactly, got {ids}")


def convert_drafts(token_ids: Sequence[int], draft: Any, target: Any) -> list[int]:
    """Draft ids -> target ids through their bytes. Adds nothing: no <s>, no leading space.

    Special tokens go by role (bos, eos, pad, unk), other added tokens by their text; conversion stops before one that
    the target lacks, and before a trailing part of a UTF-8 character. The target's merges decide the cut, so the
    number of ids may change. Errors: ValueError for an id outside the draft, or a target that cannot encode.
    """
    ours, theirs = load_vocabulary(target), load_vocabulary(draft)
    roles = {token_id: role for role, token_id in theirs.special.items()}
    by_text = {ours.tokens[i]: i for i in ours.added or ()}
    out: list[int] = []
    pending = b""
    for token_id in token_ids:
        token = theirs.token(token_id)
        if token_id not in roles and token_id not in (theirs.added or ()):
            pending += token
            continue
        whole = ours.special.get(roles.get(token_id, ""), by_text.get(token))
        if whole is None or _whole_characters(pending) != pending:
            break
        out += [*(_encode_exactly(ours, pending) if pending else []), whole]
        pending = b""
    text = _whole_characters(pending)
    return out + (_encode_exactly(ours, text) if text else [])


def _whole_characters(text: bytes) -> bytes:
    """The longest start of `text` that is UTF-8."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start]
    return text


def main(argv: Sequence[str] | None = None, *, out: Callable[[str], Any] = print) -> int:
    """`check-tokenizer TARGET DRAFT [--json]`. Exit codes: see `EXIT_CODES`; 2 for wrong input."""
    parser = argparse.ArgumentParser(
        prog="specdec check-tokenizer",
        description="Compare two tokenizers id by id: may this draft propose tokens to that target?",
        epilog="exit code: 0 compatible, 1 compatible on the first n ids (with --strict also: any flag), 2 wrong "
        "input, 3 needs conversion, 4 incompatible. Example: check-tokenizer target_dir draft.gguf --json",
    )
    parser.add_argument(
        "target", help="directory with tokenizer.json, a tokenizer.json, a .gguf, or a .json map of ids"
    )
    parser.add_argument("draft", help="the same")
    parser.add_argument("--target-width", type=int, help="columns of the target's head, where padded")
    parser.add_argument("--draft-width", type=int, help="columns of the draft's head, where padded")
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON")
    parser.add_argument("--strict", action="store_true", help="exit 1 for a compatible pair with flags")
    args = parser.parse_args(argv)
    try:
        report = check_tokenizers(
            load_vocabulary(args.target, width=args.target_width), load_vocabulary(args.draft, width=args.draft_width)
        )
    except (ValueError, TypeError, ImportError, OSError) as error:
        print(f"check-tokenizer: {error}", file=sys.stderr)
        return WRONG_INPUT
    code = EXIT_CODES[report.verdict]
    if args.strict and code == 0 and report.flags:
        code = 1
    if args.json:
        out(json.dumps(report.to_json() | {"exit_code": code}, indent=2))
        return code
    out(report.summary)
    for difference in report.first_differences[1:] if report.num_ids == 0 else report.first_differences:
        out(f"  id {difference.token_id}: target {difference.target!r}, draft {difference.draft!r}")
    for flag in report.flags:
        out(f"  note: {flag}")
    if report.not_compared:
        out(f"  not compared: {', '.join(report.not_compared)}")
    return code


if __name__ == "__main__":
    sys.exit(main())
