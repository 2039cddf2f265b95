"""Task scores through lm-eval: task files and data that lie on this machine, one record per question and repeat."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

from fasttrack.checks.base import Context, Unit, evidence
from fasttrack.errors import UsageError
from fasttrack.manifest.model import TaskConfig
from fasttrack.records import EvalItemRecord
from fasttrack.tasks.data import GATED, METRICS, rows_for, write_task

#: Generated prompts are not longer than this, or than the longest context of the unit's bucket, in characters.
GENERATED_CHARS = 512
SAMPLING_TEMPERATURE = 1.0  #: of repeats; a single repeat is greedy


def run(unit: Unit, ctx: Context) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from fasttrack.checks.lm import EngineLM

    task = next(t for t in ctx.scope.manifest.tasks if t.name == unit.params["task"])
    arm, knobs, cell = unit.arms[0], ctx.scope.knobs, unit.cell
    engine, info = ctx.engine_for(arm, cell) if cell else ctx.engine(arm)
    longest = ctx.scope.bucket(cell.context).max if cell else GENERATED_CHARS
    rows = rows_for(
        task,
        items=knobs.task_items,
        seed=ctx.seed(f"evals/task/{task.name}"),
        max_chars=min(info.max_context, max(GENERATED_CHARS, longest)) - knobs.task_tokens,
    )
    folder = ctx.workdir / "tasks" / f"{task.name}-{arm}"
    name = write_task(task, rows, folder)
    for repeat in range(knobs.task_repeats):
        ctx.progress(repeat, knobs.task_repeats, f"{task.name} {arm}")
        engine.reset()

        def seed_of(doc: int, repeat: int = repeat) -> int:
            return ctx.seed(f"evals/task/{task.name}/{repeat}/{doc}")

        lm = EngineLM(
            engine,
            run=f"{unit.name}/{repeat}",
            max_tokens=knobs.task_tokens,
            temperature=SAMPLING_TEMPERATURE if knobs.task_repeats > 1 else 0.0,
            seed_of=seed_of,
        )
        samples = evaluate(lm, name, folder)
        steps = engine.drain_ledger()
        paths = {f"{path}_steps": sum(s.path == path for s in steps) for path in ("specialized", "stock")}
        for sample in samples:
            _record(ctx, task, sample, lm.observations[sample["doc_id"]], repeat, paths, evidence(info))


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


def _record(
    ctx: Context,
    task: TaskConfig,
    sample: dict[str, Any],
    observed: list[Any],
    repeat: int,
    paths: dict[str, int],
    proof: Any,
) -> None:
    metric = METRICS[task.task]
    response = observed[0].text if observed[0].finish_reason != "scored" else str(sample["resps"])
    gated = task.task in GATED and not task.generated
    item = str(sample["doc"]["id"])
    skipped = any(o.finish_reason == "skipped" for o in observed)
    ctx.record(
        EvalItemRecord,
        arm=ctx.unit.arms[0],
        cell=ctx.unit.cell,
        evidence=proof,
        task=task.name,
        item=_sha256(item) if gated else item,
        repeat=repeat,
        score=0.0 if skipped else float(sample[metric]),
        metric=metric,
        prompt_sha256=_sha256("\0".join(o.prompt for o in observed)),
        response_sha256=_sha256(response),
        response=None if gated else response,
        finish_reason="skipped" if skipped else observed[0].finish_reason,
        parsed=bool(sample.get("parsed", True)) and not skipped,
        output_tokens=sum(o.output_tokens for o in observed),
        details={**paths, "requests": len(observed)},
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
