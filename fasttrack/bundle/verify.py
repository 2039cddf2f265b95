"""Verify a bundle: hashes, journal, seeds, and every verdict recomputed from raw records. Torch-free, offline.

The bundle is untrusted: whatever it holds, the outcome is a list of problems, one line each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fasttrack.bundle.binding import BINDING, Binding, read_binding
from fasttrack.bundle.content import (
    ENVIRONMENT,
    GATES,
    JOURNAL,
    MANIFEST,
    REQUIRED_FILES,
    RUN,
    Records,
    Run,
    SeedsInfo,
    load_records,
    parse_environment,
    parse_manifest,
    parse_run_info,
)
from fasttrack.bundle.derived import DERIVED, OPTIONAL, derived_files
from fasttrack.bundle.files import list_files, parse_json, printable, read_bytes
from fasttrack.bundle.files import sha256 as digest_of
from fasttrack.bundle.hashes import HASHES, HashList, parse_hashes
from fasttrack.bundle.journal import parse_journal, plan_problems
from fasttrack.bundle.layout import DIFF, diff_problems, layout_problems
from fasttrack.bundle.planned import replan_problems
from fasttrack.bundle.prompts import Ties, tie_prompts
from fasttrack.bundle.verdicts import evaluate_all, parse_gates, scope_of, verdict_problems
from fasttrack.errors import BundleError, UsageError
from fasttrack.records.seeds import root_seed

if TYPE_CHECKING:
    from fasttrack.gates import GateResult, Scope

T = TypeVar("T")
NOT_PROVEN = "internally consistent, origin not proven"
_NAMED_DIGEST = re.compile(r"-pr\d+-([0-9a-f]{12})")
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass
class Verification:
    """The outcome. ``results`` and ``verdict`` are recomputed from records, never read from the bundle."""

    path: Path
    root: str | None = None
    problems: list[str] = field(default_factory=list)
    digest: str | None = None  #: the digest that was asked for
    verdict: str | None = None
    results: list[GateResult] = field(default_factory=list)
    binding: Binding | None = None
    name: str = ""
    manifest_sha256: str = ""
    tier: str = ""
    planned: int = 0  #: work units of the plan
    required: list[str] = field(default_factory=list)  #: gates that the manifest requires
    unfinished: list[str] = field(default_factory=list)  #: planned units without a finished attempt
    ties: Ties = field(default_factory=Ties)  #: which prompts follow from the seeds, and what was not held against them
    seeds: SeedsInfo | None = None
    other_code: bool = False  #: a head commit was given, and what ran was not a clean checkout of it
    judged_by: str = ""  #: version and commit of the fasttrack that ran and judged, as the bundle states them

    @property
    def intact(self) -> bool:
        return not self.problems

    @property
    def origin(self) -> str:
        """What is known about where the bundle comes from, in a few words."""
        if not self.intact:
            return "not intact"
        return "matches the given digest" if self.digest is not None else NOT_PROVEN

    def exit_code(self, require: str | None = None) -> int:
        """0 when intact and the verdict follows; 1 otherwise, or when ``require`` is ``pass`` and it is no pass."""
        return 0 if self.intact and (require is None or self.verdict == require) else 1


def verify(bundle: Path, *, digest: str | None = None) -> Verification:
    """Check ``bundle``. Raises :class:`UsageError` only for arguments: no such folder, a digest that is none."""
    if digest is not None:
        digest = digest.lower().removeprefix("sha256:")
        if not _HEX.fullmatch(digest):
            raise UsageError(f"{printable(digest, 80)!r} is no digest", where="--digest", expected="64 hex digits")
    if not bundle.is_dir():
        what = "is not a folder" if bundle.exists() else "no such folder"
        raise UsageError(what, where=str(bundle), expected="a bundle folder, e.g. one of bundles/")
    found = Verification(bundle, digest=digest)
    contents, present = _check_files(found)
    if digest is not None and found.root is not None and digest != found.root:
        found.problems.append(f"{HASHES}: root digest is {found.root}, not the {digest} that was given")
    _check_meaning(found, contents, present)
    return found


def _check_files(found: Verification) -> tuple[dict[str, bytes], dict[str, int]]:
    """Compare files with ``hashes.json``. Returns what is parsed later, read once and so exactly what was hashed."""
    present, problems = list_files(found.path)
    found.problems += problems
    contents: dict[str, bytes] = {}
    listed: HashList | None = None
    if HASHES in present:
        listed = _try(found, lambda: parse_hashes(read_bytes(found.path, HASHES)))
    else:
        found.problems.append(f"{HASHES}: is missing")
    expected = {file.name: file for file in listed.files} if listed else {}
    if listed is not None:
        found.root = listed.root
        named = _NAMED_DIGEST.search(found.path.resolve().name)
        if named and not listed.root.startswith(named[1]):
            found.problems.append(f"{HASHES}: root digest {listed.root} is not the {named[1]} of the folder's name")
        found.problems += [f"{name}: is missing" for name in expected if name not in present]
        extra = [name for name in present if name not in expected and name != HASHES]
        found.problems += [f"{name}: is extra, not in {HASHES}" for name in extra]
    for name, size in present.items():
        wanted = expected.get(name)
        if wanted is not None and wanted.bytes != size:
            found.problems.append(f"{name}: was changed ({size} bytes, sealed with {wanted.bytes})")
        needed = name in (*REQUIRED_FILES, *DERIVED, *OPTIONAL, DIFF) or name.startswith("records/")
        if not needed and (wanted is None or wanted.bytes != size):
            continue
        data = _try(found, lambda name=name: read_bytes(found.path, name))  # type: ignore[misc]
        if data is None:
            continue
        if wanted is not None and wanted.bytes == size and digest_of(data) != wanted.sha256:
            found.problems.append(f"{name}: was changed (sha256 differs)")
        if needed:
            contents[name] = data
    return contents, present


def _check_meaning(found: Verification, contents: Mapping[str, bytes], present: Mapping[str, int]) -> None:
    """Parse, and recompute everything that follows from something else."""
    absent = [name for name in (*REQUIRED_FILES, *DERIVED) if name not in present]
    known = set(found.problems)
    found.problems += [line for name in absent if (line := f"{name}: is missing") not in known]
    run = _parse_run(found, contents)
    if run is None:
        return
    found.name, found.tier, found.judged_by = run.manifest.name, run.info.tier, _judged_by(run)
    found.manifest_sha256, found.required = run.manifest_sha256, list(run.manifest.gates.required)
    found.planned, found.unfinished = len(run.info.units), run.unfinished
    _check_seeds(found, run)
    found.problems += layout_problems(present, (*REQUIRED_FILES, *DERIVED, *OPTIONAL, HASHES), run.journal)
    if DIFF in contents or DIFF not in present:
        found.problems += diff_problems(run.environment, contents.get(DIFF))
    found.problems += plan_problems(run.journal, run.info.units)
    records = load_records(contents, contents.__getitem__, run.journal)
    found.problems += [*records.problems, *records.census.problems(run.journal)]
    if BINDING in contents:
        seeds_head = run.info.seeds.head
        found.binding = _try(
            found, lambda: read_binding(parse_json(contents[BINDING], where=BINDING), seeds_head=seeds_head)
        )
        if found.binding is not None and found.binding.head is not None:
            found.other_code = not found.binding.ran(run.environment)
    scope = _try(found, lambda: scope_of(run))
    if scope is not None:
        _tie(found, scope, run, records)
        found.problems += _try(found, lambda: list(replan_problems(run))) or []
        _check_verdicts(found, scope, run, records, contents)


def _parse_run(found: Verification, contents: Mapping[str, bytes]) -> Run | None:
    """The run's documents; every one that cannot be used is named, not only the first."""

    def parse(name: str, how: Callable[[bytes], T]) -> T | None:
        return _try(found, lambda: how(contents[name])) if name in contents else None

    manifest = parse(MANIFEST, parse_manifest)
    info = parse(RUN, parse_run_info)
    environment = parse(ENVIRONMENT, parse_environment)
    journal = parse(JOURNAL, parse_journal)
    if manifest is None or info is None or environment is None or journal is None:
        return None
    return Run(manifest, digest_of(contents[MANIFEST]), info, environment, journal)


