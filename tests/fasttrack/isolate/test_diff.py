"""Reading diffs: every header form, and one clear line for what is no diff."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fasttrack.errors import UsageError
from fasttrack.isolate.diff import MAX_BYTES, parse
from fasttrack.isolate.run import from_diff

GOOD = """diff --git a/a.py b/a.py
index 111..222 100644
--- a/a.py
+++ b/a.py
@@ -1,3 +1,4 @@ def f():
 x = 1
-y = 2
+y = 3
+z = 4
 # end
"""


def test_line_numbers() -> None:
    (change,) = parse(GOOD, "d")
    assert change.added == [(2, "y = 3"), (3, "z = 4")]
    assert change.removed == [(2, "y = 2")]
    assert change.first_line == 2


def test_several_hunks_and_missing_newline() -> None:
    text = GOOD + "@@ -10 +11,2 @@\n-a\n\\ No newline at end of file\n+a\n+b\n\\ No newline at end of file\n"
    (change,) = parse(text + GOOD.replace("a.py", "b.py"), "d")[:1]
    assert [n for n, _ in change.added] == [2, 3, 11, 12]
    assert len(parse(text + GOOD.replace("a.py", "b.py"), "d")) == 2


@pytest.mark.parametrize(
    ("header", "old", "new", "status"),
    [
        ("diff --git a/x b/x\nnew file mode 100644\nindex 0..1\n", "", "x", "added"),
        ("diff --git a/x b/x\ndeleted file mode 100644\nindex 1..0\n", "x", "", "deleted"),
        ("diff --git a/x b/y\nsimilarity index 100%\nrename from x\nrename to y\n", "x", "y", "renamed"),
        ("diff --git a/x b/y\nsimilarity index 90%\ncopy from x\ncopy to y\n", "x", "y", "copied"),
        (
            'diff --git "a/gr\\303\\266\\303\\237e" "b/gr\\303\\266\\303\\237e"\nindex 1..2\n',
            "größe",
            "größe",
            "modified",
        ),
        ("diff --git a/a b.txt b/a b.txt\nindex 1..2\n", "a b.txt", "a b.txt", "modified"),
        ("diff --git a/x b/x\nindex 1..2\nBinary files a/x and b/x differ\n", "x", "x", "modified"),
        (
            "diff --git a/x b/x\nindex 1..2\nGIT binary patch\nliteral 3\nKcmZQzU|?W\n\nliteral 0\nHcmV?d\n\n",
            "x",
            "x",
            "modified",
        ),
        ("--- old/x\t2026-01-01\n+++ new/x\t2026-01-02\n@@ -1 +1 @@\n-a\n+b\n", "old/x", "new/x", "modified"),
        ("--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+b\n", "", "x", "added"),
        ("--- a/x\n+++ /dev/null\n@@ -1 +0,0 @@\n-b\n", "x", "", "deleted"),
    ],
)
def test_headers(header: str, old: str, new: str, status: str) -> None:
    found = parse("From 1234 Mon Sep 17\nSubject: [PATCH] x\n---\n x | 2 +-\n\n" + header + GOOD, "d")
    assert (found[0].old, found[0].new, found[0].status) == (old, new, status)
    assert found[1].path == "a.py"
    assert found[0].binary == ("inary" in header)


def test_windows_line_ends() -> None:
    (change,) = parse(GOOD.replace("\n", "\r\n"), "d")
    assert change.path == "a.py"
    assert len(change.added) == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello\nworld\n", "not a unified diff"),
        ("", "empty diff"),
        (GOOD[: GOOD.index("+z")], "diff ends inside a hunk of a.py"),
        (GOOD.replace("+z = 4\n", "*z = 4\n"), "shorter than its header says"),
        ("diff --cc a.py\nindex 1,2..3\n", "combined diff"),
    ],
)
def test_bad_diffs_give_one_line(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "c.diff"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        from_diff(path, ("a",))
    assert expected in str(error.value)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_huge_diff_is_refused_and_a_large_one_is_not_slow() -> None:
    with pytest.raises(UsageError, match="MiB of diff"):
        parse("x" * (MAX_BYTES + 1), "d")
    lines = "\n".join(f"+line {i}" for i in range(200_000))
    started = time.monotonic()
    (change,) = parse(f"--- /dev/null\n+++ b/big.py\n@@ -0,0 +1,200000 @@\n{lines}\n", "d")
    assert len(change.added) == 200_000
    assert time.monotonic() - started < 10
