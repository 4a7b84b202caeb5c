"""The PTX parser: what a text becomes, and what it says about a text that it cannot read."""

import struct

import numpy as np
import pytest
from emulator_kernels import text

from mla_cute.emulator import ptx
from mla_cute.emulator.ptx import Const, Label, Memory, Not, Pair, PtxError, Reg, Special, Symbol, Vector


def kernel(body: str, head: str = "", params: str = "", outside: str = "") -> ptx.Kernel:
    module = ptx.parse(
        f".version 8.6\n.target sm_90a\n.address_size 64\n{outside}\n.visible .entry k({params}) "
        f"{head}\n{{\n{body}\n}}\n"
    )
    return module.kernels["k"]


def operands(instruction: str, declared: str = ".reg .b32 %r<9>; .reg .b64 %d<9>; .reg .pred p, q;") -> list:
    return kernel(f"{declared}\n{instruction}").instructions[0].operands


def test_module():
    m = ptx.parse(
        """// a comment with .target sm_10
        .version 8.6
        .target sm_100a, debug /* over
        two lines */
        .address_size 64
        .file 1 "/src/kernel.py"
        .extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b) ;
        .func (.reg .b32 r) helper (.reg .b32 x) { add.s32 r, x, 1; ret; }
        .extern .shared .align 1024 .b8 smem[];
        .visible .entry first() { ret; }
        .weak .entry second(.param .u32 n) { ret; }
        .section .debug_str { .b8 0 }
        """
    )
    assert m.target == "sm_100a"
    assert list(m.kernels) == ["first", "second"]
    assert m.variables["smem"].extern and m.variables["smem"].align == 1024 and m.variables["smem"].size == 0


def test_parameters_and_directives():
    k = kernel(
        "ret;",
        ".reqntid 384, 1, 1\n.minnctapersm 1\n.reqnctapercluster 2, 1, 1\n.explicitcluster .maxnreg 168",
        ".param .u64 .ptr .global .align 16 a, .param .align 64 .b8 map[128], .param .f32 scale, .param .u64 .ptr b",
    )
    assert [(p.name, p.size, p.align) for p in k.params] == [
        ("a", 8, 8),
        ("map", 128, 64),
        ("scale", 4, 4),
        ("b", 8, 8),
    ]
    assert k.directives["reqntid"] == (384, 1, 1) and k.directives["reqnctapercluster"] == (2, 1, 1)
    assert k.directives["maxnreg"] == (168,) and k.directives["explicitcluster"] == ()


def test_opcodes_are_split_at_dots_but_not_at_colons():
    k = kernel(
        """.reg .b32 %r<3>; .reg .b64 %d;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r0], [%d], 16, [%r1];
        fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster;"""
    )
    assert k.instructions[0].parts == (
        "cp",
        "async",
        "bulk",
        "shared::cluster",
        "global",
        "mbarrier::complete_tx::bytes",
    )
    assert k.instructions[1].parts[2:] == ("async::generic", "acquire", "sync_restrict::shared::cluster", "cluster")


@pytest.mark.parametrize(
    "operand, expected",
    [
        ("5", Const(5)),
        ("-5", Const(-5)),
        ("0x1F", Const(31)),
        ("0xffffffffU", Const(2**32 - 1)),
        ("017", Const(15)),
        ("0b101", Const(5)),
        ("WARP_SZ", Const(32)),
        ("0f3F800000", Const(0x3F800000, 32)),
        ("0D3FF0000000000000", Const(0x3FF0000000000000, 64)),
        ("1.5", Const(struct.unpack("<Q", struct.pack("<d", 1.5))[0], 64)),
        ("-2.5e-3", Const(struct.unpack("<Q", struct.pack("<d", -2.5e-3))[0], 64)),
        ("%tid.x", Special("%tid.x")),
        ("%r7", Reg(7, "b32", "%r7")),
        ("name", Symbol("name")),
        ("[%d0]", Memory(Reg(9, "b64", "%d0"), 0)),
        ("[%d0+16]", Memory(Reg(9, "b64", "%d0"), 16)),
        ("[%d0+-16]", Memory(Reg(9, "b64", "%d0"), -16)),
        ("[ %d0 + 0x10 ]", Memory(Reg(9, "b64", "%d0"), 16)),
        ("[%d0-8]", Memory(Reg(9, "b64", "%d0"), -8)),
        ("[smem+4]", Memory(Symbol("smem"), 4)),
        ("[1024]", Memory(None, 1024)),
        ("{%r0, _, 3}", Vector((Reg(0, "b32", "%r0"), Symbol("_"), Const(3)))),
        ("!p", Not(Reg(18, "pred", "p"))),
        ("p|q", Pair(Reg(18, "pred", "p"), Reg(19, "pred", "q"))),
        ("_|p", Pair(Symbol("_"), Reg(18, "pred", "p"))),
        ("[%d0, {%r1, -2}]", Memory(Reg(9, "b64", "%d0"), 0, (Vector((Reg(1, "b32", "%r1"), Const(-2))),))),
    ],
)
def test_operands(operand, expected):
    assert operands(f"mov.b32 {operand};") == [expected]


