"""``fasttrack bundle``: seal a finished run and bind it to a pull request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fasttrack.cli.untrusted import say
from fasttrack.errors import FasttrackError, UsageError


def bundle(
    pr: Annotated[int, typer.Option(help="Number of the pull request the run is about.")],
    repo: Annotated[str | None, typer.Option(help="Its repository, owner/name.")] = None,
    head: Annotated[str | None, typer.Option(help="Its head commit, in full; without it: unbound.")] = None,
    run: Annotated[Path | None, typer.Option(help="The run folder; default: the latest finished one.")] = None,
    runs: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = Path("runs"),
    out: Annotated[Path, typer.Option(help="Folder that receives the bundle.")] = Path("bundles"),
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> int:
    """Seal a finished run into a bundle and bind it to a pull request. No network; same run, same bytes."""
    from fasttrack.bundle import seal, verify

    folder = run if run is not None else latest_finished(runs)
    path = seal(folder, out, pr=pr, repo=repo, head=head)
    sealed = verify(path)  # what was written is what a reviewer will read
    if not sealed.intact:
        raise RuntimeError(f"{path} does not verify: {sealed.problems[0]}")
    assert sealed.binding is not None
    if as_json:
        values = {"bundle": str(path), "root": sealed.root, "run": str(folder), "verdict": sealed.verdict}
        say(json.dumps({**values, "binding": sealed.binding.state}, indent=1))
        return 0
    say(f"run      {folder}")
    say(f"bundle   {path}")
    say(f"verdict  {sealed.verdict}")
    say(f"about    {sealed.binding.sentence}")
    say(f"root     {sealed.root}")
    say(f"Publish the root digest with the pull request: fasttrack verify {path} --digest {sealed.root}")
    return 0


def latest_finished(runs: Path) -> Path:
    """The run below ``runs`` that ended last. Raises :class:`UsageError` when there is none."""
    from fasttrack.bundle.content import parse_run_info
    from fasttrack.bundle.files import read_bytes

    if not runs.is_dir():
        what = "is not a folder" if runs.exists() else "no such folder"
        raise UsageError(what, where=f"--runs {runs}", expected="the folder `fasttrack validate` writes to")
    found: list[tuple[str, str, Path]] = []
    unfinished = 0
    for path in runs.glob("*/run.json"):
        if not (path.parent / "gates.json").is_file():
            unfinished += 1
            continue
        try:
            info = parse_run_info(read_bytes(path.parent, "run.json"))
        except FasttrackError:
            continue  # not a run of ours
        found.append((info.finished or info.started, path.parent.name, path.parent))
    if not found:
        more = f", {unfinished} unfinished" if unfinished else ""
        raise UsageError(f"holds no finished run{more}", where=f"--runs {runs}", expected="`fasttrack validate` first")
    return max(found)[2]
