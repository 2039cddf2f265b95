"""``fasttrack validate``: plan, run, verdict."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fasttrack.cli.data import DataOption, task_data
from fasttrack.cli.output import plain, table
from fasttrack.errors import UsageError

if TYPE_CHECKING:
    from fasttrack.gates import GateResult


def validate(
    manifest: Annotated[Path, typer.Argument(help="The scope to validate, e.g. configs/kimi-k3-embedded.yaml.")],
    tier: Annotated[str | None, typer.Option(help="smoke, standard or full; default: the manifest's.")] = None,
    check: Annotated[str | None, typer.Option(help="Only these checks, comma-separated.")] = None,
    runs: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = Path("runs"),
    run: Annotated[Path | None, typer.Option(help="Exactly this run folder: a new one, or one to continue.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew even if an unfinished run could go on.")] = False,
    head: Annotated[str | None, typer.Option(help="Commit the seeds derive from; default: the checkout's.")] = None,
    data: DataOption = None,
    nonce: Annotated[str | None, typer.Option(help="A reviewer's word that goes into the seeds.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> int:
    """Run the experiment a manifest declares, and judge it."""
    from fasttrack.run.progress import reporter
    from fasttrack.run.runner import Request, exit_code
    from fasttrack.run.runner import validate as run_experiment

    if head is not None and not _is_commit(head):
        raise UsageError(f"{head!r} is no commit", where="--head", expected="40 hexadecimal digits")
    if nonce is not None and not nonce.strip():
        raise UsageError("is empty", where="--nonce", expected="a word that the run could not know before")
    request = Request(
        manifest=manifest,
        tier=tier,
        checks=tuple(name.strip() for name in check.split(",") if name.strip()) if check else (),
        runs=runs,
        run_dir=run,
        fresh=fresh,
        head=head,
        nonce=nonce,
        data=task_data(data),
        argv=tuple(sys.argv[1:]),
    )
    outcome = run_experiment(request, reporter(quiet))
    if as_json:
        plain(
            json.dumps(
                {
                    "verdict": outcome.verdict,
                    "run": str(outcome.folder),
                    "resumed": outcome.resumed,
                    "unfinished": list(outcome.unfinished),
                    "gates": [result.model_dump(mode="json") for result in outcome.results],
                },
                indent=1,
            )
        )
        return exit_code(outcome.verdict)
    from fasttrack.manifest import load_manifest

    declared, _ = load_manifest(outcome.folder / "manifest.yaml")
    required = declared.gates.required
    rows = [
        [r.gate, "required" if r.gate in required else "optional", r.verdict, _deciding(r)] for r in outcome.results
    ]
    table(["gate", "", "verdict", "the numbers that decided"], rows, colour_column=2)
    for result in outcome.results:
        if result.verdict != "pass":
            plain(f"{result.gate} {result.verdict}: {result.reason}")
    for name in outcome.unfinished:
        plain(f"unit {name} did not finish: the run cannot pass")
    if not declared.trained_checkpoint:
        plain("Task scores are optional here: the checkpoint is untrained, so they say nothing about answers.")
    for sentence in declared.cannot_show:
        plain(f"Not shown: {sentence}")
    plain(f"verdict: {outcome.verdict}    run: {outcome.folder}")
    return exit_code(outcome.verdict)


def _deciding(result: GateResult, most: int = 2) -> str:
    """The first numbers of a gate, each with its limit; `fasttrack show` has them all."""
    from fasttrack.report.text import show

    shown = []
    for number in result.numbers[:most]:
        unit = number.unit if len(number.unit) <= 40 else ""
        limit = f" ({number.limit})" if number.limit else ""
        shown.append(" ".join(f"{number.name} {show(number.value)} {unit}".split()) + limit)
    rest = len(result.numbers) - most
    return "; ".join(shown) + (f"; {rest} more" if rest > 0 else "")


def _is_commit(text: str) -> bool:
    return len(text) in (40, 64) and all(c in "0123456789abcdef" for c in text)
