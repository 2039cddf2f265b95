"""``statement.json``: an in-toto Statement v1 with a test-result v0.1 predicate, for policy engines.

Sources: https://github.com/in-toto/attestation, spec/v1/statement.md, spec/v1/resource_descriptor.md and
spec/predicates/test-result.md. The statement is unsigned; whoever publishes a bundle may sign it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fasttrack.bundle.binding import Binding
from fasttrack.bundle.files import canonical_json, sha256
from fasttrack.records import EngineRecord

if TYPE_CHECKING:
    from fasttrack.gates import GateResult, Scope

STATEMENT = "statement.json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://in-toto.io/attestation/test-result/v0.1"


def statement(
    scope: Scope,
    results: Sequence[GateResult],
    binding: Binding,
    records: Iterable[Any],
    files: Mapping[str, bytes],
    unfinished: Sequence[str] = (),
) -> bytes:
    """The statement's bytes. ``files`` holds at least the manifest and ``run.json``, the test configuration.

    ``result``: PASSED when every gate passed, WARNED when only optional gates did not, FAILED otherwise; missing
    evidence for a required gate is FAILED, since a policy must not let it through. ``failedTests`` are required
    gates that did not pass, ``warnedTests`` optional ones; a planned unit that did not finish is a failed test.
    """
    required = set(scope.manifest.gates.required)
    passed = [r.gate for r in results if r.verdict == "pass"]
    failed = [r.gate for r in results if r.verdict != "pass" and r.gate in required]
    failed += [f"unit {name} did not finish" for name in unfinished]
    warned = [r.gate for r in results if r.verdict != "pass" and r.gate not in required]
    predicate: dict[str, Any] = {
        "result": "FAILED" if failed or not required else ("WARNED" if warned else "PASSED"),
        "configuration": [_file(name, files[name]) for name in ("manifest.yaml", "run.json")],
        "passedTests": passed,
        "warnedTests": warned,
        "failedTests": failed,
    }
    if binding.url:
        predicate["url"] = binding.url
    return canonical_json(
        {
            "_type": STATEMENT_TYPE,
            "subject": _subjects(binding, records, files),
            "predicateType": PREDICATE_TYPE,
            "predicate": predicate,
        }
    )


def _subjects(binding: Binding, records: Iterable[Any], files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """Head commit (where one was given), manifest and checkpoints. The first carries the binding's state."""
    found: list[dict[str, Any]] = []
    if binding.head is not None:
        found.append({"name": binding.repo or "head", "digest": {"gitCommit": binding.head}})
    found.append(_file("manifest.yaml", files["manifest.yaml"]))
    checkpoints = {record.checkpoint for record in records if isinstance(record, EngineRecord)}
    for value in sorted(checkpoints):
        digest = value.removeprefix("sha256:")
        if re.fullmatch(r"[0-9a-f]{64}", digest):
            found.append({"name": "checkpoint", "digest": {"sha256": digest}})
    found[0]["annotations"] = {"binding": binding.state, "pullRequest": binding.pr, "repository": binding.repo}
    return found


def _file(name: str, data: bytes) -> dict[str, Any]:
    return {"name": name, "digest": {"sha256": sha256(data)}}
