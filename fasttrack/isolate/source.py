"""Texts of changed files before and after: from git, or as far as a diff shows them."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from fasttrack.errors import UsageError
from fasttrack.isolate.diff import FileChange, parse


@dataclass(frozen=True)
class Text:
    """``text`` keeps line numbers: lines a diff does not show are empty. ``complete``: nothing is missing."""

    text: str
    complete: bool


class DiffSource:
    """A diff alone. Added and deleted files are complete; of others only hunks are known."""

    def __init__(self, changes: list[FileChange]) -> None:
        self.changes = changes

    def before(self, change: FileChange) -> Text | None:
        return self._side(change, "+", 1, change.old, change.status == "deleted")

    def after(self, change: FileChange) -> Text | None:
        return self._side(change, "-", 2, change.new, change.status == "added")

    @staticmethod
    def _side(change: FileChange, other: str, number: int, path: str, complete: bool) -> Text | None:
        if not path or change.binary or change.submodule:
            return None
        lines: dict[int, str] = {}
        for hunk in change.hunks:
            for entry in hunk.lines:
                if entry[0] != other:
                    lines[entry[number]] = entry[3]  # type: ignore[index]
        last = max(lines, default=0)
        return Text("\n".join(lines.get(n, "") for n in range(1, last + 1)) + "\n", complete)

    def known_elsewhere(self, name: str) -> bool | None:
        """Does the word occur in the tree before the change? None: cannot know."""
        return None


class GitSource(DiffSource):
    """Two commits of a repository; the older side is their merge base."""

    def __init__(self, repo: Path, base: str, head: str) -> None:
        self.repo = repo
        self.head = self._commit(head)
        base_commit = self._commit(base)
        merge = self._git("merge-base", base_commit, self.head, check=False).strip()
        self.base = merge or base_commit
        flags = ["-M", "--no-color", "--no-ext-diff", "--no-textconv", "--src-prefix=a/", "--dst-prefix=b/"]
        text = self._git("diff", *flags, "--submodule=short", self.base, self.head, "--")
        super().__init__(parse(text, f"{base}..{head}"))

    def _git(self, *arguments: str, check: bool = True) -> str:
        command = ["git", "-C", str(self.repo), "-c", "core.quotepath=true", *arguments]
        try:
            done = subprocess.run(command, capture_output=True, check=False, timeout=300)
        except FileNotFoundError:
            raise UsageError("git is not installed", expected="git on the PATH, or --diff FILE") from None
        except subprocess.TimeoutExpired:
            raise UsageError("git took more than 300 s", where=str(self.repo), expected="a smaller range") from None
        if check and done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines() or ["git failed"]
            raise UsageError(lines[0].removeprefix("fatal: "), where=str(self.repo), expected="a git repository")
        return done.stdout.decode(errors="replace")

    def _commit(self, ref: str) -> str:
        found = self._git(
            "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}", check=False
        ).strip()
        if not found:
            self._git("rev-parse", "--git-dir")  # not a repository: say that instead
            raise UsageError(f"unknown revision {ref!r}", where=str(self.repo), expected="a branch, tag or commit")
        return found

    def _show(self, commit: str, path: str) -> Text | None:
        return Text(self._git("show", f"{commit}:{path}", check=False), True)

    def before(self, change: FileChange) -> Text | None:
        return None if not change.old or change.binary or change.submodule else self._show(self.base, change.old)

    def after(self, change: FileChange) -> Text | None:
        return None if not change.new or change.binary or change.submodule else self._show(self.head, change.new)

    def known_elsewhere(self, name: str) -> bool | None:
        found = self._git("grep", "-l", "-w", "-F", "--max-count=1", "-e", name, self.base, "--", "*.py", check=False)
        return bool(found.strip())
