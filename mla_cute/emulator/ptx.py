"""PTX text -> `Module`, `Kernel`, `Instruction`: names resolved, nothing interpreted.

    text ──comments off──► statements ──► directives (registers, shared variables, lines) and instructions

Registers are numbered per kernel; a name declared in an inner `{ }` is another register. Immediates and special registers
become `Const` and `Special` operands. Sizes are bytes.
"""

from __future__ import annotations

import bisect
import re
import struct
from dataclasses import dataclass, field

TYPE_BYTES = {"pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2}
TYPE_BYTES |= dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2", "tf32"), 4)
TYPE_BYTES |= dict.fromkeys(("b64", "u64", "s64", "f64", "f32x2"), 8) | {"b128": 16}


class PtxError(ValueError):
    """The text is not PTX that this parser knows; says the line."""


@dataclass(frozen=True)
class Reg:
    index: int
    type: str
    name: str


@dataclass(frozen=True)
class Const:
    """An immediate: an integer (`float_bits` 0), or the bits of a float of 32 or 64 bits."""

    value: int
    float_bits: int = 0


@dataclass(frozen=True)
class Special:
    name: str  # "%tid.x"


@dataclass(frozen=True)
class Symbol:
    name: str  # a variable, parameter or function


@dataclass(frozen=True)
class Memory:
    """[base + offset], or [base, {coordinates}] of a tensor instruction; base None: an absolute address."""

    base: Reg | Symbol | None
    offset: int = 0
    coords: tuple = ()


@dataclass(frozen=True)
class Vector:
    items: tuple


@dataclass(frozen=True)
class Not:
    operand: Reg


@dataclass(frozen=True)
class Pair:
    """%p1|%p2: two results."""

    first: object
    second: object


@dataclass(frozen=True)
class Label:
    name: str
    target: int = -1


SINK = Symbol("_")


@dataclass
class Instruction:
    opcode: str  # "ld.shared.v4.b32"
    operands: list
    guard: Reg | None  # executed by the lanes in which it is true (or false, `guard_not`)
    guard_not: bool
    line: int  # of the PTX text, from 1
    source: tuple[str, int] | None  # Python file and line, when the text has line information
    text: str
    parts: tuple[str, ...] = ()

    def __post_init__(self):
        self.parts = tuple(re.split(r"(?<!:)\.(?!:)", self.opcode))  # "::" stays inside a part


@dataclass(frozen=True)
class Param:
    name: str
    size: int
    align: int
    kind: str = "b8"  # of a value; b8 for an array


@dataclass(frozen=True)
class Variable:
    name: str
    space: str  # shared, global, const, local
    size: int
    align: int
    data: bytes | None = None  # of an initialised one
    extern: bool = False


@dataclass
class Kernel:
    name: str
    params: list[Param]
    directives: dict[str, tuple[int, ...]]  # reqntid, minnctapersm, reqnctapercluster, maxnreg, ...
    instructions: list[Instruction] = field(default_factory=list)
    registers: list[Reg] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)  # declared inside


@dataclass
class Module:
    target: str  # "sm_90a"
    kernels: dict[str, Kernel]
    variables: dict[str, Variable]
    text: str


