"""Small kernels in PTX, each right, and the edits that plant one fault in each."""

from __future__ import annotations

from dataclasses import dataclass

HEADER = """.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 128 .b8 smem[];
"""
REGISTERS = (
    "\t.reg .pred %p<16>;\n\t.reg .b16 %rs<16>;\n\t.reg .b32 %r<64>;\n\t.reg .f32 %f<32>;\n\t.reg .b64 %rd<64>;\n"
)


def kernel(name: str, parameters: str, body: str) -> str:
    """A PTX module with one entry; ``parameters``: ``x:u64 n:u32``."""
    declared = []
    for item in parameters.split():
        p, _, kind = item.partition(":")
        size = f"[{kind[4:]}]" if kind.startswith("desc") else ""
        declared.append(f"\t.param .align 64 .b8 {p}{size}" if size else f"\t.param .{kind} {p}")
    return f"{HEADER}\n.visible .entry {name}(\n" + ",\n".join(declared) + f"\n)\n{{\n{REGISTERS}{body}\n}}\n"


@dataclass(frozen=True)
class Fault:
    """``edits``: (text that is there, its replacement), applied in order. ``rule`` on ``parameter`` must follow."""

    name: str
    good: str
    edits: tuple[tuple[str, str], ...]
    rule: str
    parameter: str

    @property
    def bad(self) -> str:
        text = KERNELS[self.good]
        for old, new in self.edits:
            assert text.count(old) == 1, f"{self.name}: {old!r} occurs {text.count(old)} times"
            text = text.replace(old, new)
        return text


# y[i] = w[i] * x[i]; the weight is read early, the activation after the wait
SCALE = kernel(
    "scale",
    "x:u64 w:u64 y:u64 n:u32",
    """
	ld.param.u64 %rd1, [x];
	ld.param.u64 %rd2, [w];
	ld.param.u64 %rd3, [y];
	ld.param.u32 %r9, [n];
	mov.u32 %r1, %ctaid.x;
	mov.u32 %r2, %tid.x;
	mad.lo.s32 %r3, %r1, 128, %r2;
	mul.wide.s32 %rd4, %r3, 4;
	add.s64 %rd5, %rd2, %rd4;
	ld.global.f32 %f1, [%rd5];
	add.s64 %rd6, %rd1, %rd4;
	griddepcontrol.wait;
	griddepcontrol.launch_dependents;
	ld.global.f32 %f2, [%rd6];
	setp.ge.s32 %p1, %r3, %r9;
	@%p1 bra DONE;
	mul.f32 %f3, %f1, %f2;
	add.s64 %rd7, %rd3, %rd4;
	st.global.f32 [%rd7], %f3;
DONE:
	ret;""",
)

