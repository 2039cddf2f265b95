"""The rules, as data. Ids are stable: contracts, exceptions and SARIF consumers refer to them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    id: str
    severity: str  #: error, warning or note; only errors fail an audit
    title: str
    why: str


RULES: dict[str, Rule] = {
    r.id: r
    for r in (
        Rule(
            "early-load",
            "error",
            "load that can run before griddepcontrol.wait",
            "Until the wait returns, the kernel before may still be writing this memory. Only memory that no kernel of "
            "the step writes (static weights), or a read the contract declares early with its reason, may precede it.",
        ),
        Rule(
            "early-store",
            "error",
            "store that can run before griddepcontrol.wait",
            "Until the wait returns, kernels before may still read or write this memory; the store can overtake them.",
        ),
        Rule(
            "nc-load",
            "error",
            "non-coherent load of memory another kernel or rank writes",
            "ld.global.nc promises that nobody writes the memory during the kernel. ptxas moves such loads across "
            "griddepcontrol.wait and barriers, and caches may serve old bytes.",
        ),
        Rule(
            "missing-wait",
            "error",
            "kernel launched with programmatic dependent launch that never waits",
            "Without griddepcontrol.wait nothing orders the kernel after its predecessor, and its completion no longer "
            "implies its predecessor's: every kernel behind it is exposed.",
        ),
        Rule(
            "early-trigger",
            "error",
            "dependents are launched earlier than the contract declares",
            "A kernel that launches its dependents before its own wait lets them start while its predecessors run.",
        ),
        Rule(
            "exposed-dependent",
            "error",
            "access that the declared schedule does not order",
            "Along the declared launch order nothing guarantees that the kernel which writes the buffer has completed.",
        ),
        Rule(
            "store-after-trigger",
            "error",
            "store after launch_dependents that a dependent reads without waiting",
            "The dependent may start as soon as every block has launched its dependents; only its wait makes the store "
            "visible.",
        ),
        Rule(
            "missing-proxy-fence",
            "error",
            "no proxy fence between ordinary accesses and a bulk copy of the same shared memory",
            "Ordinary loads and stores (generic proxy) and bulk copies (async proxy) are ordered only by "
            "fence.proxy.async in the accessing threads before the barrier release; without it a slot is overwritten "
            "before it has been read.",
        ),
        Rule(
            "weak-poll",
            "error",
            "poll that is neither volatile nor relaxed nor acquire",
            "A weak load in a poll may be served from L1 for ever, merged or moved; data written by another block or "
            "rank needs a strong load of sufficient scope.",
        ),
        Rule(
            "unbounded-poll",
            "warning",
            "poll without a time or trip limit",
            "If the writer never arrives the kernel hangs the device; debug builds should give up and report.",
        ),
        Rule(
            "collapsed-poll",
            "error",
            "poll that reads memory only once",
            "The compiler took the load out of the loop: the kernel goes on with stale data or spins for ever.",
        ),
        Rule(
            "weak-mailbox-store",
            "error",
            "mailbox store weaker than the protocol",
            "A word that another rank polls is its own flag: it must be stored relaxed (or stronger) at system scope.",
        ),
        Rule(
            "early-rearm",
            "error",
            "mailbox word set back to idle before its last read",
            "A later read of the same word sees the idle value, and the peer may already be writing the next one.",
        ),
        Rule(
            "contract-mismatch",
            "error",
            "contract and compiled code do not fit",
            "Parameters are matched by position; a contract of another shape would vouch for the wrong memory.",
        ),
        Rule(
            "unused-exception",
            "error",
            "declared exception that nothing needs",
            "An exception that matches no finding hides the next one.",
        ),
        Rule(
            "late-weight",
            "note",
            "weight load placed before the wait in PTX but after it by the assembler",
            "Correct, but the overlap it was written for is lost; ld.global.nc is the usual cause.",
        ),
        Rule(
            "unlinked-early-read",
            "note",
            "early read of a buffer no kernel of the schedule is known to write",
            "The schedule cannot prove it complete; only the declared reason vouches for it.",
        ),
    )
}

SEVERITIES = ("error", "warning", "note")
ROLES = ("weight", "activation", "state", "table", "mailbox", "output", "scratch", "scalar")

#: For code without a contract: role by parameter or variable name. First match wins; everything else is an activation,
#: the careful choice. Compilers usually drop names (``kernel_param_3``), so most foreign code needs a contract table.
FOREIGN_ROLES: tuple[tuple[str, str], ...] = (
    (r"(?:^|_)(?:mailbox|mbox|lamport|inbox)(?:_|$)", "mailbox"),
    (r"(?:^|_)(?:w|wt|weight|weights|gamma|beta|filter)(?:_ptr)?$", "weight"),
    (r"(?:^|_)(?:indptr|lengths?|slots?|table|page_table|block_table)(?:_ptr)?$", "table"),
    (r"(?:^|_)(?:out|output|dst|result)(?:_ptr)?$", "output"),
    (r"(?:^|_)(?:state|cache|kv_cache)(?:_ptr)?$", "state"),
)
