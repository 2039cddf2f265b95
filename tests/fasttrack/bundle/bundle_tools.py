"""What an attacker does to a bundle: change it, then fix the hash list so that every hash fits again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fasttrack.bundle import verify
from fasttrack.bundle.hashes import HASHES, HashList
from fasttrack.records.digest import unit_digest


def files_of(bundle: Path) -> list[str]:
    return sorted(p.relative_to(bundle).as_posix() for p in bundle.rglob("*") if p.is_file())


def fix_hashes(bundle: Path) -> Path:
    """Rewrite ``hashes.json`` for the files as they are, and rename the folder after the new root digest."""
    contents = {name: (bundle / name).read_bytes() for name in files_of(bundle) if name != HASHES}
    hashes = HashList.of(contents)
    (bundle / HASHES).write_bytes(hashes.to_bytes())
    return bundle.rename(bundle.with_name(f"toy-pr7-{hashes.root[:12]}"))


def edit_json(bundle: Path, name: str, change: Callable[[Any], None]) -> None:
    value = json.loads((bundle / name).read_bytes())
    change(value)
    (bundle / name).write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", newline="\n")


def fix_journal(bundle: Path) -> None:
    """Make the journal count the records as they are now."""
    lines: dict[str, list[str]] = {}
    for path in sorted((bundle / "records").glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            lines.setdefault(json.loads(line)["unit"], []).append(line)
    events = [json.loads(line) for line in (bundle / "journal.jsonl").read_text().splitlines()]
    for event in events:
        if event["event"] == "finished":
            own = lines.get(event["unit"], [])
            event.update(records=len(own), sha256=unit_digest(own))
    (bundle / "journal.jsonl").write_text("".join(json.dumps(e, sort_keys=True) + "\n" for e in events), newline="\n")


def problems(bundle: Path, **options: Any) -> list[str]:
    return verify(bundle, **options).problems
