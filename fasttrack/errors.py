"""Errors that end a command, and the exit code each one stands for.

A message is one line: what is wrong, where, and what would be right. Anything that is not a
:class:`FasttrackError` is a bug: the command line writes its traceback to a file and exits with
:data:`EXIT_INTERNAL`.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

EXIT_PASS = 0
EXIT_FAIL = 1
EXIT_USAGE = 2
EXIT_EVIDENCE = 3
EXIT_INTERNAL = 4
EXIT_INTERRUPTED = 130


class FasttrackError(Exception):
    """Base of the errors a user can cause; ``exit_code`` is what the process returns."""

    exit_code = EXIT_USAGE


class UsageError(FasttrackError):
    """Bad input: a file, a field or an argument that cannot be used as it is (exit 2)."""

    exit_code = EXIT_USAGE

    def __init__(self, what: str, *, where: str = "", expected: str = "") -> None:
        self.what, self.where, self.expected = what, where, expected
        text = f"{where}: {what}" if where else what
        super().__init__(f"{text}; expected {expected}" if expected else text)


def nearest(given: object, known: Iterable[str]) -> str:
    """What would be right instead of ``given``, for :class:`UsageError`: the closest of ``known`` first, then all."""
    names = list(dict.fromkeys(known))
    if not names:
        return "none: there are none"
    close = get_close_matches(str(given), names, n=2, cutoff=0.6)
    listed = ", ".join(names)
    return f"{' or '.join(close)}, of: {listed}" if close and len(names) > 1 else f"one of: {listed}"


class ManifestError(UsageError):
    """A manifest that cannot be used; ``where`` is ``file:line: field``."""


class EvidenceError(FasttrackError):
    """The experiment cannot produce the evidence the manifest asks for, e.g. no such hardware (exit 3)."""

    exit_code = EXIT_EVIDENCE


class BundleError(FasttrackError):
    """A bundle that is not what it claims to be: changed, missing or extra files, a wrong verdict (exit 1)."""

    exit_code = EXIT_FAIL


class Interrupted(FasttrackError):
    """Stopped by a signal; the message says how to go on (exit 130)."""

    exit_code = EXIT_INTERRUPTED
