"""What a bundle is about: a pull request, and the head commit whose digest the run's seeds derive from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fasttrack import SCHEMA_VERSION
from fasttrack.bundle.files import canonical_json
from fasttrack.errors import BundleError, UsageError

BINDING = "binding.json"
State = Literal["bound", "unbound", "head not bound to seeds"]

_HEAD = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,38}/[A-Za-z0-9_.-]{1,100}")


@dataclass(frozen=True)
class Binding:
    """``head`` is the pull request's head commit as the sealer gave it; ``seeds_head`` the one the run used."""

    pr: int
    repo: str | None = None
    head: str | None = None
    seeds_head: str | None = None

    @property
    def state(self) -> State:
        if self.head is None:
            return "unbound"
        return "bound" if self.head == self.seeds_head else "head not bound to seeds"

    @property
    def sentence(self) -> str:
        where = f"pull request {self.pr}" + (f" of {self.repo}" if self.repo else "")
        if self.state == "bound":
            return f"{where}, head commit {self.head}; the run's seeds derive from that commit"
        if self.state == "unbound":
            return f"{where}, unbound: sealed without a head commit, so nothing ties these results to a version of it"
        of = f"commit {self.seeds_head}" if self.seeds_head else "no commit"
        return f"{where}, head commit {self.head}: head not bound to seeds (the run's seeds derive from {of})"

    def ran(self, environment: Mapping[str, Any]) -> bool:
        """Whether the code that ran was a clean checkout of ``head``, as the environment tells it."""
        source = environment.get("source")
        return isinstance(source, Mapping) and source.get("commit") == self.head and not source.get("dirty")

    @property
    def url(self) -> str | None:
        return f"https://github.com/{self.repo}/pull/{self.pr}" if self.repo else None

    def to_bytes(self) -> bytes:
        values = {"pr": self.pr, "repo": self.repo, "head": self.head, "state": self.state}
        return canonical_json({"schema_version": SCHEMA_VERSION, **values})


def make_binding(*, pr: int, repo: str | None, head: str | None, seeds_head: str | None) -> Binding:
    """Check what the user gave. Raises :class:`UsageError`."""
    if pr < 1:
        raise UsageError(f"--pr {pr} is no pull request", expected="a number from 1")
    if repo is not None and not _REPO.fullmatch(repo):
        raise UsageError(f"--repo {repo!r} is no repository", expected="owner/name")
    if head is not None and not _HEAD.fullmatch(head.lower()):
        raise UsageError(f"--head {head!r} is no full commit id", expected="40 (SHA-1) or 64 (SHA-256) hex digits")
    return Binding(pr, repo, head.lower() if head else None, seeds_head)


def read_binding(document: Any, *, seeds_head: str | None) -> Binding:
    """The binding a bundle states. Raises :class:`BundleError` for anything :func:`make_binding` would refuse."""
    if not isinstance(document, dict) or set(document) != {"schema_version", "pr", "repo", "head", "state"}:
        raise BundleError(f"{BINDING}: is not a binding (schema_version, pr, repo, head, state)")
    pr, repo, head = document["pr"], document["repo"], document["head"]
    if (
        not isinstance(pr, int)
        or isinstance(pr, bool)
        or not all(v is None or isinstance(v, str) for v in (repo, head))
    ):
        raise BundleError(f"{BINDING}: pr is not a number, or repo or head is not text")
    try:
        binding = make_binding(pr=pr, repo=repo, head=head, seeds_head=seeds_head)
    except UsageError as error:
        raise BundleError(f"{BINDING}: {error}") from None
    if document["state"] != binding.state:
        raise BundleError(f"{BINDING}: says {document['state']!r}, but the run's seeds make it {binding.state!r}")
    return binding
