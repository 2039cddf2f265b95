"""Task scores through lm-eval: one record per question and repeat, and one that says how the task was run."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasttrack.checks.base import Context, Unit, evidence
from fasttrack.errors import UsageError
from fasttrack.manifest.model import TaskConfig
from fasttrack.records import CellKey, EvalItemRecord, EvalTaskRecord, Evidence
from fasttrack.target import Engine, EngineInfo
from fasttrack.tasks.data import bin_of, gated, metric_of, rows_digest, rows_for, task_file, write_task
from fasttrack.tasks.second import second_choice, second_score
from fasttrack.tasks.sources import source_of

if TYPE_CHECKING:
    from fasttrack.checks.lm import Observation
    from fasttrack.gates.base import Scope

#: Generated prompts are not longer than this, or than the longest context of the unit's bucket, in characters.
GENERATED_CHARS = 512


def run(unit: Unit, ctx: Context) -> None:
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")  # our rows come from files; lm-eval need not ask the hub
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from fasttrack.checks.lm import EngineLM, chat_template_sha256

    manifest, arm, cell = ctx.scope.manifest, unit.arms[0], unit.cell
    task = next(t for t in manifest.tasks if t.name == unit.params["task"])
    plan = manifest.task_run(task, ctx.scope.tier)
    engine, info = ctx.engine_for(arm, cell) if cell else ctx.engine(arm)
    template = chat_template_sha256(engine) if task.style == "generate" else None
    if task.chat_template_sha256 and template != task.chat_template_sha256:
        raise UsageError(
            f"the engine's chat template has SHA-256 {template}",
            where=f"tasks.{task.name}.chat_template_sha256",
            expected=task.chat_template_sha256,
        )
    rows = rows_for(
        task,
        items=plan.items,
        seed=ctx.seed(f"evals/task/{task.name}"),
        max_chars=longest_question(ctx.scope, task, cell, info.max_context),
    )
    _record_task(ctx, task, rows, template, info)
    with tempfile.TemporaryDirectory(prefix="fasttrack-task-") as folder:  # questions stay out of the run's folder
        name = write_task(task, rows, Path(folder), max_tokens=plan.max_tokens)
        for repeat in range(plan.repeats):
            ctx.progress(repeat, plan.repeats, f"{task.name} {arm}")
            engine.reset()

            def seed_of(doc: int, repeat: int = repeat) -> int:
                return ctx.seed(f"evals/task/{task.name}/{repeat}/{doc}")

            lm = EngineLM(
                engine,
                run=f"{unit.name}/{repeat}",
                max_tokens=plan.max_tokens,
                temperature=plan.temperature,
                seed_of=seed_of,
            )
            samples = evaluate(lm, name, Path(folder))
            steps = engine.drain_ledger()
            paths = {f"{path}_steps": sum(s.path == path for s in steps) for path in ("specialized", "stock")}
            for sample in samples:
                _record_item(
                    ctx, task, engine, sample, lm.observations[sample["doc_id"]], repeat, paths, evidence(info)
                )


def longest_question(scope: Scope, task: TaskConfig, cell: CellKey | None, max_context: int) -> int:
    """Characters that a generated question may have: it and the answer fit the context bucket and the engine."""
    longest = scope.bucket(cell.context).max if cell else GENERATED_CHARS
    return min(max_context, max(GENERATED_CHARS, longest)) - scope.manifest.task_run(task, scope.tier).max_tokens


def evaluate(lm: Any, name: str, folder: Path) -> list[dict[str, Any]]:
    """lm-eval's logged samples of one task whose YAML file lies in ``folder``, in the order of its data."""
    import datasets
    import lm_eval.api.task
    from lm_eval.evaluator import evaluate as lm_evaluate
    from lm_eval.tasks import TaskManager

    datasets.disable_progress_bars()
    lm_eval.api.task.tqdm = _no_bar  # its bars would run through ours
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    result = lm_evaluate(lm=lm, task_dict=manager.load([name]), bootstrap_iters=0, log_samples=True)
    if result is None or not result["samples"][name]:
        raise UsageError("no items", where=str(folder), expected="a data file with at least one row")
    return list(result["samples"][name])


def _no_bar(items: Any, *_: object, **__: object) -> Any:
    return items


def _record_task(
    ctx: Context, task: TaskConfig, rows: list[dict[str, Any]], template: str | None, info: EngineInfo
) -> None:
    plan = ctx.scope.manifest.task_run(task, ctx.scope.tier)
    ours = task_file(task)
    scorers = [p for p in (ours.parent / "scoring.py", ours.parent.parent / "text.py") if p.exists()]
    ctx.record(
        EvalTaskRecord,
        arm=ctx.unit.arms[0],
        cell=ctx.unit.cell,
        evidence=evidence(info),
        task=task.name,
        source=source_of(task),
        rows_sha256=rows_digest(rows),
        task_file_sha256=hashlib.sha256(b"".join(p.read_bytes() for p in (ours, *scorers))).hexdigest(),
        chat_template_sha256=template,
        items=len(rows),
        repeats=plan.repeats,
        max_tokens=plan.max_tokens,
        temperature=plan.temperature,
    )


def _record_item(
    ctx: Context,
    task: TaskConfig,
    engine: Engine,
    sample: dict[str, Any],
    observed: list[Observation],
    repeat: int,
    paths: dict[str, int],
    proof: Evidence,
) -> None:
    metric, doc, first = metric_of(task), sample["doc"], observed[0]
    response = first.text if task.style == "generate" else str(sample["resps"])
    item = str(doc["id"])
    skipped = any(o.finish_reason == "skipped" for o in observed)
    details: dict[str, Any] = {**paths, "requests": len(observed)}
    if task.task == "mrcr" and not skipped:
        tokens = first.prompt_tokens + len(engine.encode(doc["answer"]))
        details |= {"needles": doc["needles"], "bin": bin_of(tokens)}
    ctx.record(
        EvalItemRecord,
        arm=ctx.unit.arms[0],
        cell=ctx.unit.cell,
        evidence=proof,
        task=task.name,
        item=_sha256(item) if gated(task) else item,
        repeat=repeat,
        score=0.0 if skipped else float(sample[metric]),
        second_score=0.0 if skipped else _second(task, sample, first.text),
        metric=metric,
        prompt_sha256=_sha256("\0".join(o.prompt for o in observed)),
        response_sha256=_sha256(response),
        response=None if gated(task) else response,
        finish_reason="skipped" if skipped else first.finish_reason,
        parsed=bool(sample.get("parsed", True)) and not skipped,
        output_tokens=sum(o.output_tokens for o in observed),
        details=details,
    )


def _second(task: TaskConfig, sample: dict[str, Any], response: str) -> float:
    if task.style == "choice":
        return second_choice([float(r[0][0]) for r in sample["resps"]], int(sample["doc"]["answer"]))
    return second_score(task.task, sample["doc"], response)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
