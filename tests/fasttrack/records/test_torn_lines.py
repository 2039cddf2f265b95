"""A kill may leave half a line anywhere; a whole line that is no record is still an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_run import engine

from fasttrack.errors import UsageError
from fasttrack.records import RecordReader, RecordWriter


def test_half_lines_are_skipped_wherever_they_were_torn(tmp_path: Path):
    line = engine(1, "stock", "auto").model_dump_json()
    braces = [place for place, character in enumerate(line[:-1]) if character == "}"]
    assert braces
    for place in (1, len(line) // 2, *(brace + 1 for brace in braces)):
        path = tmp_path / str(place) / "a.jsonl"
        path.parent.mkdir()
        path.write_text(line[:place])  # the kill
        with RecordWriter(path) as writer:
            writer.write(engine(1, "stock", "auto"))
        found = list(RecordReader(path.parent, {"isolation/cell/decode/tp2/r1/dl0/dcp1/short": 1}))
        assert found == [engine(1, "stock", "auto")]


def test_a_whole_line_that_is_no_record_is_an_error(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"type": "nonsense"}\n')
    with pytest.raises(UsageError, match=r"a.jsonl:1: .*expected a record"):
        list(RecordReader(tmp_path, {}))
