"""What a manifest's fields must have to do with each other: names are unique, and what is named exists.

Each :class:`Problem` knows the key path it stands at, so that a message can say file, line and field.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fasttrack.errors import nearest

if TYPE_CHECKING:
    from fasttrack.manifest.model import Manifest

Loc = tuple[str | int, ...]


@dataclass(frozen=True)
class Problem:
    loc: Loc
    what: str
    expected: str = ""

    @property
    def text(self) -> str:
        return f"{self.what}; expected {self.expected}" if self.expected else self.what


def problems(manifest: Manifest) -> Iterator[Problem]:
    """Everything that is wrong between fields which are right by themselves, in the order of the file's keys."""
    yield from _twice(manifest)
    yield from _gates(manifest)
    yield from _unknown(manifest)
    yield from _impossible(manifest)
    yield from _left_out(manifest)


def _left_out(manifest: Manifest) -> Iterator[Problem]:
    """Deployments on which features are to be checked, of which the tier runs no cell."""
    scope = [row.name for row in manifest.scope]
    for tier, knobs in manifest.tiers.items():
        run = {cell.name for cell in manifest.cells(tier) if knobs.features.admits(cell.name, cell.key)}
        for i, name in enumerate(knobs.features.rows):
            if name in scope and name not in run:
                where: Loc = ("tiers", tier, "features", "rows", i)
                what = f"tier {tier!r} runs no cell of {name!r} that this selection admits"
                yield Problem(where, what, f"a row that tiers.{tier}.cells has: {', '.join(sorted(run)) or 'none'}")


def _impossible(manifest: Manifest) -> Iterator[Problem]:
    for i, cell in enumerate(manifest.named_cells):
        length, most = cell.acceptance_length, 1 + cell.draft_length
        if length is not None and not 1 <= length <= most:
            expected = f"1 to {most} tokens a step (1 + draft_length)"
            yield Problem(("named_cells", i, "acceptance"), f"acceptance length {length:g}", expected)


def _twice(manifest: Manifest) -> Iterator[Problem]:
    rows: list[tuple[Loc, str]] = [(("scope", i, "name"), row.name) for i, row in enumerate(manifest.scope)]
    rows += [(("named_cells", i, "name"), cell.name) for i, cell in enumerate(manifest.named_cells)]
    probes: list[tuple[Loc, str]] = [(("probes", i, "name"), probe.name) for i, probe in enumerate(manifest.probes)]
    tasks: list[tuple[Loc, str]] = [(("tasks", i, "name"), task.name) for i, task in enumerate(manifest.tasks)]
    features: list[tuple[Loc, str]] = [(("features", i), name) for i, name in enumerate(manifest.features)]
    groups = (("scope row or named cell", rows), ("probe", probes), ("task", tasks), ("feature", features))
    for what, named in groups:
        for loc, name in _repeated(named):
            yield Problem(loc, f"{what} {name!r} is there twice", "each name once")


def _gates(manifest: Manifest) -> Iterator[Problem]:
    required: list[tuple[Loc, str]] = [(("gates", "required", i), g) for i, g in enumerate(manifest.gates.required)]
    optional: list[tuple[Loc, str]] = [(("gates", "optional", i), g) for i, g in enumerate(manifest.gates.optional)]
    for loc, name in (*_repeated(required), *_repeated(optional)):
        yield Problem(loc, f"gate {name!r} is listed twice", "each gate once")
    for loc, name in optional:
        if name in manifest.gates.required:
            yield Problem(loc, f"gate {name!r} is both required and optional", "one of the two")


def _unknown(manifest: Manifest) -> Iterator[Problem]:
    contexts, tasks = list(manifest.contexts), [task.name for task in manifest.tasks]
    for i, row in enumerate(manifest.scope):
        yield from _absent("context", [(("scope", i, "context", j), n) for j, n in enumerate(row.context)], contexts)
    for i, cell in enumerate(manifest.named_cells):
        yield from _absent("context", [(("named_cells", i, "context"), cell.context)], contexts)
    for i, probe in enumerate(manifest.probes):
        yield from _absent("context", [(("probes", i, "context"), probe.context)], contexts)
    yield from _absent("task", [(("margins", "task_points", n), n) for n in manifest.margins.task_points], tasks)
    yield from _absent("tier", [(("default_tier",), manifest.default_tier)], list(manifest.tiers))
    rows, cells = [row.name for row in manifest.scope], [cell.name for cell in manifest.named_cells]
    for tier, knobs in manifest.tiers.items():
        for field, selection in (("cells", knobs.cells), ("features", knobs.features)):
            loc: Loc = ("tiers", tier, field)
            named = selection.named if isinstance(selection.named, list) else []
            for key, what, names, known in (
                ("rows", "scope row", selection.rows, rows),
                ("context", "context", selection.context, contexts),
                ("named", "named cell", named, cells),
            ):
                yield from _absent(what, [((*loc, key, i), n) for i, n in enumerate(names)], known)


def _repeated(named: Sequence[tuple[Loc, str]]) -> Iterator[tuple[Loc, str]]:
    seen: set[str] = set()
    for loc, name in named:
        if name in seen:
            yield loc, name
        seen.add(name)


def _absent(what: str, named: Iterable[tuple[Loc, str]], known: Sequence[str]) -> Iterator[Problem]:
    for loc, name in named:
        if name not in known:
            yield Problem(loc, f"unknown {what} {name!r}", nearest(name, known))