def _judged_by(run: Run) -> str:
    source = run.environment.get("source")
    commit = source.get("commit") if isinstance(source, dict) else None
    changed = " with uncommitted changes" if isinstance(source, dict) and source.get("dirty") else ""
    return printable(f"fasttrack {run.environment.get('fasttrack')}, commit {commit}{changed}")


def _check_seeds(found: Verification, run: Run) -> None:
    seeds = found.seeds = run.info.seeds
    if seeds.manifest_sha256 != run.manifest_sha256:
        found.problems.append(f"{RUN}: seeds: derive from another manifest (sha256 {printable(seeds.manifest_sha256)})")
    if seeds.root != root_seed(head=seeds.head, manifest_sha256=seeds.manifest_sha256, nonce=seeds.nonce):
        found.problems.append(f"{RUN}: seeds: root does not derive from head, manifest digest and nonce")


def _tie(found: Verification, scope: Scope, run: Run, records: Records) -> None:
    try:
        found.ties = tie_prompts(scope, run.info.seeds.root, records.records)
    except BundleError as error:
        found.problems.append(str(error))
    except Exception as error:  # hostile numbers that a generator cannot take
        text = printable(str(error))
        found.problems.append(f"records: prompts cannot be drawn again ({type(error).__name__}: {text})")
    found.problems += found.ties.problems


