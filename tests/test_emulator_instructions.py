"""Every group of instructions, in kernels of a few lines whose result is known."""

import numpy as np
import pytest
import torch
from emulator_kernels import (
    BULK,
    CLUSTER_SYNC,
    LOAD_SMEM,
    lanes,
    mbarriers,
    operand,
    rng,
    run,
    run_two,
    smem_operand,
    swizzled,
    tensor_map,
    text,
    wait,
    wgmma_body,
)

from mla_cute.emulator.decode import UnsupportedInstruction
from mla_cute.emulator.host import Compiled
from mla_cute.emulator.machine import Options
from mla_cute.emulator.run import Emulated, run_ptx, session
from mla_cute.emulator.tensormap import Swizzle

LANE = np.arange(32, dtype=np.uint32)
ALL = (0, 1, 2, 3)  # schedules: eager, lazy, two random ones
STORE = "st.global.b32 [%e], %r0;"


# ----- moves and arithmetic: the wiring; numeric.py has its own tests -------------------------------------------------


def test_pack_puts_the_first_item_lowest():
    body = "mov.b16 %h0, 0x1234; mov.b16 %h1, 0xabcd; mov.b32 %r0, {%h0, %h1};" + STORE
    assert (lanes(body) == 0xABCD1234).all()


def test_unpack_and_pack_of_64_bits():
    body = (
        """mov.b64 %d0, 0x1122334455667788; mov.b64 {%r1, %r2}, %d0; mov.b64 {%h0, %h1, %h2, %h3}, %d0;
    mov.b64 %d1, {%h3, %h2, %h1, %h0}; mov.b64 {_, %r3}, %d1; sub.u32 %r0, %r1, %r2; xor.b32 %r0, %r0, %r3;"""
        + STORE
    )
    assert (lanes(body) == ((0x55667788 - 0x11223344) ^ 0x77885566)).all()


def test_move_of_128_bits():
    body = (
        """mov.b64 %d0, 1; mov.b64 %d1, 2; mov.b128 %q0, {%d0, %d1}; mov.b128 %q1, %q0; mov.b128 {%d2, %d3}, %q1;
    shl.b64 %d3, %d3, 4; add.u64 %d2, %d2, %d3; cvt.u32.u64 %r0, %d2;"""
        + STORE
    )
    assert (lanes(body) == 33).all()


def test_float_immediates():
    body = (
        """mov.f32 %f0, 0f40490FDB; add.f32 %f0, %f0, 1.5; fma.rn.f32 %f0, %f0, 2.0, 0d3FF0000000000000;
    mov.b32 %r0, %f0;"""
        + STORE
    )
    expected = np.float32(np.float32(np.float32(np.pi) + np.float32(1.5)) * np.float64(2) + 1)
    assert (lanes(body).view(np.float32) == expected).all()


def test_two_results_and_negated_predicates():
    body = (
        """setp.lt.u32 %p0|%p1, %t, 5; setp.lt.and.u32 %p2|%p3, %t, 20, !%p0;
    selp.u32 %r0, 1, 0, %p0; selp.u32 %r1, 2, 0, %p1; selp.u32 %r2, 4, 0, %p2; selp.u32 %r3, 8, 0, %p3;
    add.u32 %r0, %r0, %r1; add.u32 %r0, %r0, %r2; add.u32 %r0, %r0, %r3;"""
        + STORE
    )
    p0 = LANE < 5
    expected = p0 * 1 + ~p0 * 2 + ((LANE < 20) & ~p0) * 4 + (~(LANE < 20) & ~p0) * 8
    assert (lanes(body) == expected).all()


def test_wide_and_half_arithmetic():
    body = (
        """mul.wide.u32 %d0, %t, 0x40000000; shr.u64 %d0, %d0, 30; cvt.u32.u64 %r1, %d0;
    cvt.rn.f32.u32 %f0, %r1; cvt.rn.f16x2.f32 %r2, %f0, %f0; fma.rn.f16x2 %r2, %r2, %r2, %r2; mov.b32 {%h0, %h1}, %r2;
    cvt.f32.f16 %f1, %h1; cvt.rzi.u32.f32 %r0, %f1;"""
        + STORE
    )
    assert (lanes(body) == LANE * LANE + LANE).all()


@pytest.mark.parametrize("guard, expected", [("@%p0", LANE < 7), ("@!%p0", LANE >= 7)])
def test_guards(guard, expected):
    body = f"setp.lt.u32 %p0, %t, 7; mov.u32 %r0, 1; {guard} mov.u32 %r0, 9;" + STORE
    assert (lanes(body) == np.where(expected, 9, 1)).all()


def test_guard_of_a_load_and_a_store():
    data = np.arange(32, dtype=np.uint32) * 3
    body = """setp.lt.u32 %p0, %t, 4; mov.u32 %r0, 77; mad.wide.u32 %d0, %t, 4, %a1;
    @%p0 ld.global.u32 %r0, [%d0]; setp.gt.u32 %p1, %t, 1; @%p1 st.global.u32 [%e], %r0;"""
    assert (lanes(body, data) == np.where(LANE < 2, 0, np.where(LANE < 4, LANE * 3, 77))).all()


