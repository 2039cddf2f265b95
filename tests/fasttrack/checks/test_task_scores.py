"""Tasks through lm-eval, with an engine whose answers are known."""

import json

import pytest
from fake_target.engine import ToyEngine
from harness import run_units, toy_scope

from fasttrack.errors import UsageError
from fasttrack.gates import GATES
from fasttrack.records import EvalItemRecord, EvalTaskRecord
from fasttrack.target import Completion


class Oracle:
    """Answers AIME-like problems and repeats MRCR answers, right for the share ``right`` of its items."""

    def __init__(self, rows, right):
        self.rows, self.right = rows, right

    def __getattr__(self, name):
        from fake_target import TARGET

        return getattr(TARGET, name)

    def engine(self, spec):
        rows, right = self.rows, self.right

        class Known(ToyEngine):
            def generate(self, requests, *, run, keep_logits=False, on_step=None):
                done = []
                for number, request in enumerate(requests):
                    prompt = self.decode(request.prompt)
                    row = next(r for r in rows if r["problem"] in prompt)
                    answer = int(row["answer"]) + (number >= right)
                    done.append(Completion(request.id, [1, 2, 3], "stop", f" so \\boxed{{{answer}}}."))
                return done

        return Known(spec)


ROWS = [{"id": f"q{i}", "problem": f"What is {i} plus {i}?", "answer": str(2 * i)} for i in range(5)]


def scope_with(path, **tier):
    tasks = [{"name": "sums", "task": "aime25", "data": str(path)}]
    tiers = {"smoke": {"minutes": 1, "task_items": 4, "task_tokens": 16, **tier}}
    return toy_scope(tasks=tasks, tiers=tiers)


def tasks_only(unit):
    return unit.name.startswith("evals/task")


def test_scores_finish_reasons_and_counts_per_item(tmp_path):
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    records = run_units(
        scope_with(data, task_repeats=2), tmp_path, tasks_only, check="evals", target=Oracle(ROWS, right=3)
    )
    items = [r for r in records if isinstance(r, EvalItemRecord)]
    assert len(items) == 2 * 2 * 4  # arms, repeats, items: the tier caps the five rows at four
    assert {(r.arm, r.repeat) for r in items} == {(a, k) for a in ("stock", "optimized") for k in (0, 1)}
    assert {r.item: r.score for r in items if r.arm == "stock" and r.repeat == 0} == {
        "q0": 1,
        "q1": 1,
        "q2": 1,
        "q3": 0,
    }
    assert {(r.finish_reason, r.output_tokens, r.parsed, r.metric) for r in items} == {("stop", 3, True, "exact_match")}
    assert "\\boxed{6}" not in {r.response for r in items if r.item == "q3"}


def test_all_three_formats_run_on_the_toy_engine(toy_records):
    items = [r for r in toy_records["evals"] if isinstance(r, EvalItemRecord)]
    assert {(r.task, r.metric) for r in items} == {("aime", "exact_match"), ("gpqa", "acc"), ("mrcr", "ratio")}
    assert {r.details["requests"] for r in items if r.task == "gpqa"} == {4}
    pairs = {}
    for record in items:
        pairs.setdefault((record.task, record.item, record.repeat), []).append(record)
    assert all(len(p) == 2 and p[0].prompt_sha256 == p[1].prompt_sha256 for p in pairs.values())
    assert all(r.details["specialized_steps"] > 0 for r in items if r.arm == "optimized")


def test_gated_questions_leave_only_hashes(tmp_path):
    row = {"id": "secret-1", "question": "Which?", "options": ["w", "x", "y", "z"], "answer": 1}
    data = tmp_path / "gpqa.jsonl"
    data.write_text(json.dumps(row) + "\n")
    scope = toy_scope(tasks=[{"name": "g", "task": "gpqa_diamond", "data": str(data)}])
    items = [r for r in run_units(scope, tmp_path, tasks_only, check="evals") if isinstance(r, EvalItemRecord)]
    assert items
    assert all(r.response is None and len(r.item) == 64 for r in items)
    assert "secret" not in "".join(r.model_dump_json() for r in items)
    left = [p for p in tmp_path.rglob("*") if p.is_file() and p != data]
    assert not [p for p in left if b"Which?" in p.read_bytes()]  # nor do questions stay in the run's folder


def test_an_empty_data_set_is_refused_while_planning(tmp_path):
    data = tmp_path / "empty.jsonl"
    data.write_text("\n")
    with pytest.raises(UsageError, match="no rows"):
        run_units(scope_with(data), tmp_path, tasks_only, check="evals")


def test_a_record_says_how_each_arm_ran_the_task(tmp_path):
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    scope = scope_with(data, task_repeats=2)
    records = run_units(scope, tmp_path, tasks_only, check="evals", target=Oracle(ROWS, right=3))
    runs = [r for r in records if isinstance(r, EvalTaskRecord)]
    assert [r.arm for r in runs] == ["stock", "optimized"]
    assert {(r.source, r.items, r.repeats, r.temperature, r.chat_template_sha256) for r in runs} == {
        ("file:sums.jsonl", 4, 2, 1.0, None)
    }
    assert runs[0].rows_sha256 == runs[1].rows_sha256
    items = [r for r in records if isinstance(r, EvalItemRecord)]
    assert all(r.second_score == r.score for r in items)
    result = GATES["evals.task_scores"](scope, records)
    assert result.verdict == "inconclusive"
    assert "no step of the optimised arm ran specialised" in result.reason  # this engine keeps no ledger


def test_repeats_use_other_seeds_and_arms_the_same(toy_records, tmp_path):
    tasks = [{"name": "aime", "task": "aime25", "generated": True}]
    tiers = {"smoke": {"minutes": 1, "task_items": 4, "task_repeats": 3, "task_tokens": 12}}
    records = run_units(toy_scope(tasks=tasks, tiers=tiers), tmp_path, tasks_only, check="evals")
    texts = {}
    for r in records:
        if isinstance(r, EvalItemRecord):
            texts.setdefault((r.item, r.repeat), set()).add(r.response)
    assert len(texts) == 12
    assert all(len({frozenset(texts[i, k]) for k in range(3)}) == 3 for i, _ in texts)
    # Sampling noise is the seed's: on the toy the paths agree to the last bit or nearly so.
    assert sum(len(own) == 1 for own in texts.values()) >= 9


def test_a_pinned_chat_template_must_be_the_engines(tmp_path):
    tasks = [{"name": "aime", "task": "aime25", "generated": True, "chat_template_sha256": "ab"}]
    with pytest.raises(UsageError, match="chat template has SHA-256 None; expected ab"):
        run_units(toy_scope(tasks=tasks), tmp_path, tasks_only, check="evals")
