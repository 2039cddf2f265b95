"""Unified diffs, as git and others write them, to file changes with line numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from fasttrack.errors import UsageError

MAX_BYTES = 64 << 20

_GIT = re.compile(r'diff --git (?:"(?P<qa>(?:[^"\\]|\\.)*)"|(?P<a>.*?)) (?:"(?P<qb>(?:[^"\\]|\\.)*)"|(?P<b>\S.*))$')
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_BINARY = re.compile(r"Binary files (.*) and (.*) differ$")
_MODE_SUBMODULE = "160000"


@dataclass
class Hunk:
    """``lines``: (' ', '+' or '-', line number in the old file or 0, in the new file or 0, text)."""

    old_start: int
    new_start: int
    lines: list[tuple[str, int, int, str]] = field(default_factory=list)


@dataclass
class FileChange:
    """``status``: added, deleted, modified, renamed, copied. ``old`` and ``new`` are paths, '' when absent."""

    old: str
    new: str
    status: str = "modified"
    binary: bool = False
    submodule: bool = False
    mode: str = ""  #: "100644 -> 100755" when the mode changed
    hunks: list[Hunk] = field(default_factory=list)

    @property
    def path(self) -> str:
        """The path after the change, or the path that went away."""
        return self.new or self.old

    @property
    def paths(self) -> list[str]:
        """Every path the change touches: a rename touches two."""
        both = [p for p in (self.old, self.new) if p]
        return both[-1:] if self.status == "copied" else list(dict.fromkeys(both))

    @property
    def added(self) -> list[tuple[int, str]]:
        return [(n, text) for h in self.hunks for sign, _, n, text in h.lines if sign == "+"]

    @property
    def removed(self) -> list[tuple[int, str]]:
        return [(o, text) for h in self.hunks for sign, o, _, text in h.lines if sign == "-"]

    @property
    def first_line(self) -> int:
        """First line of the new file that changed; of the old one when the file only lost lines; 0 without hunks."""
        for numbers in ([n for n, _ in self.added], [o for o, _ in self.removed]):
            if numbers:
                return numbers[0]
        return 0


def parse(text: str, origin: str) -> list[FileChange]:
    """Every file a diff changes. Raises :class:`UsageError` when the text is no diff, or a truncated one."""
    if len(text) > MAX_BYTES:
        raise UsageError(f"{len(text) >> 20} MiB of diff", where=origin, expected=f"at most {MAX_BYTES >> 20} MiB")
    parser = _Parser(text.split("\n"), origin)
    found = parser.run()
    if not found and text.strip():
        raise UsageError("not a unified diff", where=origin, expected="the output of git diff or diff -u")
    return found


class _Parser:
    def __init__(self, lines: list[str], origin: str) -> None:
        self.lines, self.origin, self.at = lines, origin, 0
        self.found: list[FileChange] = []

    def run(self) -> list[FileChange]:
        while self.at < len(self.lines):
            line = self.lines[self.at]
            if line.startswith("diff --git "):
                self._git_header(line)
            elif line.startswith(("diff --cc ", "diff --combined ")):
                self._fail("a merge's combined diff", "a diff between two trees")
            elif line.startswith("--- ") and self._peek(1).startswith("+++ ") and self._peek(2).startswith("@@ "):
                old, new = _plain(line[4:]), _plain(self._peek(1)[4:])
                status = "added" if not old else "deleted" if not new else "modified"
                self.at += 2
                self.found.append(FileChange(old, new, status))
                self._hunks(self.found[-1])
            else:
                self.at += 1
        return self.found

    def _peek(self, ahead: int) -> str:
        k = self.at + ahead
        return self.lines[k] if k < len(self.lines) else ""

    def _fail(self, what: str, expected: str) -> None:
        raise UsageError(what, where=f"{self.origin}:{self.at + 1}", expected=expected)

    def _git_header(self, line: str) -> None:
        old, new = _header_paths(line.rstrip("\r"))
        change = FileChange(old, new)
        self.found.append(change)
        self.at += 1
        while self.at < len(self.lines):
            line = self.lines[self.at].rstrip("\r")
            word, _, rest = line.partition(" ")
            if line.startswith("new file mode "):
                change.status, change.old = "added", ""
                change.submodule |= line.endswith(_MODE_SUBMODULE)
            elif line.startswith("deleted file mode "):
                change.status, change.new = "deleted", ""
                change.submodule |= line.endswith(_MODE_SUBMODULE)
            elif line.startswith("old mode "):
                change.mode = rest.removeprefix("mode ")
            elif line.startswith("new mode "):
                change.mode = f"{change.mode} -> {rest.removeprefix('mode ')}"
            elif line.startswith(("rename from ", "copy from ")):
                change.status = "renamed" if word == "rename" else "copied"
                change.old = _unquote(rest.removeprefix("from "))
            elif line.startswith(("rename to ", "copy to ")):
                change.new = _unquote(rest.removeprefix("to "))
            elif word == "index":
                change.submodule |= line.endswith(" " + _MODE_SUBMODULE)
            elif word in ("similarity", "dissimilarity"):
                pass
            elif _BINARY.match(line) or line == "GIT binary patch":
                change.binary = True
            elif line.startswith("--- ") and self._peek(1).startswith("+++ "):
                self.at += 2
                self._hunks(change)
                return
            elif line.startswith("@@ "):
                self._hunks(change)
                return
            elif line.startswith(("diff --git ", "diff --cc ", "--- ")) or not (change.binary or line == ""):
                return
            self.at += 1

    def _hunks(self, change: FileChange) -> None:
        while (m := _HUNK.match(self._peek(0))) is not None:
            o, oc, n, nc = (int(x) if x is not None else 1 for x in m.groups())
            hunk = Hunk(o, n)
            change.hunks.append(hunk)
            self.at += 1
            left_old, left_new = oc, nc
            while left_old > 0 or left_new > 0:
                if self.at >= len(self.lines) or (self.at == len(self.lines) - 1 and self.lines[self.at] == ""):
                    self._fail(f"diff ends inside a hunk of {change.path}", "a complete diff")
                line = self.lines[self.at]
                sign, text = (line[:1] or " "), line[1:]
                if sign == "\\":
                    self.at += 1
                    continue
                if sign not in " +-":
                    self._fail(f"hunk of {change.path} is shorter than its header says", "a complete diff")
                hunk.lines.append((sign, o if sign != "+" else 0, n if sign != "-" else 0, text))
                if sign != "+":
                    o, left_old = o + 1, left_old - 1
                if sign != "-":
                    n, left_new = n + 1, left_new - 1
                self.at += 1
            if self._peek(0).startswith("\\"):
                self.at += 1
        if any(text.startswith("Subproject commit ") for h in change.hunks for _, _, _, text in h.lines):
            change.submodule = True


def _header_paths(line: str) -> tuple[str, str]:
    m = _GIT.match(line)
    if m is None:
        return "", ""
    if m.group("qa") is None and m.group("qb") is None:
        # unquoted names may contain spaces: the two halves are equal but for the prefix
        rest = line.removeprefix("diff --git ")
        middle = len(rest) // 2
        if rest[middle : middle + 1] == " " and rest[:middle].split("/", 1)[-1] == rest[middle + 1 :].split("/", 1)[-1]:
            return _strip(rest[:middle]), _strip(rest[middle + 1 :])
    old = _escaped(m.group("qa")) if m.group("qa") is not None else m.group("a")
    new = _escaped(m.group("qb")) if m.group("qb") is not None else m.group("b")
    return _strip(old), _strip(new)


def _strip(path: str) -> str:
    return path[2:] if path[:2] in ("a/", "b/") else path


def _plain(text: str) -> str:
    """A path of a ``---`` or ``+++`` line; '' for the missing side."""
    path = _unquote(text.rstrip("\r").split("\t")[0].rstrip())
    return "" if path == "/dev/null" else _strip(path)


def _unquote(text: str) -> str:
    text = text.rstrip("\r")
    return _escaped(text[1:-1]) if len(text) > 1 and text[0] == text[-1] == '"' else text


def _escaped(text: str) -> str:
    """git quotes bytes outside ASCII as octal escapes of their UTF-8."""
    raw = re.sub(
        r"\\([0-7]{3}|.)",
        lambda m: (
            chr(int(m.group(1), 8)) if len(m.group(1)) == 3 else {"n": "\n", "t": "\t"}.get(m.group(1), m.group(1))
        ),
        text,
    )
    try:
        return raw.encode("latin-1").decode("utf-8")
    except (UnicodeDecodeError, UnicodeEncodeError):
        return raw