def test_special_registers():
    names = [f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xy"] + ["%tid.z", "%laneid"]
    names += ["%warpid", "%nwarpid", "%cluster_ctarank", "%cluster_nctarank", "%clusterid.x", "%nclusterid.x"]
    names += ["%cluster_ctaid.x", "%lanemask_lt", "%lanemask_ge"]
    n = len(names)
    out = np.zeros((4 * 2, 4 * 16, n), np.uint32)
    stores = "".join(f"mov.u32 %r0, {name}; st.global.b32 [%d0+{4 * i}], %r0;\n" for i, name in enumerate(names))
    body = f"""mov.u32 %r1, %tid.y; mad.lo.u32 %r1, %r1, 16, %t; mov.u32 %r2, %ctaid.y; mad.lo.u32 %r2, %r2, 4, %ctaid.x;
    mad.lo.u32 %r1, %r2, 64, %r1; mad.wide.u32 %d0, %r1, {4 * n}, %a0; {stores}"""
    findings = run_ptx(text(body, (out,)), (out,), grid=(4, 2, 1), block=(16, 4, 1), cluster=(2, 1, 1))
    assert not findings
    thread, cta = np.arange(64), np.arange(8)[:, None]
    lane, x = thread % 32, cta % 4
    expected = [thread % 16, thread // 16, 16, 4, x, cta // 4, 4, 2, 0, lane, thread // 32, 2]
    expected += [x % 2, 2, x // 2, 2, x % 2, (1 << lane) - 1, (2**32 - (1 << lane)) % 2**32]
    for i, name in enumerate(names):
        assert (out[:, :, i] == expected[i]).all(), name


def test_a_clock_that_goes_on():
    body = (
        """mov.u64 %d0, %clock64; L: mov.u64 %d1, %clock64; sub.u64 %d1, %d1, %d0; setp.lt.u64 %p0, %d1, 300;
    @%p0 bra L; mov.u32 %r0, 1;"""
        + STORE
    )
    assert (lanes(body) == 1).all()


# ----- control flow ---------------------------------------------------------------------------------------------------


def test_if_else():
    body = (
        """setp.lt.u32 %p0, %t, 10; @%p0 bra SMALL; mul.lo.u32 %r0, %t, 100; bra END; SMALL: add.u32 %r0, %t, 1;
    END: activemask.b32 %r1; setp.ne.u32 %p1, %r1, 0xffffffff; @%p1 mov.u32 %r0, 0;"""
        + STORE
    )
    assert (lanes(body) == np.where(LANE < 10, LANE + 1, LANE * 100)).all()


def test_loops_with_different_trip_counts():
    body = (
        """mov.u32 %r0, 0; mov.u32 %r1, 0; L: setp.ge.u32 %p0, %r1, %t; @%p0 bra END; add.u32 %r1, %r1, 1;
    add.u32 %r0, %r0, %r1; bra L; END:"""
        + STORE
    )
    assert (lanes(body) == LANE * (LANE + 1) // 2).all()


def test_nested_divergence():
    body = (
        """mov.u32 %r0, 0; mov.u32 %r1, 0;
    OUTER: and.b32 %r2, %t, 3; setp.gt.u32 %p0, %r1, %r2; @%p0 bra END; mov.u32 %r3, 0;
    INNER: shr.u32 %r4, %t, 3; setp.ge.u32 %p1, %r3, %r4; @%p1 bra NEXT; and.b32 %r5, %r3, 1; setp.eq.u32 %p2, %r5, 0;
    @%p2 bra EVEN; add.u32 %r0, %r0, 100; bra JOIN; EVEN: add.u32 %r0, %r0, 1; JOIN: add.u32 %r3, %r3, 1; bra INNER;
    NEXT: add.u32 %r1, %r1, 1; bra OUTER; END:"""
        + STORE
    )
    once = sum(np.where(i < LANE // 8, 100 if i % 2 else 1, 0) for i in range(4))
    assert (lanes(body) == once * (LANE % 4 + 1)).all()


@pytest.mark.parametrize("leave", ["@%p0 ret;", "@%p0 exit;", "@!%p1 bra ON; ret; ON:"])
def test_early_exit_of_some_lanes(leave):
    body = f"""mov.u32 %r0, 5; {STORE} setp.lt.u32 %p0, %t, 20; setp.lt.u32 %p1, %t, 20; {leave}
    activemask.b32 %r0; {STORE}"""
    assert (lanes(body) == np.where(LANE < 20, 5, 0xFFF00000)).all()


def test_exit_within_a_branch_and_the_others_meet():
    body = (
        """setp.ge.u32 %p0, %t, 16; @%p0 bra UP; setp.lt.u32 %p1, %t, 3; @%p1 exit; bra END; UP: nanosleep.u32 20;
    END: activemask.b32 %r0;"""
        + STORE
    )
    assert (lanes(body) == np.where(LANE < 3, 0, 0xFFFFFFF8)).all()


def test_a_block_that_is_no_multiple_of_32():
    body = "activemask.b32 %r0;" + STORE
    assert (lanes(body, threads=40) == [0xFFFFFFFF] * 32 + [0xFF] * 8).all()


def test_labels_of_inner_scopes_and_shadowed_registers():
    body = (
        """mov.u32 %r0, 1; { .reg .b32 %r0; mov.u32 %r0, 50; bra L; L: add.u32 %r0, %r0, 1; }
    { .reg .pred q; setp.eq.u32 q, %t, 3; @q bra L; add.u32 %r0, %r0, 1; L: }"""
        + STORE
    )
    assert (lanes(body) == np.where(LANE == 3, 1, 2)).all()


def test_branch_by_table():
    body = """and.b32 %r1, %t, 3; setp.lt.u32 %p0, %t, 30; mov.u32 %r0, 9; ts: .branchtargets A, B, C, A;
    @%p0 brx.idx %r1, ts; bra END; A: mov.u32 %r0, 1; bra END; B: mov.u32 %r0, 2; bra END; C: mov.u32 %r0, 3; END:"""
    expected = np.where(LANE < 30, np.array([1, 2, 3, 1])[LANE % 4], 9)
    assert (lanes(body + STORE) == expected).all()


def test_bar_warp_sync_waits_for_the_other_branch():
    body = """mov.u32 %r0, 0; mov.u32 %r1, 0; setp.lt.u32 %p0, %t, 16; @!%p0 bra HIGH;
    mad.lo.u32 %r2, %t, 4, %s; st.shared.b32 [%r2], %t; bra MEET; HIGH: nanosleep.u32 1;
    MEET: bar.warp.sync 0xffffffff; and.b32 %r3, %t, 15; mad.lo.u32 %r3, %r3, 4, %s; ld.shared.b32 %r0, [%r3];"""
    assert (lanes(body + STORE, smem=256) == LANE % 16).all()


# ----- across lanes ---------------------------------------------------------------------------------------------------


def shfl_expected(mode: str, b: int, c: int) -> tuple[np.ndarray, np.ndarray]:
    lane, clamp, segment = np.arange(32), c & 31, c >> 8 & 31
    top, low = (lane & segment) | (clamp & ~segment), lane & segment
    source = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": low | (b & ~segment)}[mode]
    valid = source >= top if mode == "up" else source <= top
    return np.where(valid, source, lane), valid


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("b, width", [(1, 32), (3, 8), (5, 16), (9, 4)])
def test_shfl(mode, b, width):
    c = (32 - width) << 8 | (0 if mode == "up" else 31)
    body = f"""mul.lo.u32 %r1, %t, 3; shfl.sync.{mode}.b32 %r0|%p0, %r1, {b}, {c}, -1; @%p0 add.u32 %r0, %r0, 1000;"""
    source, valid = shfl_expected(mode, b, c)
    assert (lanes(body + STORE) == source * 3 + 1000 * valid).all()


def test_votes():
    body = """setp.lt.u32 %p0, %t, 9; vote.sync.ballot.b32 %r0, %p0, -1; vote.sync.any.pred %p1, %p0, -1;
    vote.sync.all.pred %p2, %p0, -1; vote.sync.uni.pred %p3, !%p0, -1; vote.sync.all.pred %p4, !%p1, -1;
    @%p1 add.u32 %r0, %r0, 0x10000; @%p2 add.u32 %r0, %r0, 0x20000; @%p3 add.u32 %r0, %r0, 0x40000;"""
    assert (lanes(body + STORE) == 0x101FF).all()


def test_vote_of_a_part_of_the_warp():
    body = """mov.u32 %r0, 0; setp.lt.u32 %p0, %t, 8; @!%p0 bra END; setp.gt.u32 %p1, %t, 3;
    vote.sync.ballot.b32 %r0, %p1, 0xff; END:"""
    assert (lanes(body + STORE) == np.where(LANE < 8, 0xF0, 0)).all()


def test_match():
    body = """and.b32 %r1, %t, 3; match.any.sync.b32 %r0, %r1, -1; match.all.sync.b32 %r2|%p0, %r1, -1;
    @%p0 mov.u32 %r0, 0; cvt.u64.u32 %d0, %n1; match.all.sync.b64 %r3|%p1, %d0, -1; @!%p1 mov.u32 %r0, 0;
    setp.ne.u32 %p2, %r3, 0xffffffff; @%p2 mov.u32 %r0, 1; add.u32 %r0, %r0, %r2;"""
    assert (lanes(body + STORE, 5) == (0x11111111 << (LANE % 4))).all()


@pytest.mark.parametrize(
    "name, expected",
    [("add.s32", sum(range(-5, 27))), ("min.s32", -5), ("max.u32", 2**32 - 1), ("and.b32", 0), ("xor.b32", None)],
)
def test_redux(name, expected):
    values = np.arange(-5, 27).astype(np.uint32)
    expected = np.bitwise_xor.reduce(values) if expected is None else expected % 2**32
    assert (lanes(f"add.s32 %r1, %t, -5; redux.sync.{name} %r0, %r1, -1;" + STORE) == expected).all()


def test_elect_and_activemask():
    body = """mov.u32 %r0, 0; setp.ge.u32 %p0, %t, 4; @!%p0 bra END; activemask.b32 %r2; elect.sync %r1|%p1, 0xfffffff0;
    @%p1 mov.u32 %r0, %r2; @!%p1 mov.u32 %r0, %r1; END: elect.sync _|%p2, -1; @%p2 mov.u32 %r0, 99;"""
    expected = np.where(LANE < 4, 0, 4)
    expected[[0, 4]] = 99, 0xFFFFFFF0
    assert (lanes(body + STORE) == expected).all()


# ----- loads and stores -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["u8", "s8", "u16", "s16", "b32", "b64", "f32"])
@pytest.mark.parametrize("space", ["global", "shared"])
def test_every_width(kind, space):
    size = int(kind[1:]) // 8
    data = rng(1).integers(0, 256, 32 * size, np.uint8)
    register = {1: "%h0", 2: "%h0", 4: "%r0", 8: "%d0"}[size]
    base = "%d5" if space == "global" else "%r5"
    to_shared = f"mad.lo.u32 %r5, %t, {size}, %s; st.shared.{kind} [%r5], {register};" if space == "shared" else ""
    widen = {
        1: f"cvt.{kind[0]}32.{kind[0]}16 %r0, %h0;",
        2: f"cvt.{kind[0]}32.{kind} %r0, %h0;",
        8: "cvt.u32.u64 %r0, %d0;",
    }
    body = f"""mad.wide.u32 %d5, %t, {size}, %a1; ld.global.{kind} {register}, [%d5]; {to_shared}
    ld.{space}.{kind} {register}, [{base}]; {widen.get(size, "")}"""
    view = {"s": "i", "u": "u"}.get(kind[0], "u")
    expected = data.view(f"{view}{size}").astype(np.int64) % 2**32
    assert (lanes(body + STORE, data, smem=256) == expected).all()


@pytest.mark.parametrize("count, kind", [(2, "b32"), (4, "b32"), (2, "b64"), (4, "b16"), (2, "b8"), (4, "b8")])
@pytest.mark.parametrize("space", ["global", "shared", ""])
def test_vectors(count, kind, space):
    size = int(kind[1:]) // 8
    data = rng(2).integers(0, 256, 32 * size * count, np.uint8)
    out = np.zeros_like(data)
    names = {1: "%h{}", 2: "%h{}", 4: "%r{}", 8: "%d{}"}[size]
    vector = "{" + ", ".join(names.format(i) for i in range(count)) + "}"
    dot, step = f".{space}" if space else "", size * count
    if space == "shared":
        middle = f"mad.lo.u32 %r50, %t, {step}, %s; st.shared.v{count}.{kind} [%r50], {vector}; bar.sync 0;"
        middle += f"ld.shared.v{count}.{kind} {vector}, [%r50];"
    else:
        middle = ""
    body = f"""mad.wide.u32 %d50, %t, {step}, %a1; ld{dot if space == "global" else ".global"}.v{count}.{kind} {vector}, [%d50];
    {middle} mad.wide.u32 %d51, %t, {step}, %a0; st{dot if space != "shared" else ""}.v{count}.{kind} [%d51], {vector};"""
    assert not run(body, (out, data), smem=1024)
    assert (out == data).all()


def test_sign_extension_into_wider_registers():
    data = np.array([-3, 200], np.int64).astype(np.uint8)
    body = """ld.global.s8 %r1, [%a1]; ld.global.u8 %r2, [%a1+1]; ld.global.s8 %d0, [%a1+1]; cvt.u32.u64 %r3, %d0;
    add.s32 %r0, %r1, %r2; add.s32 %r0, %r0, %r3;"""
    assert (lanes(body + STORE, data).view(np.int32) == -3 + 200 - 56).all()


def test_generic_addresses():
    body = """.local .align 8 .b8 depot[64]; mov.u64 %d0, depot; cvta.local.u64 %d1, %d0; st.b32 [%d1+8], %t;
    ld.local.b32 %r1, [depot+8]; cvt.u64.u32 %d2, %s; cvta.shared.u64 %d3, %d2; mad.wide.u32 %d3, %t, 4, %d3;
    st.b32 [%d3], %r1; cvta.to.shared.u64 %d4, %d3; cvt.u32.u64 %r4, %d4; ld.shared.b32 %r2, [%r4]; ld.b32 %r3, [%d3];
    cvta.global.u64 %d6, %a1; ld.b32 %r5, [%d6+4]; isspacep.shared %p0, %d3; isspacep.global %p1, %d6;
    isspacep.local %p2, %d6; add.u32 %r0, %r2, %r3; add.u32 %r0, %r0, %r5; @!%p0 mov.u32 %r0, 0; @!%p1 mov.u32 %r0, 0;
    @%p2 mov.u32 %r0, 0;"""
    assert (lanes(body + STORE, np.array([1, 70], np.uint32), smem=256) == 2 * LANE + 70).all()


def test_local_memory_is_the_lanes_own():
    body = """.local .align 16 .b8 depot[32]; st.local.v2.b32 [depot+16], {%t, %r9}; ld.local.b64 %d0, [depot+16];
    ld.local.u16 %h0, [depot+16]; cvt.u32.u16 %r1, %h0; cvt.u32.u64 %r0, %d0; add.u32 %r0, %r0, %r1;"""
    assert (lanes("mov.u32 %r9, 0;" + body + STORE) == 2 * LANE).all()


def test_tables_of_the_module():
    tables = """.const .align 4 .f32 half[3] = {0f3F000000, 1.25, 2}; .global .align 4 .u32 ints[4] = {10, 20, 30, 0x28};
    .global .align 8 .b8 bytes[4] = {1, 2, 3};"""
    body = """mov.u64 %d0, ints; and.b32 %r1, %t, 3; mad.wide.u32 %d0, %r1, 4, %d0; ld.global.u32 %r0, [%d0];
    mov.u64 %d1, half; ld.const.f32 %f0, [half+4]; ld.const.f32 %f1, [%d1+8]; add.f32 %f0, %f0, %f1;
    mul.f32 %f0, %f0, 0f40800000; cvt.rzi.u32.f32 %r2, %f0; add.u32 %r0, %r0, %r2; ld.global.nc.u8 %h0, [bytes+1];
    cvt.u32.u16 %r3, %h0; add.u32 %r0, %r0, %r3;"""
    assert (lanes(body + STORE, globals_=tables) == np.array([10, 20, 30, 40])[LANE % 4] + 13 + 2).all()


def test_parameters():
    raw = np.arange(16, dtype=np.uint32).tobytes()
    body = """ld.param.v4.b32 {%r1, %r2, %r3, %r4}, [p1+16]; ld.param.u64 %d0, [p1+40]; ld.param.f32 %f0, [p2];
    ld.param.u16 %h0, [p1+60]; cvt.u32.u16 %r5, %h0; mov.b64 %d1, p1; cvta.param.u64 %d2, %d1; ld.b32 %r6, [%d2+4];
    cvt.rzi.u32.f32 %r7, %f0; cvt.u32.u64 %r8, %d0; add.u32 %r0, %r1, %r4; add.u32 %r0, %r0, %r5; add.u32 %r0, %r0, %r6;
    add.u32 %r0, %r0, %r7; add.u32 %r0, %r0, %r8; ld.param.b32 %r9, [%d1+8]; add.u32 %r0, %r0, %r9;"""
    assert (lanes(body + STORE, raw, 100.0) == 4 + 7 + 15 + 1 + 100 + 10 + 2).all()


def test_static_and_dynamic_shared_memory_do_not_overlap():
    body = """.shared .align 8 .b8 mine[24]; mov.u32 %r1, mine; sub.u32 %r0, %s, %r1;"""
    assert (lanes(body + STORE, smem=64)[0] >= 24).all()


def test_flags_in_shared_memory_by_strong_accesses():
    body = """setp.ge.u32 %p0, %t, 32; setp.ne.u32 %p1, %t, 0; @%p1 bra READY; mov.u32 %r9, 0; st.shared.b32 [%s], %r9;
    READY: bar.sync 0; mov.u32 %r0, 0; @%p0 bra READER; mov.u32 %r1, 7; @!%p1 st.shared.b32 [%s+8], %r1; mov.u32 %r2, 1;
    @!%p1 st.release.cta.shared.b32 [%s], %r2; bra END;
    READER: ld.acquire.cta.shared.b32 %r3, [%s]; setp.eq.u32 %p2, %r3, 0; @%p2 bra READER; ld.shared.b32 %r0, [%s+8];
    END:"""
    assert (lanes(body + STORE, threads=64, smem=64, schedules=range(8)) == [0] * 32 + [7] * 32).all()


# ----- global memory between CTAs -------------------------------------------------------------------------------------


def second_adds(flag_before: str, flag: str, barrier: str = "bar.sync 0;") -> str:
    """Two CTAs store a word a thread; the one that finds the other's flag (%a1) set adds up both."""
    return f"""mov.u32 %r1, %ctaid.x; mad.lo.u32 %r2, %r1, 64, %t; mad.wide.u32 %d0, %r2, 4, %a0; xor.b32 %r3, %r2, 64;
    mad.wide.u32 %d1, %r3, 4, %a0; setp.ne.u32 %p0, %t, 0; mov.b64 %d2, 7; mov.b64 %d3, 0; setp.ne.b64 %p1, %d2, %d2;
    @%p0 bra LOOKED; {flag_before} LOOKED: setp.eq.b64 %p1, %d3, %d2; barrier.cta.red.or.pred %p2, 0, 64, %p1;
    @%p2 bra SECOND; st.global.b32 [%d0], %r2; {barrier}
    @%p0 bra SET; {flag} SET: setp.eq.b64 %p1, %d3, %d2; barrier.cta.red.or.pred %p2, 0, 64, %p1; @!%p2 bra END;
    SECOND: ld.global.b32 %r4, [%d1]; add.u32 %r4, %r4, %r2; mad.wide.u32 %d4, %t, 4, %a2; st.global.b32 [%d4], %r4; END:"""


LOOK = "ld.acquire.gpu.global.b64 %d3, [%a1];"
SET = "atom.acq_rel.gpu.global.exch.b64 %d3, [%a1], %d2;"


@pytest.mark.parametrize(
    "before, flag",
    [
        (LOOK, SET),
        ("", SET),
        (LOOK, "fence.acq_rel.gpu; atom.relaxed.gpu.global.exch.b64 %d3, [%a1], %d2; fence.acq_rel.gpu;"),
        ("ld.relaxed.gpu.global.b64 %d3, [%a1]; fence.acq_rel.gpu;", SET),
        ("", "fence.acq_rel.sys; atom.global.exch.b64 %d3, [%a1], %d2; fence.acq_rel.sys;"),
        ("ld.acquire.sys.b64 %d3, [%a1];", "atom.acq_rel.sys.exch.b64 %d3, [%a1], %d2;"),
    ],
)
def test_a_flag_in_global_memory_orders_two_ctas(before, flag):
    for n in range(8):
        words, flags, out = np.zeros(128, np.uint32), np.zeros(1, np.uint64), np.zeros(64, np.uint32)
        found = run(second_adds(before, flag), (words, flags, out), threads=64, grid=(2, 1, 1), options=Options.schedule(n))
        assert not found, found[0]
        assert (out == 64 + 2 * np.arange(64)).all()


@pytest.mark.parametrize(
    "before, flag, barrier",
    [
        ("", "atom.relaxed.gpu.global.exch.b64 %d3, [%a1], %d2;", "bar.sync 0;"),  # neither releases nor acquires
        ("", "atom.release.gpu.global.exch.b64 %d3, [%a1], %d2;", "bar.sync 0;"),  # does not acquire
        ("", "atom.acquire.gpu.global.exch.b64 %d3, [%a1], %d2;", "bar.sync 0;"),  # does not release
        ("", "fence.acq_rel.gpu; atom.relaxed.gpu.global.exch.b64 %d3, [%a1], %d2;", "bar.sync 0;"),
        ("", "atom.relaxed.gpu.global.exch.b64 %d3, [%a1], %d2; fence.acq_rel.gpu;", "bar.sync 0;"),
        ("", "fence.acq_rel.cta; atom.relaxed.gpu.global.exch.b64 %d3, [%a1], %d2; fence.acq_rel.cta;", "bar.sync 0;"),
        ("", "atom.acq_rel.cta.global.exch.b64 %d3, [%a1], %d2;", "bar.sync 0;"),  # of another CTA
        ("ld.relaxed.gpu.global.b64 %d3, [%a1];", SET, "bar.sync 0;"),
        ("ld.acquire.cta.global.b64 %d3, [%a1];", SET, "bar.sync 0;"),
        ("", SET, ""),  # releases thread 0's warp's stores only
    ],
)
def test_a_flag_in_global_memory_that_orders_nothing(before, flag, barrier):
    words, flags, out = np.zeros(128, np.uint32), np.zeros(1, np.uint64), np.zeros(64, np.uint32)
    body = second_adds(before, flag, barrier)
    kinds = set()
    for n in (0, 3):  # one CTA behind the other: the second one finds the flag
        flags[:] = 0
        kinds |= {f.kind for f in run(body, (words, flags, out), threads=64, grid=(2, 1, 1), options=Options.schedule(n))}
    assert kinds == {"race"}


def test_what_is_known_of_one_cta_is_passed_on_by_another():
    body = """mov.u32 %r1, %ctaid.x; mad.lo.u32 %r2, %r1, 32, %t; mad.wide.u32 %d0, %r2, 4, %a0; st.global.b32 [%d0], %t;
    setp.ne.u32 %p0, %t, 0; @%p0 bra END; atom.acq_rel.gpu.global.add.u32 %r3, [%a1], 1; setp.ne.u32 %p1, %r3, 2; @%p1 bra END;
    ld.global.b32 %r4, [%a0+8]; ld.global.b32 %r5, [%a0+136]; ld.global.b32 %r6, [%a0+264]; END:"""
    for n in range(8):
        words, count = np.zeros(96, np.uint32), np.zeros(1, np.uint32)
        assert not run(body, (words, count), grid=(3, 1, 1), options=Options.schedule(n))
    relaxed = body.replace("acq_rel", "relaxed")
    assert [f.kind for f in run(relaxed, (words, np.zeros(1, np.uint32)), grid=(3, 1, 1))][:1] == ["race"]


def test_two_ctas_that_store_to_the_same_place():
    body = "mov.u32 %r1, %ctaid.x; st.global.b32 [%e], {};"
    words = np.zeros(32, np.uint32)
    assert not run(body.format("%t"), (words,), grid=(2, 1, 1))  # the same
    (found,) = run(body.format("%r1"), (words,), grid=(2, 1, 1))
    assert found.kind == "race" and found.place.cta != found.other.cta
    warps = """setp.ge.u32 %p0, %t, 32; mov.u32 %r1, 1; @!%p0 st.global.b32 [%e], %r1; {}
    @%p0 ld.global.b32 %r2, [%e+-128];"""
    assert not run(warps.format("bar.sync 0;"), (words,), threads=64)
    found = [f.kind for n in range(8) for f in run(warps.format(""), (words,), threads=64, options=Options.schedule(n))]
    assert set(found) == {"race"}  # where the store comes first


# ----- atomics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize(
    "name, start, operand, end",
    [
        ("add.u32", 5, "%t", 5 + sum(range(64))),
        ("min.s32", 7, "%r9", 2**32 - 63),
        ("max.u32", 7, "%t", 63),
        ("and.b32", 0xFF, "%r8", 0),
        ("or.b32", 0x100, "%t", 0x13F),
        ("inc.u32", 0, "%r7", 64 % 51),
        ("exch.b32", 1, "4", 4),
    ],
)
def test_atomics(space, name, start, operand, end):
    data = np.array([start, 0], np.uint32)
    body = f"""neg.s32 %r9, %t; and.b32 %r7, %t, 1; shl.b32 %r8, 1, %r7; mov.u32 %r7, 50; mov.u32 %r20, {start};
    setp.ne.u32 %p0, %t, 0; @!%p0 st.shared.b32 [%s], %r20; bar.sync 0;
    red.{space}.{name.replace("exch.b32", "add.u32")} [{{}}], {operand if "exch" not in name else "0"};
    atom.{space}.{name} %r1, [{{}}], {operand}; bar.sync 0;
    ld.{space}.b32 %r0, [{{}}];""".replace("{}", "%a1" if space == "global" else "%s")
    if name.startswith(("add", "inc")):  # not idempotent
        body = body.replace(f"red.{space}.{name} ", "//")
    assert (lanes(body + STORE, data, threads=64, smem=16) == end).all()


def test_atom_returns_the_old_value_and_cas():
    body = """atom.global.add.u32 %r0, [%a1], 1; mad.wide.u32 %d0, %t, 4, %a1; atom.global.cas.b32 %r1, [%d0+4], 3, 100;
    atom.global.cas.b64 %d3, [%a1+256], 0, 9; ld.global.u32 %r2, [%d0+4]; add.u32 %r0, %r0, %r2;"""
    data = np.zeros(68, np.uint32)
    data[1:33] = LANE
    got = np.sort(lanes(body + STORE, data))
    assert (got == np.sort(np.where(LANE == 3, 100, LANE) + LANE)).all()
    assert data[0] == 32 and data[4] == 100 and data[64] == 9


def test_float_half_and_vector_reductions():
    data = np.zeros(8, np.uint32)
    body = """mov.f32 %f0, 1.5; red.global.add.f32 [%a1], %f0; mov.b32 %r1, 0x3f803f80;
    red.global.add.noftz.bf16x2 [%a1+4], %r1;
    mov.b32 %r1, 0x3c003800; red.global.add.noftz.f16x2 [%a1+8], %r1;
    red.global.add.v2.f32 [%a1+16], {%f0, %f0}; mov.u32 %r0, 0;"""
    lanes(body + STORE, data)
    assert data[0].view(np.float32) == data[4].view(np.float32) == data[5].view(np.float32) == 48
    assert data[1] == 0x42004200  # 32 in bf16
    assert data[2:3].view(np.float16).tolist() == [16, 32]


# ----- matrices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix(count, trans):
    tiles = rng(3).integers(0, 2**16, (count, 8, 8), np.uint16)
    outs = ", ".join(f"%r{i}" for i in range(count))
    body = f"""mad.wide.u32 %d0, %t, 16, %a1; setp.ge.u32 %p0, %t, {8 * count}; mad.lo.u32 %r50, %t, 16, %s;
    @%p0 mov.u32 %r50, %s; @!%p0 ld.global.v4.b32 {{%r51, %r52, %r53, %r54}}, [%d0];
    @!%p0 st.shared.v4.b32 [%r50], {{%r51, %r52, %r53, %r54}}; bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x{count}{".trans" if trans else ""}.shared.b16 {{{outs}}}, [%r50];
    mad.wide.u32 %d1, %t, 16, %a0;""" + "".join(f"st.global.b32 [%d1+{4 * i}], %r{i};" for i in range(count))
    got = lanes(body, tiles, width=4, smem=512)[:, :count].view(np.uint16).reshape(32, count, 2)
    for lane in range(32):
        row, columns = lane // 4, [lane % 4 * 2, lane % 4 * 2 + 1]
        for i in range(count):
            expected = tiles[i][columns, row] if trans else tiles[i][row, columns]
            assert (got[lane, i] == expected).all()


@pytest.mark.parametrize("trans", [False, True])
def test_stmatrix_then_movmatrix(trans):
    body = f"""mov.b32 %r1, %t; add.u32 %r2, %t, 100; mad.lo.u32 %r50, %t, 16, %s; setp.ge.u32 %p0, %t, 16;
    @%p0 mov.u32 %r50, %s; stmatrix.sync.aligned.m8n8.x2{".trans" if trans else ""}.shared.b16 [%r50], {{%r1, %r2}};
    movmatrix.sync.aligned.m8n8.trans.b16 %r4, %r1; bar.warp.sync -1; mad.lo.u32 %r3, %t, 4, %s; ld.shared.b32 %r0, [%r3];
    ld.shared.b32 %r5, [%r3+128]; mad.wide.u32 %d0, %t, 12, %a0; st.global.b32 [%d0], %r0; st.global.b32 [%d0+4], %r5;
    st.global.b32 [%d0+8], %r4;"""
    got = lanes(body, width=3, smem=512)
    for i, first in enumerate((0, 100)):
        tile = (np.arange(32, dtype=np.uint32) + first).view(np.uint16).reshape(8, 8)
        expected = (np.ascontiguousarray(tile.T) if trans else tile).view(np.uint32).reshape(32)
        assert (got[:, i] == expected).all()
    assert (got[:, 2] == np.ascontiguousarray(LANE.view(np.uint16).reshape(8, 8).T).view(np.uint32).reshape(32)).all()


def fragment_indices(bits: int, k: int):
    """(row, column) of A [lane, element], (k, n) of B [lane, element] of m16n8kK, as the PTX ISA defines them."""
    per = 32 // bits
    lane = np.arange(32)[:, None]
    i = np.arange(16 * k // 32)
    row = lane // 4 + 8 * (i // per % 2)
    column = lane % 4 * per + i % per + 4 * per * (i // (2 * per))
    j = np.arange(8 * k // 32)
    return (row, column), (lane % 4 * per + j % per + 4 * per * (j // per), lane // 4 + 0 * j)


MMA = [("f16", k, d_type) for k in (8, 16) for d_type in ("f16", "f32")] + [("bf16", 8, "f32"), ("bf16", 16, "f32")]
MMA += [("tf32", 4, "f32"), ("tf32", 8, "f32"), ("s8", 16, "s32"), ("s8", 32, "s32"), ("u8", 32, "s32")]
MMA += [("e4m3", 32, "f32"), ("e4m3", 16, "f16"), ("e5m2", 16, "f32")]


@pytest.mark.parametrize("kind, k, d_type", MMA)
def test_mma_sync(kind, k, d_type):
    bits = {"f16": 16, "bf16": 16, "tf32": 32}.get(kind, 8)
    a, av = operand((16, k), kind, 1)
    b, bv = operand((k, 8), kind, 2)
    ai, bi = fragment_indices(bits, k)
    registers = [np.ascontiguousarray(a[ai]).view(np.uint32), np.ascontiguousarray(b[bi]).view(np.uint32)]
    c = rng(3).integers(-8, 8, (16, 8)).astype({"f32": np.float32, "f16": np.float16, "s32": np.int32}[d_type])
    lane, i = np.arange(32)[:, None], np.arange(4)
    ci = lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2
    registers.append(np.ascontiguousarray(c[ci]).view(np.uint32))
    loads, names, n = "", [], 10
    for j, r in enumerate(registers):
        count = r.shape[1]
        loads += f"mad.wide.u32 %d{j}, %t, {4 * count}, %a{j + 1};"
        loads += "".join(f"ld.global.b32 %r{n + x}, [%d{j}+{4 * x}];" for x in range(count))
        names.append("{" + ", ".join(f"%r{n + x}" for x in range(count)) + "}")
        n += count
    count = registers[2].shape[1]
    out = "{" + ", ".join(f"%r{x}" for x in range(count)) + "}"
    body = f"""{loads} mma.sync.aligned.m16n8k{k}.row.col.{d_type}.{kind}.{kind}.{d_type} {out}, {", ".join(names)};
    mad.wide.u32 %d5, %t, {4 * count}, %a0;""" + "".join(f"st.global.b32 [%d5+{4 * x}], %r{x};" for x in range(count))
    got = lanes(body, *registers, width=count).view(c.dtype)
    assert (got == (av @ bv + c)[ci]).all()


# ----- barriers of the CTA --------------------------------------------------------------------------------------------


def test_bar_sync_and_arrive_as_producer_and_consumer():
    body = """setp.ge.u32 %p0, %t, 64; and.b32 %r1, %t, 63; mad.lo.u32 %r2, %r1, 4, %s; mov.u32 %r0, 0; mov.u32 %r5, 0;
    LOOP: @%p0 bra CONSUMER; bar.sync 2, 128; add.u32 %r3, %t, %r5; st.shared.b32 [%r2], %r3; bar.arrive 1, 128; bra NEXT;
    CONSUMER: bar.arrive 2, 128; bar.sync 1, 128; xor.b32 %r4, %r2, 4; ld.shared.b32 %r3, [%r4]; add.u32 %r0, %r0, %r3;
    NEXT: add.u32 %r5, %r5, 1; setp.lt.u32 %p1, %r5, 3; @%p1 bra LOOP;"""
    x = np.arange(64) ^ 1
    assert (
        lanes(body + STORE, threads=128, smem=256, schedules=ALL) == np.concatenate([np.zeros(64), 3 * x + 3])
    ).all()


@pytest.mark.parametrize("how, expected", [("popc.u32", 40), ("and.pred", 0), ("or.pred", 1)])
def test_bar_red(how, expected):
    out = "%r0" if "popc" in how else "%p1"
    body = f"setp.lt.u32 %p0, %t, 40; bar.red.{how} {out}, 0, %p0;"
    body += "" if "popc" in how else "selp.u32 %r0, 1, 0, %p1;"
    assert (lanes(body + STORE, threads=64) == expected).all()


def test_barrier_cta_and_number_in_a_register():
    body = """shr.u32 %r1, %t, 6; add.u32 %r2, %r1, 3; mov.u32 %r9, 64; mad.lo.u32 %r4, %t, 4, %s; st.shared.b32 [%r4], %t;
    barrier.cta.sync.aligned %r2, %r9; xor.b32 %r5, %r4, 128; ld.shared.b32 %r0, [%r5];"""
    assert (lanes(body + STORE, threads=128, smem=512, schedules=ALL) == np.arange(128) ^ 32).all()


# ----- mbarriers ------------------------------------------------------------------------------------------------------


def test_mbarrier_with_counts_and_parity():
    body = f"""{mbarriers(64, 5)} mov.u32 %r5, 0; mov.u32 %r0, 0; mad.lo.u32 %r1, %t, 4, %s;
    LOOP: and.b32 %r6, %r5, 1; add.u32 %r2, %t, %r5; st.shared.b32 [%r1+64], %r2;
    mbarrier.arrive.shared::cta.b64 _, [%s]; {wait(0, "%r6")} xor.b32 %r3, %r1, 128; ld.shared.b32 %r4, [%r3+64];
    add.u32 %r0, %r0, %r4; bar.sync 0; setp.ne.u32 %p1, %t, 40; @!%p1 mbarrier.arrive.shared.b64 _, [%s+8], 3;
    setp.ne.u32 %p1, %t, 0; @!%p1 mbarrier.arrive.shared.b64 %d1, [%s+8], 2; {wait(8, "%r6")}
    add.u32 %r5, %r5, 1; setp.lt.u32 %p0, %r5, 4; @%p0 bra LOOP;"""
    assert (lanes(body + STORE, threads=64, smem=512, schedules=ALL) == 4 * (np.arange(64) ^ 32) + 6).all()


def test_mbarrier_states_and_test_wait():
    body = f"""{mbarriers(33)} setp.ge.u32 %p0, %t, 32; mov.u32 %r0, 0; @%p0 bra OTHER;
    mbarrier.arrive.shared::cta.b64 %d0, [%s]; L: mbarrier.test_wait.shared::cta.b64 %p1, [%s], %d0; @!%p1 bra L;
    ld.shared.b32 %r0, [%s+16]; bra END; OTHER: setp.ne.u32 %p2, %t, 33; mov.u32 %r1, 6;
    @!%p2 st.shared.b32 [%s+16], %r1; @!%p2 mbarrier.arrive.shared::cta.b64 %d0, [%s]; END:"""
    assert (lanes(body + STORE, threads=64, smem=64, schedules=ALL) == [6] * 32 + [0] * 32).all()


def test_try_wait_may_give_up():
    """Nobody arrives until the waiting thread has given up."""
    body = f"""{mbarriers(1)} mov.u32 %r0, 3; mbarrier.try_wait.parity.shared::cta.b64 %p0, [%s], 0; @%p0 mov.u32 %r0, 5;
    setp.eq.u32 %p1, %t, 0; @%p1 mbarrier.arrive.shared.b64 _, [%s]; {wait(0, 0)}"""
    assert (lanes(body + STORE, smem=64, schedules=ALL) == 3).all()


def test_guarded_wait_that_gives_up_keeps_the_other_lanes():
    body = f"""{mbarriers(1)} mov.u32 %r0, 3; setp.lt.u32 %p2, %t, 8; setp.lt.u32 %p0, %t, 0;
    @%p2 mbarrier.try_wait.parity.shared::cta.b64 %p0, [%s], 0; activemask.b32 %r0;"""
    assert (lanes(body + STORE, smem=64, schedules=ALL) == 0xFFFFFFFF).all()


def test_expect_tx_and_complete_tx_and_arrive_drop():
    body = f"""{mbarriers(3)} setp.eq.u32 %p0, %t, 0; mov.u32 %r0, 1;
    @%p0 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%s], 64;
    @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%s], 16; @%p0 mbarrier.arrive.shared.b64 _, [%s];
    @%p0 mbarrier.arrive_drop.shared.b64 _, [%s]; mbarrier.test_wait.parity.shared.b64 %p1, [%s], 0;
    @%p1 mov.u32 %r0, 100; @%p0 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%s], 80; {wait(0, 0)}
    @%p0 mbarrier.arrive.shared.b64 _, [%s]; @%p0 mbarrier.arrive.shared.b64 _, [%s]; {wait(0, 1)} add.u32 %r0, %r0, 1;"""
    assert (lanes(body + STORE, smem=64, schedules=ALL) == 2).all()


def test_mbarrier_memory_can_be_used_again():
    body = f"""{mbarriers(32)} mbarrier.arrive.shared.b64 _, [%s]; {wait(0, 0)} bar.sync 0; setp.eq.u32 %p0, %t, 0;
    @%p0 mbarrier.inval.shared.b64 [%s]; @%p0 st.shared.b32 [%s], 12; bar.warp.sync -1; ld.shared.b32 %r0, [%s];"""
    assert (lanes("mov.u32 %r1, 12;" + body.replace("[%s], 12", "[%s], %r1") + STORE, smem=64) == 12).all()


def test_an_mbarrier_that_is_initialised_again_starts_with_phase_0():
    again = """bar.sync 0; setp.eq.u32 %p0, %t, 0; @%p0 mbarrier.inval.shared.b64 [%s]; bar.sync 0;
    @%p0 mbarrier.init.shared.b64 [%s], 1; bar.sync 0; mbarrier.test_wait.parity.shared.b64 %p1, [%s], 0;
    @%p1 add.u32 %r0, %r0, 100; mbarrier.test_wait.parity.shared.b64 %p1, [%s], 1; @%p1 add.u32 %r0, %r0, 1;"""
    body = f"{mbarriers(64)} mov.u32 %r0, 0; mbarrier.arrive.shared.b64 _, [%s]; {wait(0, 0)} {again}"
    assert (lanes(body + STORE, threads=64, smem=64, schedules=ALL) == 1).all()


# ----- clusters -------------------------------------------------------------------------------------------------------


def two(body: str, *args, schedules=ALL, **kw) -> np.ndarray:
    """[2, threads] of a cluster of two CTAs; %e is the thread's place, %r99 the rank, %r98 the other rank."""
    head = """mov.u32 %r99, %cluster_ctarank; xor.b32 %r98, %r99, 1; mov.u32 %r97, %ntid.x; mad.lo.u32 %r97, %r99, %r97, %t;
    mad.wide.u32 %e, %r97, 4, %a0;"""
    threads = kw.get("threads", 32)
    got = lanes(head + body + STORE, *args, grid=(2, 1, 1), cluster=(2, 1, 1), schedules=schedules, **kw)
    return got.reshape(2, threads)


def test_distributed_shared_memory():
    body = f"""mad.lo.u32 %r1, %t, 4, %s; {CLUSTER_SYNC} mapa.shared::cluster.u32 %r2, %r1, %r98; add.u32 %r3, %t, %r99;
    st.shared::cluster.b32 [%r2], %r3; {CLUSTER_SYNC} ld.shared.b32 %r4, [%r1]; mapa.shared::cluster.u32 %r5, %s, %r98;
    ld.shared::cluster.b32 %r6, [%r5+8]; cvt.u64.u32 %d0, %s; cvta.shared.u64 %d0, %d0; mapa.u64 %d1, %d0, %r98;
    ld.b32 %r7, [%d1+12]; getctarank.u64 %r8, %d1; getctarank.shared::cluster.u32 %r9, %r5;
    mad.lo.u32 %r0, %r6, 100, %r4; mad.lo.u32 %r0, %r7, 10000, %r0; mad.lo.u32 %r0, %r8, 1000000, %r0;
    mad.lo.u32 %r0, %r9, 10000000, %r0; {CLUSTER_SYNC}"""
    got = two(body, smem=256)
    for rank in (0, 1):
        other = 1 - rank
        assert (got[rank] == LANE + other + 100 * (2 + rank) + 10000 * (3 + rank) + 11000000 * other).all()


def test_lanes_may_read_different_ctas():
    body = f"""mad.lo.u32 %r1, %t, 4, %s; mad.lo.u32 %r2, %r99, 100, %t; st.shared.b32 [%r1], %r2; {CLUSTER_SYNC}
    and.b32 %r3, %t, 1; mapa.shared::cluster.u32 %r4, %r1, %r3; ld.shared::cluster.b32 %r0, [%r4]; {CLUSTER_SYNC}"""
    assert (two(body, smem=256) == LANE + 100 * (LANE % 2)).all()


def test_remote_arrive_and_atomics():
    body = f"""{mbarriers(32)} mov.u32 %r9, 0; setp.eq.u32 %p0, %t, 0; @%p0 st.shared.b32 [%s+16], %r9; {CLUSTER_SYNC}
    mapa.shared::cluster.u32 %r1, %s, %r98; atom.shared::cluster.add.u32 %r2, [%r1+16], %t;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r1]; {wait(0, 0)} ld.shared.b32 %r0, [%s+16];"""
    assert (two(body, smem=64) == sum(range(32))).all()


def test_relaxed_cluster_barrier_behind_the_fence_of_the_mbarriers():
    body = f"""setp.ne.u32 %p0, %t, 0; @%p0 bra NO; mbarrier.init.shared.b64 [%s], 32; fence.mbarrier_init.release.cluster;
    NO: bar.warp.sync -1; barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;
    mapa.shared::cluster.u32 %r1, %s, %r98; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r1]; {wait(0, 0)}
    mov.u32 %r0, 4;"""
    assert (two(body, smem=64) == 4).all()


def test_cluster_barrier_does_not_wait_for_warps_that_ended():
    body = f"""setp.ge.u32 %p0, %t, 32; mov.u32 %r0, 1; @!%p0 bra STAY; {STORE} exit; STAY: {CLUSTER_SYNC} {CLUSTER_SYNC}
    mov.u32 %r0, 2;"""
    assert (two(body, threads=64, schedules=range(8)) == [1 + (i < 32) for i in range(64)]).all()


def test_st_async():
    body = f"""{mbarriers(1)} setp.eq.u32 %p0, %t, 0; @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%s], 512;
    {CLUSTER_SYNC} mad.lo.u32 %r1, %t, 16, %s; mapa.shared::cluster.u32 %r2, %r1, %r98; mapa.shared::cluster.u32 %r3, %s, %r98;
    mad.lo.u32 %r4, %r99, 1000, %t; st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32
    [%r2+64], {{%r4, %r4, %r4, %t}}, [%r3]; {wait(0, 0)} ld.shared.b32 %r5, [%r1+72]; ld.shared.b32 %r6, [%r1+76];
    mad.lo.u32 %r0, %r6, 10000, %r5;"""
    got = two(body, smem=1024)
    for rank in (0, 1):
        assert (got[rank] == LANE * 10001 + 1000 * (1 - rank)).all()


# ----- asynchronous copies --------------------------------------------------------------------------------------------


def test_cp_async_groups():
    data = rng(4).integers(0, 2**32, 32 * 12, np.uint32)
    body = """mad.wide.u32 %d0, %t, 16, %a1; mad.lo.u32 %r1, %t, 16, %s; mad.wide.u32 %d1, %t, 4, %a1;
    mad.lo.u32 %r2, %t, 4, %s;
    cp.async.cg.shared.global [%r1], [%d0], 16; cp.async.commit_group; and.b32 %r3, %t, 3; setp.lt.u32 %p1, %t, 16;
    cp.async.ca.shared.global [%r2+512], [%d1+512], 4, %r3; cp.async.ca.shared.global [%r1+1024], [%d0+512], 16, %p1;
    cp.async.commit_group; cp.async.wait_group 1; ld.shared.v2.b32 {%r4, %r5}, [%r1+8]; cp.async.wait_all;
    ld.shared.b32 %r6, [%r2+512]; ld.shared.b32 %r7, [%r1+1024]; mad.wide.u32 %d2, %t, 16, %a0;
    st.global.v4.b32 [%d2], {%r4, %r5, %r6, %r7};"""
    got = lanes(body, data, width=4, smem=2048, schedules=ALL)
    assert (got[:, :2] == data[:128].reshape(32, 4)[:, 2:]).all()
    kept = [0, 0xFF, 0xFFFF, 0xFFFFFF]
    assert (got[:, 2] == data[128:160] & np.array(kept, np.uint32)[LANE % 4]).all()
    assert (got[:, 3] == np.where(LANE < 16, 0, data[128:256].reshape(32, 4)[:, 0])).all()


@pytest.mark.parametrize("noinc", [False, True])
def test_cp_async_arrives_at_an_mbarrier(noinc):
    data = rng(5).integers(0, 2**32, 64, np.uint32)
    body = f"""{mbarriers(64 if noinc else 1)} mad.wide.u32 %d0, %t, 4, %a1; mad.lo.u32 %r1, %t, 4, %s;
    cp.async.ca.shared.global [%r1+64], [%d0], 4; cp.async.mbarrier.arrive{".noinc" if noinc else ""}.shared::cta.b64 [%s];
    {"" if noinc else "bar.sync 0; setp.eq.u32 %p0, %t, 0; @%p0 mbarrier.arrive.shared.b64 _, [%s];"} {wait(0, 0)}
    xor.b32 %r2, %r1, 128; ld.shared.b32 %r0, [%r2+64];"""
    got = lanes(body + STORE, data, threads=64, smem=1024, schedules=ALL)
    assert (got == data[np.arange(64) ^ 32]).all()


def test_bulk_copies_both_ways():
    data, out = rng(6).integers(0, 2**32, 256, np.uint32), np.zeros(256, np.uint32)
    body = f"""{mbarriers(1)} setp.ne.u32 %p0, %t, 0; @%p0 bra WAIT; mbarrier.arrive.expect_tx.shared.b64 _, [%s], 1024;
    {BULK} [%s+1024], [%a1], 1008, [%s]; mov.b64 %d0, 16; {BULK}.L2::cache_hint [%s+2032], [%a1+1008], 16, [%s], %d0;
    WAIT: {wait(0, 0)} mad.lo.u32 %r1, %t, 4, %s; ld.shared.b32 %r2, [%r1+1024]; add.u32 %r2, %r2, 1;
    st.shared.b32 [%r1+1024], %r2; fence.proxy.async.shared::cta; bar.sync 0; @%p0 bra END;
    cp.async.bulk.global.shared::cta.bulk_group [%a0], [%s+1024], 1024; cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0; END:"""
    for n in ALL:
        out[:] = 0
        assert not run(body, (out, data), threads=64, smem=2048, options=Options.schedule(n))
        assert (out == data + (np.arange(256) < 64)).all()


def test_wait_group_without_read_waits_for_the_writes():
    """The thread reads back, by generic loads, what its bulk store has written."""
    body = """mad.lo.u32 %r1, %t, 4, %s; st.shared.b32 [%r1], %t; fence.proxy.async; bar.warp.sync -1; setp.ne.u32 %p0, %t, 0;
    @%p0 bra END; cp.async.bulk.global.shared::cta.bulk_group [%a1], [%s], 128; cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0; fence.proxy.async; END: bar.warp.sync -1; mad.wide.u32 %d0, %t, 4, %a1;
    ld.global.b32 %r0, [%d0];"""
    assert (lanes(body + STORE, np.zeros(32, np.uint32), smem=128, schedules=range(8)) == LANE).all()


def test_bulk_copy_to_another_cta():
    body = f"""{mbarriers(1)} mad.lo.u32 %r1, %t, 4, %s; mad.lo.u32 %r2, %r99, 100, %t; st.shared.b32 [%r1+128], %r2;
    fence.proxy.async; {CLUSTER_SYNC} setp.ne.u32 %p0, %t, 0; @%p0 bra WAIT; mbarrier.arrive.expect_tx.shared.b64 _, [%s], 128;
    add.u32 %r3, %s, 256; mapa.shared::cluster.u32 %r3, %r3, %r98; mapa.shared::cluster.u32 %r4, %s, %r98; add.u32 %r5, %s, 128;
    cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r3], [%r5], 128, [%r4];
    WAIT: {wait(0, 0)} ld.shared.b32 %r0, [%r1+256]; {CLUSTER_SYNC}"""
    got = two(body, smem=512)
    assert (got == [LANE + 100, LANE]).all()


def test_bulk_multicast():
    data = rng(7).integers(0, 2**32, 64, np.uint32)
    body = f"""{mbarriers(1)} setp.ne.u32 %p0, %t, 0; @!%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%s], 256; {CLUSTER_SYNC}
    @%p0 bra WAIT; mad.wide.u32 %d0, %r99, 128, %a1; mad.lo.u32 %r1, %r99, 128, %s; mov.b16 %h0, 3;
    {BULK}.multicast::cluster [%r1+128], [%d0], 128, [%s], %h0; WAIT: {wait(0, 0)} mad.lo.u32 %r2, %t, 8, %s;
    ld.shared.v2.b32 {{%r3, %r4}}, [%r2+128]; xor.b32 %r0, %r3, %r4; {CLUSTER_SYNC}"""
    assert (two(body, data, smem=512) == data[0::2] ^ data[1::2]).all()


@pytest.mark.parametrize(
    "name, dtype", [("add.u32", np.uint32), ("min.s32", np.int32), ("add.f32", np.float32), ("xor.b32", np.uint32)]
)
def test_bulk_reduction(name, dtype):
    new, old = (rng(i).integers(-50, 50, 32).astype(dtype) for i in (8, 9))
    expected = {"add": new + old, "min": np.minimum(new, old)}.get(name[:3])
    expected = new ^ old if expected is None else expected
    body = f"""mad.wide.u32 %d0, %t, 4, %a1; ld.global.b32 %r1, [%d0]; mad.lo.u32 %r2, %t, 4, %s; st.shared.b32 [%r2], %r1;
    fence.proxy.async; bar.sync 0; setp.ne.u32 %p0, %t, 0; @%p0 bra END;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.{name} [%a0], [%s], 128; cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0; END:"""
    for n in ALL:
        out = old.copy()
        assert not run(body, (out, new), smem=128, options=Options.schedule(n))
        assert (out == expected).all()


# ----- TMA tiles ------------------------------------------------------------------------------------------------------


def at_box(array: np.ndarray, start: tuple, box: tuple) -> np.ndarray:
    """The box, zeros where it is out of bounds."""
    out = np.zeros(box, array.dtype)
    for i in np.ndindex(*box):
        at = tuple(s + x for s, x in zip(start, i))
        if all(0 <= a < n for a, n in zip(at, array.shape)):
            out[i] = array[at]
    return out


TILES = [
    ((40, 64), (8, 16), (3, 32), Swizzle.NONE, 0),
    ((40, 64), (8, 8), (36, -3), Swizzle.B32, 1),
    ((40, 64), (16, 16), (-4, 56), Swizzle.B64, 2),
    ((40, 64), (8, 32), (2, 20), Swizzle.B128, 3),
    ((5, 9, 16), (2, 4, 8), (4, 7, 4), Swizzle.NONE, 0),
    ((3, 4, 5, 8), (2, 2, 3, 4), (1, 3, -1, 6), Swizzle.NONE, 0),
    ((2, 3, 3, 4, 8), (2, 1, 2, 2, 8), (1, 2, 0, 3, 0), Swizzle.B32, 1),
]


@pytest.mark.parametrize("shape, box, start, swizzle, bits", TILES)
def test_tma_load_and_store(shape, box, start, swizzle, bits):
    source = rng(10).integers(0, 2**32, shape, np.uint32)
    target = np.zeros(shape, np.uint32)
    nbytes = int(np.prod(box)) * 4
    coords = ", ".join(str(c) for c in reversed(start))
    out = np.zeros(nbytes // 4, np.uint32)
    n = len(shape)
    body = f"""{mbarriers(1)} mov.b64 %d0, p1; mov.b64 %d1, p2; cvta.param.u64 %d0, %d0; setp.ne.u32 %p0, %t, 0; @%p0 bra WAIT;
    prefetch.tensormap [%d0]; mbarrier.arrive.expect_tx.shared.b64 _, [%s], {nbytes};
    cp.async.bulk.tensor.{n}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%s+1024], [%d0, {{{coords}}}], [%s];
    WAIT: {wait(0, 0)} @%p0 bra END;
    cp.async.bulk.tensor.{n}d.global.shared::cta.tile.bulk_group [%d1, {{{coords}}}], [%s+1024]; cp.async.bulk.commit_group;
    cp.async.bulk.global.shared::cta.bulk_group [%a0], [%s+1024], {nbytes}; cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0; END:"""
    args = (out, tensor_map(source, box, swizzle), tensor_map(target, box, swizzle), source, target)
    for schedule in ALL:
        assert not run(body, args, smem=1024 + nbytes, options=Options.schedule(schedule))
        expected = at_box(source, start, box)
        rows = expected.view(np.uint8).reshape(-1, box[-1] * 4)
        assert (out.view(np.uint8) == swizzled(rows, bits)).all()
        inside = np.zeros(shape, bool)
        region = tuple(slice(max(s, 0), s + b) for s, b in zip(start, box))
        inside[region] = True
        assert (target == np.where(inside, source, 0)).all()


def test_tma_fills_with_nan():
    source = np.ones((4, 8), np.float32)
    out = np.zeros(32, np.float32)
    body = f"""{mbarriers(1)} mov.b64 %d0, p1; setp.ne.u32 %p0, %t, 0; @%p0 bra WAIT;
    mbarrier.arrive.expect_tx.shared.b64 _, [%s], 128;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%s+1024], [%d0, {{4, 2}}], [%s];
    WAIT: {wait(0, 0)} mad.lo.u32 %r1, %t, 4, %s; ld.shared.b32 %r0, [%r1+1024];"""
    args = (out, tensor_map(source, (4, 8), fill_nan=True), source)
    assert not run(body + STORE, args, smem=2048)
    assert (np.isnan(out.reshape(4, 8)) == ~((np.arange(4)[:, None] < 2) & (np.arange(8) < 4))).all()


def test_tma_reduction():
    old = rng(11).integers(0, 100, (8, 8), np.uint32)
    before = old.copy()
    body = """mad.lo.u32 %r1, %t, 4, %s; st.shared.b32 [%r1], %t; fence.proxy.async.shared::cta; bar.sync 0; mov.b64 %d0, p1;
    setp.ne.u32 %p0, %t, 0; @%p0 bra END; mov.u32 %r2, 4;
    cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%d0, {%r2, 2}], [%s]; cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0; END: mov.u32 %r0, 0;"""
    lanes(body + STORE, tensor_map(old, (8, 4)), old, smem=128)
    add = np.zeros((8, 8), np.uint32)
    add[2:, 4:] = np.arange(32).reshape(8, 4)[:6]
    assert (old == before + add).all()


def test_tma_multicast_in_a_cluster():
    source = rng(12).integers(0, 2**32, (2, 16), np.uint32)
    body = f"""{mbarriers(1)} mov.b64 %d0, p1; setp.ne.u32 %p0, %t, 0; @!%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%s], 128;
    {CLUSTER_SYNC} @%p0 bra WAIT; mov.b16 %h0, 3; mad.lo.u32 %r1, %r99, 128, %s;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
    [%r1+128], [%d0, {{0, %r99}}], [%s], %h0; WAIT: {wait(0, 0)} and.b32 %r2, %t, 15; shr.u32 %r3, %t, 4;
    mad.lo.u32 %r4, %r3, 128, %s; mad.lo.u32 %r4, %r2, 4, %r4; ld.shared.b32 %r0, [%r4+128]; {CLUSTER_SYNC}"""
    got = two(body, tensor_map(source, (1, 16)), source, smem=1024)
    assert (got == source.reshape(-1)).all()


# ----- wgmma ----------------------------------------------------------------------------------------------------------


WGMMA = [
    ("bf16", "f32", 64, "K128", "K128", False),
    ("bf16", "f32", 8, "K0", "K0", False),
    ("bf16", "f32", 64, "MN128", "MN128", False),
    ("bf16", "f32", 128, None, "MN128", False),
    ("f16", "f32", 96, None, "K128", False),
    ("f16", "f16", 32, "K128", "MN128", False),
    ("f16", "f32", 64, "K128", "K128", True),
    ("tf32", "f32", 16, "K128", "K128", False),
    ("e4m3", "f32", 64, "K128", "K0", False),
    ("e4m3", "f32", 24, None, "K128", False),
    ("s8", "s32", 32, "K128", "K128", False),
]


@pytest.mark.parametrize("kind, d_type, n, a_form, b_form, negate", WGMMA)
def test_wgmma(kind, d_type, n, a_form, b_form, negate):
    n = 64 if b_form == "MN128" and n < 64 else n
    k = {"bf16": 16, "f16": 16, "tf32": 8}.get(kind, 32)
    bits = 256 // k
    (a, av), (b, bv) = operand((64, k), kind, 1), operand((n, k), kind, 2)
    a, b = (x.view(f"u{bits // 8}") for x in (a, b))
    a_bytes, a_desc = smem_operand(a, a_form) if a_form else (np.zeros(0, np.uint8), None)
    b_bytes, b_desc = smem_operand(b, b_form)
    b_at = -(-len(a_bytes) // 1024) * 1024
    shared = np.concatenate([a_bytes, np.zeros(b_at - len(a_bytes), np.uint8), b_bytes])
    flags = ""
    if kind not in ("s8", "u8"):
        flags = f", {-1 if negate else 1}, 1"
        if kind in ("bf16", "f16"):
            flags += (f", {int(a_form == 'MN128')}" if a_form else "") + f", {int(b_form == 'MN128')}"
    (rows, columns), _ = fragment_indices(bits, k)
    warp = np.arange(128)[:, None] // 32
    fragment = np.ascontiguousarray(a[rows[np.arange(128) % 32] + 16 * warp, columns[np.arange(128) % 32]]).view(
        np.uint32
    )
    count = n // (4 if d_type == "f16" else 2)
    load_a = "mad.wide.u32 %d1, %t, 16, %a2; ld.global.v4.b32 {%r150, %r151, %r152, %r153}, [%d1];"
    mma = wgmma_body(n, k, kind, d_type, a_desc, b_desc, b_at, flags, "%r191")
    again = wgmma_body(n, k, kind, d_type, a_desc, b_desc, b_at, flags, "1").replace("%r191", "%r192")
    size = len(shared)
    body = f"""{mbarriers(1, offset=size)} {LOAD_SMEM.format(bar=size, n=size)} {load_a} {wait(size, 0)} mov.u32 %r191, 0;
    {mma} wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; mov.u32 %r192, 1;
    {again.replace(", 1, 0;", ", %r192, 0;", 1)} wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
    mad.wide.u32 %d5, %t, {4 * count}, %a0;""" + "".join(f"st.global.b32 [%d5+{4 * i}], %r{i};" for i in range(count))
    got = lanes(body, shared, fragment, threads=128, width=count, smem=size + 8, schedules=(0, 1, 2))
    i = np.arange(n // 2)
    thread = np.arange(128)[:, None]
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * (i // 2 % 2)
    column = i // 4 * 8 + thread % 4 * 2 + i % 2
    expected = 2 * (av @ bv.T) * (-1 if negate else 1)
    assert (got.view({"f32": np.float32, "f16": np.float16, "s32": np.int32}[d_type]) == expected[row, column]).all()


def test_two_wgmma_groups_in_flight():
    """wait_group 1 makes the first result usable while the second is under way."""
    a, av = operand((64, 16), "bf16", 1)
    b, bv = operand((16, 16), "bf16", 2)
    (a_bytes, a_desc), (b_bytes, b_desc) = (
        smem_operand(a.view(np.uint16), "K128"),
        smem_operand(b.view(np.uint16), "K128"),
    )
    shared = np.concatenate([a_bytes, b_bytes])
    size, b_at = len(shared), len(a_bytes)
    one = wgmma_body(16, 16, "bf16", "f32", a_desc, b_desc, b_at, ", 1, 1, 0, 0", "%r191")
    two_ = one
    for i in range(8):
        two_ = two_.replace(f"%r{i}," if i < 7 else f"%r{i}}}", f"%r{100 + i}," if i < 7 else f"%r{100 + i}}}")
    stores = lambda first, at: "".join(f"st.global.b32 [%d5+{4 * (at + i)}], %r{first + i};" for i in range(8))  # noqa: E731
    body = f"""{mbarriers(1, offset=size)} {LOAD_SMEM.format(bar=size, n=size)} {wait(size, 0)} mov.u32 %r191, 0;
    {one} wgmma.commit_group.sync.aligned; {two_} wgmma.commit_group.sync.aligned; mad.wide.u32 %d5, %t, 64, %a0;
    wgmma.wait_group.sync.aligned 1; {stores(0, 0)} wgmma.wait_group.sync.aligned 0; {stores(100, 8)}"""
    got = lanes(body, shared, threads=128, width=16, smem=size + 8, schedules=range(6)).view(np.float32)
    assert (got[:, :8] == got[:, 8:]).all()
    assert (got[0, :2] == (av @ bv.T)[0, :2]).all()


def test_setmaxnreg():
    body = """setp.ge.u32 %p0, %t, 128; @%p0 bra UP; setmaxnreg.dec.sync.aligned.u32 40; bra END;
    UP: setmaxnreg.inc.sync.aligned.u32 232; END: mov.u32 %r0, 1;"""
    assert (lanes(body + STORE, threads=256) == 1).all()
    findings = run(body.replace("40", "152").replace("232", "256"), (), threads=256)
    assert not findings
    findings = run("setmaxnreg.inc.sync.aligned.u32 232;", (), threads=384)
    assert [f.kind for f in findings] == ["registers"]


# ----- launches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", range(8))
def test_a_dependent_launch_waits(schedule):
    data, out = np.zeros(64, np.uint32), np.zeros(32, np.uint32)
    primary = """griddepcontrol.launch_dependents; mov.u32 %r1, %ctaid.x; mad.lo.u32 %r2, %r1, 32, %t;
    mad.wide.u32 %d0, %r2, 4, %a0;
    add.u32 %r0, %r2, 5; st.global.b32 [%d0], %r0;"""
    secondary = "griddepcontrol.wait; mad.wide.u32 %d0, %t, 4, %a1; ld.global.b32 %r0, [%d0+128];" + STORE
    assert not run_two((primary, (data,)), (secondary, (out, data)), options=Options.schedule(schedule))
    assert (out == LANE + 37).all()


def test_blocks_are_all_run():
    body = "mov.u32 %r1, %ctaid.x; mad.lo.u32 %r0, %r1, 32, %t; mad.wide.u32 %e, %r0, 4, %a0;" + STORE
    assert (lanes(body, grid=(7, 1, 1), schedules=ALL) == np.arange(7 * 32)).all()


# ----- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reached", [True, False])
def test_an_unknown_instruction_is_named_with_its_line(reached):
    body = f"{'' if reached else 'bra END;'}\n\n frobnicate.b32 %r0, %r1;\nEND:"
    line = text(body).split("frobnicate")[0].count("\n") + 1
    with pytest.raises(UnsupportedInstruction, match=rf"line {line}: .* frobnicate\.b32"):
        run(body)


@pytest.mark.parametrize(
    "instruction",
    [
        "ld.global.weird.b32 %r0, [%d0];",
        "atom.global.frob.b32 %r0, [%d0], %r1;",
        "mma.sync.aligned.m8n8k4.row.col.f16.f16.f16.f16 {%r0}, {%r1}, {%r2}, {%r3};",
        "wgmma.mma_async.sync.aligned.m64n12k16.f32.bf16.bf16 {%r0}, %d0, %d1, 1, 1, 1, 0, 0;",
        "redux.sync.frob.s32 %r0, %r1, -1;",
        "cp.async.bulk.tensor.2d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%r0], [%d0, {%r1, %r2}], "
        "[%r3], {%h0};",
        "add.frob.s32 %r0, %r1, %r2;",
        "call (), f, ();",
        "tcgen05.wait::ld.sync.aligned;",
        "mov.u32 %r0;",
    ],
)
def test_unknown_forms_are_refused(instruction):
    with pytest.raises((UnsupportedInstruction, ValueError), match=r"line \d+"):
        run(f"bra END; {instruction} END:")


def test_ptx_of_another_target():
    compiled = Compiled(b"", "f", (text("", target="sm_80"),))
    with pytest.raises(ValueError, match=r"arch: PTX of target sm_80 cannot run as sm_90a"):
        Emulated(compiled, "sm_90a")
    with pytest.raises(UnsupportedInstruction, match=r"wgmma.* does not exist on sm_100a"):
        run("wgmma.fence.sync.aligned;", target="sm_100a")


# ----- lanes with addresses of their own ------------------------------------------------------------------------------


def test_the_lanes_of_an_access_may_address_two_tensors():
    body = """and.b32 %r1, %t, 1; setp.eq.u32 %p0, %r1, 0; selp.b64 %d0, %a1, %a2, %p0; mad.wide.u32 %d0, %t, 4, %d0;
    ld.global.b32 %r0, [%d0]; add.u32 %r2, %r0, 1; st.global.b32 [%d0], %r2;"""
    first, second = LANE + 100, LANE + 200
    even = LANE % 2 == 0
    assert (lanes(body + STORE, first, second) == np.where(even, LANE + 100, LANE + 200)).all()
    assert (first == LANE + 100 + even).all() and (second == LANE + 200 + ~even).all()
    (finding,) = run(body, (np.zeros(32, np.uint32), first, second[:20]))
    assert finding.kind == "out_of_bounds" and "which has 80 bytes" in finding.message


def test_a_bulk_copy_does_not_run_from_one_tensor_into_the_next():
    both = np.arange(64, dtype=np.uint32)
    body = f"""{mbarriers(1)} setp.ne.u32 %p0, %t, 0; @!%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%s], 128;
    @!%p0 {BULK} [%s+128], [%a0+64], 128, [%s]; {wait(0, 0)}"""
    assert not run(body, (both,), smem=512)
    (finding,) = run(body, (both[:32], both[32:]), smem=512)
    assert finding.kind == "out_of_bounds" and "argument 0 [32] + 64, which has 128 bytes" in finding.message
    wide = "ld.global.v2.b32 {%r0, %r1}, [%a0+120];"
    assert not run(wide, (both[:32], both[32:]))
    (finding,) = run("ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%a0+112];", (both[:30], both[30:]))
    assert finding.kind == "out_of_bounds"


def test_an_address_outside_is_told_of_the_nearest_tensor():
    both = np.arange(1024, dtype=np.uint32)
    (finding,) = run("ld.global.b32 %r0, [%a0+2048];", (both[:64], both[500:512]))
    assert "argument 1 [12] + 48, which has 48 bytes" in finding.message


def test_parameters_at_addresses_that_differ_between_lanes():
    table = np.arange(100, 132, dtype=np.uint32).tobytes()
    body = "mov.b64 %d0, p1; xor.b32 %r1, %t, 5; mad.wide.u32 %d0, %r1, 4, %d0; ld.param.b32 %r0, [%d0];" + STORE
    assert (lanes(body, table) == 100 + (LANE ^ 5)).all()
    (finding,) = run(body, (np.zeros(32, np.uint32), table[:64]))
    assert finding.kind == "out_of_bounds" and "parameters" in finding.message


def test_a_parameter_s_part_that_goes_nowhere():
    body = "ld.param.v2.u32 {_, %r0}, [p1]; add.u32 %r0, %r0, 77;" + STORE
    assert (lanes(body, np.array([3, 4], np.uint32).tobytes()) == 81).all()


def test_constants_of_two_arrays():
    arrays = ".const .align 4 .b32 c0[32] = {1, 2, 3}; .const .align 4 .b32 c1[32] = {11, 12, 13};"
    body = """mov.b64 %d0, c0; mov.b64 %d1, c1; and.b32 %r1, %t, 1; setp.eq.u32 %p0, %r1, 0; selp.b64 %d0, %d0, %d1, %p0;
    ld.const.b32 %r0, [%d0+4];"""
    assert (lanes(body + STORE, globals_=arrays) == np.where(LANE % 2 == 0, 2, 12)).all()


def test_generic_addresses_of_a_module_s_variable():
    body = "mov.b64 %d0, g; mad.wide.u32 %d0, %t, 4, %d0; st.b32 [%d0], %t; ld.b32 %r0, [%d0];" + STORE
    assert (lanes(body, globals_=".global .align 4 .b32 g[32];") == LANE).all()


@pytest.mark.parametrize("access", ["ld.b32 %r0, [%d0];", "st.b32 [%d0], %t;", "atom.add.u32 %r0, [%d0], 1;"])
def test_generic_addresses_of_two_spaces_are_refused(access):
    body = f"""cvta.shared.u64 %d1, 0; cvt.u64.u32 %d2, %s; add.u64 %d1, %d1, %d2; setp.lt.u32 %p0, %t, 16;
    selp.b64 %d0, %a0, %d1, %p0; {access}"""
    (finding,) = run(body, (np.zeros(32, np.uint32),), smem=128)
    assert finding.kind == "unsupported" and "two state spaces, global and shared" in finding.message


# ----- barriers and warps that have ended -----------------------------------------------------------------------------


@pytest.mark.parametrize("barrier", ["bar.sync 0;", "barrier.sync 0;", "barrier.cta.sync.aligned 0;"])
def test_a_barrier_of_the_whole_cta_does_not_wait_for_warps_that_have_ended(barrier):
    """Whether they end before the others come to it or while these wait."""
    for slow in "", "nanosleep.u32 1;" * 300:
        body = f"setp.ge.u32 %p0, %t, 64; @!%p0 bra ON; {slow} exit; ON: {barrier} mov.u32 %r0, 7; {barrier} {STORE}"
        out = lanes(body, threads=96, schedules=ALL)
        assert (out == np.where(np.arange(96) < 64, 7, 0)).all()
    body = "setp.ge.u32 %p0, %t, 64; @%p0 exit; setp.lt.u32 %p0, %t, 32; bar.red.popc.u32 %r0, 0, %p0;" + STORE
    assert (lanes(body, threads=96, schedules=ALL)[:64] == 32).all()


def test_a_barrier_with_a_count_waits_for_all_of_it():
    findings = run("setp.ge.u32 %p0, %t, 32; @%p0 exit; bar.sync 0, 64;", threads=64)
    assert [f.kind for f in findings] == ["deadlock"]


def test_parts_of_a_warp_at_a_barrier_that_is_not_aligned():
    body = "setp.lt.u32 %p0, %t, 16; @%p0 bra A; barrier.sync 0; bra B; A: barrier.sync 0; B: mov.u32 %r0, 1;"
    findings = run(body, threads=64)
    assert [f.kind for f in findings] == ["unsupported"] and "by a part of the warp (16 of 32)" in findings[0].message


# ----- what a launch refuses ------------------------------------------------------------------------------------------

OUT = np.zeros(32, np.uint32)
READ_ONLY = np.zeros(32, np.uint32)
READ_ONLY.flags.writeable = False
STATIC = ".shared .align 16 .b8 big[200000];"
REFUSED = {
    "target": ({"target": "sm_80"}, r"target must be one of sm_90a, .*got 'sm_80'"),
    "block of no threads": ({"block": (0, 1, 1)}, "block: must be three positive"),
    "block of two dims": ({"block": (32, 1)}, "block: must be three positive"),
    "large block": ({"block": (1024, 2, 1)}, "at most 1024 threads"),
    "reqntid": ({"directives": ".reqntid 64, 1, 1", "block": (32, 1, 1)}, r"\.reqntid \(64, 1, 1\)"),
    "maxntid": ({"directives": ".maxntid 16, 2, 1", "block": (64, 1, 1)}, r"at most 32 threads \(\.maxntid\)"),
    "cluster": ({"grid": (32, 1, 1), "cluster": (32, 1, 1)}, "1 to 16 CTAs"),
    "cluster of the kernel": ({"grid": (32, 1, 1), "directives": ".reqnctapercluster 32, 1, 1"}, "at most 16 CTAs"),
    "no multiple of the cluster": ({"grid": (3, 1, 1), "cluster": (2, 1, 1)}, "multiple of cluster"),
    "dynamic shared memory": ({"smem_bytes": 232449}, "at most 232448"),
    "static and dynamic": ({"globals_": STATIC, "smem_bytes": 40000}, "less the static 200"),
    "negative shared memory": ({"smem_bytes": -4}, "smem_bytes must be 0 to"),
    "grid": ({"grid": (0, 1, 1)}, "grid: must be three positive"),
    "kernel": ({"kernel": "other"}, "kernel: must be one of k, got 'other'"),
    "number of arguments": ({"args": (OUT, OUT)}, "kernel k has 1 parameters, got 2"),
    "read-only": ({"args": (READ_ONLY,)}, r"argument 0 \(p0\): must be writable"),
    "bytes": ({"args": (b"1234",)}, "must have 8 bytes, got 4"),
    "a large number": ({"args": (1 << 64,)}, "is a .u64, got"),
    "a meta tensor": ({"args": (torch.zeros(4, device="meta"),)}, "on the CPU, got .* on meta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_launches_that_are_refused(name):
    kw, message = REFUSED[name]
    kw = dict(kw)
    source = text("", (OUT,), **{k: kw.pop(k) for k in ("target", "directives", "globals_") if k in kw})
    with pytest.raises(ValueError, match=message):
        run_ptx(source, kw.pop("args", (OUT,)), **kw)


def test_arguments_of_other_types_are_refused():
    for arg in (None, "4", [1, 2], np.array([None])):
        with pytest.raises(TypeError, match=r"argument 0 \(p0\): must be"):
            run_ptx(text("", (OUT,)), (arg,))
    for arg, declared in ((OUT, 1), (OUT, b"12345678" * 2)):
        with pytest.raises(ValueError, match="no address"):
            run_ptx(text("", (declared,)), (arg,))
    with pytest.raises(TypeError, match="is a .u32, got the float"):
        run_ptx(text("", (1,)), (1.5,))
    with pytest.raises(TypeError, match="must be bytes"):
        run_ptx(text("", (b"12345678",)), (3,))
    with pytest.raises(ValueError, match="has no kernel"):
        run_ptx("", ())
    with pytest.raises(TypeError, match="text: must be PTX as a str, got bytes"):
        run_ptx(b"", ())
    with pytest.raises(ValueError, match="policy: must be one of eager, lazy, random, got 'never'"):
        Options(policy="never")


def test_numbers_are_passed_by_value():
    body = "ld.param.f32 %f0, [p1]; ld.param.u32 %r1, [p2]; cvt.rzi.u32.f32 %r0, %f0; add.u32 %r0, %r0, %r1;" + STORE
    for f, n in ((2, np.int64(5)), (np.float64(2.0), np.uint8(5)), (np.float32(2.0), 5), (np.int32(2), 5), (True, 6)):
        out = np.zeros(32, np.uint32)
        assert not run_ptx(text(body, (out, 2.0, 5)), (out, f, n)) and (out == 7).all()
    assert not run_ptx(text("", (out,)), (np.zeros((3, 0)),))


@pytest.mark.parametrize(
    "body, message",
    [
        ("mov.u32 %r0, %nothing;", "kernel k: %nothing is no declared register, and no special register"),
        ("mov.u32 %r0, %nothing.x;", "kernel k: %nothing.x is no declared register"),
        ("mov.u64 %d0, nothing;", "kernel k: nothing is not declared"),
    ],
)
def test_names_that_are_not_declared(body, message):
    (finding,) = run(body)
    assert finding.kind == "unsupported" and finding.message.startswith(message) and "at None" not in str(finding)


def test_a_result_that_is_not_declared():
    with pytest.raises(UnsupportedInstruction, match="%nothing is no declared register"):
        run("mov.u32 %nothing, 1;")


def test_a_grid_that_is_no_multiple_of_the_kernel_s_cluster():
    (finding,) = run("", directives=".reqnctapercluster 2, 1, 1", grid=(3, 1, 1))
    assert finding.kind == "launch" and "kernel k: grid (3, 1, 1) is no multiple of the cluster" in finding.message


def test_the_number_of_sms_is_the_session_s():
    with session(num_sms=5):
        assert (lanes("mov.u32 %r0, %nsmid;" + STORE) == 5).all()
        out = np.zeros(8, np.uint32)
        body = """mov.u32 %r0, %smid; mov.u32 %r1, %ctaid.x; mad.wide.u32 %d0, %r1, 4, %a0; st.global.b32 [%d0], %r0;"""
        assert not run(body, (out,), grid=(8, 1, 1)) and out.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
