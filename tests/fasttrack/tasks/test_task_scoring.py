"""Golden transcripts: the right score stands beside each response, both scorers give it."""

import importlib.util
import json
from difflib import SequenceMatcher
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fasttrack.tasks
from fasttrack.tasks.generate import aime
from fasttrack.tasks.second import second_choice, second_score, similarity
from fasttrack.tasks.text import answer_part, boxes

GOLDEN = Path(__file__).parents[2] / "golden_transcripts"
METRIC = {"aime25": "exact_match", "gpqa_diamond": "exact_match", "mrcr": "ratio"}
TRANSCRIPTS = [
    pytest.param(task, json.loads(line), id=f"{task}: {json.loads(line)['name']}")
    for task in METRIC
    for line in (GOLDEN / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()
]


def scorer(name):
    """Scorers are loaded by path, as lm-eval does."""
    path = Path(fasttrack.tasks.__file__).parent / name / "scoring.py"
    spec = importlib.util.spec_from_file_location(f"scoring_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.process_results


@pytest.mark.parametrize(("task", "transcript"), TRANSCRIPTS)
def test_first_scorer(task, transcript):
    found = scorer(task)(transcript["doc"], [transcript["response"]])
    assert found[METRIC[task]] == pytest.approx(transcript["score"], abs=1e-9), transcript["why"]
    assert found["parsed"] == transcript["parsed"], transcript["why"]


@pytest.mark.parametrize(("task", "transcript"), TRANSCRIPTS)
def test_second_scorer(task, transcript):
    found = second_score(task, transcript["doc"], transcript["response"])
    assert found == pytest.approx(transcript["score"], abs=1e-9), transcript["why"]


def test_there_are_transcripts_of_every_kind():
    assert len(TRANSCRIPTS) > 80
    for task in METRIC:
        scores = {bool(p.values[1]["score"]) for p in TRANSCRIPTS if p.values[0] == task}
        assert scores == {True, False}


PIECES = [
    *(
        "\\boxed{",
        "\\fbox{",
        "}",
        "{",
        "\\text{",
        "\\mathrm {",
        "\\}",
        "42",
        "042",
        "4",
        ",",
        ".",
        ".0",
        "-",
        "−",
        "n = ",
    ),
    *(
        "A",
        "b",
        "(B)",
        "B.",
        "a",
        " ",
        "\\,",
        "$",
        "^\\circ",
        "°",
        "\u200b",
        "４２",
        "\\",
        "boxed{",
        "cm",
        "=",
        "~",
        "%",
    ),
    *("<think>", "</think>", "◁think▷", "◁/think▷", "<|open|>think<|sep|>", "<|close|>think<|sep|>", "\n"),
    *("<|open|>response<|sep|>", "<|end_of_msg|>", "k9x2ab"),
]


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_the_scorers_agree_on_anything(response):
    """Whatever the pieces of the traps add up to, two programs written apart read it alike."""
    for task, docs in {
        "aime25": [{"answer": "42"}, {"answer": "4"}, {"answer": "-42"}],
        "gpqa_diamond": [{"answer": 0}, {"answer": 1}],
        "mrcr": [{"prefix": "k9x2ab", "answer": "k9x2ab 42 B. cm"}],
    }.items():
        for doc in docs:
            first = scorer_of[task](doc, [response])[METRIC[task]]
            assert first == pytest.approx(second_score(task, doc, response), abs=1e-12)


scorer_of = {task: scorer(task) for task in METRIC}


@settings(max_examples=300, deadline=None)
@given(st.text("ab c", max_size=60), st.text("ab c", max_size=60), st.integers(1, 8))
def test_similarity_is_difflibs(a, b, times):
    for one, other in ((a, b), (a * times, b * times)):
        assert similarity(one, other) == pytest.approx(SequenceMatcher(None, one, other).ratio(), abs=1e-12)


def test_equally_likely_options_go_to_the_first():
    assert second_choice([-1.0, -1.0, -2.0, -3.0], 0) == 1
    assert second_choice([-1.0, -0.5, -2.0, -3.0], 0) == 0


def test_worked_solutions_of_generated_problems_score_one():
    for row in aime(20, 5):
        assert scorer("aime25")(row, [row["solution"]]) == {"exact_match": 1.0, "parsed": 1.0}
        assert second_score("aime25", row, row["solution"]) == 1


def test_boxes_and_reasoning():
    assert boxes(r"\boxed{a\boxed{b}} \boxed{c") == [r"a\boxed{b}", "b"]
    assert answer_part("x</think>y") == "y"
    assert answer_part("<think>x") is None
