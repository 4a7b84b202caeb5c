"""Faults that are put into right programs are found, and the right programs have no finding, whatever the schedule."""

import re
import time
from dataclasses import dataclass, field

import numpy as np
import pytest
from emulator_kernels import (
    BULK,
    CLUSTER_SYNC,
    LOAD_SMEM,
    mbarriers,
    operand,
    run,
    run_two,
    smem_operand,
    tensor_map,
    wait,
    wgmma_body,
)

from mla_cute.emulator.machine import Options

SCHEDULES = range(8)
STORE = "st.global.b32 [%e], %r0;"


@dataclass
class Case:
    """A right program, what is replaced in it to make a wrong one, and what is to be found."""

    body: str
    old: str
    new: str
    kind: str
    message: str  # regular expression
    threads: int = 32
    smem: int = 4096
    args: tuple = ()
    some: bool = False  # found under some schedules only, else under each
    kw: dict = field(default_factory=dict)

    def run(self, wrong: bool, schedule: int, **options) -> list:
        assert not self.old or self.old in self.body, "nothing to replace"
        body = self.body.replace(self.old, self.new, 1) if wrong else self.body
        out = np.zeros(2 * self.threads, np.uint32)
        n = Options.schedule(schedule)
        n = Options(n.seed, n.policy, n.resident, **options)
        return run(body, (out, *self.args), threads=self.threads, smem=self.smem, options=n, **self.kw)


DATA = np.arange(1, 1025, dtype=np.uint32)
TWO_CTAS = {"grid": (2, 1, 1), "cluster": (2, 1, 1)}
THREAD_0 = "setp.ne.u32 %p0, %t, 0;"
ADDRESS = "mad.lo.u32 %r1, %t, 4, %s;"
OTHER = "mapa.shared::cluster.u32 %r2, %r1, %r98;"
RANKS = "mov.u32 %r99, %cluster_ctarank; xor.b32 %r98, %r99, 1;"
EXPECT = "@!%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%s], 128;"
COPY = f"@!%p0 {BULK} [%s+128], [%a1], 128, [%s];"
READ = "ld.shared.b32 %r0, [%r1+128];" + STORE
WRITE_FENCED = f"{ADDRESS} st.shared.b32 [%r1], %t; fence.proxy.async.shared::cta; bar.sync 0; {THREAD_0}"
BULK_STORE = "@!%p0 cp.async.bulk.global.shared::cta.bulk_group [%a0], [%s], 128; @!%p0 cp.async.bulk.commit_group;"
READ_WAIT = "@!%p0 cp.async.bulk.wait_group.read 0;"
EXCHANGE = (
    f"{ADDRESS} st.shared.b32 [%r1], %t; bar.sync 0; xor.b32 %r2, %r1, 128; ld.shared.b32 %r0, [%r2]; bar.sync 0;"
)

# A ring of two slots of 128 bytes behind %s + 1024: warp 0 fills them by bulk copies, warp 1 reads them.
RING = f"""{mbarriers(1, 1, 32, 32)} mov.u32 %r10, 0; mov.u32 %r0, 0; {ADDRESS} and.b32 %r5, %t, 31; mad.lo.u32 %r5, %r5, 4, %s;
    setp.ge.u32 %p1, %t, 32; @%p1 bra CONSUMER; {THREAD_0} @%p0 bra END;
    PRODUCER: and.b32 %r11, %r10, 1; shr.u32 %r12, %r10, 1; and.b32 %r12, %r12, 1; xor.b32 %r13, %r12, 1;
    mad.lo.u32 %r14, %r11, 8, %s; mad.lo.u32 %r15, %r11, 128, %s; mad.wide.u32 %d1, %r10, 128, %a1;
    E: mbarrier.try_wait.parity.shared.b64 %p2, [%r14+16], %r13; @!%p2 bra E;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r14], 128; {BULK} [%r15+1024], [%d1], 128, [%r14];
    add.u32 %r10, %r10, 1; setp.lt.u32 %p3, %r10, 6; @%p3 bra PRODUCER; bra END;
    CONSUMER: and.b32 %r11, %r10, 1; shr.u32 %r12, %r10, 1; and.b32 %r12, %r12, 1; mad.lo.u32 %r14, %r11, 8, %s;
    F: mbarrier.try_wait.parity.shared.b64 %p2, [%r14], %r12; @!%p2 bra F;
    mad.lo.u32 %r16, %r11, 128, %r5; ld.shared.b32 %r17, [%r16+1024]; add.u32 %r0, %r0, %r17;
    mbarrier.arrive.shared.b64 _, [%r14+16]; add.u32 %r10, %r10, 1; setp.lt.u32 %p3, %r10, 6; @%p3 bra CONSUMER;
    END: {STORE}"""

