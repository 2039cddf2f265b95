"""``fasttrack isolate``: report what a diff touches outside its declared paths."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fasttrack.cli.untrusted import say
from fasttrack.errors import EXIT_FAIL, EXIT_PASS, UsageError


def isolate(
    base: Annotated[str | None, typer.Option(help="Revision the change is against.")] = None,
    head: Annotated[str | None, typer.Option(help="Revision with the change.")] = None,
    diff: Annotated[Path | None, typer.Option(help="A unified diff, instead of --base and --head.")] = None,
    scope: Annotated[Path | None, typer.Option(help="Manifest whose target declares the paths.")] = None,
    allow: Annotated[list[str] | None, typer.Option(help="Declared file, folder or glob; repeatable.")] = None,
    repo: Annotated[Path, typer.Option(help="Repository of --base and --head.")] = Path("."),
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> int:
    """Files inside and outside the declared paths, shared components, patches, environment variables, defaults.

    Exit 0: stays inside. 1: reaches outside. 2: arguments or a diff that cannot be used.
    """
    from fasttrack.isolate.report import as_json as json_form
    from fasttrack.isolate.report import as_text
    from fasttrack.isolate.run import from_diff, from_git

    allowed = list(allow or [])
    if scope is not None:
        allowed += _declared(scope)
    if not allowed:
        raise UsageError("no declared paths", expected="--scope MANIFEST or --allow PATH")
    if diff is not None:
        if base or head:
            raise UsageError("--diff stands instead of --base and --head", expected="one of the two")
        radius = from_diff(diff, allowed)
    elif base and head:
        radius = from_git(repo, base, head, allowed)
    else:
        raise UsageError("nothing to look at", expected="--base REF --head REF, or --diff FILE")
    say(json_form(radius) if as_json else as_text(radius))
    return EXIT_FAIL if radius.outside else EXIT_PASS


def _declared(scope: Path) -> list[str]:
    """The paths the manifest's target may touch."""
    from fasttrack.manifest import load_manifest, place
    from fasttrack.target import find_target

    name = load_manifest(scope)[0].target
    return list(find_target(name, where=place(scope, "target")).describe().source_paths)