# a ring of two slots: warp 4 copies w in, the others read it with ordinary loads and release each slot
RING = kernel(
    "ring",
    "w:u64 x:u64 y:u64 tiles:u32",
    """
	ld.param.u64 %rd1, [w];
	ld.param.u64 %rd2, [x];
	ld.param.u64 %rd3, [y];
	ld.param.u32 %r20, [tiles];
	mov.u32 %r1, smem;
	mov.u32 %r2, %tid.x;
	setp.ne.s32 %p1, %r2, 0;
	@%p1 bra READY;
	mbarrier.init.shared.b64 [%r1+8192], 1;
	mbarrier.init.shared.b64 [%r1+8200], 1;
	mbarrier.init.shared.b64 [%r1+8208], 4;
	mbarrier.init.shared.b64 [%r1+8216], 4;
READY:
	bar.sync 0;
	mov.u32 %r3, 0;
	setp.lt.u32 %p2, %r2, 128;
	@%p2 bra CONSUME;
	setp.ne.s32 %p3, %r2, 128;
	@%p3 bra DONE;
	griddepcontrol.wait;
	griddepcontrol.launch_dependents;
FILL:
	and.b32 %r4, %r3, 1;
	shl.b32 %r5, %r4, 3;
	add.s32 %r6, %r1, %r5;
	shr.u32 %r7, %r3, 1;
	and.b32 %r7, %r7, 1;
	xor.b32 %r7, %r7, 1;
EMPTY:
	mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r6+8208], %r7;
	@!%p4 bra EMPTY;
	mbarrier.arrive.expect_tx.shared::cta.b64 %rd9, [%r6+8192], 4096;
	shl.b32 %r8, %r4, 12;
	add.s32 %r9, %r1, %r8;
	mul.wide.u32 %rd4, %r3, 4096;
	add.s64 %rd5, %rd1, %rd4;
	add.s32 %r10, %r6, 8192;
	cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r9], [%rd5], 4096, [%r10];
	add.s32 %r3, %r3, 1;
	setp.lt.u32 %p5, %r3, %r20;
	@%p5 bra FILL;
	bra DONE;
CONSUME:
	griddepcontrol.wait;
	mul.wide.u32 %rd6, %r2, 4;
	add.s64 %rd7, %rd2, %rd6;
	ld.global.f32 %f1, [%rd7];
	mov.f32 %f2, 0f00000000;
	and.b32 %r11, %r2, 31;
	shl.b32 %r12, %r2, 2;
TAKE:
	and.b32 %r13, %r3, 1;
	shl.b32 %r14, %r13, 3;
	add.s32 %r15, %r1, %r14;
	shr.u32 %r16, %r3, 1;
	and.b32 %r16, %r16, 1;
FULL:
	mbarrier.try_wait.parity.shared::cta.b64 %p6, [%r15+8192], %r16;
	@!%p6 bra FULL;
	shl.b32 %r17, %r13, 12;
	add.s32 %r18, %r1, %r17;
	add.s32 %r19, %r18, %r12;
	ld.shared.f32 %f3, [%r19];
	fma.rn.f32 %f2, %f1, %f3, %f2;
	fence.proxy.async.shared::cta;
	bar.warp.sync -1;
	setp.ne.s32 %p7, %r11, 0;
	@%p7 bra NEXT;
	mbarrier.arrive.shared.b64 %rd10, [%r15+8208];
NEXT:
	add.s32 %r3, %r3, 1;
	setp.lt.u32 %p8, %r3, %r20;
	@%p8 bra TAKE;
	add.s64 %rd8, %rd3, %rd6;
	st.global.f32 [%rd8], %f2;
DONE:
	ret;""",
)

# reads one word per rank out of a mailbox, sets it back to idle, adds up
PULL = kernel(
    "pull",
    "box:u64 y:u64",
    """
	ld.param.u64 %rd1, [box];
	ld.param.u64 %rd2, [y];
	mov.u32 %r1, %tid.x;
	mul.wide.u32 %rd3, %r1, 4;
	add.s64 %rd4, %rd1, %rd3;
	griddepcontrol.wait;
	griddepcontrol.launch_dependents;
	mov.u32 %r9, 0;
POLL:
	ld.relaxed.sys.global.b32 %r2, [%rd4];
	add.s32 %r9, %r9, 1;
	setp.gt.u32 %p3, %r9, 100000000;
	@%p3 bra GIVEUP;
	setp.eq.b32 %p1, %r2, -2147483648;
	@%p1 bra POLL;
AGAIN:
	ld.relaxed.sys.global.b32 %r3, [%rd4+4096];
	add.s32 %r9, %r9, 1;
	setp.gt.u32 %p3, %r9, 100000000;
	@%p3 bra GIVEUP;
	setp.eq.b32 %p2, %r3, -2147483648;
	@%p2 bra AGAIN;
	st.relaxed.sys.global.b32 [%rd4], -2147483648;
	st.relaxed.sys.global.b32 [%rd4+4096], -2147483648;
	add.s32 %r4, %r2, %r3;
	add.s64 %rd5, %rd2, %rd3;
	st.global.b32 [%rd5], %r4;
	ret;
GIVEUP:
	trap;""",
)

# sends one word per thread to every rank, through a table of their mailboxes
PUSH = kernel(
    "push",
    "x:u64 peers:u64 rank:u32",
    """
	ld.param.u64 %rd1, [x];
	ld.param.u64 %rd2, [peers];
	ld.param.u32 %r9, [rank];
	mov.u32 %r1, %tid.x;
	mul.wide.u32 %rd3, %r1, 4;
	add.s64 %rd4, %rd1, %rd3;
	griddepcontrol.wait;
	ld.global.b32 %r2, [%rd4];
	mul.wide.u32 %rd5, %r9, 4096;
	add.s64 %rd6, %rd5, %rd3;
	mov.u32 %r3, 0;
RANK:
	mul.wide.u32 %rd7, %r3, 8;
	add.s64 %rd8, %rd2, %rd7;
	ld.global.u64 %rd9, [%rd8];
	add.s64 %rd10, %rd9, %rd6;
	st.relaxed.sys.global.b32 [%rd10], %r2;
	add.s32 %r3, %r3, 1;
	setp.lt.u32 %p1, %r3, 8;
	@%p1 bra RANK;
	griddepcontrol.launch_dependents;
	ret;""",
)