def _check_verdicts(
    found: Verification, scope: Scope, run: Run, records: Records, contents: Mapping[str, bytes]
) -> None:
    outcome = _try(found, lambda: evaluate_all(scope, records.records, found.unfinished))
    stated = _try(found, lambda: parse_gates(contents[GATES])) if GATES in contents else None
    if outcome is None:
        return
    found.results, found.verdict = outcome
    if stated is None:
        return
    wrong = list(verdict_problems(*stated, *outcome))
    found.problems += wrong
    if found.binding is None or wrong:
        return  # what follows from a wrong verdict is not worth comparing
    expected = _try(found, lambda: _derive(scope, run, records, stated[0], found.binding, contents))
    if expected is None:
        return
    for name in OPTIONAL:
        if (name in expected) != (name in contents):
            line = f"{name}: " + ("is missing" if name in expected else "shows what no record holds")
            found.problems += [line] if line not in found.problems else []
    for name, data in expected.items():
        if name in contents and contents[name] != data:
            found.problems.append(
                f"{name}: does not follow from the records ({_first_difference(contents[name], data)})"
            )


def _derive(
    scope: Scope, run: Run, records: Records, results: list[GateResult], binding: Any, contents: Mapping[str, bytes]
) -> dict[str, bytes]:
    try:
        return derived_files(scope, run, records.records, results, binding, contents)
    except Exception as error:  # hostile values that a template or a format cannot take
        text = printable(str(error))
        raise BundleError(f"report.md: cannot be rendered again ({type(error).__name__}: {text})") from None


def _first_difference(told: bytes, found: bytes) -> str:
    for number, (one, other) in enumerate(zip(told.split(b"\n"), found.split(b"\n"), strict=False), start=1):
        if one != other:
            return f"first difference in line {number}"
    return "one is a beginning of the other"


def _try(found: Verification, action: Callable[[], T]) -> T | None:
    """The action's value; its :class:`BundleError` becomes a problem."""
    try:
        return action()
    except BundleError as error:
        found.problems.append(str(error))
        return None
