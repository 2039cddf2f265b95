"""Generated twins: reproducible, of any size, and right about their own answers."""

import itertools
import json
import re

import pytest

from fasttrack.tasks import generate
from fasttrack.tasks.rows import normalise

MAKERS = {"aime25": generate.aime, "gpqa_diamond": generate.gpqa, "mrcr": generate.mrcr}


@pytest.mark.parametrize("make", MAKERS.values())
def test_rows_depend_on_the_seed_alone_and_are_a_prefix_of_more(make):
    assert make(6, 1) == make(6, 1)
    assert make(6, 1) == make(9, 1)[:6]
    assert make(6, 1) != make(6, 2)
    assert len({json.dumps({k: v for k, v in row.items() if k != "id"}) for row in make(40, 1)}) == 40


@pytest.mark.parametrize("task", MAKERS)
def test_rows_pass_the_checks_of_real_data_unchanged(task):
    for row in MAKERS[task](5, 2):
        checked = normalise(task, row, default_id="x", where="here")
        assert {key: row[key] for key in checked} == checked


def test_aime_answers_are_what_the_steps_give():
    for row in [*generate.aime(20, 3), *generate.aime(3, 3, steps=(200, 300))]:
        value = int(re.match(r"Start with (\d+)", row["problem"])[1])
        for kind, n in re.findall(r"Then (add|multiply by|square and add) (\d+)", row["problem"]):
            value = {"add": value + int(n), "multiply by": value * int(n), "square and add": value**2 + int(n)}[kind]
            value %= 1000
        assert row["answer"] == str(value)
        assert row["solution"].endswith(f"\\boxed{{{value}}}.")


def test_gpqa_has_the_right_option_at_every_place():
    rows = generate.gpqa(40, 3)
    for row in rows:
        mass, speed = map(int, re.findall(r"(\d+) (?:kg|m/s)", row["question"]))
        assert row["options"][row["answer"]] == str(mass * speed**2 // 2)
        assert len(set(row["options"])) == 4
    assert {row["answer"] for row in rows} == {0, 1, 2, 3}


ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


@pytest.mark.parametrize(("needles", "most"), [(2, 3000), (4, 3000), (8, 3000), (8, 200_000)])
def test_mrcr_asks_for_one_of_its_needles_and_fills_the_length(needles, most):
    for row in generate.mrcr(4, 3, needles=(needles,), max_chars=most):
        assert 0.9 * most < len(row["prompt"]) <= most
        ask = re.search(r"to the (\w+) (\w+) about a (\w+) and", row["messages"][-1]["content"])
        wanted, form, noun = ORDINALS.index(ask[1]), ask[2], ask[3]
        turns = row["messages"]
        request = f"Write a {form} about a {noun}."
        said = [b["content"] for a, b in itertools.pairwise(turns) if a["content"] == request]
        assert len(said) == needles
        assert row["answer"] == f"{row['prefix']} {said[wanted]}"
        assert [t["role"] for t in turns[:2]] == ["user", "assistant"]
