"""One entry under translation: registers with scopes, operand values, addresses, source sites."""

from __future__ import annotations

import re

from tests.cuda_on_cpu.ptx.parser import UnsupportedError

C_TYPES = dict(pred="bool", b8="uint8_t", u8="uint8_t", s8="int8_t", b16="uint16_t", u16="uint16_t", s16="int16_t",
               f16="uint16_t", bf16="uint16_t", e4m3x2="uint16_t", e5m2x2="uint16_t", b32="uint32_t", u32="uint32_t",
               s32="int32_t", f32="float", tf32="uint32_t", f16x2="uint32_t", bf16x2="uint32_t", b64="uint64_t",
               u64="uint64_t", s64="int64_t", f64="double")  # fmt: skip
_SPECIAL = {"tid": "threadIdx", "ntid": "blockDim", "ctaid": "blockIdx", "nctaid": "gridDim"}


class Function:
    """Emits C++ for one entry. A register is a C++ variable of its declared type; `value` and `assign` convert."""

    def __init__(self, parameters: dict[str, tuple[int, int]], symbols: dict[str, str]):
        self.parameters, self.symbols = parameters, dict(symbols)
        self.scopes: list[dict[str, tuple[str, str]]] = [{}]
        self.num_scopes = 0
        self.variables: list[tuple[str, str]] = []  # (C++ name, PTX type)
        self.local_bytes = 0
        self.sites: list[tuple[str, str, int]] = []  # (where, kind, bytes)
        self.where = "?"

    # ---- registers
    def declare(self, kind: str, name: str) -> None:
        """`.reg .kind name` or `name<count>`."""
        if match := re.match(r"(.*)<(\d+)>$", name):
            self.scopes[-1][match[1] + "<>"] = ("", kind)
            return
        suffix = f"_s{self.num_scopes}" if len(self.scopes) > 1 else ""
        variable = re.sub(r"\W", "_", name) + suffix
        self.scopes[-1][name] = (variable, kind)
        self.variables.append((variable, kind))

    def open_scope(self) -> None:
        self.num_scopes += 1
        self.scopes.append({})

    def register(self, name: str) -> tuple[str, str]:
        """(C++ variable, PTX type); members of a `name<count>` family come into being at first use."""
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        if match := re.match(r"(%\w*?[a-zA-Z])(\d+)$", name):
            for scope in reversed(self.scopes):
                if match[1] + "<>" in scope:
                    kind = scope[match[1] + "<>"][1]
                    scope[name] = (name[1:], kind)
                    self.variables.append((name[1:], kind))
                    return scope[name]
        raise UnsupportedError(f"register {name}")

    # ---- operands
    def value(self, operand: str, kind: str) -> str:
        """C++ expression of `operand` read as PTX type `kind`."""
        operand = operand.strip()
        if operand.startswith("!"):
            return "!" + self.value(operand[1:], kind)
        if match := re.match(r"%(n?tid|n?ctaid)\.([xyz])$", operand):
            return f"uint32_t({_SPECIAL[match[1]]}.{match[2]})"
        special = {"%laneid": "current->lane", "%warpid": "(current->linear / 32)",
                   "%lanemask_lt": "((1u << current->lane) - 1)",
                   "%clock": "0u", "%clock64": "0ull", "%globaltimer": "0ull", "WARP_SZ": "32u"}  # fmt: skip
        if operand in special:
            return special[operand]
        if re.match(r"0[fF][0-9a-fA-F]{8}$", operand):
            return f"F(0x{operand[2:]}u)" if kind == "f32" else f"0x{operand[2:]}u"
        if re.match(r"0[dD][0-9a-fA-F]{16}$", operand):
            return f"D(0x{operand[2:]}ull)" if kind == "f64" else f"0x{operand[2:]}ull"
        if re.match(r"-?(0[xX][0-9a-fA-F]+|\d+)U?$", operand):
            number = int(operand.rstrip("U"), 0)
            if kind == "pred":
                return "true" if number else "false"
            if kind == "f32":
                return f"F({number & 0xFFFFFFFF}u)"
            return f"({C_TYPES[kind]})({number & (1 << 64) - 1}ull)"
        if operand in self.parameters:  # its address, for generic loads
            return f"({C_TYPES[kind]})(uintptr_t)(P + {self.parameters[operand][0]})"
        if operand in self.symbols:
            return f"({C_TYPES[kind]})({self.symbols[operand]})"
        variable, have = self.register(operand)
        if have == kind or "pred" in (have, kind):
            return variable
        if have == "f32":
            return f"({C_TYPES[kind]})U({variable})"
        if kind == "f32":
            return f"F({variable})"
        if have == "f64":
            return f"({C_TYPES[kind]})UD({variable})"
        if kind == "f64":
            return f"D({variable})"
        return f"({C_TYPES[kind]})({variable})"

    def assign(self, operand: str, kind: str, expression: str) -> str:
        """C++ statement storing an expression of PTX type `kind`."""
        operand = operand.strip()
        if operand == "_":
            return f"(void)({expression});"
        variable, have = self.register(operand)
        if have == kind or have == "pred":
            return f"{variable} = {expression};"
        if have == "f32":
            return f"{variable} = F((uint32_t)({expression}));"
        if kind == "f32":
            return f"{variable} = U({expression});"
        if have == "f64":
            return f"{variable} = D({expression});"
        if kind == "f64":
            return f"{variable} = UD({expression});"
        return f"{variable} = ({C_TYPES[have]})({expression});"

    def elements(self, operand: str) -> list[str]:
        """Members of `{a, b}`, or the operand alone."""
        operand = operand.strip()
        return [one.strip() for one in operand[1:-1].split(",")] if operand.startswith("{") else [operand]

    def values(self, operand: str, kind: str) -> str:
        return ", ".join(self.value(one, kind) for one in self.elements(operand))

    def address(self, operand: str, space: str) -> str:
        """`[base+offset]` in param (pointer), shared (32-bit offset) or any other space (char pointer)."""
        match = re.match(r"\[\s*(.+?)\s*(?:\+\s*(-?\d+|-?0x[0-9a-fA-F]+))?\s*\]$", operand.strip())
        if not match:
            raise UnsupportedError(f"address {operand}")
        base, offset = match[1], int(match[2] or "0", 0)
        if space == "param" and base in self.parameters:
            return f"(P + {self.parameters[base][0] + offset})"
        if space == "shared":
            return f"(uint32_t)({self.value(base, 'u32')} + {offset})"
        return f"(char*)({self.value(base, 'u64')} + {offset}ll)"

    def site(self, kind: str, size: int = 0) -> str:
        """A new entry in the site table: where reports of this statement point."""
        self.sites.append((self.where, kind, size))
        return f"S[{len(self.sites) - 1}]"
