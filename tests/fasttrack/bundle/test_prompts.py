"""Prompts follow from the seeds that a bundle states, or verification says which do not."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bundle_tools import edit_json, fix_hashes, fix_journal, problems
from fake_target import TARGET
from harness import TOY, run_units
from toy_run import EMULATED, HEAD, MANIFEST, cell, default_records, engine, write_run

from fasttrack.bundle import prompts, seal, verify
from fasttrack.bundle.prompts import tie_prompts
from fasttrack.checks.base import sha256_tokens
from fasttrack.errors import BundleError
from fasttrack.gates import Scope
from fasttrack.gates.features import RULES
from fasttrack.manifest.model import Manifest
from fasttrack.records import (
    EngineRecord,
    EvalItemRecord,
    EvalTaskRecord,
    FidelityRecord,
    FreeRunRecord,
    GenerationRecord,
)
from fasttrack.records.seeds import named_seed, root_seed

UNIT = "isolation/a_a/decode/tp2/r2/dl0/dcp1/short"
ROOT = root_seed(head=HEAD, manifest_sha256=hashlib.sha256(MANIFEST.encode()).hexdigest(), nonce=None)


def drawn(seed: int, count: int, vocabulary: int = 50, end: int = 0, length: int = 7) -> list[tuple[int, ...]]:
    """Random tokens but the end token, request after request: written again, not imported."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        tokens: list[int] = []
        while len(tokens) < length:
            token = rng.randrange(vocabulary)
            tokens += [token] if token != end else []
        found.append(tuple(tokens))
    return found


def generations(root: str = ROOT, unit: str = UNIT) -> list[Any]:
    """Both arms of a stock-against-stock unit, and their engine."""
    stock = engine(2, "stock", "auto").model_copy(update={"unit": unit, "vocab_size": 50, "eos_token_ids": [0]})
    made: list[Any] = [stock]
    for arm in ("stock", "stock-repeat"):
        for i, prompt in enumerate(drawn(named_seed(root, unit), 2)):
            made.append(
                GenerationRecord(
                    unit=unit,
                    arm=arm,
                    cell=cell(2),
                    evidence=EMULATED,
                    run=f"{unit}/{arm}",
                    request=f"r{i}",
                    prompt_sha256=hashlib.sha256(",".join(map(str, prompt)).encode()).hexdigest(),
                    prompt_tokens=len(prompt),
                    token_ids=[1, 2],
                    finish_reason="length",
                )
            )
    return made


def bundle_of(folder: Path, made: list[Any]) -> Path:
    return seal(write_run(folder / "run", {**default_records(), UNIT: made}), folder / "out", pr=7)


def test_prompts_of_the_stated_seeds_are_tied(tmp_path: Path):
    found = verify(bundle_of(tmp_path, generations()))
    assert found.problems == []
    assert found.ties.tied == {"isolation/a_a": 4}
    assert found.ties.loose["numerics"] == "inputs are drawn by torch"
    assert found.ties.loose["isolation/cell"] == "records hold steps, not prompts"
    assert found.seeds is not None
    assert (found.seeds.head, found.seeds.nonce) == (HEAD, None)


def test_records_made_with_other_seeds_are_named(tmp_path: Path):
    """What a run without the nonce leaves behind, sealed as one with it."""
    found = problems(bundle_of(tmp_path, generations(root="0" * 64)))
    wrong = f"request r0 of run {UNIT}/stock: prompt does not follow from the seeds"
    assert f"records: unit {UNIT}: {wrong}" in found
    assert len(found) == 4


def test_seeds_exchanged_behind_the_run_are_named(tmp_path: Path):
    bundle = bundle_of(tmp_path, generations())

    def exchange(run: dict[str, Any]) -> None:
        seeds = {**run["seeds"], "nonce": "mine"}
        run["seeds"] = {**seeds, "root": root_seed(**{k: v for k, v in seeds.items() if k != "root"})}

    edit_json(bundle, "run.json", exchange)
    assert any("does not follow from the seeds" in line for line in problems(fix_hashes(bundle)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt_sha256": "0" * 64}, "request r1 of run"),
        ({"request": "r7"}, "request r7 of run"),
        ({"request": "mine"}, "its prompt follows from no seed"),
        ({"prompt_tokens": 8}, "request r1 of run"),
        ({"prompt_tokens": 10**12}, "more than 64000000 tokens"),
        ({"prompt_tokens": -1}, "or of fewer than none"),
    ],
)
def test_a_changed_prompt_is_named(tmp_path: Path, change: dict[str, Any], words: str):
    made = generations()
    made[2] = made[2].model_copy(update=change)
    assert any(words in line for line in problems(bundle_of(tmp_path, made)))


@pytest.mark.parametrize(
    "lost",
    [{"vocab_size": None}, {"eos_token_ids": None}, {"vocab_size": 1}, {"vocab_size": 3, "eos_token_ids": [1, 2]}],
)
def test_leaving_the_vocabulary_out_does_not_help(tmp_path: Path, lost: dict[str, Any]):
    made = generations(root="0" * 64)
    made[0] = made[0].model_copy(update=lost)
    bundle = bundle_of(tmp_path, made)
    fix_journal(bundle)
    assert any("no vocabulary of the engine" in line for line in problems(fix_hashes(bundle)))


