"""Bad rows are named by file, row and field; which rows run, and in which order, is nobody's choice."""

import csv
import json
from pathlib import Path

import pytest

from fasttrack.errors import UsageError
from fasttrack.manifest.model import TaskConfig
from fasttrack.tasks.data import bin_of, check_source, count_rows, rows_for
from fasttrack.tasks.rows import option_order
from fasttrack.tasks.sources import HUB, data_digest, scan, source_of

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
GOOD = {
    "aime25": {"problem": "p", "answer": "7"},
    "gpqa_diamond": {"question": "q", "options": ["a", "b", "c", "d"], "answer": 2},
    "mrcr": {"prompt": "p", "answer": "xy z", "prefix": "xy"},
}
PUBLISHED = {
    "aime25": {"problem": "p", "answer": "007"},
    "gpqa_diamond": {
        "Record ID": "rec1",
        "Question": "q",
        "Correct Answer": "right",
        "Incorrect Answer 1": "x",
        "Incorrect Answer 2": "y",
        "Incorrect Answer 3": "z\n",
        "High-level domain": "Physics",
    },
    "mrcr": {"prompt": json.dumps(TURNS), "answer": "xy b", "random_string_to_prepend": "xy", "n_needles": 4},
}


def task(kind, path, **more):
    return TaskConfig(name="t", task=kind, data=str(path), **more)


def write(tmp_path, rows, suffix=".jsonl"):
    path = tmp_path / f"data{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    elif suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
            writer.writeheader()
            writer.writerows(rows)
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("kind", GOOD)
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_published_rows_have_one_shape_whatever_the_format(kind, suffix, tmp_path):
    (row,) = scan(task(kind, write(tmp_path, [PUBLISHED[kind]], suffix)))
    if kind == "aime25":
        assert row == {"id": "0", "problem": "p", "answer": "7"}
    elif kind == "gpqa_diamond":
        assert row["id"] == "rec1"
        assert sorted(row["options"]) == ["right", "x", "y", "z"]
        assert row["options"][row["answer"]] == "right"
    else:
        assert (row["messages"], row["prefix"], row["needles"]) == (TURNS, "xy", 4)
        assert row["prompt"] == "User: a\nAssistant: b\nUser: c\nAssistant:"


@pytest.mark.parametrize("kind", GOOD)
def test_good_rows_get_ids(kind, tmp_path):
    rows = list(scan(task(kind, write(tmp_path, [GOOD[kind], {**GOOD[kind], "id": "mine"}]))))
    assert [r["id"] for r in rows] == ["0", "mine"]


AIME, GPQA, MRCR = (GOOD[kind] for kind in ("aime25", "gpqa_diamond", "mrcr"))
RAW = PUBLISHED["gpqa_diamond"]


