"""Bad rows are named by file, row and field; generated rows are reproducible and answer themselves."""

import json
import re

import pytest

from fasttrack.errors import UsageError
from fasttrack.manifest.model import TaskConfig
from fasttrack.tasks import generate
from fasttrack.tasks.data import check_source, read_rows, rows_for

GOOD = {
    "aime25": {"problem": "p", "answer": "7"},
    "gpqa_diamond": {"question": "q", "options": ["a", "b", "c", "d"], "answer": 2},
    "mrcr": {"prompt": "p", "answer": "xy z", "prefix": "xy"},
}


def task(kind, path):
    return TaskConfig(name="t", task=kind, data=str(path))


def write(tmp_path, *rows):
    path = tmp_path / "data.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("kind", GOOD)
def test_good_rows_get_ids(kind, tmp_path):
    rows = read_rows(task(kind, write(tmp_path, GOOD[kind], {**GOOD[kind], "id": "mine"})))
    assert [r["id"] for r in rows] == ["0", "mine"]


@pytest.mark.parametrize(
    ("kind", "rows", "message"),
    [
        ("aime25", [{"problem": "p"}], r"data\.jsonl:1: answer is missing; expected columns problem, answer"),
        ("aime25", [GOOD["aime25"], {"problem": "", "answer": "1"}], r"data\.jsonl:2: problem is empty"),
        ("aime25", [{**GOOD["aime25"], "id": 1}, {**GOOD["aime25"], "id": "1"}], r"data\.jsonl:2: id '1' occurs twice"),
        ("aime25", ["{not json"], r"data\.jsonl:1: not JSON"),
        ("aime25", ["[1]"], r"data\.jsonl:1: not an object"),
        ("aime25", [], r"data\.jsonl: no rows"),
        ("gpqa_diamond", [{**GOOD["gpqa_diamond"], "options": ["a", "a", "c", "d"]}], "four different"),
        ("gpqa_diamond", [{**GOOD["gpqa_diamond"], "answer": 4}], "answer is 4"),
        ("mrcr", [{"prompt": "p", "answer": "a"}], "prefix is missing"),
    ],
)
def test_bad_rows_are_named(kind, rows, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        check_source(task(kind, write(tmp_path, *rows)))


def test_bytes_that_are_no_text_and_missing_files(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"problem": "\xff"}\n')
    with pytest.raises(UsageError, match="byte 13 is not UTF-8"):
        check_source(task("aime25", path))
    with pytest.raises(UsageError, match="no such file"):
        check_source(task("aime25", tmp_path / "none.jsonl"))
    with pytest.raises(UsageError, match="neither data nor generated"):
        check_source(TaskConfig(name="t", task="aime25"))


@pytest.mark.parametrize("make", [generate.aime, generate.gpqa, generate.mrcr])
def test_generated_rows_depend_on_the_seed_alone_and_are_a_prefix_of_more(make):
    assert make(6, 1) == make(6, 1)
    assert make(6, 1) == make(9, 1)[:6]
    assert make(6, 1) != make(6, 2)
    assert len({json.dumps({k: v for k, v in row.items() if k != "id"}) for row in make(40, 1)}) == 40


def test_generated_aime_answers_are_what_the_steps_give():
    for row in generate.aime(20, 3):
        value = int(re.match(r"Start with (\d+)", row["problem"])[1])
        for kind, n in re.findall(r"Then (add|multiply by|square and add) (\d+)", row["problem"]):
            value = {"add": value + int(n), "multiply by": value * int(n), "square and add": value**2 + int(n)}[kind]
            value %= 1000
        assert row["answer"] == str(value)


def test_generated_gpqa_has_the_right_option_at_every_place():
    rows = generate.gpqa(40, 3)
    for row in rows:
        mass, speed = map(int, re.findall(r"(\d+) (?:kg|m/s)", row["question"]))
        assert row["options"][row["answer"]] == str(mass * speed**2 // 2)
        assert len(set(row["options"])) == 4
    assert {row["answer"] for row in rows} == {0, 1, 2, 3}


@pytest.mark.parametrize("needles", [2, 4, 8])
def test_generated_mrcr_asks_for_one_of_its_needles_and_respects_the_length(needles):
    for row in generate.mrcr(8, 3, needles=(needles,), max_chars=3000):
        assert len(row["prompt"]) <= 3000
        ask = re.search(r"to the (\w+) number (\d+) about a (\w+) and", row["prompt"])
        form, number, noun = ask[1], int(ask[2]), ask[3]
        said = re.findall(rf"User: Write a {form} about a {noun}\.\nAssistant: (.*)", row["prompt"])
        assert len(said) == needles
        assert row["answer"] == f"{row['prefix']} {said[number - 1]}"


def test_items_are_capped(tmp_path):
    rows = [{"problem": str(i), "answer": "1"} for i in range(5)]
    assert len(rows_for(task("aime25", write(tmp_path, *rows)), items=3, seed=0, max_chars=100)) == 3
