"""PTX text to one C++ file on the runtime: a function with labels and gotos for each entry.

Nothing is skipped silently: a statement without a handler stops the translation with its text.
"""

from __future__ import annotations

import re

from tests.cuda_on_cpu.ptx import memory  # noqa: F401  (registers its handlers)
from tests.cuda_on_cpu.ptx.arithmetic import HANDLERS
from tests.cuda_on_cpu.ptx.function import C_TYPES, Function
from tests.cuda_on_cpu.ptx.parser import Entry, Module, UnsupportedError, parse, split_operands

_INSTRUCTION = re.compile(r"(?:@(!?)(%?[\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.S)
_IGNORED = (".pragma", ".shared", ".branchtargets", ".param", ".section", ".callprototype", ".maxntid", ".minnctapersm")


class TranslationError(RuntimeError):
    """A PTX statement outside the translator's knowledge; the text quotes it."""


def translate(source: str, origin: str, entries: str = "") -> str:
    """C++ text for the entries of a PTX module whose names `entries` matches; `origin` names it in errors."""
    module = parse(source)
    lines = [f"// Made from {origin}.", '#include "cuda_on_cpu/runtime/ptx_support.h"', "",
             "namespace {", "using namespace emulated;", "using namespace emulated::ptx;"]  # fmt: skip
    symbols = {}
    for align, kind, name, count, initialiser in module.variables:
        variable = "variable_" + re.sub(r"\W", "_", name)
        lines.append(f"alignas({align}) {C_TYPES[kind]} {variable}[{count}] = {{{initialiser}}};")
        symbols[name] = f"(uint64_t)(uintptr_t){variable}"
    for entry in module.entries:
        if not re.search(entries, entry.name):
            continue
        lines += _entry(module, entry, symbols, origin)
    return "\n".join([*lines, "}  // namespace", ""])


def _shared_layout(module: Module, entry: Entry) -> tuple[dict[str, str], int]:
    """Static shared objects from offset 0, dynamic memory behind them: name -> offset, static bytes."""
    offsets, top = {}, 0
    for align, name, size in module.shared + entry.shared:
        top = -(-top // max(align, 16)) * max(align, 16)
        offsets[name] = f"{top}u"
        top += size
    for align, name in module.dynamic_shared:
        top = -(-top // align) * align
        offsets[name] = f"{top}u"
    return offsets, top


def _entry(module: Module, entry: Entry, symbols: dict[str, str], origin: str) -> list[str]:
    shared, shared_bytes = _shared_layout(module, entry)
    function = Function(entry.parameters, symbols | shared)
    body = []
    for statement in entry.statements:
        function.where = statement.where
        try:
            body.append(_statement(function, statement.text))
        except (UnsupportedError, KeyError, IndexError, ValueError) as error:
            raise TranslationError(
                f"{origin}: entry {entry.name}: no translation for '{statement.text}' at {statement.where} ({error})"
            ) from error
    name = re.sub(r"\W", "_", entry.name)
    sites = ",\n".join(f"  {{\"{where}\", '{kind[0]}', {size}}}" for where, kind, size in function.sites)
    out = [f"const Site sites_{name}[] = {{\n{sites or '  {0, 0, 0}'}}};",
           f"void body_{name}([[maybe_unused]] const unsigned char* P) {{",
           f"  [[maybe_unused]] const Site* const S = sites_{name};"]  # fmt: skip
    by_type: dict[str, list[str]] = {}
    for variable, kind in function.variables:
        by_type.setdefault(C_TYPES[kind], []).append(f"{variable}{{}}")
    out += [f"  [[maybe_unused]] {c_type} {', '.join(names)};" for c_type, names in by_type.items()]
    if function.local_bytes:
        out.append(f"  alignas(16) char local_memory[{function.local_bytes}];")
    out += [f"  {line}" for line in body if line] + ["}"]
    sizes = f"{entry.parameter_bytes}, {shared_bytes}, sites_{name}, {max(len(function.sites), 1)}"
    out.append(f'const Registration register_{name}("{entry.name}", body_{name}, {sizes});')
    return out


def _statement(f: Function, text: str) -> str:
    if text == "{":
        f.open_scope()
        return ""
    if text == "}":
        f.scopes.pop()
        return ""
    if text.endswith(":"):
        return re.sub(r"\W", "_", text[:-1]) + ":;"
    if text.startswith(".reg"):
        match = re.match(r"\.reg\s+\.(\w+)\s+(.*)", text, re.S)
        assert match
        for name in match[2].split(","):
            f.declare(match[1], name.strip())
        return ""
    if text.startswith(".local"):
        match = re.match(r"\.local\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d+)\]", text)
        assert match
        f.local_bytes = int(match[3])
        f.symbols[match[2]] = "(uint64_t)(uintptr_t)local_memory"
        return ""
    if text.startswith(_IGNORED):
        return ""
    match = _INSTRUCTION.match(text)
    if not match:
        raise UnsupportedError(text)
    parts = match[3].replace("::", "__").split(".")
    parts = [part.split("__")[0] if part.split("__")[0] == "shared" else part for part in parts]
    handler = HANDLERS.get(parts[0])
    if handler is None:
        raise UnsupportedError(parts[0])
    code = handler(f, parts, split_operands(match[4]))
    if match[2]:
        return f"if ({match[1]}{f.register(match[2])[0]}) {{ {code} }}"
    return code
