"""``fasttrack plan``: what a run would do, how long it takes, what it can see, and what it cannot show here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fasttrack.cli.data import DataOption, task_data
from fasttrack.cli.output import plain, table

if TYPE_CHECKING:
    from fasttrack.plan.outlook import Outlook, TaskOutlook
    from fasttrack.stats.power import Odds


def plan(
    manifest: Annotated[Path, typer.Argument(help="The scope to plan.")],
    tier: Annotated[str | None, typer.Option(help="smoke, standard or full; default: the manifest's.")] = None,
    check: Annotated[str | None, typer.Option(help="Only these checks, comma-separated.")] = None,
    data: DataOption = None,
    units: Annotated[bool, typer.Option("--units", help="List every unit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> int:
    """Print what a run would do, how long, what it can see, and what it cannot show here.

    Exit 0: the plan is printed, also where its last lines say that it cannot run or pass here. 2: bad input.
    """
    from fasttrack.plan.outlook import outlook
    from fasttrack.run.runner import Request, prepare

    checks = tuple(name.strip() for name in check.split(",") if name.strip()) if check else ()
    planned = prepare(Request(manifest=manifest, tier=tier, checks=checks, data=task_data(data))).plan
    declared = planned.manifest
    ahead = outlook(planned.scope) if "evals" in planned.checks else None
    if as_json:
        document = {
            "name": declared.name,
            "tier": planned.tier,
            "seconds": planned.cost_s,
            "missing_hardware": planned.gap,
            "missing": list(planned.missing),
            "cannot_show": list(declared.cannot_show),
            "unused_gates": list(planned.unused_gates),
            "units": [{"name": u.name, "check": u.check, "seconds": u.cost_s} for u in planned.units],
            "task_scores": _outlook_json(ahead) if ahead else None,
        }
        plain(json.dumps(document, indent=1))
        return 0
    budget = declared.tier(planned.tier).minutes
    about, over = planned.cost_s / 60, " (above it)" if planned.cost_s > 60 * budget else ""
    plain(
        f"{declared.name}, tier {planned.tier}: {len(planned.units)} units,"
        f" about {about:.0f} minutes{over}, budget {budget:g} minutes"
    )
    rows = []
    for name in planned.checks:
        own = [u for u in planned.units if u.check == name]
        gates = [g for g in (*declared.gates.required, *declared.gates.optional) if g.split(".")[0] == name]
        rows.append([name, str(len(own)), f"{sum(u.cost_s for u in own):.0f}", ", ".join(gates)])
    table(["check", "units", "seconds", "decides"], rows)
    if units:
        table(["unit", "seconds"], [[u.name, f"{u.cost_s:.1f}"] for u in planned.units])
    if ahead:
        _print_outlook(ahead)
    for gate in planned.unused_gates:
        plain(f"Not decided by this run: {gate}")
    for sentence in declared.cannot_show:
        plain(f"Not shown: {sentence}")
    for sentence in planned.missing:
        plain(f"Missing: {sentence}")
    plain(f"Cannot run here: {planned.gap}" if planned.gap else "Can run here.")
    return 0


def _print_outlook(ahead: Outlook) -> None:
    plain("Chances of the task scores, if the assumed mean and spread are right:")
    rows = []
    for one in ahead.tasks:
        design = one.design
        rows.append(
            [
                one.task.name,
                f"{design.questions} x {design.repeats}",
                f"{100 * design.margin:g}",
                design.estimand,
                f"{100 * design.mean:g}",
                f"{100 * one.unchanged.passes:.0f} %",
                f"{100 * one.dropped.passes:.1f} %",
                _amount(one.tokens, one.seconds),
                _needed(one),
            ]
        )
    header = ["task", "questions x repeats", "margin", "estimand", "mean", "pass unchanged", "pass at -2", "costs"]
    table([*header, "all tasks pass unchanged in 9 of 10 with"], rows)
    role = "the verdict needs all of them" if ahead.required else "optional here: the verdict does not depend on them"
    plain(f"All tasks together ({role}):")
    lines = [
        ("nothing changed", _odds(ahead.unchanged)),
        ("one task lost 2 points, where it shows least", f"pass {100 * ahead.one_dropped:.1f} %"),
        ("every task lost 2 points", _odds(ahead.all_dropped)),
    ]
    if ahead.reached is None or ahead.reached_dropped is None:
        stuck = ", ".join(t.task.name for t in ahead.tasks if t.repeats is None)
        plain(f"  no number of repeats reaches 0.9: too few questions in {stuck}")
    else:
        lines.append(("with the repeats named above, nothing changed", _odds(ahead.reached)))
        lines.append(("with these repeats, one task lost 2 points", f"pass {100 * ahead.reached_dropped:.1f} %"))
        tokens = sum(t.repeats_tokens or 0 for t in ahead.tasks)
        seconds = sum(t.repeats_seconds or 0.0 for t in ahead.tasks)
        lines.append(("these repeats cost", _amount(tokens, seconds)))
    for what, text in lines:
        plain(f"  {what}: {text}")


def _odds(chance: Odds) -> str:
    values = (("pass", chance.passes), ("fail", chance.fails), ("inconclusive", chance.inconclusive))
    return ", ".join(f"{word} {100 * value:.1f} %" for word, value in values)


def _needed(one: TaskOutlook) -> str:
    if one.repeats is None or one.repeats_tokens is None or one.repeats_seconds is None:
        return "no number of repeats"
    return f"{one.repeats} repeats, {_amount(one.repeats_tokens, one.repeats_seconds)}"


def _amount(tokens: int, seconds: float) -> str:
    count = f"{tokens / 1e6:.3g} M tokens" if tokens >= 1e6 else f"{tokens / 1e3:.3g} k tokens"
    time = f"{seconds / 3600:.3g} h" if seconds >= 3600 else f"{max(seconds, 1):.0f} s"
    return f"{count}, {time}"


def _outlook_json(ahead: Outlook) -> dict[str, Any]:
    def chances(chance: Odds | None) -> dict[str, float] | None:
        if chance is None:
            return None
        return {"pass": chance.passes, "fail": chance.fails, "inconclusive": chance.inconclusive}

    return {
        "required": ahead.required,
        "unchanged": chances(ahead.unchanged),
        "pass_when_one_task_lost_2_points": ahead.one_dropped,
        "all_tasks_lost_2_points": chances(ahead.all_dropped),
        "with_needed_repeats_unchanged": chances(ahead.reached),
        "with_needed_repeats_pass_when_one_task_lost_2_points": ahead.reached_dropped,
        "tasks": [
            {
                "name": one.task.name,
                "questions": one.design.questions,
                "repeats": one.design.repeats,
                "margin_points": 100 * one.design.margin,
                "estimand": one.design.estimand,
                "assumed_mean": one.design.mean,
                "unchanged": chances(one.unchanged),
                "lost_2_points": chances(one.dropped),
                "tokens": one.tokens,
                "seconds": one.seconds,
                "needed_repeats": one.repeats,
                "needed_tokens": one.repeats_tokens,
                "needed_seconds": one.repeats_seconds,
            }
            for one in ahead.tasks
        ],
    }