_LABEL = re.compile(r"([$\w%.]+)\s*:(?!:)")
_ENTRY = re.compile(r"(?:\.(?:visible|weak|extern)\s+)*\.(entry|func)\b")
_VARIABLE = re.compile(
    r"(?:\.(?:visible|weak|common)\s+)?(\.extern\s+)?(?:\.visible\s+)?\.(shared|global|const|local)\s+"
    r"(?:\.attribute\([^)]*\)\s+)?(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([$\w.]+)\s*((?:\[\s*\d*\s*\])*)\s*(?:=\s*(.*))?$",
    re.DOTALL,
)
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)$", re.DOTALL)
_INSTRUCTION = re.compile(r"(?:@(!?)\s*([$\w%.]+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.DOTALL)


class _Scanner:
    """The text without comments, with a position and line numbers."""

    def __init__(self, text: str):
        blank = lambda m: m[0] if m[0][0] == '"' else re.sub(r"[^\n]", " ", m[0])  # noqa: E731  line numbers stay
        self.text = re.sub(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/', blank, text, flags=re.DOTALL)
        self.starts = [0, *(m.end() for m in re.finditer("\n", self.text))]
        self.at = 0

    def line(self) -> int:
        return bisect.bisect_right(self.starts, self.at)

    def skip_space(self) -> bool:
        m = re.compile(r"\s*").match(self.text, self.at)
        self.at = m.end()
        return self.at < len(self.text)

    def take(self, pattern: str) -> str | None:
        m = re.compile(pattern, re.DOTALL).match(self.text, self.at)
        if m:
            self.at = m.end()
        return m[0] if m else None

    def until(self, end: str) -> str:
        stop = self.text.find(end, self.at)
        if stop < 0:
            raise PtxError(f"line {self.line()}: no {end!r} behind {self.text[self.at : self.at + 60]!r}")
        found, self.at = self.text[self.at : stop], stop + len(end)
        return found

    def braces(self) -> str:
        """A balanced { ... } at the position."""
        depth, start = 0, self.at
        for m in re.compile(r"[{}]").finditer(self.text, self.at):
            depth += 1 if m[0] == "{" else -1
            if not depth:
                self.at = m.end()
                return self.text[start : self.at]
        raise PtxError(f"line {self.line()}: unbalanced braces")


def parse(text: str) -> Module:
    """The kernels and variables of a PTX module. Raises PtxError naming the line."""
    s = _Scanner(text)
    target, kernels, variables = "", {}, {}
    files: dict[int, str] = {int(n): name for n, name in re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', s.text)}
    while s.skip_space():
        if s.take(r"\.target\b"):
            target = s.take(r"[^\n]*").split(",")[0].strip()
        elif s.take(r"\.(version|address_size|file|loc)\b"):
            s.take(r"[^\n]*")
        elif s.take(r"\.section\b"):
            s.take(r"[^{]*")
            s.braces()
        elif head := s.take(_ENTRY.pattern):
            if head.endswith("func"):  # NVVM inlines what it can; a call of the rest is refused
                s.take(r"[^{;]*")
                s.take(";") or s.braces()
            elif kernel := _function(s, files):
                kernels[kernel.name] = kernel
        elif m := _VARIABLE.match(statement := s.until(";").strip()):
            variable = _variable(m)
            variables[variable.name] = variable
        elif not statement.startswith((".pragma", ".alias")):
            raise PtxError(f"line {s.line()}: cannot read {statement[:80]!r}")
    return Module(target, kernels, variables, text)


def _variable(m: re.Match) -> Variable:
    extern, space, align, kind, name, dims, init = m.groups()
    if kind not in TYPE_BYTES:
        raise PtxError(f"variable {name}: type .{kind} is not known")
    size = TYPE_BYTES[kind]
    for n in re.findall(r"\d+", dims):
        size *= int(n)
    if dims.replace(" ", "") == "[]":
        size = 0
    data = None
    if init:
        values = re.findall(r"[-\w.]+", init.strip("{} \n"))
        width = TYPE_BYTES[kind]
        try:
            data = b"".join((_element(v, kind) & (256**width - 1)).to_bytes(width, "little") for v in values)
        except (AttributeError, TypeError, ValueError):
            raise PtxError(f"variable {name}: cannot read the initialiser {init[:60]!r}") from None
        data = data.ljust(size, b"\0")
    return Variable(name, space, size, int(align or TYPE_BYTES[kind]), data, bool(extern))


def _element(text: str, kind: str) -> int:
    """The bits of one value of an initialiser."""
    c = _number(text)
    if kind == "f32" and c.float_bits == 64:
        value = struct.unpack("<d", struct.pack("<Q", c.value))[0]
        return struct.unpack("<I", struct.pack("<f", value))[0]
    if kind in ("f32", "f64") and not c.float_bits:
        code, bits = ("f", "I") if kind == "f32" else ("d", "Q")
        return struct.unpack(f"<{bits}", struct.pack(f"<{code}", float(c.value)))[0]
    return c.value


def _function(s: _Scanner, files: dict[int, str]) -> Kernel | None:
    """Behind `.entry`: a kernel; None for a declaration."""
    s.skip_space()
    name = s.take(r"[$\w.]+")
    params = []
    s.skip_space()
    if s.take(r"\("):
        for item in filter(str.strip, s.until(")").split(",")):
            m = re.match(r"\s*\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)(?:\s+\.ptr\b[^%$\w]*(?:\.\w+\s+|\d+\s+)*)?", item)
            dims = re.search(r"([$\w.]+)\s*(?:\[\s*(\d+)\s*\])?\s*$", item)
            size = TYPE_BYTES[m[2]] * int(dims[2] or 1)
            params.append(Param(dims[1], size, int(m[1] or TYPE_BYTES[m[2]]), "b8" if dims[2] else m[2]))
    head = s.take(r"[^{;]*")
    if s.take(";"):
        return None
    directives = {
        key: tuple(int(n) for n in re.findall(r"\d+", value)) for key, value in re.findall(r"\.(\w+)([\s\d,]*)", head)
    }
    kernel = Kernel(name, params, directives)
    _body(s, kernel, files)
    return kernel


def _body(s: _Scanner, kernel: Kernel, files: dict[int, str]) -> None:
    scopes: list[dict] = []  # name -> Reg or, for a label, its instruction's index
    pending: list[tuple[Instruction, list[dict]]] = []
    tables: list[tuple[dict, str, list[str], list[dict]]] = []  # .branchtargets: scope and name, labels, scopes around
    source, label = None, ""
    while True:
        if not s.skip_space():
            raise PtxError(f"{kernel.name}: no end of the body")
        c = s.text[s.at]
        line = s.line()
        if c == "{":
            s.at += 1
            scopes.append({})
        elif c == "}":
            s.at += 1
            scopes.pop()
            if not scopes:
                break
        elif s.take(r"\.loc\b"):
            numbers = re.findall(r"\d+", s.take(r"[^\n]*"))
            source = (files.get(int(numbers[0]), "?"), int(numbers[1]))
        elif m := _LABEL.match(s.text, s.at):
            s.at, label = m.end(), m[1]
            scopes[-1][label] = Label(label, len(kernel.instructions))
        else:
            statement = s.until(";").strip()
            if m := _REGISTERS.match(statement):
                _declare(kernel, scopes[-1], m[1], m[2])
            elif m := _VARIABLE.match(statement):
                variable = _variable(m)
                kernel.variables[variable.name] = variable
            elif statement.startswith("."):
                if statement.startswith(".branchtargets"):
                    tables.append((scopes[-1], label, statement.split(None, 1)[1].replace(",", " ").split(), list(scopes)))
                elif not statement.startswith((".pragma", ".param")):  # .param: of a call, which is refused later
                    raise PtxError(f"line {line}: cannot read {statement[:80]!r}")
            else:
                ins = _instruction(statement, line, source, kernel, scopes)
                kernel.instructions.append(ins)
                if any(isinstance(o, Symbol) for o in ins.operands):
                    pending.append((ins, list(scopes)))
    look_up = lambda name, around, default: next((x[name] for x in reversed(around) if name in x), default)  # noqa: E731
    for scope, name, labels, around in tables:
        scope[name] = Vector(tuple(look_up(label, around, Symbol(label)) for label in labels))
    for ins, around in pending:  # labels may stand behind their use
        for i, o in enumerate(ins.operands):
            if isinstance(o, Symbol):
                ins.operands[i] = look_up(o.name, around, o)


def _declare(kernel: Kernel, scope: dict, kind: str, names: str) -> None:
    if kind not in TYPE_BYTES:
        raise PtxError(f"{kernel.name}: register type .{kind} is not known")
    for name in (n.strip() for n in names.split(",")):
        m = re.match(r"([$\w%.]+)<(\d+)>$", name)
        for one in [f"{m[1]}{i}" for i in range(int(m[2]))] if m else [name]:
            scope[one] = Reg(len(kernel.registers), kind, one)
            kernel.registers.append(scope[one])


def _instruction(statement: str, line: int, source, kernel: Kernel, scopes: list[dict]) -> Instruction:
    m = _INSTRUCTION.match(statement)
    if not m:
        raise PtxError(f"line {line}: cannot read {statement[:80]!r}")
    negated, guard, opcode, rest = m.groups()
    try:
        operands = [_operand(text, line, scopes) for text in _split(rest)]
    except (ValueError, IndexError) as e:
        raise PtxError(f"line {line}: cannot read {statement[:80]!r}: {e}") from None
    if guard is not None:
        guard = _name(guard, scopes)
        if not isinstance(guard, Reg):
            raise PtxError(f"line {line}: unknown predicate in {statement[:80]!r}")
    return Instruction(opcode, operands, guard, bool(negated), line, source, " ".join(statement.split()))


def _split(text: str) -> list[str]:
    """At the commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "[{(":
            depth += 1
        elif c in "]})":
            depth -= 1
        elif c == "," and not depth:
            parts.append(text[start:i])
            start = i + 1
    if depth:
        raise ValueError("unbalanced brackets")
    parts.append(text[start:])
    return [p.strip() for p in parts if p.strip()]


def _operand(text: str, line: int, scopes: list[dict]):
    if text[0] == "[":
        inner = _split(text[1:-1])
        base, offset = inner[0], 0
        if m := re.match(r"([$\w%.]+)\s*([+-])\s*(-?\w+)$", base):
            base, offset = m[1], int(m[3], 0) * (-1 if m[2] == "-" else 1)
        address = _name(base, scopes)
        if isinstance(address, Const):
            address, offset = None, address.value
        coords = tuple(_operand(t, line, scopes) for t in inner[1:])
        return Memory(address, offset, coords)
    if text[0] == "{":
        return Vector(tuple(_operand(t, line, scopes) for t in _split(text[1:-1])))
    if text[0] == "(":
        return Vector(tuple(_operand(t, line, scopes) for t in _split(text[1:-1])))
    if text[0] == "!":
        return Not(_name(text[1:].strip(), scopes))
    if "|" in text:
        first, second = (_name(t.strip(), scopes) for t in text.split("|"))
        return Pair(first, second)
    return _name(text, scopes)


def _name(text: str, scopes: list[dict]):
    for scope in reversed(scopes):
        found = scope.get(text)
        if isinstance(found, Reg):
            return found
    if text[0] == "%":
        return Special(text)
    if text[0].isdigit() or text[0] == "-":
        return _number(text)
    return Const(32) if text == "WARP_SZ" else Symbol(text)


def _number(text: str) -> Const:
    if m := re.match(r"0[fF]([0-9a-fA-F]{8})$", text):
        return Const(int(m[1], 16), 32)
    if m := re.match(r"0[dD]([0-9a-fA-F]{16})$", text):
        return Const(int(m[1], 16), 64)
    try:
        return Const(int(text.rstrip("U"), 8 if re.match(r"-?0[0-7]+U?$", text) else 0))
    except ValueError:
        return Const(struct.unpack("<Q", struct.pack("<d", float(text)))[0], 64)
