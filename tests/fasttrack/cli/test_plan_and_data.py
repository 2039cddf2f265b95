"""``plan`` prints what the evaluation can see; ``--data`` reaches the tasks, and bad data is one line and exit 2."""

import json
import time

import pytest
import yaml
from fake_target import TARGET
from harness import TOY

from fasttrack.cli import main as cli
from fasttrack.errors import UsageError
from fasttrack.manifest.model import Manifest
from fasttrack.tasks.sources import bind_data

PUBLIC = [
    {"name": "aime25", "task": "aime25", "estimand": "benchmark", "assumed_mean": 0.93, "assumed_tokens": 20000},
    {"name": "gpqa", "task": "gpqa_diamond", "assumed_mean": 0.85, "assumed_tokens": 8000},
    {"name": "mrcr", "task": "mrcr", "assumed_mean": 0.6, "assumed_tokens": 2000},
]
TIER = {"minutes": 1, "task_items": 400, "task_repeats": 32, "task_tokens": 32768, "tokens_per_s": 2000}


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys):
    """Runs a command on a toy manifest with these changes; gives exit code, standard output and standard error."""
    monkeypatch.setattr("fasttrack.run.runner.find_target", lambda name, **_: TARGET)
    monkeypatch.chdir(tmp_path)

    def run(verb, *arguments, **changes):
        gates = {"required": ["evals.task_scores"]}
        manifest = {**TOY, "gates": gates, "tasks": PUBLIC, "tiers": {"smoke": TIER}, **changes}
        (tmp_path / "toy.yaml").write_text(yaml.safe_dump(manifest))
        code = cli.run([verb, "toy.yaml", *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_plan_prints_the_odds_of_the_whole_verdict_quickly(shell):
    started = time.monotonic()
    code, out, _ = shell("plan", "--json")
    assert time.monotonic() - started < 10
    assert code == 0
    ahead = json.loads(out)["task_scores"]
    sizes = {t["name"]: (t["questions"], t["repeats"], t["estimand"]) for t in ahead["tasks"]}
    assert sizes == {
        "aime25": (30, 32, "benchmark"),
        "gpqa": (198, 32, "population"),
        "mrcr": (400, 32, "population"),
    }
    assert 0.3 < ahead["unchanged"]["pass"] < 0.9
    assert ahead["pass_when_one_task_lost_2_points"] <= 0.057
    assert ahead["with_needed_repeats_unchanged"]["pass"] > 0.88
    assert ahead["with_needed_repeats_pass_when_one_task_lost_2_points"] <= 0.057
    gpqa = ahead["tasks"][1]
    assert gpqa["tokens"] == 2 * 198 * 32 * 8000
    assert gpqa["seconds"] == gpqa["tokens"] / 2000
    assert gpqa["needed_tokens"] == 2 * 198 * gpqa["needed_repeats"] * 8000


def test_plan_in_words(shell):
    code, out, _ = shell("plan")
    assert code == 0
    assert "All tasks together (the verdict needs all of them):" in out
    assert "nothing changed: pass" in out
    assert "one task lost 2 points, where it shows least: pass" in out
    assert "with the repeats named above, nothing changed: pass 9" in out


def test_plan_says_when_no_number_of_repeats_would_do(shell):
    few = [{"name": "aime25", "task": "aime25"}]
    code, out, _ = shell("plan", tasks=few)
    assert code == 0
    assert "no number of repeats reaches 0.9: too few questions in aime25" in out
    assert (
        "optional here" in shell("plan", gates={"required": ["evals.fidelity"], "optional": ["evals.task_scores"]})[1]
    )
    assert "task_scores" not in shell("plan", gates={"required": ["evals.fidelity"]})[1]


def test_data_of_the_command_line_wins_and_is_counted(shell, tmp_path):
    rows = [{"problem": f"p{i}", "answer": i} for i in range(7)]
    (tmp_path / "aime.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = shell("plan", "--json", "--data", "aime25=aime.jsonl")
    assert code == 0
    assert json.loads(out)["task_scores"]["tasks"][0]["questions"] == 7


BAD = {
    "missing.jsonl": ('{"problem": "p"}\n', "missing.jsonl:1: answer is missing"),
    "double.jsonl": ('{"id": 1, "problem": "p", "answer": 1}\n' * 2, "double.jsonl:2: id '1' occurs twice"),
    "empty.csv": ("problem,answer\np,\n", "empty.csv:2: answer is empty"),
    "latin.jsonl": ('{"problem": "\xe9", "answer": 1}\n', "latin.jsonl:1: byte 13 is not UTF-8"),
    "none.jsonl": (None, "--data aime25=none.jsonl: no such file"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("verb", ["plan", "validate"])
def test_bad_data_is_one_line_exit_2_and_no_run(shell, tmp_path, verb, name):
    text, words = BAD[name]
    if text is not None:
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    code, _, err = shell(verb, "--data", f"aime25={name}")
    assert code == 2
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_equal_options_are_named(shell, tmp_path):
    row = {"question": "q", "options": ["a", "b", "c", "b"], "answer": 0}
    (tmp_path / "gpqa.jsonl").write_text(json.dumps(row) + "\n")
    code, _, err = shell("validate", "--data", "gpqa=gpqa.jsonl")
    assert (code, len(err.strip().splitlines())) == (2, 1)
    assert "gpqa.jsonl:1: options[3] equals options[1]" in err


@pytest.mark.parametrize("given", ["aime25", "=x", "aime25=", "moon=toy.yaml"])
def test_malformed_options_are_one_line(shell, given):
    code, _, err = shell("plan", "--data", given)
    assert code == 2
    assert "--data" in err
    assert len(err.strip().splitlines()) == 1


def manifest(*tasks):
    return Manifest.model_validate({**TOY, "tasks": list(tasks)})


def test_paths_of_the_manifest_are_relative_to_it_and_given_ones_to_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_text("")
    both = manifest(
        {"name": "one", "task": "aime25", "data": "data/a.jsonl"}, {"name": "two", "task": "mrcr", "generated": True}
    )
    bound = bind_data(both, {"mrcr": "mine.jsonl"}, tmp_path / "configs")
    assert [t.data for t in bound.tasks] == [
        str(tmp_path / "configs/data/a.jsonl"),
        str(tmp_path / "mine.jsonl"),
    ]
    assert [t.generated for t in bound.tasks] == [False, False]
    twice = manifest(*({"name": n, "task": "aime25", "generated": True} for n in ("one", "two")))
    with pytest.raises(UsageError, match="'aime25' names 2 tasks; expected one of: one, two"):
        bind_data(twice, {"aime25": "mine.jsonl"}, tmp_path)
    assert bind_data(twice, {"two": "mine.jsonl"}, tmp_path).tasks[0].generated


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ({"task": "aime25", "generated": True, "data": "x"}, "exclude each other"),
        ({"task": "aime25", "generated": True, "revision": "0" * 40}, "revision is for data of the hub"),
        ({"task": "aime25", "revision": "main"}, "pattern"),
        ({"task": "mrcr", "style": "choice"}, "style choice is for gpqa_diamond"),
        ({"task": "aime25", "estimand": "benchmark", "temperature": 0}, "temperature above 0"),
    ],
)
def test_contradictions_of_a_task_are_refused(task, words):
    with pytest.raises(ValueError, match=words):
        manifest({"name": "t", **task})


def test_how_a_task_runs():
    base = manifest({"name": "a", "task": "aime25"}, {"name": "b", "task": "aime25", "estimand": "benchmark"})
    runs = [base.task_run(task, "smoke") for task in base.tasks]
    assert [(r.items, r.repeats, r.max_tokens, r.temperature) for r in runs] == [(3, 1, 16, 0.0), (3, 1, 16, 1.0)]
    own = manifest({"name": "a", "task": "aime25", "items": 9, "repeats": 4, "max_tokens": 5, "temperature": 0.6})
    assert own.task_run(own.tasks[0], "smoke").model_dump() == {
        "items": 9,
        "repeats": 4,
        "max_tokens": 5,
        "temperature": 0.6,
    }
