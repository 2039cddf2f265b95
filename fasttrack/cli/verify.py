"""``fasttrack verify``: check a bundle and recompute its verdict, offline, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fasttrack.cli.untrusted import say, say_table
from fasttrack.errors import UsageError

if TYPE_CHECKING:
    from fasttrack.bundle import Verification

MAX_PROBLEMS = 200  #: printed; JSON has them all


def verify(
    path: Annotated[Path, typer.Argument(help="The bundle folder.")],
    digest: Annotated[str | None, typer.Option(help="Root digest published with the pull request.")] = None,
    require: Annotated[str | None, typer.Option(help="`pass`: also demand that the verdict is a pass.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> int:
    """Check every hash of a bundle and recompute every verdict from its raw records.

    Exit 0: intact, and the verdict follows, whatever it is. Exit 1: every problem is named, one line each.
    """
    from fasttrack.bundle import verify as check

    if require not in (None, "pass"):
        raise UsageError(f"{require!r} cannot be required", where="--require", expected="pass")
    found = check(path, digest=digest)
    code = found.exit_code(require)
    if as_json:
        values = {
            "bundle": str(path),
            "intact": found.intact,
            "root": found.root,
            "origin": found.origin,
            "verdict": found.verdict,
            "name": found.name or None,
            "manifest_sha256": found.manifest_sha256 or None,
            "tier": found.tier or None,
            "required": found.required,
            "planned": found.planned,
            "unfinished": found.unfinished,
            "seeds": found.seeds.model_dump() if found.seeds else None,
            "tied_to_seeds": dict(sorted(found.ties.tied.items())),
            "not_tied_to_seeds": dict(sorted(found.ties.loose.items())),
            "binding": found.binding.state if found.binding else None,
            "problems": found.problems,
            "gates": [json.loads(result.model_dump_json()) for result in found.results],
        }
        say(json.dumps(values, indent=1))
        return code
    say(f"root     {found.root or 'none'}")
    if found.name:
        say(f"manifest {found.name}, sha256 {found.manifest_sha256}")
        say(f"tier     {found.tier}, {found.planned - len(found.unfinished)} of {found.planned} planned units finished")
    if found.intact:
        rows = [[result.gate, result.verdict, result.reason] for result in found.results]
        say_table(["gate", "verdict", "recomputed from raw records"], rows, colour_column=1)
        passed = sum(result.verdict == "pass" and result.gate in found.required for result in found.results)
        say(f"required {passed} of {len(found.required)} required gates passed")
    if found.binding is not None:
        say(f"about    {found.binding.sentence}")
    if found.judged_by:
        say(f"code     {found.judged_by}")
        if found.other_code and found.binding is not None:
            say(f"note     the code that ran is not a clean checkout of head commit {found.binding.head}")
    if found.seeds is not None:
        _say_seeds(found)
    for unit in found.unfinished[:MAX_PROBLEMS]:
        say(f"missing  unit {unit} did not finish: the run cannot pass")
    for problem in found.problems[:MAX_PROBLEMS]:
        say(f"problem  {problem}")
    if len(found.problems) > MAX_PROBLEMS:
        say(f"problem  and {len(found.problems) - MAX_PROBLEMS} more (--json lists all)")
    if found.intact:
        say(f"verdict  {found.verdict} (follows from the records)")
    else:
        say(f"verdict  none: {len(found.problems)} problem{'s' if len(found.problems) != 1 else ''}")
        if any("does not follow" in problem for problem in found.problems):
            say(f"note     says it was judged by {found.judged_by}; gates of another version may judge otherwise")
    say(f"origin   {found.origin}")
    if require and found.intact and found.verdict != require:
        say(f"required {require}, and the verdict is {found.verdict}")
    return code


def _say_seeds(found: Verification) -> None:
    """What the seeds derive from, and which prompts were drawn again from them."""
    assert found.seeds is not None
    nonce = "no nonce" if found.seeds.nonce is None else f"nonce {found.seeds.nonce!r}"
    say(f"seeds    from commit {found.seeds.head or 'none'}, the manifest and {nonce}")
    tied = ", ".join(f"{kind} {number}" for kind, number in sorted(found.ties.tied.items()))
    say(f"tied     prompts drawn again from these seeds and found in the records: {tied or 'none'}")
    reasons: dict[str, list[str]] = {}
    for kind, reason in sorted(found.ties.loose.items()):
        reasons.setdefault(reason, []).append(kind)
    for reason, kinds in reasons.items():
        say(f"not tied {', '.join(kinds)}: {reason}")