@pytest.fixture
def harness_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seeds of :func:`harness.run_units`, which has no root."""
    monkeypatch.setattr(
        prompts, "named_seed", lambda root, name: int(hashlib.sha256(f"{root}{name}".encode()).hexdigest()[:7], 16)
    )


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Of PyTorch: the toy's tensors are too small to gain from more, and lose much on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def toy_scope(gates: list[str], **changes: Any) -> Scope:
    manifest = {**TOY, "gates": {"required": gates}, **changes}
    return Scope(Manifest.model_validate(manifest), "smoke", replace(TARGET.describe(), features=tuple(RULES)))


@pytest.mark.usefixtures("harness_seeds", "one_thread")
def test_what_the_checks_draw_is_what_is_drawn_again(tmp_path: Path):
    """Every check that records prompts, run on the toy engine; with other seeds nothing of it fits."""
    features = ["stop", "penalties", "prefix_reuse", "streaming", "full_context", "stock_resumed"]
    scope = toy_scope(
        ["isolation.a_a", "evals.free_running", "evals.fidelity", *(f"features.{f}" for f in features)], tasks=[]
    )
    two = {"features/": "tp2", "isolation/a_a/": "tp2/r4", "evals/": "tp2", "performance/": "tp2/r4"}
    records = []
    for check in ("isolation", "evals", "performance", "features"):
        records += run_units(
            scope,
            tmp_path,
            lambda unit: any(unit.name.startswith(k) and v in unit.name for k, v in two.items()),
            check=check,
        )
    found = tie_prompts(scope, "", records)
    assert found.problems == []
    made = [r for r in records if isinstance(r, GenerationRecord | FreeRunRecord | FidelityRecord)]
    assert sum(found.tied.values()) == len(made)
    named = {f"features/{name}" for name in features}
    assert set(found.tied) == {"isolation/a_a", "evals/free_running", "evals/fidelity", "performance", *named}
    assert {"undrafted", "w0", "w1", "s0"} & {r.request for r in made if isinstance(r, GenerationRecord)} >= {
        "w0",
        "s0",
    }
    other = tie_prompts(scope, "x", records)
    assert sum(other.tied.values()) == 0
    assert other.problems


def test_requests_without_drafts_repeat_a_prompt(harness_seeds: None):
    unit = "features/full_context/tp2-dcp1-dl3"
    (prompt,) = drawn(prompts.named_seed("", f"{unit}/prompts"), 1)
    stock, first, *_ = generations(unit=unit)
    same = [
        first.model_copy(update={"request": r, "prompt_sha256": sha256_tokens(prompt)}) for r in ("r0", "undrafted")
    ]
    found = tie_prompts(toy_scope(["isolation.a_a"]), "", [stock, *same])
    assert (found.problems, found.tied) == ([], {"features/full_context": 2})


def task_records(scope: Scope, root: str, task: str, items: list[str] | None = None) -> list[Any]:
    from fasttrack.tasks.data import rows_digest, rows_for

    declared = next(t for t in scope.manifest.tasks if t.name == task)
    seed = named_seed(root, f"evals/task/{task}")
    rows = rows_for(declared, items=3, seed=seed, max_chars=512 - 16)
    unit = f"evals/task/{task}/stock"
    common: dict[str, Any] = {"unit": unit, "arm": "stock", "evidence": EMULATED, "task": task}
    about = {"task_file_sha256": "", "chat_template_sha256": None, "repeats": 1, "max_tokens": 16, "temperature": 0.0}
    told = EvalTaskRecord(**common, **about, source="generated", rows_sha256=rows_digest(rows), items=3)
    answers = [
        EvalItemRecord(
            **common,
            item=item,
            repeat=0,
            score=0.0,
            metric="exact_match",
            prompt_sha256="",
            response_sha256="",
            finish_reason="length",
            parsed=True,
            output_tokens=1,
        )
        for item in (items or [row["id"] for row in rows])
    ]
    own = EngineRecord(
        unit=unit,
        arm="stock",
        evidence=EMULATED,
        engine="embedded",
        switch={},
        devices=[],
        checkpoint="",
        config={"max_context": 512},
    )
    return [own, told, *answers]


@pytest.mark.parametrize("task", ["aime", "gpqa", "mrcr"])
def test_generated_questions_are_made_again(task: str):
    scope = toy_scope(["evals.task_scores"])
    honest = tie_prompts(scope, ROOT, task_records(scope, ROOT, task))
    assert (honest.problems, honest.tied) == ([], {"generated questions": 3})
    other = tie_prompts(scope, "1" * 64, task_records(scope, ROOT, task))
    assert other.problems == [
        f"records: unit evals/task/{task}/stock: task {task}: its questions do not follow from the seeds"
    ]
    picked = tie_prompts(scope, ROOT, task_records(scope, ROOT, task, items=["mine"]))
    assert "item mine is not among the questions of these seeds" in picked.problems[0]


def test_questions_from_elsewhere_are_said_not_to_be_tied():
    scope = toy_scope(["evals.task_scores"])
    records = task_records(scope, ROOT, "aime")
    records[1] = records[1].model_copy(update={"source": "file:aime.jsonl"})
    found = tie_prompts(scope, ROOT, records)
    assert found.loose == {"questions of aime": "they come from file:aime.jsonl, which a bundle does not hold"}
    assert not found.tied


def test_more_tokens_than_any_run_has_are_refused_at_once():
    made = generations()
    made[2] = made[2].model_copy(update={"prompt_tokens": 10**9})
    with pytest.raises(BundleError, match="64000000 tokens"):
        tie_prompts(toy_scope(["isolation.a_a"]), ROOT, made)
