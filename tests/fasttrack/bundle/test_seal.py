"""Sealing: what goes in, what is refused, and the same bytes everywhere."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bundle_tools import files_of
from toy_run import HEAD, default_records, event, numerics, write_json, write_run

from fasttrack.bundle import seal, verify
from fasttrack.errors import UsageError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def contents(bundle: Path) -> dict[str, bytes]:
    return {name: (bundle / name).read_bytes() for name in files_of(bundle)}


def test_holds_the_run_and_what_follows_from_it(run: Path, tmp_path: Path):
    bundle = seal(run, tmp_path / "bundles", pr=61867, repo="vllm-project/vllm", head=HEAD)
    assert files_of(bundle) == [
        "binding.json",
        "coverage.svg",
        "dirty.diff",
        "environment.json",
        "gates.json",
        "hashes.json",
        "journal.jsonl",
        "manifest.yaml",
        "records/isolation.jsonl",
        "records/numerics.jsonl",
        "records/performance.jsonl",
        "report.md",
        "run.json",
        "samples/answers.txt",
        "statement.json",
    ]
    for name in ("manifest.yaml", "run.json", "records/numerics.jsonl", "samples/answers.txt"):
        assert (bundle / name).read_bytes() == (run / name).read_bytes()
    root = verify(bundle).root
    assert root is not None
    assert bundle.name == f"toy-pr61867-{root[:12]}"


def test_the_root_digest_is_what_coreutils_compute(run: Path, tmp_path: Path):
    bundle = seal(run, tmp_path, pr=7)
    listed = sorted((name for name in files_of(bundle) if name != "hashes.json"), key=str.encode)
    lines = "".join(f"{hashlib.sha256((bundle / name).read_bytes()).hexdigest()}  {name}\n" for name in listed)
    assert verify(bundle).root == hashlib.sha256(lines.encode()).hexdigest()


@pytest.mark.skipif(os.name == "nt", reason="umask, TZ and locale are POSIX")
def test_same_bytes_whatever_folder_umask_locale_timezone_and_hash_seed(run: Path, tmp_path: Path):
    first = seal(run, tmp_path / "a", pr=7, head=HEAD)
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "copy").symlink_to(run)
    code = (
        "import os, sys; os.umask(0o077)\n"
        "from pathlib import Path\n"
        "from fasttrack.bundle import seal\n"
        f"print(seal(Path('copy'), Path('out'), pr=7, head={HEAD!r}).resolve())"
    )
    env = {**os.environ, "LC_ALL": "C", "LANG": "tr_TR.UTF-8", "TZ": "Asia/Kathmandu", "PYTHONHASHSEED": "77"}
    env["PYTHONUTF8"] = "0"
    done = subprocess.run([sys.executable, "-c", code], cwd=other, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    second = Path(done.stdout.strip())
    assert second.name == first.name
    assert contents(second) == contents(first)


@pytest.mark.skipif(os.name == "nt", reason="umask is POSIX")
@pytest.mark.parametrize(("umask", "file", "folder"), [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750)])
def test_a_bundle_is_as_readable_as_the_umask_says(run: Path, tmp_path: Path, umask: int, file: int, folder: int):
    before = os.umask(umask)
    try:
        bundle = seal(run, tmp_path / "b", pr=7)
    finally:
        os.umask(before)
    modes = {(p.is_dir(), p.stat().st_mode & 0o777) for p in (bundle, *bundle.rglob("*"))}
    assert modes == {(False, file), (True, folder)}


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
@pytest.mark.parametrize("at", ["mkdir", "write_bytes", "rename"])
def test_nothing_is_left_of_a_seal_that_did_not_end(run: Path, tmp_path: Path, monkeypatch, at: str, error: Any):
    owner: Any = os if at == "rename" else Path
    real = getattr(owner, at)

    def fails(path: Path, *more: Any, **options: Any) -> Any:
        done = real(path, *more, **options) if at == "mkdir" else None  # made, and then the signal comes
        if ".sealing-" in str(path):
            raise error
        return done if at == "mkdir" else real(path, *more, **options)

    out = tmp_path / "b"
    out.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(owner, at, fails)
        with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else UsageError):
            seal(run, out, pr=7)
    assert list(out.iterdir()) == []


def test_what_a_killed_seal_left_goes_with_the_next_one(run: Path, tmp_path: Path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left, other = tmp_path / "b" / f".sealing-{gone.pid}", tmp_path / "b" / f".sealing-{os.getppid()}"
    for folder in (left, other):
        folder.mkdir(parents=True)
        (folder / "run.json").write_text("half")
    bundle = seal(run, tmp_path / "b", pr=7)
    assert sorted((tmp_path / "b").iterdir()) == sorted([other, bundle])


def test_nothing_of_the_place_or_the_hour_goes_in(run: Path, tmp_path: Path):
    bundle = seal(run, tmp_path / "b", pr=7)
    for name, data in contents(bundle).items():
        assert str(tmp_path).encode() not in data, name
    assert list((tmp_path / "b").iterdir()) == [bundle]  # no temporary folder is left


def test_sealing_twice_is_fine_and_another_content_at_the_place_is_not(run: Path, tmp_path: Path):
    bundle = seal(run, tmp_path / "b", pr=7)
    assert seal(run, tmp_path / "b", pr=7) == bundle
    (bundle / "report.md").write_text("mine")
    with pytest.raises(UsageError, match="exists and holds something else"):
        seal(run, tmp_path / "b", pr=7)
    assert (bundle / "report.md").read_text() == "mine"


def test_binding_states(run: Path, tmp_path: Path):
    states = {}
    for head in (None, HEAD, "d" * 40, "d" * 64):
        bundle = seal(run, tmp_path / "b", pr=7, head=head)
        found = verify(bundle)
        assert found.problems == []
        assert found.binding is not None
        states[head] = found.binding.state
        first_line = (bundle / "report.md").read_text().splitlines()[0]
        assert f", {found.binding.state})" in first_line
        subjects = json.loads((bundle / "statement.json").read_bytes())["subject"]
        assert subjects[0]["annotations"]["binding"] == found.binding.state
        commits = [s["digest"]["gitCommit"] for s in subjects if "gitCommit" in s["digest"]]
        assert commits == ([head] if head else [])
    unbound = "head not bound to seeds"
    assert states == {None: "unbound", HEAD: "bound", "d" * 40: unbound, "d" * 64: unbound}


@pytest.mark.parametrize("head", ["abc", "g" * 40, "c" * 41, "", "c" * 39 + "\n"])
def test_a_head_that_is_no_commit_is_refused(run: Path, tmp_path: Path, head: str):
    with pytest.raises(UsageError, match=r"40 .* or 64"):
        seal(run, tmp_path / "b", pr=7, head=head)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("repo", ["vllm", "a/b/c", "https://github.com/a/b", "../b", ""])
def test_a_repository_that_is_none_is_refused(run: Path, tmp_path: Path, repo: str):
    with pytest.raises(UsageError, match="owner/name"):
        seal(run, tmp_path / "b", pr=7, repo=repo)


def test_an_unfinished_run_is_refused_and_names_the_unit(tmp_path: Path):
    run = write_run(tmp_path / "run", edit_journal=lambda events: events[:-1], gates=False)
    with pytest.raises(
        UsageError, match=r"not over: 1 of 13 units .* first performance/decode/tp2/r1/dl0/dcp1/short"
    ) as refused:
        seal(run, tmp_path / "b", pr=7)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "b").exists()


def test_failed_and_killed_attempts_go_in_and_are_shown(tmp_path: Path):
    def history(events):
        error = "OSError: disk | full\n"
        return [event("started", "numerics/normal"), event("failed", "numerics/normal", error=error), *(
            {**e, "attempt": 2} if e["unit"] == "numerics/normal" else e for e in events
        )]  # fmt: skip

    records = default_records()
    records["numerics/normal"] = [r.model_copy(update={"attempt": 2}) for r in records["numerics/normal"]]
    run = write_run(tmp_path / "run", records, edit_journal=history, gates=False)
    with (run / "records" / "numerics.jsonl").open("a") as file:
        file.write(numerics("toy::head", "normal", worst=9.0, failing=3, attempt=1).model_dump_json() + "\n")
        file.write('{"type":"numerics","unit":"nume\n')
    bundle = seal(run, tmp_path / "b", pr=7)  # gates.json is made where the run wrote none
    found = verify(bundle)
    assert (found.problems, found.verdict) == ([], "pass")
    assert "| numerics/normal | 1 | failed |" in (bundle / "report.md").read_text()
    assert "disk \\| full\\\\n |" in (bundle / "report.md").read_text()


def test_a_failed_last_unit_is_not_a_pass(tmp_path: Path):
    def history(events):
        return [e if (e["unit"], e["event"]) != ("numerics/normal", "finished") else event("failed", "numerics/normal")
                for e in events]  # fmt: skip

    run = write_run(tmp_path / "run", edit_journal=history, gates=False)
    found = verify(seal(run, tmp_path / "b", pr=7))
    assert (found.problems, found.verdict) == ([], "inconclusive")


def test_a_failed_unit_no_required_gate_reads_is_not_a_pass_either(tmp_path: Path):
    """Whatever the crashed unit would have found is unknown, so the gates that did pass do not make a pass."""

    def history(events):
        return [*events[:-1], event("failed", "performance/decode/tp2/r1/dl0/dcp1/short")]

    bundle = seal(write_run(tmp_path / "run", edit_journal=history, gates=False), tmp_path / "b", pr=7)
    found = verify(bundle)
    assert {r.verdict for r in found.results if r.gate != "performance.speedup"} == {"pass"}
    assert (found.problems, found.verdict, found.unfinished) == (
        [],
        "inconclusive",
        ["performance/decode/tp2/r1/dl0/dcp1/short"],
    )
    assert (found.exit_code(), found.exit_code("pass")) == (0, 1)
    first = (bundle / "report.md").read_text().splitlines()[0]
    assert first.startswith("**NOT ENOUGH EVIDENCE**")
    assert "unit performance/decode/tp2/r1/dl0/dcp1/short did not finish" in first
    predicate = json.loads((bundle / "statement.json").read_bytes())["predicate"]
    assert (predicate["result"], predicate["failedTests"]) == (
        "FAILED",
        ["unit performance/decode/tp2/r1/dl0/dcp1/short did not finish"],
    )
    gates = json.loads((bundle / "gates.json").read_bytes())
    write_json(bundle / "gates.json", {**gates, "verdict": "pass"})
    wrong = verify(bundle).problems
    assert any("'pass' does not follow: records give 'inconclusive'" in line for line in wrong)


def test_gates_that_do_not_follow_are_not_sealed(run: Path, tmp_path: Path):
    gates = json.loads((run / "gates.json").read_bytes())
    gates["gates"][0]["verdict"] = "fail"
    write_json(run / "gates.json", gates)
    with pytest.raises(UsageError, match=r"numerics.error.* does not follow"):
        seal(run, tmp_path / "b", pr=7)


@pytest.mark.parametrize("name", ["manifest.yaml", "run.json", "journal.jsonl", "environment.json"])
def test_what_is_no_run_is_refused(run: Path, tmp_path: Path, name: str):
    (run / name).unlink()
    with pytest.raises(UsageError, match=f"has no {name}"):
        seal(run, tmp_path / "b", pr=7)
    with pytest.raises(UsageError, match="no such folder"):
        seal(tmp_path / "nowhere", tmp_path / "b", pr=7)
    with pytest.raises(UsageError, match="is not a folder"):
        seal(run / "dirty.diff", tmp_path / "b", pr=7)


@pytest.mark.skipif(os.name == "nt", reason="symbolic links")
def test_a_link_in_the_run_is_refused(run: Path, tmp_path: Path):
    (run / "samples" / "passwords").symlink_to("/etc/passwd")
    with pytest.raises(UsageError, match="symbolic link"):
        seal(run, tmp_path / "b", pr=7)


def test_a_file_where_the_bundles_should_go(run: Path, tmp_path: Path):
    (tmp_path / "b").write_text("")
    with pytest.raises(UsageError, match="is not a folder"):
        seal(run, tmp_path / "b", pr=7)


def test_statement_of_each_outcome(tmp_path: Path):
    def statement(name: str, records) -> dict:
        bundle = seal(write_run(tmp_path / name, records), tmp_path / "b", pr=7)
        return json.loads((bundle / "statement.json").read_bytes())["predicate"]

    passed = statement("passed", default_records())
    assert passed["result"] == "WARNED"  # the optional speed-up gate did not run
    assert passed["warnedTests"] == ["performance.speedup"]
    assert [c["name"] for c in passed["configuration"]] == ["manifest.yaml", "run.json"]
    records = default_records()
    records["numerics/normal"][3] = numerics("toy::update", "negative_zero", worst=3.0, failing=2)
    failed = statement("failed", records)
    assert failed["result"] == "FAILED"
    assert failed["failedTests"] == ["numerics.error"]
    records = default_records()
    del records["isolation/probe/above"]
    missing = statement("missing", records)
    assert (missing["result"], missing["failedTests"]) == ("FAILED", ["isolation.probes"])


def test_the_log_of_a_crash_goes_in_and_one_the_journal_does_not_know_stays_out(tmp_path: Path):
    def history(events):
        return [*events[:-1], event("failed", events[-1]["unit"], error="ValueError: x", log="logs/a-1.log")]

    run = write_run(tmp_path / "run", edit_journal=history, gates=False)
    (run / "logs").mkdir()
    for name in ("a-1.log", "b-1.log"):
        (run / "logs" / name).write_text("Traceback\n")
    bundle = seal(run, tmp_path / "b", pr=7)
    assert [name for name in files_of(bundle) if name.startswith("logs/")] == ["logs/a-1.log"]
    assert verify(bundle).problems == []


def test_records_of_no_check_are_refused(run: Path, tmp_path: Path):
    (run / "records" / "mine.jsonl").write_text("")
    with pytest.raises(UsageError, match=r"records/mine\.jsonl: is no file of a bundle"):
        seal(run, tmp_path / "b", pr=7)