CASES = {
    # Proxies.
    "no proxy fence before a bulk store": Case(
        WRITE_FENCED + BULK_STORE + READ_WAIT, "fence.proxy.async.shared::cta;", "", "proxy", "reads shared 0x400, written by"
    ),
    "a generic fence is no proxy fence": Case(
        WRITE_FENCED + BULK_STORE + READ_WAIT, "fence.proxy.async.shared::cta;", "fence.acq_rel.cta;", "proxy",
        "without a fence"
    ),
    "no proxy fence before a copy overwrites generic stores": Case(
        f"{mbarriers(1)} {ADDRESS} st.shared.b32 [%r1+128], %t; fence.proxy.async; bar.sync 0; "
        f"{THREAD_0} {EXPECT} {COPY} {wait(0, 0)}"
        + READ, "fence.proxy.async;", "", "proxy", "overwrites shared .* written by the generic proxy", args=(DATA,),
    ),
    "no fence behind the initialisation of an mbarrier": Case(
        f"{mbarriers(1)} {ADDRESS} {THREAD_0} {EXPECT} {COPY} {wait(0, 0)} {READ}",
        "fence.mbarrier_init.release.cluster;", "", "proxy", "no fence.mbarrier_init", args=(DATA,),
    ),
    # mbarriers and their bytes.
    "expect_tx too large": Case(
        f"{mbarriers(1)} {ADDRESS} {THREAD_0} {EXPECT} {COPY} {wait(0, 0)} {READ}", "[%s], 128;", "[%s], 160;", "deadlock",
        r"waits for phase 0 \(parity 0\) of the mbarrier at shared 0x400: phase 0, 0 of 1 arrivals missing, 32 bytes missing",
        args=(DATA,),
    ),
    "expect_tx too small for one copy": Case(
        f"{mbarriers(1)} {ADDRESS} {THREAD_0} {EXPECT} {COPY} {wait(0, 0)} {READ}", "[%s], 128;", "[%s], 64;", "deadlock",
        "64 bytes more than expect_tx said", args=(DATA,),
    ),
    "expect_tx too small for two copies": Case(
        f"""{mbarriers(1)} {ADDRESS} {THREAD_0} @!%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%s], 256; {COPY}
        @!%p0 {BULK} [%s+256], [%a1], 128, [%s]; {wait(0, 0)} {READ} ld.shared.b32 %r0, [%r1+256]; {STORE}""",
        "[%s], 256;", "[%s], 128;", "barrier|race", "expect_tx is too small|reads shared 0x5", args=(DATA,),
    ),
    "expect_tx left out": Case(
        f"{mbarriers(1)} {ADDRESS} {THREAD_0} {EXPECT} {COPY} {wait(0, 0)} {READ}", EXPECT, "", "deadlock", "1 of 1 arrivals",
        args=(DATA,),
    ),
    "swapped parity": Case(
        f"{mbarriers(1)} {ADDRESS} {THREAD_0} {EXPECT} {COPY} {wait(0, 0)} {READ}", "[%s+0], 0;", "[%s+0], 1;", "race|deadlock",
        r"reads shared .* without knowing that the write is done|waits for phase 1 \(parity 1\)", args=(DATA,),
    ),
    "a tile is read without waiting": Case(
        f"{mbarriers(1)} {ADDRESS} {THREAD_0} {EXPECT} {COPY} {wait(0, 0)} {READ}", wait(0, 0), "", "race", "reads shared",
        args=(DATA,),
    ),
    "the wrong stage's barrier": Case(
        f"""{mbarriers(1, 1)} {ADDRESS} {THREAD_0} {EXPECT} {COPY} @!%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%s+8], 128;
        @!%p0 {BULK} [%s+256], [%a1], 128, [%s+8]; {wait(0, 0)} {READ} {wait(8, 0)} ld.shared.b32 %r0, [%r1+256]; {STORE}""",
        "ld.shared.b32 %r0, [%r1+128]", "ld.shared.b32 %r0, [%r1+256]", "race", "reads shared", args=(DATA,),
    ),
    "more arrivals than were announced": Case(
        f"{mbarriers(32)} mbarrier.arrive.shared.b64 _, [%s]; {wait(0, 0)}", "arrive.shared.b64 _, [%s];",
        "arrive.shared.b64 _, [%s], 5;", "barrier", "more arrivals than the 32",
    ),
    "too few arrivals": Case(
        f"{mbarriers(64)} mbarrier.arrive.shared.b64 _, [%s]; {wait(0, 0)}", "init.shared.b64 [%s+0], 64",
        "init.shared.b64 [%s+0], 65",
        "deadlock",
        r"2 warps are left:\n(.*\n)*.*warp 1 of cta \(0, 0, 0\): waits for phase 0 .* 1 of 65 arrivals missing", threads=64,
    ),
    "an mbarrier is used before it is known": Case(
        f"{mbarriers(64)} mbarrier.arrive.shared.b64 _, [%s]; {wait(0, 0)}", "bar.sync 0;", "", "barrier",
        "used without knowing that its initialisation|no mbarrier was initialised", threads=64,
    ),
    "no mbarrier is there": Case(
        f"{mbarriers(32)} mbarrier.arrive.shared.b64 _, [%s]; {wait(0, 0)}", "arrive.shared.b64 _, [%s]",
        "arrive.shared.b64 _, [%s+8]",
        "barrier", "no mbarrier was initialised at shared 0x408",
    ),
    "an mbarrier is overwritten": Case(
        f"{mbarriers(32)} mbarrier.arrive.shared.b64 _, [%s]; {wait(0, 0)} {ADDRESS} st.shared.b32 [%r1+8], %t;",
        "[%r1+8]", "[%r1+4]",
        "barrier", "overwrites shared 0x404, which is part of the mbarrier at shared 0x400",
    ),
    "an mbarrier is initialised twice": Case(
        mbarriers(3), "fence.mbarrier", "mbarrier.init.shared.b64 [%s], 2; fence.mbarrier", "barrier", "initialised twice",
    ),
    # Bulk stores.
    "shared memory is used again while a store reads it": Case(
        WRITE_FENCED + BULK_STORE + READ_WAIT + "bar.warp.sync -1; st.shared.b32 [%r1], %t;", READ_WAIT, "", "race",
        "overwrites shared .* which may still be read",
    ),
    "a store that was not committed": Case(
        WRITE_FENCED + BULK_STORE + READ_WAIT + "bar.warp.sync -1; st.shared.b32 [%r1], %t;",
        "@!%p0 cp.async.bulk.commit_group;", "", "race", "overwrites shared .* which may still be read",
    ),
    "wait_group leaves the wrong group": Case(
        WRITE_FENCED + BULK_STORE + BULK_STORE.replace("[%s]", "[%s+64]").replace("128", "64") + READ_WAIT
        + "bar.warp.sync -1; setp.lt.u32 %p1, %t, 32; @%p1 st.shared.b32 [%r1], %t; @!%p0 cp.async.bulk.wait_group 0;",
        READ_WAIT, READ_WAIT.replace("0;", "1;"), "race", "may still be read",
    ),
    # Races between warps.
    "read behind a write": Case(EXCHANGE, "bar.sync 0;", "", "race", "reads shared|depends on", threads=64, some=True),
    "write behind a read": Case(
        EXCHANGE + "st.shared.b32 [%r1], %r0;", "ld.shared.b32 %r0, [%r2]; bar.sync 0;", "ld.shared.b32 %r0, [%r2];", "race",
        "overwrites shared .* may still be read|reads shared", threads=64,
    ),
    "write behind a write": Case(
        "setp.lt.u32 %p1, %t, 32; st.shared.b32 [%s], %t; bar.sync 0; @%p1 st.shared.b32 [%s], %t;".replace(
            "st.shared.b32 [%s], %t; bar", "@!%p1 st.shared.b32 [%s], %t; bar"
        ), "bar.sync 0;", "", "race", "overwrites shared 0x400 without knowing", threads=64,
    ),
    "bar.warp.sync is no barrier of the CTA": Case(
        EXCHANGE, "bar.sync 0;", "bar.warp.sync -1;", "race|uninitialised", "shared", threads=64,
    ),
    "a barrier of other warps": Case(
        """shr.u32 %r5, %t, 6; add.u32 %r5, %r5, 1; mad.lo.u32 %r1, %t, 4, %s; st.shared.b32 [%r1], %t; bar.sync %r5, 64;
        xor.b32 %r2, %r1, 128;
        ld.shared.b32 %r0, [%r2];""" + STORE, "xor.b32 %r2, %r1, 128", "xor.b32 %r2, %r1, 256", "race|uninitialised",
        "reads shared|depends on", threads=128, some=True,
    ),
    "a relaxed arrival releases nothing": Case(
        f"{mbarriers(64)} {ADDRESS} st.shared.b32 [%r1+64], %t; mbarrier.arrive.shared.b64 _, [%s]; "
        f"{wait(0, 0)} xor.b32 %r2, %r1, 128;"
        + "ld.shared.b32 %r0, [%r2+64];" + STORE, "mbarrier.arrive.shared.b64",
        "mbarrier.arrive.relaxed.cta.shared::cta.b64", "race",
        "reads shared", threads=64,
    ),
    "the producer does not wait for the empty slot": Case(
        RING, "E: mbarrier.try_wait.parity.shared.b64 %p2, [%r14+16], %r13; @!%p2 bra E;", "", "race|barrier",
        "overwrites shared|expect_tx",
        threads=64, args=(DATA,), some=True,
    ),
    "the consumer gives the slot back before it reads": Case(
        RING.replace("%r17;\n    mbarrier.arrive.shared.b64 _, [%r14+16];", "%r17; mbarrier.arrive.shared.b64 _, [%r14+16];"),
        "ld.shared.b32 %r17, [%r16+1024]; add.u32 %r0, %r0, %r17; mbarrier.arrive.shared.b64 _, [%r14+16];",
        "mbarrier.arrive.shared.b64 _, [%r14+16]; ld.shared.b32 %r17, [%r16+1024]; add.u32 %r0, %r0, %r17;",
        "race", "which may still be read|reads shared", threads=64, args=(DATA,),
    ),
    "the consumer waits for the wrong parity": Case(
        RING, "[%r14], %r12; @!%p2 bra F;", "[%r14], %r13; @!%p2 bra F;", "race|deadlock|barrier|uninitialised", "",
        threads=64, args=(DATA,),
    ),
    # cp.async.
    "no cp.async.wait_group": Case(
        f"""{ADDRESS} mad.wide.u32 %d0, %t, 4, %a1; cp.async.ca.shared.global [%r1], [%d0], 4; cp.async.commit_group;
        cp.async.wait_group 0; ld.shared.b32 %r0, [%r1];
        {STORE}""", "cp.async.wait_group 0;", "", "race", "reads shared", args=(DATA,),
    ),
    "cp.async.wait_group keeps one group too many": Case(
        f"""{ADDRESS} mad.wide.u32 %d0, %t, 4, %a1; cp.async.ca.shared.global [%r1], [%d0], 4; cp.async.commit_group;
        cp.async.wait_group 0; ld.shared.b32 %r0, [%r1];
        {STORE}""", "wait_group 0;", "wait_group 1;", "race", "reads shared", args=(DATA,),
    ),
    "cp.async of other warps without a barrier": Case(
        f"""{ADDRESS} mad.wide.u32 %d0, %t, 4, %a1; cp.async.ca.shared.global [%r1], [%d0], 4; cp.async.wait_all; bar.sync 0;
        xor.b32 %r2, %r1, 128; ld.shared.b32 %r0, [%r2];
        {STORE}""", "bar.sync 0;", "", "race|uninitialised", "reads shared|depends on",
        args=(DATA,), threads=64, some=True,
    ),
    # Bounds, alignment, values that nobody wrote.
    "a gather out of bounds": Case(
        f"ld.global.b32 %r1, [%a1]; mad.wide.u32 %d0, %r1, 4, %a1; mad.wide.u32 %d0, %t, 4, %d0; "
        f"ld.global.b32 %r0, [%d0]; {STORE}",
        "%r1, 4, %a1", "%r1, 4064, %a1", "out_of_bounds", r"in no tensor \(argument 1 .* \+ 40", args=(DATA,),
    ),
    "one lane's store before the tensor": Case(
        f"mov.u32 %r0, 1; setp.ne.u32 %p0, %t, 5; selp.b64 %d0, %e, %e, %p0; st.global.b32 [%d0], %r0; {STORE}",
        "selp.b64 %d0, %e, %e",
        "sub.u64 %d1, %a0, 64; selp.b64 %d0, %e, %d1", "out_of_bounds", "64 bytes before argument 0",
    ),
    "a bulk copy out of bounds": Case(
        f"{mbarriers(1)} {ADDRESS} {THREAD_0} {EXPECT} {COPY} {wait(0, 0)} {READ}", "[%a1], 128, [%s]", "[%a1+4000], 128, [%s]",
        "out_of_bounds", "argument 1", args=(DATA,),
    ),
    "past the end of shared memory": Case(
        f"{ADDRESS} st.shared.b32 [%r1], %t;", "[%r1]", "[%r1+4]", "out_of_bounds",
        r"0x404\.\.0x484; the CTA has 0x400\.\.0x480", smem=128,
    ),
    "the reserved part of shared memory": Case(
        "mov.u32 %r1, %s; st.shared.b32 [%r1], %t;", "%r1, %s", "%r1, 512", "out_of_bounds", "shared access",
    ),
    "misaligned global access": Case(
        "ld.global.b64 %d0, [%a1+8];", "+8", "+4", "misaligned", "global access of 8 bytes", args=(DATA,)
    ),
    "misaligned shared access": Case(
        "mov.u32 %r0, 1; st.shared.v2.b32 [%s+8], {%r0, %r0};", "+8", "+4", "misaligned", "shared access of 8 bytes"
    ),
    "misaligned bulk copy": Case(
        f"{mbarriers(1)} {ADDRESS} {THREAD_0} {EXPECT} {COPY} {wait(0, 0)} {READ}", "[%a1], 128, [%s]", "[%a1+8], 128, [%s]",
        "misaligned", "multiples of 16", args=(DATA,),
    ),
    "local memory out of bounds": Case(
        ".local .align 4 .b8 x[16]; st.local.b32 [x+12], %t;", "+12", "+16", "out_of_bounds", "local access"
    ),
    "a register that nothing was written to": Case("mov.u32 %r0, 2; add.u32 %r0, %r0, %r0;" + STORE, "mov.u32 %r0, 2;",
    "", "uninitialised", "register"),
    "a predicate that nothing was written to": Case(
        "setp.eq.u32 %p0, %t, 1; mov.u32 %r0, 1; @!%p0 mov.u32 %r0, 2;" + STORE, "setp.eq.u32 %p0, %t, 1;", "",
        "uninitialised", "register"
    ),
    "shared memory that nothing was written to": Case(
        f"{ADDRESS} st.shared.b32 [%r1], %t; ld.shared.b32 %r0, [%r1]; add.u32 %r0, %r0, 1; {STORE}",
        "ld.shared.b32 %r0, [%r1]",
        "ld.shared.b32 %r0, [%r1+128]", "uninitialised",
        "depends on shared memory that nothing was written to, loaded at .*PTX line",
    ),
    "a branch on shared memory that nothing was written to": Case(
        f"{ADDRESS} st.shared.b32 [%r1], %t; ld.shared.b32 %r0, [%r1]; setp.gt.u32 %p1, %r0, 3; @%p1 bra END; "
        f"nanosleep.u32 1; END: {STORE}",
        "ld.shared.b32 %r0, [%r1]", "ld.shared.b32 %r0, [%r1+4]", "uninitialised", "branch depends on",
    ),
    "an exit on shared memory that nothing was written to": Case(
        f"{ADDRESS} st.shared.b32 [%r1], %t; ld.shared.b32 %r0, [%r1]; setp.gt.u32 %p1, %r0, 3; @%p1 exit; {STORE}",
        "ld.shared.b32 %r0, [%r1]", "ld.shared.b32 %r0, [%r1+4]", "uninitialised", "exit depends on",
    ),
    "a vote on shared memory that nothing was written to": Case(
        f"""{ADDRESS} st.shared.b32 [%r1], %t; ld.shared.b32 %r0, [%r1]; setp.gt.u32 %p1, %r0, 3;
        vote.sync.any.pred %p2, %p1, -1;
        selp.u32 %r0, 1, 0, %p2;
        {STORE}""", "ld.shared.b32 %r0, [%r1]", "ld.shared.b32 %r0, [%r1+4]", "uninitialised", "vote depends on",
    ),
    "a bulk store of shared memory that nothing was written to": Case(
        WRITE_FENCED + BULK_STORE + READ_WAIT, "[%a0], [%s], 128", "[%a0], [%s+16], 128", "uninitialised", "reads shared 0x480"
    ),
    "local memory that nothing was written to": Case(
        ".local .align 4 .b8 x[16]; st.local.b32 [x+4], %t; ld.local.b32 %r0, [x+4];" + STORE, "ld.local.b32 %r0, [x+4]",
        "ld.local.b32 %r0, [x+8]", "uninitialised", "local memory",
    ),
    "ldmatrix of rows that nothing was written to": Case(
        f"""mad.lo.u32 %r1, %t, 4, %s; st.shared.b32 [%r1], %t; and.b32 %r2, %t, 7; mad.lo.u32 %r2, %r2, 16, %s;
        bar.warp.sync -1;
        ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r0}}, [%r2];
        {STORE}""", "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r0}, [%r2]",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r0}, [%r2+16]", "uninitialised", "depends on shared memory",
    ),
    # Barriers of the CTA, divergence.
    "bar.sync by half a warp": Case("setp.lt.u32 %p0, %t, 16; bar.sync 0;", "bar.sync", "@%p0 bar.sync", "divergence",
    "by a part of the warp"),
    "bar.sync in one branch": Case(
        "setp.lt.u32 %p0, %t, 16; @%p0 bra A; nanosleep.u32 1; bra B; A: nanosleep.u32 2; B: bar.sync 0;",
        "A: nanosleep.u32 2;", "A: bar.sync 0;",
        "divergence", r"16 of 32",
    ),
    "different thread counts at one barrier": Case(
        "setp.lt.u32 %p0, %t, 32; mov.u32 %r1, 64; selp.u32 %r1, 64, %r1, %p0; bar.sync 1, %r1;", "%r1, 64;",
        "%r1, 96;", "barrier",
        "while .* are expected", threads=64,
    ),
    "a thread count that is no multiple of 32": Case("bar.sync 1, 32;", "32;", "40;", "barrier", "multiple of 32"),
    "a warp that does not come to the barrier": Case(
        "setp.lt.u32 %p0, %t, 32; @%p0 bra A; nanosleep.u32 1; A: bar.sync 0, 64;", "nanosleep.u32 1;", "exit;", "deadlock",
        r"1 warps are left:\n *warp 0 of cta \(0, 0, 0\): waits for barrier 0: 32 of 64 threads are there", threads=64,
    ),
    "shfl from a lane that is elsewhere": Case(
        "mov.u32 %r0, 0; setp.lt.u32 %p0, %t, 16; shfl.sync.bfly.b32 %r0, %t, 1, 31, -1;" + STORE, "shfl", "@%p0 shfl",
        "divergence", "not here"
    ),
    "spinning on a flag that nobody sets": Case(
        "L: ld.volatile.global.b32 %r0, [%a1]; setp.eq.u32 %p0, %r0, 0; @%p0 bra L;" + STORE, "%r0, 0;", "%r0, 1;", "livelock",
        "without progress", args=(DATA,),
    ),
    "a trap": Case("setp.gt.u32 %p0, %t, 40; @%p0 trap;", "40", "3", "trap", "trap"),
    # Clusters.
    "shared memory of a CTA that may not have started": Case(
        f"{RANKS} {ADDRESS} {CLUSTER_SYNC} {OTHER} st.shared::cluster.b32 [%r2], %t; {CLUSTER_SYNC}", CLUSTER_SYNC, "", "race",
        "without knowing that it has started", kw=TWO_CTAS,
    ),
    "a peer's mbarrier that may not be there": Case(
        f"{RANKS} {mbarriers(32)} {CLUSTER_SYNC} mov.u32 %r1, %s; "
        f"{OTHER} mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r2]; {wait(0, 0)}",
        CLUSTER_SYNC, "", "barrier|race", "initiali|started", kw=TWO_CTAS,
    ),
    "the peer may end while its shared memory is written": Case(
        f"{RANKS} {ADDRESS} {CLUSTER_SYNC} {OTHER} st.shared::cluster.b32 [%r2], %t; {CLUSTER_SYNC}",
        f"[%r2], %t; {CLUSTER_SYNC}", "[%r2], %t;", "race", "which has ended|ends without knowing", kw=TWO_CTAS,
    ),
    "the peer may end while its shared memory is read": Case(
        f"{RANKS} {ADDRESS} st.shared.b32 [%r1], %t; {CLUSTER_SYNC} {OTHER} ld.shared::cluster.b32 %r0, [%r2]; {CLUSTER_SYNC}",
        f"[%r2]; {CLUSTER_SYNC}", "[%r2];", "race", "which has ended|ends without knowing", kw=TWO_CTAS,
    ),
    "the peer may end before a remote arrival": Case(
        f"{RANKS} {mbarriers(32)} {CLUSTER_SYNC} mov.u32 %r1, %s; "
        f"{OTHER} mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r2]; {wait(0, 0)}",
        wait(0, 0), "", "race", "which has ended|ends without knowing", kw=TWO_CTAS,
    ),
    "data of the peer without a cluster barrier": Case(
        f"{RANKS} {ADDRESS} {CLUSTER_SYNC} st.shared.b32 [%r1], %t; "
        f"{CLUSTER_SYNC} {OTHER} ld.shared::cluster.b32 %r0, [%r2]; {CLUSTER_SYNC} {STORE}",
        f"%t; {CLUSTER_SYNC}", "%t;", "race|uninitialised", "reads shared|depends on", kw=TWO_CTAS, some=True,
    ),
    "the CTA ends with a copy under way": Case(
        f"{mbarriers(1)} {THREAD_0} {EXPECT} {COPY} {wait(0, 0)}", wait(0, 0), "", "race",
        "ends without knowing that a copy", args=(DATA,),
    ),
    "cluster arrive without a wait": Case(CLUSTER_SYNC, "barrier.cluster.wait.aligned;",
    "barrier.cluster.arrive.aligned;", "barrier", "twice", kw=TWO_CTAS),
    "a rank that the cluster has not": Case(
        f"{RANKS} {ADDRESS} {CLUSTER_SYNC} {OTHER} st.shared::cluster.b32 [%r2], %t; {CLUSTER_SYNC}", "%r1, %r98;",
        "%r1, 2;", "out_of_bounds",
        "of CTA 2 of a cluster of 2", kw=TWO_CTAS,
    ),
    "a copy to the peer still reads when its source is used again": Case(
        f"""{RANKS} {mbarriers(1)} {ADDRESS} st.shared.b32 [%r1+128], %t; fence.proxy.async; {THREAD_0}
        @!%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%s], 128; {CLUSTER_SYNC} add.u32 %r3, %s, 256;
        mapa.shared::cluster.u32 %r3, %r3, %r98; mapa.shared::cluster.u32 %r4, %s, %r98; add.u32 %r5, %s, 128;
        @!%p0 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r3], [%r5], 128, [%r4]; bar.warp.sync -1;
        {wait(0, 0)} {CLUSTER_SYNC} st.shared.b32 [%r1+128], %t; {CLUSTER_SYNC}""",
        f"{CLUSTER_SYNC} st.shared.b32 [%r1+128], %t;", "st.shared.b32 [%r1+128], %t;", "race", "may still be read",
        kw=TWO_CTAS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_right_programs_have_no_findings(name):
    for schedule in SCHEDULES:
        findings = CASES[name].run(False, schedule)
        assert not findings, f"schedule {schedule}: " + "\n".join(map(str, findings))


@pytest.mark.parametrize("name", CASES)
def test_faults_are_found(name):
    case, found = CASES[name], []
    for schedule in SCHEDULES:
        findings = case.run(True, schedule, max_idle=5_000)
        hit = [f for f in findings if re.fullmatch(case.kind, f.kind) and re.search(case.message, f.message)]
        assert hit or case.some, f"schedule {schedule}: " + ("\n".join(map(str, findings)) or "no findings")
        found += hit
    assert found
    assert all(f.place is not None and f.place.ptx_line > 0 for f in found)


# ----- wgmma ----------------------------------------------------------------------------------------------------------

A, B = operand((64, 16), "bf16", 1)[0].view(np.uint16), operand((16, 16), "bf16", 2)[0].view(np.uint16)
(A_BYTES, A_DESC), (B_BYTES, B_DESC) = smem_operand(A, "K128"), smem_operand(B, "K128")
SHARED = np.concatenate([A_BYTES, B_BYTES])
SIZE = len(SHARED)
MMA = wgmma_body(16, 16, "bf16", "f32", A_DESC, B_DESC, len(A_BYTES), ", 1, 1, 0, 0", "%r191")
COMMIT, WAIT_0 = "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"
BY_COPY = f"{mbarriers(1, offset=SIZE)} {LOAD_SMEM.format(bar=SIZE, n=SIZE)} {wait(SIZE, 0)} mov.u32 %r191, 0;"
BY_STORES = f"""mov.u32 %r191, 0; mov.u32 %r160, %t; L: mad.lo.u32 %r161, %r160, 16, %s; mad.wide.u32 %d1, %r160, 16, %a1;
    ld.global.v4.b32 {{%r162, %r163, %r164, %r165}}, [%d1]; st.shared.v4.b32 [%r161], {{%r162, %r163, %r164, %r165}};
    add.u32 %r160, %r160, 128; setp.lt.u32 %p1, %r160, {SIZE // 16}; @%p1 bra L; fence.proxy.async.shared::cta; bar.sync 0;"""
ZERO = "".join(f"sub.u32 %r{i}, %t, %t;" for i in range(8))  # no moves: these may stand behind the fence
SUM = ZERO + "mov.u32 %r191, 1;" + MMA + COMMIT + WAIT_0
FRAGMENTS = "mov.u32 %r150, 0; mov.u32 %r151, 0; mov.u32 %r152, 0; mov.u32 %r153, 0;"
MMA_RS = wgmma_body(16, 16, "bf16", "f32", None, B_DESC, len(A_BYTES), ", 1, 1, 0", "%r191")


def wgmma_case(body, old, new, kind, message, some=False):
    return Case(body, old, new, kind, message, threads=128, smem=SIZE + 8, args=(SHARED,), some=some)


WGMMA = {
    "no proxy fence before wgmma": wgmma_case(
        BY_STORES + MMA + COMMIT + WAIT_0 + STORE, "fence.proxy.async.shared::cta;", "", "proxy",
        "the asynchronous proxy reads shared"
    ),
    "no barrier before wgmma": wgmma_case(
        BY_STORES + MMA + COMMIT + WAIT_0 + STORE, "bar.sync 0;", "", "race|uninitialised", "reads shared"
    ),
    "no wait_group": wgmma_case(
        BY_COPY + MMA + COMMIT + WAIT_0 + STORE, WAIT_0, "", "in_flight", "wgmma.wait_group is missing"
    ),
    "wait_group keeps the group that is used": wgmma_case(
        BY_COPY + MMA + COMMIT + WAIT_0 + STORE, "aligned 0;", "aligned 1;", "in_flight", "wgmma.wait_group is missing"
    ),
    "no commit_group": wgmma_case(BY_COPY + MMA + COMMIT + WAIT_0 + STORE, COMMIT, "", "in_flight", "still in flight"),
    "an accumulator is written while in flight": wgmma_case(
        BY_COPY + MMA + COMMIT + WAIT_0 + "setp.lt.u32 %p2, %t, 64; @%p2 mov.b32 %r3, 0;" + STORE, WAIT_0, "",
        "in_flight", "still in flight|in flight",
    ),
    "no fence before the first wgmma": wgmma_case(
        BY_COPY + SUM + STORE, "wgmma.fence.sync.aligned;", "", "wgmma", "without a wgmma.fence"
    ),
    "an accumulator is written behind the fence": wgmma_case(
        BY_COPY + "wgmma.fence.sync.aligned;" + SUM + STORE, "wgmma.fence.sync.aligned; setp", "setp", "wgmma",
        "written behind the last wgmma.fence",
    ),
    "A's registers are written while in flight": wgmma_case(
        BY_COPY + FRAGMENTS + MMA_RS + COMMIT + WAIT_0 + "mov.u32 %r150, %t;" + WAIT_0 + STORE, WAIT_0, "", "in_flight",
        "a register of A was written",
    ),
    "shared memory is overwritten while in flight": wgmma_case(
        BY_COPY + MMA + COMMIT + WAIT_0 + "bar.sync 0; mad.lo.u32 %r1, %t, 4, %s; st.shared.b32 [%r1], %t;" + STORE,
        WAIT_0 + "bar.sync 0; mad.lo.u32 %r1, %t, 4, %s; st.shared.b32 [%r1], %t;",
        "bar.sync 0; mad.lo.u32 %r1, %t, 4, %s; st.shared.b32 [%r1], %t;" + WAIT_0, "race", "may still be read",
    ),
    "wgmma by a part of the warp": wgmma_case(
        BY_COPY + MMA + COMMIT + WAIT_0 + STORE, "wgmma.fence",
        "and.b32 %r170, %t, 31; setp.lt.u32 %p3, %r170, 5; @%p3 wgmma.fence", "divergence", "part of the warp"
    ),
    "an operand out of bounds": wgmma_case(
        BY_COPY + MMA + COMMIT + WAIT_0 + STORE, f"add.u64 %d21, %d22, {B_DESC + (len(A_BYTES) >> 4)}",
        f"add.u64 %d21, %d22, {B_DESC + (SIZE >> 4)}", "out_of_bounds", "a wgmma operand lies at shared",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WGMMA)
def test_wgmma_faults_are_found(name):
    case = WGMMA[name]
    for schedule in SCHEDULES:
        findings = case.run(False, schedule)
        assert not findings, f"schedule {schedule}: " + "\n".join(map(str, findings))
        findings = case.run(True, schedule)
        assert any(f.kind in case.kind.split("|") and re.search(case.message, f.message) for f in findings), "\n".join(
            map(str, findings)
        )


# ----- a copy that overtakes a load -----------------------------------------------------------------------------------

# A warp that refills the slot it has read itself. USE reads the loaded register.
REFILL = f"""{mbarriers(1)} {ADDRESS} {THREAD_0} mov.u32 %r0, 0; mov.u32 %r10, 0; {EXPECT} {COPY}
    LOOP: and.b32 %r11, %r10, 1; W: mbarrier.try_wait.parity.shared.b64 %p2, [%s], %r11; @!%p2 bra W;
    ld.shared.b32 %r5, [%r1+128]; LOADED: mov.b32 %r6, %r5; USE: add.u32 %r0, %r0, %r6;
    setp.eq.u32 %p3, %r10, 3; @%p3 bra END; bar.warp.sync -1; {EXPECT} {COPY} add.u32 %r10, %r10, 1;
    LATE: bra LOOP; END: {STORE}"""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("guard", ["", "fence.acq_rel.cta;", "bar.sync 0;", "shfl.sync.bfly.b32 %r7, %r6, 1, 31, -1;"])
def test_a_copy_behind_a_load_that_is_not_done(schedule, guard):
    case = Case(REFILL, "", "", "race", "", args=(DATA,))
    assert not case.run(False, schedule)
    late = REFILL.replace("USE: add.u32 %r0, %r0, %r6;", f"{guard} setp.lt.u32 %p4, %t, 99;").replace(
        "LATE:", "LATE: add.u32 %r0, %r0, %r6;"
    )
    late = late.replace("@%p3 bra END;", "@%p3 add.u32 %r0, %r0, %r6; @%p3 bra END;")
    findings = Case(late, "", "", "race", "", args=(DATA,)).run(False, schedule)
    if guard:
        assert not findings
        return
    assert [f.kind for f in findings] == ["race"]
    assert "may overtake the load" in findings[0].message
    assert findings[0].place.text.startswith("@!%p0 cp.async.bulk") and findings[0].other.text.startswith(
        "ld.shared.b32 %r5"
    )


def test_a_copy_into_another_slot_may_overtake_a_load():
    late = REFILL.replace("USE: add.u32 %r0, %r0, %r6;", "").replace("LATE:", "LATE: add.u32 %r0, %r0, %r6;")
    other = late.replace("[%s+128], [%a1], 128", "[%s+256], [%a1], 128").replace(
        "ld.shared.b32 %r5, [%r1+128]", "ld.shared.b32 %r5, [%r1+512]"
    )
    other = f"{ADDRESS} st.shared.b32 [%r1+512], %t;" + other.replace(
        "@%p3 bra END;", "@%p3 add.u32 %r0, %r0, %r6; @%p3 bra END;"
    )
    assert not Case(other, "", "", "race", "", args=(DATA,)).run(False, 2)


# ----- launches, reports ----------------------------------------------------------------------------------------------


def test_a_dependent_launch_that_does_not_wait_gives_wrong_data():
    primary = """griddepcontrol.launch_dependents; mov.u32 %r1, %ctaid.x; mad.lo.u32 %r2, %r1, 32, %t;
    mad.wide.u32 %d0, %r2, 4, %a0;
    add.u32 %r0, %r2, 5; st.global.b32 [%d0], %r0;"""
    secondary = (
        """mov.u32 %r1, %ctaid.x; mad.lo.u32 %r2, %r1, 32, %t; mad.wide.u32 %d0, %r2, 4, %a1; ld.global.b32 %r0, [%d0];
    mad.wide.u32 %e, %r2, 4, %a0;"""
        + STORE
    )
    for pdl in (True, False):
        wrong = 0
        for schedule in SCHEDULES:
            data, out = np.zeros(64, np.uint32), np.zeros(64, np.uint32)
            assert not run_two(
                (primary, (data,)), (secondary, (out, data)), options=Options.schedule(schedule), pdl=pdl
            )
            wrong += (out != np.arange(64) + 5).any()
        assert bool(wrong) == pdl  # in stream order nothing is wrong


def test_a_bulk_store_is_not_written_when_its_reading_is_done():
    """wait_group.read says nothing about global memory: a thread that reads it back sees the old values under some schedule."""
    body = """mad.lo.u32 %r1, %t, 4, %s; st.shared.b32 [%r1], %t; fence.proxy.async; bar.warp.sync -1; setp.ne.u32 %p0, %t, 0;
    @%p0 bra END; cp.async.bulk.global.shared::cta.bulk_group [%a1], [%s], 128; cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0; END: bar.warp.sync -1; mad.wide.u32 %d0, %t, 4, %a1; ld.global.b32 %r0, [%d0];"""
    wrong = 0
    for schedule in SCHEDULES:
        out, data = np.zeros(32, np.uint32), np.full(32, 99, np.uint32)
        assert not run(body + STORE, (out, data), smem=128, options=Options.schedule(schedule))
        wrong += (out != np.arange(32)).any()
    assert wrong


def test_tma_faults():
    source, out = np.zeros((8, 8), np.uint32), np.zeros(32, np.uint32)
    good = f"""{mbarriers(1)} mov.b64 %d0, p1; {THREAD_0} @%p0 bra WAIT; mbarrier.arrive.expect_tx.shared.b64 _, [%s], 128;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%s+128], [%d0, {{0, 0}}], [%s];
    WAIT: {wait(0, 0)}"""
    good_map = tensor_map(source, (4, 8))
    faults = [
        (good.replace("[%s+128]", "[%s+144]"), good_map, "misaligned"),
        (good.replace("{0, 0}", "{0, 0, 0}"), good_map, "tensor_map"),
        (good.replace("[%d0,", "[%d0+16,"), good_map + bytes(64), "misaligned"),
        (good, bytes([255]) * 128, "tensor_map"),
        (good.replace("[%s+128]", "[%s+4096]"), good_map, "out_of_bounds"),
        (good.replace("[%s];\n", "[%s+64];\n"), good_map, "barrier"),
    ]
    assert not run(good, (out, good_map, source), smem=2048)
    for body, raw, kind in faults:
        assert [f.kind for f in run(body, (out, raw, source), smem=2048)] == [kind]
    assert [f.kind for f in run(good, (out, good_map), smem=2048)] == ["out_of_bounds"]  # the tensor was not passed


def test_no_proxy_fence_before_a_tma_store():
    target, out = np.zeros((4, 8), np.uint32), np.zeros(32, np.uint32)
    body = (
        WRITE_FENCED
        + """mov.b64 %d0, p1;
    @!%p0 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d0, {0, 0}], [%s];
    @!%p0 cp.async.bulk.commit_group; @!%p0 cp.async.bulk.wait_group.read 0;"""
    )
    for schedule in SCHEDULES:
        args = {"args": (out, tensor_map(target, (4, 8)), target), "smem": 128, "options": Options.schedule(schedule)}
        assert not run(body, **args)
        assert (target.reshape(-1) == np.arange(32)).all()
        findings = run(body.replace("fence.proxy.async.shared::cta;", ""), **args)
        assert [f.kind for f in findings] == ["proxy"]
        assert findings[0].place.text.startswith("@!%p0 cp.async.bulk.tensor") and "st.shared" in findings[0].other.text


def test_a_livelock_is_reported_in_seconds():
    started = time.perf_counter()
    findings = run(
        "L: ld.volatile.global.b32 %r0, [%a0]; setp.eq.u32 %p0, %r0, 0; @%p0 bra L;",
        (np.zeros(64, np.uint32),),
        threads=64,
    )
    assert [f.kind for f in findings] == ["livelock"]
    assert "warp 1 of cta (0, 0, 0): runs" in findings[0].message
    assert time.perf_counter() - started < 10


@pytest.mark.parametrize(
    "take",
    ["atom.global.cas.b32 %r0, [%a0], 0, 1;", "atom.global.exch.b32 %r0, [%a0], 1;", "atom.shared.cas.b32 %r0, [%s], 0, 1;"],
)
def test_a_lock_that_nobody_gives_back_is_a_livelock(take):
    started = time.perf_counter()
    findings = run(
        f"""setp.ne.u32 %p1, %t, 0; @%p1 bra END; st.shared.b32 [%s], 1;
        L: {take} setp.ne.u32 %p0, %r0, 0; @%p0 bra L; END: nanosleep.u32 1;""",
        (np.ones(1, np.uint32),),
        smem=128,
    )
    assert [f.kind for f in findings] == ["livelock"]
    assert time.perf_counter() - started < 10


def test_a_fault_in_asynchronous_work_names_the_instruction_that_started_it():
    """The second copy completes a phase that the first one's bytes have completed: found when it is done, late."""
    body = f"""{mbarriers(1)} {THREAD_0} @%p0 bra END; mbarrier.arrive.expect_tx.shared.b64 _, [%s], 128;
    {BULK} [%s+128], [%a1], 128, [%s]; {BULK} [%s+256], [%a1+128], 128, [%s]; END: {wait(0, 0)}"""
    out = np.zeros(32, np.uint32)
    findings = run(body, (out, DATA), smem=1024, options=Options.schedule(1))
    assert findings[-1].kind == "barrier" and "expect_tx is too small" in findings[-1].message
    assert findings[-1].place.text.startswith("cp.async.bulk")


def test_same_warp_accesses_are_no_race():
    body = f"""{ADDRESS} st.shared.b32 [%r1], %t; ld.shared.b32 %r2, [%s]; st.shared.b32 [%r1], %r2; st.shared.b32 [%s], %t;
    ld.shared.b32 %r0, [%s];"""
    for schedule in SCHEDULES:
        assert not run(body + STORE, (np.zeros(32, np.uint32),), smem=128, options=Options.schedule(schedule))


def test_a_race_names_both_places():
    case = CASES["write behind a write"]
    for schedule in SCHEDULES:
        (finding,) = case.run(True, schedule)
        texts = {finding.place.text, finding.other.text}
        assert texts == {"@!%p1 st.shared.b32 [%s], %t", "@%p1 st.shared.b32 [%s], %t"}
        assert {finding.place.warp, finding.other.warp} == {0, 1}