@pytest.mark.parametrize(
    ("kind", "rows", "message"),
    [
        ("aime25", [{"problem": "p"}], r"data\.jsonl:1: answer is missing; expected a column answer"),
        ("aime25", [AIME, {"problem": " ", "answer": "1"}], r"data\.jsonl:2: problem is empty"),
        ("aime25", [AIME, {"problem": "p", "answer": None}], r"data\.jsonl:2: answer is empty"),
        ("aime25", [{**AIME, "answer": "x"}], r"data\.jsonl:1: answer is 'x'; expected an integer"),
        ("aime25", [{**AIME, "problem": 3}], r"data\.jsonl:1: problem is int; expected text"),
        ("aime25", [{**AIME, "id": 1}, {**AIME, "id": "1"}], r"data\.jsonl:2: id '1' occurs twice, first in .*:1"),
        ("aime25", ["{not json"], r"data\.jsonl:1: not JSON"),
        ("aime25", ["[1]"], r"data\.jsonl:1: not an object"),
        ("aime25", [], r"data\.jsonl: no rows"),
        ("gpqa_diamond", [{**GPQA, "options": ["a", "b", "a ", "d"]}], r":1: options\[2\] equals options\[0\]"),
        ("gpqa_diamond", [{**GPQA, "options": ["a", "b", "c"]}], "options are not four texts"),
        ("gpqa_diamond", [{**GPQA, "answer": 4}], r"answer is 4; expected the index of the right option, 0 to 3"),
        ("gpqa_diamond", [{**RAW, "Incorrect Answer 2": "x"}], ":1: Incorrect Answer 2 equals Incorrect Answer 1"),
        ("gpqa_diamond", [{**RAW, "Incorrect Answer 3": " right"}], "Incorrect Answer 3 equals Correct Answer"),
        ("gpqa_diamond", [{**RAW, "Correct Answer": ""}], ":1: Correct Answer is empty"),
        ("mrcr", [{"prompt": "p", "answer": "a"}], "prefix is missing"),
        ("mrcr", [{**MRCR, "prefix": "other"}], "answer does not start with the prefix"),
        ("mrcr", [{**MRCR, "prompt": "[1, 2"}], "prompt is not JSON"),
        ("mrcr", [{**MRCR, "prompt": json.dumps(TURNS[:2])}], "does not end with the user's turn"),
        ("mrcr", [{**MRCR, "prompt": json.dumps([{"role": "tool", "content": "x"}])}], "malformed message"),
    ],
)
def test_bad_rows_are_named(kind, rows, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        check_source(task(kind, write(tmp_path, rows)))


def test_bad_cells_of_tables_are_named(tmp_path):
    with pytest.raises(UsageError, match=r"data\.csv:3: answer is empty"):
        check_source(task("aime25", write(tmp_path, [AIME, {**AIME, "answer": ""}], ".csv")))
    with pytest.raises(UsageError, match=r"data\.parquet: row 1: answer is empty"):
        check_source(task("aime25", write(tmp_path, [AIME, {**AIME, "answer": ""}], ".parquet")))
    (tmp_path / "short.csv").write_text("problem,answer\np,1\nq\n")
    with pytest.raises(UsageError, match=r"short\.csv:3: the row does not have 2 fields"):
        check_source(task("aime25", tmp_path / "short.csv"))
    (tmp_path / "no.parquet").write_text("no")
    with pytest.raises(UsageError, match=r"no\.parquet: not a Parquet file"):
        check_source(task("aime25", tmp_path / "no.parquet"))


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_bytes_that_are_no_text_are_named_by_line(suffix, tmp_path):
    path = tmp_path / f"data{suffix}"
    path.write_bytes((b'{"problem": "a", "answer": 1}' if suffix == ".jsonl" else b"problem,answer") + b'\n"\xff", 1\n')
    with pytest.raises(UsageError, match=rf"data\{suffix}:2: byte 1 is not UTF-8"):
        check_source(task("aime25", path))


def test_text_of_a_parquet_file_that_is_not_utf8_is_named_by_row_and_column(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = pyarrow.array([b"fine", b"\xff"], pyarrow.binary()).view(pyarrow.string())
    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.table({"problem": texts, "answer": ["1", "2"]}), path)
    with pytest.raises(UsageError, match=r"data\.parquet: row 1: problem is not UTF-8"):
        check_source(task("aime25", path))


def test_files_that_are_not_there_or_not_data(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        check_source(task("aime25", tmp_path / "none.jsonl"))
    (tmp_path / "data.xlsx").write_text("")
    with pytest.raises(UsageError, match=r"unknown format '\.xlsx'; expected one of \.jsonl, \.csv, \.parquet"):
        check_source(task("aime25", tmp_path / "data.xlsx"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no data file"):
        check_source(task("aime25", tmp_path / "empty"))


def test_a_folder_of_files_is_one_data_set(tmp_path):
    for part in (0, 1):
        (tmp_path / f"2needle_{part}.jsonl").write_text(json.dumps(MRCR) + "\n")
    assert [row["id"] for row in scan(task("mrcr", tmp_path))] == ["2needle_0-0", "2needle_1-0"]
    assert data_digest(task("mrcr", tmp_path)) != data_digest(task("mrcr", tmp_path / "2needle_0.jsonl"))


def test_option_order_is_a_function_of_row_and_seed():
    orders = {(row, seed): tuple(option_order(row, seed)) for row in "abcdefgh" for seed in range(4)}
    assert orders == {key: tuple(option_order(*key)) for key in orders}
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders.values())
    assert len(set(orders.values())) > 12
    assert option_order("row-1", 0) == [2, 1, 3, 0]  # frozen: a change would unpair old runs and new ones


def test_option_order_reaches_the_rows_and_keeps_the_right_answer(tmp_path):
    path = write(tmp_path, [RAW])
    shown = {seed: next(iter(scan(task("gpqa_diamond", path), order_seed=seed))) for seed in range(6)}
    assert len({tuple(row["options"]) for row in shown.values()}) > 2
    assert all(row["options"][row["answer"]] == "right" for row in shown.values())


def test_which_rows_run_is_a_function_of_the_seed_evenly_over_needles(tmp_path):
    rows = [{**MRCR, "id": str(i), "needles": (2, 4, 8)[i // 20]} for i in range(60)]
    config = task("mrcr", write(tmp_path, rows))
    picked = {seed: [r["id"] for r in rows_for(config, items=9, seed=seed, max_chars=0)] for seed in range(3)}
    assert all(len(ids) == 9 for ids in picked.values())
    assert picked[0] == [r["id"] for r in rows_for(config, items=9, seed=0, max_chars=0)]
    assert picked[0] != picked[1]
    for ids in picked.values():
        assert ids == sorted(ids, key=int)
        assert [sum(int(i) // 20 == group for i in ids) for group in range(3)] == [3, 3, 3]
    assert len(rows_for(config, items=1000, seed=0, max_chars=0)) == 60
    assert len(rows_for(task("mrcr", config.data, needles=[4]), items=1000, seed=0, max_chars=0)) == 20


def test_sizes_of_published_sets_are_known_without_a_network():
    assert count_rows(TaskConfig(name="t", task="aime25")) == 30
    assert count_rows(TaskConfig(name="t", task="gpqa_diamond")) == 198
    assert count_rows(TaskConfig(name="t", task="mrcr")) == 2400
    assert count_rows(TaskConfig(name="t", task="mrcr", needles=[2])) == 800
    assert all(len(hub.revision) == 40 for hub in HUB.values())
    assert source_of(TaskConfig(name="t", task="aime25")).startswith("hub:math-ai/aime25@563bb84")


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def fail(*_, **__):
        raise OSError("no network\nand much more")

    monkeypatch.setattr(hub, "hf_hub_download", fail)
    with pytest.raises(UsageError, match=r"cannot be fetched \(no network\); expected .* HF_TOKEN .* --data t=PATH"):
        list(scan(TaskConfig(name="t", task="gpqa_diamond")))


def test_hub_files_are_asked_for_at_the_pinned_commit(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    asked = []

    def fetch(repository, name, *, repo_type, revision):
        asked.append((repository, name, repo_type, revision))
        return str(write(tmp_path, [RAW], Path(name).suffix))

    monkeypatch.setattr(hub, "hf_hub_download", fetch)
    assert [r["id"] for r in scan(TaskConfig(name="t", task="gpqa_diamond"))] == ["rec1"]
    other = "0" * 40
    list(scan(TaskConfig(name="t", task="gpqa_diamond", revision=other)))
    assert asked == [
        ("Idavidrein/gpqa", "gpqa_diamond.csv", "dataset", HUB["gpqa_diamond"].revision),
        ("Idavidrein/gpqa", "gpqa_diamond.csv", "dataset", other),
    ]


@pytest.mark.parametrize(
    ("tokens", "name"),
    [(1, "<=4096"), (4096, "<=4096"), (4097, "4097-8192"), (8192, "4097-8192"), (1048577, ">1048576")],
)
def test_bins(tokens, name):
    assert bin_of(tokens) == name