def test_guards():
    k = kernel(
        ".reg .pred %p<2>; .reg .b32 r;\n@%p1 mov.b32 r, 1;\n@!%p0 mov.b32 r, 2; @ %p1 mov.b32 r, 3; mov.b32 r, 4;"
    )
    assert [(i.guard and i.guard.name, i.guard_not) for i in k.instructions] == [
        ("%p1", False),
        ("%p0", True),
        ("%p1", False),
        (None, False),
    ]


def test_scopes():
    """A name of an inner scope is another register; a label of an inner scope is seen there first."""
    k = kernel(
        """.reg .b32 r; .reg .pred p; mov.b32 r, 0; L:
        { .reg .b32 r; mov.b32 r, 1; @p bra L; L: mov.b32 r, 2; }
        { @p bra L; @p bra END; } mov.b32 r, 3; END:"""
    )
    registers = [i.operands[0].index for i in k.instructions if i.parts[0] == "mov"]
    assert registers[0] == registers[3] != registers[1] == registers[2]
    branches = [i.operands[0] for i in k.instructions if i.parts[0] == "bra"]
    assert branches == [Label("L", 3), Label("L", 1), Label("END", 7)]
    assert len(k.instructions) == 7


def test_lines_and_sources():
    k = kernel(
        "  .loc 1 25 3\n  bar.sync 0;\n/* a\nb */ .loc 2 7 0, function_name $L__x, inlined_at 1 3 4\n\n  ret;",
        outside='.file 1 "a//b.py"\n.file 2 "c.py"',
    )
    assert [(i.line, i.source) for i in k.instructions] == [(9, ("a//b.py", 25)), (13, ("c.py", 7))]
    assert k.instructions[0].text == "bar.sync 0"


def test_statements_over_several_lines():
    k = kernel(".reg .b32 %r<9>;\nldmatrix.sync.aligned.m8n8.x4.shared.b16\n  {%r0, %r1,\n   %r2, %r3},\n  [%r4];")
    assert k.instructions[0].line == 8 and len(k.instructions[0].operands[0].items) == 4
    assert k.instructions[0].text == "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r0, %r1, %r2, %r3}, [%r4]"


def test_variables():
    k = kernel(".shared .align 16 .b8 a[2][64];\n.local .align 8 .b8 depot[24];\n.shared .u64 bar;\nret;")
    assert {(v.name, v.space, v.size, v.align) for v in k.variables.values()} == {
        ("a", "shared", 128, 16), ("depot", "local", 24, 8), ("bar", "shared", 8, 8)
    }  # fmt: skip
    m = ptx.parse(
        """.version 8.6
        .target sm_90a
        .const .align 4 .b32 t[4] = {1, -1, 0x10};
        .global .align 8 .f64 d = 1.5;
        .visible .global .f32 f[2] = {1.5, 0f40000000};
        .global .u16 h[2][2] = {{1, 2}, {3, 4}};"""
    ).variables
    assert np.frombuffer(m["t"].data, np.int32).tolist() == [1, -1, 16, 0]
    assert np.frombuffer(m["d"].data, np.float64) == 1.5
    assert np.frombuffer(m["f"].data, np.float32).tolist() == [1.5, 2.0]
    assert np.frombuffer(m["h"].data, np.uint16).tolist() == [1, 2, 3, 4]


def test_tables_of_labels():
    k = kernel(".reg .b32 r;\nts: .branchtargets A, B,\n A;\nbrx.idx r, ts;\nA: ret;\nB: ret;")
    assert [label.target for label in k.instructions[0].operands[1].items] == [1, 2, 1]


def test_many_registers():
    k = kernel(".reg .b32 %r<3>, x;\n.reg .f32 %f<2>;\nret;")
    assert [(r.index, r.type, r.name) for r in k.registers] == [
        (0, "b32", "%r0"), (1, "b32", "%r1"), (2, "b32", "%r2"), (3, "b32", "x"), (4, "f32", "%f0"), (5, "f32", "%f1")
    ]  # fmt: skip


@pytest.mark.parametrize(
    "body, message",
    [
        ("ret", "no ';'"),
        ("{ ret;", "no end of the body"),
        (".reg .v2 .b32 x;\nret;", "register type .v2 is not known"),
        ("@%p7 ret;", "line 7: unknown predicate"),
        (".frob 3;", r"line 7: cannot read '.frob 3'"),
        ("*x = 3;", r"line 7: cannot read"),
        (".reg .b32 r;\nmov.b32 r, 12abc;", "line 8: .*12abc"),
        (".reg .b32 r;\nmov.b32 r, {3;", "line 8"),
        (".reg .b32 r;\nmov.b32 r, [3;", "line 8"),
    ],
)
def test_what_cannot_be_read(body, message):
    with pytest.raises(PtxError, match=message):
        kernel(body)


@pytest.mark.parametrize("statement", ["frob x;", ".global .b32 x[2] = {other, 3};", ".shared .frob x;"])
def test_what_cannot_be_read_outside(statement):
    with pytest.raises(PtxError):
        ptx.parse(f".version 8.6\n.target sm_90a\n{statement}\n")


def test_the_text_of_the_tests_is_ptx():
    m = ptx.parse(text("", (np.zeros(1), 3, 2.0, bytes(128))))
    assert [p.size for p in m.kernels["k"].params] == [8, 4, 4, 128]
