"""PTX text to entries, parameters and statements with their source positions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

SIZES = dict(pred=1, b8=1, u8=1, s8=1, b16=2, u16=2, s16=2, f16=2, bf16=2, b32=4, u32=4, s32=4, f32=4, f16x2=4,
             bf16x2=4, e4m3x2=2, e5m2x2=2, tf32=4, b64=8, u64=8, s64=8, f64=8, b128=16)  # fmt: skip


class UnsupportedError(Exception):
    """A statement that the translator does not know; the text names it."""


@dataclass
class Statement:
    """`text` without semicolon, or a mark "{", "}", "label:"; `where` is its call chain, innermost first."""

    text: str
    where: str


@dataclass
class Entry:
    """One kernel: parameter name -> (offset, bytes) in the packed parameter buffer, and its statements."""

    name: str
    parameters: dict[str, tuple[int, int]]
    parameter_bytes: int
    statements: list[Statement]
    shared: list[tuple[int, str, int]] = field(default_factory=list)  # (alignment, name, bytes)


@dataclass
class Module:
    entries: list[Entry]
    shared: list[tuple[int, str, int]]
    dynamic_shared: list[tuple[int, str]]
    variables: list[tuple[int, str, str, int, str]]  # (alignment, type, name, count, initialiser) in global or const


def split_operands(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth, current = [], 0, ""
    for char in text:
        depth += (char in "{[(") - (char in "}])")
        if char == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += char
    return parts + [current.strip()] if current.strip() else parts


def parse(source: str) -> Module:
    """The parts of a PTX module that a launch needs."""
    source = re.sub(r"//[^\n]*", "", source)
    files = {int(n): name for n, name in re.findall(r'\.file\s+(\d+)\s+"([^"]+)"', source)}
    head = source.split(".entry")[0]
    shared = _shared(head)
    dynamic = [(int(a), n) for a, n in re.findall(r"\.extern \.shared \.align (\d+) \.b8 ([\w$]+)\[", source)]
    pattern = (
        r"\n\s*(?:\.visible |\.extern |\.weak )?\.(?:global|const) \.align (\d+) \.(\w+) ([\w$]+)(?:\[(\d*)\])?"
        r"(?: = (?:\{([^}]*)\}|([\w.]+)))?;"
    )
    variables = [(int(a), t, n, int(c or 1), i or j) for a, t, n, c, i, j in re.findall(pattern, source)]
    entries = []
    for match in re.finditer(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{", source):
        end, depth = match.end(), 1
        while depth:
            depth += {"{": 1, "}": -1}.get(source[end], 0)
            end += 1
        parameters, size = _parameters(match[2])
        body = source[match.end() : end - 1]
        entry = Entry(match[1], parameters, size, list(_statements(body, files)))
        entry.shared = _shared(body)
        entries.append(entry)
    return Module(entries, shared, dynamic, variables)


def _shared(text: str) -> list[tuple[int, str, int]]:
    found = re.findall(r"(?<!\.extern )\.shared \.align (\d+) \.(\w+) ([\w$]+)(?:\[(\d+)\])?;", text)
    return [(int(align), name, SIZES[kind] * int(count or 1)) for align, kind, name, count in found]


def _parameters(text: str) -> tuple[dict[str, tuple[int, int]], int]:
    parameters, offset = {}, 0
    for one in split_operands(text.replace("\n", " ")):
        match = re.match(r"\.param\s+(?:\.align (\d+)\s+)?\.(\w+)\b.*?([\w$]+)(?:\[(\d+)\])?$", one)
        if not match:
            raise UnsupportedError(one)
        size = SIZES[match[2]] * int(match[4] or 1)
        align = int(match[1] or SIZES[match[2]])
        offset = -(-offset // align) * align
        parameters[match[3]] = (offset, size)
        offset += size
    return parameters, offset


_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:.*?inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?")


def _statements(body: str, files: dict[int, str]) -> Iterator[Statement]:
    """Scan the body: `{` where a statement would begin opens a scope, inside one it is a vector."""
    where, callers, i = "?", {}, 0
    name = lambda at: f"{files.get(at[0], '?').rsplit('/', 1)[-1]}:{at[1]}"  # noqa: E731
    while i < len(body):
        if body[i].isspace() or body[i] == ";":
            i += 1
        elif body.startswith((".loc ", ".loc\t", ".file"), i):
            end = body.find("\n", i)
            line = body[i : end if end >= 0 else len(body)]
            i += len(line)
            if match := _LOC.match(line):
                at = tuple(map(int, match.group(1, 2, 3)))
                if match[4]:
                    callers[at] = tuple(map(int, match.group(4, 5, 6)))
                chain = [at]
                while chain[-1] in callers and len(chain) < 8 and (match[4] or len(chain) > 1):
                    chain.append(callers[chain[-1]])
                where = " < ".join(name(one) for one in chain if one[1])
        elif body[i] in "{}":
            yield Statement(body[i], where)
            i += 1
        elif match := re.compile(r"([\w$%.]+)\s*:(?!:)").match(body, i):
            yield Statement(match[1] + ":", where)
            i = match.end()
        else:
            end, depth, quoted = i, 0, False
            while end < len(body) and (body[end] != ";" or depth or quoted):
                quoted ^= body[end] == '"'
                depth += (body[end] in "{([") - (body[end] in "})]")
                end += 1
            text = " ".join(body[i:end].split())
            i = end + 1
            if text:
                yield Statement(text, where)
