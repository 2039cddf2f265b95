"""The journal survives kills: torn lines are passed over, lost attempts are told."""

import json
from pathlib import Path

import pytest

from fasttrack.errors import UsageError
from fasttrack.run.journal import Journal, read_journal
from fasttrack.run.seeds import Seeds


def test_attempts_finished_and_lost(tmp_path: Path):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.add("started", "a", 1)
    journal.add("failed", "a", 1, error="boom")
    journal.add("started", "a", 2)
    journal.add("finished", "a", 2, records=3)
    journal.add("started", "b", 1)
    history = read_journal(journal.path)
    assert history.attempts == {"a": 2, "b": 1}
    assert history.finished == {"a": 2}
    assert [(e["unit"], e["event"]) for e in history.failures] == [("a", "failed"), ("b", "killed")]


def test_a_torn_line_costs_nothing_else(tmp_path: Path):
    path = tmp_path / "journal.jsonl"
    Journal(path).add("started", "a", 1)
    with path.open("a") as file:
        file.write('{"attempt": 1, "event": "fini')
    Journal(path).add("started", "a", 2)
    history = read_journal(path)
    assert history.attempts == {"a": 2}
    assert len(history.events) == 2


@pytest.mark.parametrize("line", ['{"unit": "a"}', '{"unit": "a", "attempt": 1, "event": "paused"}'])
def test_a_malformed_entry_is_named(tmp_path: Path, line: str):
    path = tmp_path / "journal.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UsageError, match=r"journal\.jsonl:1"):
        read_journal(path)


def test_seeds_depend_on_head_manifest_nonce_and_purpose():
    base = Seeds("a" * 40, "b" * 64)
    others = [
        Seeds("c" * 40, "b" * 64),
        Seeds("a" * 40, "d" * 64),
        Seeds("a" * 40, "b" * 64, "n"),
        Seeds(None, "b" * 64),
    ]
    assert len({s.root for s in [base, *others]}) == 5
    assert base.seed("x") == Seeds("a" * 40, "b" * 64).seed("x") != base.seed("y")
    assert json.loads(json.dumps(base.to_json()))["root"] == base.root