KERNELS = {"scale": SCALE, "ring": RING, "pull": PULL, "push": PUSH}

_X = "\tld.global.f32 %f2, [%rd6];\n"
_WAIT = "\tadd.s64 %rd6, %rd1, %rd4;\n\tgriddepcontrol.wait;\n"
_READS = """POLL:
	ld.relaxed.sys.global.b32 %r2, [%rd4];
	add.s32 %r9, %r9, 1;
	setp.gt.u32 %p3, %r9, 100000000;
	@%p3 bra GIVEUP;
	setp.eq.b32 %p1, %r2, -2147483648;
	@%p1 bra POLL;
"""

FAULTS = (
    Fault(
        "hoisted activation read",
        "scale",
        ((_X, ""), (_WAIT, "\tadd.s64 %rd6, %rd1, %rd4;\n" + _X + "\tgriddepcontrol.wait;\n")),
        "early-load",
        "x",
    ),
    Fault(
        "activation read on one path without the wait",
        "scale",
        ((_WAIT, _WAIT.replace("\tgrid", "\tsetp.eq.s32 %p2, %r9, 1;\n\t@%p2 bra SKIP;\n\tgrid") + "SKIP:\n"),),
        "early-load",
        "x",
    ),
    Fault("missing wait", "scale", (("\tgriddepcontrol.wait;\n", ""),), "missing-wait", ""),
    Fault("missing proxy fence", "ring", (("\tfence.proxy.async.shared::cta;\n", ""),), "missing-proxy-fence", ""),
    Fault(
        "proxy fence in the releasing lane only",
        "ring",
        (
            ("\tfence.proxy.async.shared::cta;\n", ""),
            ("\tmbarrier.arrive.shared.b64", "\tfence.proxy.async.shared::cta;\n\tmbarrier.arrive.shared.b64"),
        ),
        "missing-proxy-fence",
        "",
    ),
    Fault("nc poll", "pull", (("ld.relaxed.sys.global.b32 %r2,", "ld.global.nc.b32 %r2,"),), "weak-poll", "box"),
    Fault("weak poll", "pull", (("ld.relaxed.sys.global.b32 %r2,", "ld.global.b32 %r2,"),), "weak-poll", "box"),
    Fault(
        "re-arm before the last read",
        "pull",
        (
            ("\tst.relaxed.sys.global.b32 [%rd4+4096], -2147483648;\n", ""),
            ("\tmov.u32 %r9, 0;\n", "\tmov.u32 %r9, 0;\n\tst.relaxed.sys.global.b32 [%rd4+4096], -2147483648;\n"),
        ),
        "early-rearm",
        "box",
    ),
    Fault(
        "re-arm inside the poll",
        "pull",
        ((_READS, _READS.replace("\tadd.s32 %r9", "\tst.global.b32 [%rd4], -2147483648;\n\tadd.s32 %r9")),),
        "early-rearm",
        "box",
    ),
    Fault(
        "poll that spins without reading",
        "pull",
        (
            (
                _READS,
                "\tld.relaxed.sys.global.b32 %r2, [%rd4];\n\tsetp.ne.b32 %p1, %r2, -2147483648;\n"
                "\t@%p1 bra AGAIN;\nSPIN:\n\tbra SPIN;\n",
            ),
        ),
        "collapsed-poll",
        "box",
    ),
    Fault("weak mailbox store", "push", (("st.relaxed.sys.global", "st.global"),), "weak-mailbox-store", "peers"),
    Fault(
        "mailbox store of device scope", "push", (("st.relaxed.sys", "st.relaxed.gpu"),), "weak-mailbox-store", "peers"
    ),
    Fault(
        "dependents launched before the wait",
        "push",
        (
            ("\tgriddepcontrol.launch_dependents;\n", ""),
            ("\tgriddepcontrol.wait;\n", "\tgriddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;\n"),
        ),
        "early-trigger",
        "",
    ),
)
