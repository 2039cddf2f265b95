"""Seal a finished run: copy its files, add the derived ones, hash everything. No clock, no network."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from fasttrack.bundle.binding import make_binding
from fasttrack.bundle.content import (
    GATES,
    REQUIRED_FILES,
    Run,
    load_records,
    load_run,
    reader,
    run_files,
)
from fasttrack.bundle.derived import derived_files
from fasttrack.bundle.files import MAX_TOTAL_BYTES, list_files, name_problem, printable, read_bytes
from fasttrack.bundle.hashes import HASHES, HashList
from fasttrack.bundle.journal import plan_problems
from fasttrack.bundle.layout import DIFF, diff_problems, is_known_name, layout_problems
from fasttrack.bundle.planned import replan_problems
from fasttrack.bundle.verdicts import evaluate_all, gates_document, parse_gates, scope_of, verdict_problems
from fasttrack.errors import BundleError, UsageError

BUILDING = ".sealing-"  #: and the number of the process: a bundle on its way


def seal(run_dir: Path, out_dir: Path, *, pr: int, repo: str | None = None, head: str | None = None) -> Path:
    """Write ``<out_dir>/<manifest name>-pr<N>-<12 digits of the root digest>`` and return it.

    The same run and arguments give the same bytes; an identical bundle that exists already is left alone.
    Raises :class:`UsageError` (exit 2) for bad arguments, a run that is not over, or one that contradicts itself.
    """
    make_binding(pr=pr, repo=repo, head=head, seeds_head=None)
    _check_folder(run_dir)
    try:
        contents, name = _contents(run_dir, pr, repo, head)
    except BundleError as error:
        raise UsageError(str(error), where=str(run_dir)) from None
    hashes = HashList.of(contents)
    contents[HASHES] = hashes.to_bytes()
    return _write(out_dir, f"{name}-pr{pr}-{hashes.root[:12]}", contents)


def _check_folder(run_dir: Path) -> None:
    expected = "a run folder written by `fasttrack validate`"
    if not run_dir.exists():
        raise UsageError("no such folder", where=str(run_dir), expected=expected)
    if not run_dir.is_dir():
        raise UsageError("is not a folder", where=str(run_dir), expected=expected)
    for name in REQUIRED_FILES:
        if name != GATES and not (run_dir / name).is_file():
            raise UsageError(f"has no {name}", where=str(run_dir), expected=expected)


def _contents(run_dir: Path, pr: int, repo: str | None, head: str | None) -> tuple[dict[str, bytes], str]:
    """Every file of the bundle but ``hashes.json``, and the manifest's name."""
    read = reader(run_dir)
    run = load_run(read)
    _check_over(run_dir, run)
    files: dict[str, bytes] = {}
    for name in run_files(run_dir):
        if (wrong := name_problem(name)) is not None:
            raise BundleError(f"{printable(name)}: {wrong}")
        if name.startswith("logs/") and not is_known_name(name, (), run.journal):
            continue  # left by a kill between a log and its line in the journal
        files[name] = read(name)
        if sum(len(data) for data in files.values()) > MAX_TOTAL_BYTES:
            raise BundleError(f"has more than {MAX_TOTAL_BYTES} bytes")
    for problem in (
        *layout_problems(files, REQUIRED_FILES, run.journal),
        *diff_problems(run.environment, files.get(DIFF)),
        *plan_problems(run.journal, run.info.units),
    ):
        raise BundleError(problem)
    scope = scope_of(run)
    for problem in replan_problems(run):
        raise BundleError(f"{problem}; planned by other code: run `fasttrack validate` again")
    records = load_records(files, files.__getitem__, run.journal)
    for problem in (*records.problems, *records.census.problems(run.journal)):
        raise BundleError(problem)
    found, verdict = evaluate_all(scope, records.records, run.unfinished)
    files.setdefault(GATES, gates_document(found, verdict))  # a run whose last unit failed wrote none
    results, stated = parse_gates(files[GATES])
    for problem in verdict_problems(results, stated, found, verdict):
        raise BundleError(f"{problem}; it was edited, or judged by other code: run `fasttrack validate` again")
    binding = make_binding(pr=pr, repo=repo, head=head, seeds_head=run.info.seeds.head)
    files.update(derived_files(scope, run, records.records, results, binding, files))
    return files, run.manifest.name


def _check_over(run_dir: Path, run: Run) -> None:
    still_open = run.journal.open_units(run.info.units)
    if still_open:
        total = len(run.info.units)
        raise UsageError(
            f"the run is not over: {len(still_open)} of {total} units neither finished nor failed,"
            f" first {printable(still_open[0])}",
            where=str(run_dir),
            expected="a finished run (`fasttrack validate` continues this one)",
        )


def _write(out_dir: Path, name: str, contents: Mapping[str, bytes]) -> Path:
    """Build the folder beside its final place and rename it, so that nobody sees half of a bundle."""
    target = out_dir / name
    for part in (out_dir, *out_dir.parents):
        if part.exists() and not part.is_dir():
            raise UsageError("is not a folder", where=str(part), expected="a folder for bundles")
    if target.exists() or target.is_symlink():
        return _existing(target, contents)
    building = out_dir / f"{BUILDING}{os.getpid()}"
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        _sweep(out_dir)
        building.mkdir()
        for file, data in contents.items():
            path = building.joinpath(*file.split("/"))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)  # as readable as the umask says: a bundle is there to be read by others
        os.rename(building, target)
    except OSError as error:
        if target.is_dir():  # another process was quicker
            return _existing(target, contents)
        raise UsageError(f"cannot be written ({error.strerror})", where=str(target)) from None
    finally:
        shutil.rmtree(building, ignore_errors=True)  # gone by now where all went well
    return target


def _sweep(out_dir: Path) -> None:
    """Remove what a killed process was building."""
    for path in out_dir.glob(f"{BUILDING}*"):
        pid = path.name.removeprefix(BUILDING)
        if pid.isdigit() and not _runs(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _runs(pid: int) -> bool:
    if os.name == "nt":  # where signal 0 would end it
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass  # somebody else's
    return pid != os.getpid()  # an earlier process of our number


def _existing(target: Path, contents: Mapping[str, bytes]) -> Path:
    if target.is_dir() and not target.is_symlink():
        present, problems = list_files(target)
        same = not problems and set(present) == set(contents)
        if same and all(read_bytes(target, name) == data for name, data in contents.items()):
            return target
    raise UsageError(
        "exists and holds something else", where=str(target), expected="no such folder, or this very bundle"
    )
