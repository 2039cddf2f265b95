"""Verifying: every kind of tampering is named, with and without the attacker fixing the hashes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bundle_tools import edit_json, files_of, fix_hashes, fix_journal, problems
from toy_run import HEAD, default_records, numerics, step, write_run

from fasttrack.bundle import NOT_PROVEN, seal, verify
from fasttrack.bundle.hashes import HASHES
from fasttrack.errors import UsageError

FILES = [
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


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sealed")
    bundle = seal(write_run(folder / "run"), folder, pr=7, repo="vllm-project/vllm", head=HEAD)
    assert files_of(bundle) == FILES
    return bundle


@pytest.fixture
def bundle(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / original.name))


def test_intact(original: Path):
    found = verify(original)
    assert found.problems == []
    assert (found.verdict, found.origin, found.exit_code(), found.exit_code("pass")) == ("pass", NOT_PROVEN, 0, 0)
    assert verify(original, digest=found.root).origin == "matches the given digest"


def test_another_digest_is_a_problem(original: Path):
    found = verify(original, digest="0" * 64)
    assert found.exit_code() == 1
    assert len(found.problems) == 1
    assert "root digest is" in found.problems[0]
    with pytest.raises(UsageError, match="64 hex digits"):
        verify(original, digest="abc")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_a_flipped_bit_in_any_file_is_named(bundle: Path, name: str, where: str):
    data = bytearray((bundle / name).read_bytes())
    position = {"first": 0, "middle": len(data) // 2, "last": len(data) - 1}[where]
    data[position] ^= 1
    (bundle / name).write_bytes(data)
    found = problems(bundle)
    if name == HASHES:  # its own bytes, or an entry that no longer fits its file
        assert found
    else:
        assert any(line.startswith(f"{name}: was changed") for line in found), found
    assert all("\n" not in line for line in found)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(bundle: Path, name: str):
    (bundle / name).unlink()
    assert f"{name}: is missing" in problems(bundle)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_or_grown_file_is_named(bundle: Path, name: str):
    data = (bundle / name).read_bytes()
    for changed in (data[:-1], data + b"\n", b""):
        (bundle / name).write_bytes(changed)
        assert any(line.startswith(f"{name}: ") for line in problems(bundle))


def test_an_extra_file_is_named(bundle: Path):
    for name in ("notes.txt", "records/more.jsonl", "samples/.hidden"):
        (bundle / name).write_text("{}\n")
    (bundle / "empty").mkdir()
    found = problems(bundle)
    assert "notes.txt: is extra, not in hashes.json" in found
    assert "records/more.jsonl: is extra, not in hashes.json" in found
    assert any(line.startswith("samples/.hidden: ") for line in found)
    assert "empty: is an empty folder" in found


@pytest.mark.skipif(os.name == "nt", reason="links and pipes")
def test_links_and_special_files_are_named_and_not_followed(bundle: Path, tmp_path: Path):
    outside = tmp_path / "outside.json"
    outside.write_bytes((bundle / "run.json").read_bytes())
    (bundle / "run.json").unlink()
    (bundle / "run.json").symlink_to(outside)
    (bundle / "loop").symlink_to(bundle)
    os.mkfifo(bundle / "records" / "pipe.jsonl")
    found = problems(bundle)
    assert "run.json: is a symbolic link; a bundle holds plain files only" in found
    assert "loop: is a symbolic link; a bundle holds plain files only" in found
    assert "records/pipe.jsonl: is not a plain file" in found
    assert "run.json: is missing" in found  # a link does not stand in for the file


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_named(bundle: Path):
    (bundle / "run.json").chmod(0)
    assert any(line.startswith("run.json: cannot be opened") for line in problems(bundle))


class TestWithHashesFixed:
    """The attacker makes every hash fit; only what follows from what can give him away."""

    def test_a_verdict_turned(self, bundle: Path):
        edit_json(bundle, "gates.json", lambda doc: doc["gates"][0].update(verdict="inconclusive"))
        found = problems(fix_hashes(bundle))
        wanted = "gates.json: gate numerics.error: verdict 'inconclusive' does not follow: records give 'pass'"
        assert found == [wanted]

    def test_a_failed_run_sold_as_a_pass(self, tmp_path: Path):
        records = default_records()
        records["numerics/normal"][0] = numerics("toy::update", "normal", worst=40.0, failing=9)
        bundle = seal(write_run(tmp_path / "run", records), tmp_path, pr=7)
        honest = verify(bundle)
        assert (honest.verdict, honest.exit_code(), honest.exit_code("pass")) == ("fail", 0, 1)

        def lie(doc):
            doc["verdict"] = "pass"
            doc["gates"][0].update(verdict="pass", reason="Every output of every op lies within its derived bound.")

        edit_json(bundle, "gates.json", lie)
        found = problems(fix_hashes(bundle))
        assert "gates.json: overall verdict 'pass' does not follow: records give 'fail'" in found
        assert any("gate numerics.error: verdict 'pass' does not follow" in line for line in found)

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            (lambda doc: doc["gates"][0].update(reason="Perfect."), "numerics.error: reason does not follow"),
            (lambda doc: doc["gates"][0]["numbers"][0].update(value=0.1), "number 'worst error / bound': value 0.1"),
            (lambda doc: doc["gates"][0]["numbers"][0].update(limit="<= 9"), "limit '<= 9' does not follow"),
            (lambda doc: doc["gates"][0]["numbers"].pop(), "lists 3 numbers; records give 4"),
            (lambda doc: doc["gates"].pop(0), "gate numerics.error is missing"),
            (lambda doc: doc["gates"].append(doc["gates"][0]), "does not list the gates the manifest selects"),
            (lambda doc: doc.update(verdict="PASS"), "overall verdict 'PASS' does not follow"),
            (lambda doc: doc.update(verdict=["pass"]), "verdict is not text"),
            (lambda doc: doc["gates"][0].update(verdict="great"), "gates.0.verdict"),
        ],
    )
    def test_gates_edited(self, bundle: Path, change, named: str):
        edit_json(bundle, "gates.json", change)
        assert any(line.startswith("gates.json: ") and named in line for line in problems(fix_hashes(bundle)))

    def test_a_number_in_its_last_digits_is_arithmetic_not_fraud(self, bundle: Path):
        edit_json(bundle, "gates.json", lambda doc: doc["gates"][0]["numbers"][0].update(value=0.25 * (1 + 1e-12)))
        assert problems(fix_hashes(bundle)) == []

    def test_a_record_deleted(self, bundle: Path):
        path = bundle / "records" / "numerics.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
        bundle = fix_hashes(bundle)
        wanted = "records: unit numerics/normal attempt 1: has 9 records, the journal says 10"
        assert wanted in problems(bundle)
        fix_journal(bundle)  # he thinks of the journal, too: then the verdict no longer follows
        found = problems(fix_hashes(bundle))
        assert any("numerics.error: verdict 'pass' does not follow: records give 'inconclusive'" in s for s in found)

    def test_records_edited_or_reordered(self, bundle: Path):
        path = bundle / "records" / "numerics.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join([lines[1], lines[0], *lines[2:]]))
        wanted = (
            "records: unit numerics/normal attempt 1: its records are not the ones the journal saw (digest differs)"
        )
        bundle = fix_hashes(bundle)
        assert wanted in problems(bundle)
        path = bundle / "records" / "numerics.jsonl"
        path.write_text("".join(lines).replace('"worst":0.25', '"worst":0.24', 1))
        bundle = fix_hashes(bundle)
        assert wanted in problems(bundle)
        fix_journal(bundle)  # then the report and the numbers give it away, if they depend on the record
        found = problems(fix_hashes(bundle))
        assert found == [] or any("does not follow" in line for line in found)

    def test_records_of_nobody(self, bundle: Path):
        line = numerics("toy::head", "normal", unit="numerics/other").model_dump_json()
        with (bundle / "records" / "numerics.jsonl").open("a") as file:
            file.write(line + "\n")
        assert "records: unit numerics/other attempt 1 is not in the journal" in problems(fix_hashes(bundle))

    def test_a_unit_taken_out_of_the_journal(self, bundle: Path):
        path = bundle / "journal.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if "performance/decode/tp2/r1/dl0/dcp1/short" not in line))
        found = problems(fix_hashes(bundle))
        assert (
            "journal.jsonl: planned unit performance/decode/tp2/r1/dl0/dcp1/short neither finished nor failed" in found
        )
        assert "records: unit performance/decode/tp2/r1/dl0/dcp1/short attempt 1 is not in the journal" in found

    def test_a_unit_taken_out_of_the_plan(self, bundle: Path):
        edit_json(bundle, "run.json", lambda doc: doc["plan"].pop())
        found = problems(fix_hashes(bundle))
        assert (
            "journal.jsonl: unit performance/decode/tp2/r1/dl0/dcp1/short attempt 1: the unit is not in the plan"
            in found
        )

    def test_a_second_finish_is_cherry_picking(self, bundle: Path):
        path = bundle / "journal.jsonl"
        events = [json.loads(line) for line in path.read_text().splitlines()]
        again = [
            {**event, "attempt": 2} for event in events if event["unit"] == "performance/decode/tp2/r1/dl0/dcp1/short"
        ]
        path.write_text("".join(json.dumps(event) + "\n" for event in events + again))
        found = problems(fix_hashes(bundle))
        assert any("the unit had finished before; a second result could have been picked" in line for line in found)

    @pytest.mark.parametrize("key", ["head", "root", "nonce", "manifest_sha256"])
    def test_seeds(self, bundle: Path, key: str):
        edit_json(bundle, "run.json", lambda doc: doc["seeds"].update({key: "e" * (40 if key == "head" else 64)}))
        assert any(line.startswith("run.json: seeds: ") for line in problems(fix_hashes(bundle)))

    def test_the_manifest_weakened(self, bundle: Path):
        text = (bundle / "manifest.yaml").read_text()
        (bundle / "manifest.yaml").write_text(text.replace("required: [numerics.error, ", "required: ["), newline="\n")
        found = problems(fix_hashes(bundle))
        assert any("derive from another manifest" in line for line in found)
        assert any("does not list the gates the manifest selects" in line for line in found)

    @pytest.mark.parametrize("name", ["report.md", "coverage.svg", "statement.json", "binding.json"])
    def test_derived_files_edited(self, bundle: Path, name: str):
        path = bundle / name
        path.write_bytes(path.read_bytes().rstrip(b"\n") + b" \n")
        found = problems(fix_hashes(bundle))
        assert found
        assert found[0].startswith(f"{name}: does not follow from the records (first difference in line ")

    def test_a_head_swapped(self, bundle: Path):
        edit_json(bundle, "binding.json", lambda doc: doc.update(head="d" * 40))
        found = problems(fix_hashes(bundle))
        assert "binding.json: says 'bound', but the run's seeds make it 'head not bound to seeds'" in found

    def test_the_folder_name_must_fit(self, bundle: Path):
        moved = bundle.rename(bundle.with_name("toy-pr7-0123456789ab"))
        assert any("is not the 0123456789ab of the folder's name" in line for line in problems(moved))
        assert problems(moved.rename(moved.with_name("any-other-name"))) == []


class TestHostile:
    """Whatever the bytes, verify ends with problems and not with a traceback, a hang or a touched outside file."""

    @pytest.mark.parametrize("name", [name for name in FILES if name not in ("dirty.diff", "samples/answers.txt")])
    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"\xff\xfe\x00",
            b"null\n",
            b"[]\n",
            b"{}\n",
            b'"text"\n',
            b"1e999\n",
            b"NaN\n",
            b'{"a": 1, "a": 2}\n',
            b"[" * 100_000 + b"\n",
            b'{"a":' * 50_000 + b"\n",
            b'{"schema_version": 1e400}\n',
            b'{"schema_version": ' + b"9" * 6000 + b"}\n",
            b'{"unit": "\\ud800", "attempt": 1, "event": "started"}\n',
            b"a: &a [*a, *a]\n",
            b"a: &a [b, b]\nb: &b [*a, *a, *a]\nc: &c [*b, *b, *b]\n" + b"d: [*c, *c, *c]\n" * 10,
        ],
        ids=lambda data: repr(data[:16]),
    )
    def test_any_document_replaced(self, bundle: Path, name: str, data: bytes):
        (bundle / name).write_bytes(data)
        found = problems(bundle if name == HASHES else fix_hashes(bundle))
        assert found
        assert all(line.isprintable() for line in found)

    def test_a_bomb_of_aliases_is_refused_quickly(self, bundle: Path):
        levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
        levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
        (bundle / "manifest.yaml").write_text("\n".join(levels) + "\n")
        assert any("aliases expand" in line for line in problems(fix_hashes(bundle)))

    @pytest.mark.parametrize(
        ("line", "named"),
        [
            ('{"type":"numerics","type":"step"}', "is given twice"),
            ('{"type":"numerics","worst":NaN}', "NaN is not JSON"),
            ('{"type":"numerics","worst":1e999}', "out of range"),
            ('{"type":"nonsense"}', "expected a record"),
            ("7", "expected a record"),
            ('{"type":"numerics","unit":"\\u001b[31mred"}', "Field required"),
        ],
    )
    def test_a_record_line_that_is_none(self, bundle: Path, line: str, named: str):
        with (bundle / "records" / "numerics.jsonl").open("a") as file:
            file.write(line + "\n")
        found = problems(fix_hashes(bundle))
        assert any(text.startswith("records/numerics.jsonl:11: ") and named in text for text in found), found

    def test_half_lines_only_where_an_attempt_was_killed(self, bundle: Path):
        with (bundle / "records" / "numerics.jsonl").open("a") as file:
            file.write('{"type":"numer\n')
        assert "records: 1 half-written lines, but only 0 attempts did not finish" in problems(fix_hashes(bundle))

    @pytest.mark.parametrize(
        "name",
        ["../run.json", "/etc/passwd", "a/../../b", "C:/x", "a\\b", "a//b", "", "samples/\x1b[2J", "a b", "x" * 2000],
    )
    def test_names_that_leave_the_folder(self, bundle: Path, name: str):
        edit_json(bundle, HASHES, lambda doc: doc["files"][0].update(name=name))
        found = problems(bundle)
        assert any(line.startswith("hashes.json: files[0]: ") for line in found)
        assert all(line.isprintable() and len(line) < 600 for line in found)

    def test_records_no_gate_can_digest(self, bundle: Path, monkeypatch: pytest.MonkeyPatch):
        import fasttrack.gates

        def crash(scope, records):
            raise KeyError("first_step")

        monkeypatch.setitem(fasttrack.gates.GATES, "numerics.error", crash)
        assert "gates.json: cannot be recomputed (KeyError: 'first_step')" in problems(bundle)

    @pytest.mark.skipif(os.name == "nt", reason="POSIX names")
    def test_file_names_in_any_encoding(self, bundle: Path):
        with open(os.fsencode(bundle) + b"/caf\xe9\n.txt", "w"):
            pass
        found = problems(bundle)
        assert len(found) == 1
        assert "is extra" in found[0] or "not portable" in found[0]

    def test_files_past_the_cap_are_not_read(self, bundle: Path, monkeypatch: pytest.MonkeyPatch):
        import fasttrack.bundle.files as files

        monkeypatch.setattr(files, "MAX_TOTAL_BYTES", 1000)
        assert any("exceeds" in line for line in problems(bundle))


def test_loads_no_torch_and_needs_no_network(original: Path):
    code = (
        "import socket, sys\n"
        "def refuse(*a, **k): raise AssertionError('network')\n"
        "socket.socket.connect = refuse\n"
        "from fasttrack.bundle import verify\n"
        f"found = verify(__import__('pathlib').Path({str(original)!r}))\n"
        "print(found.problems, found.verdict, [m for m in ('torch', 'lm_eval', 'cutlass') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[] pass []", done.stderr


@pytest.mark.slow
def test_ten_megabytes_take_seconds(tmp_path: Path):
    records = default_records()
    unit = "isolation/cell/decode/tp2/r2/dl0/dcp1/short"
    wide = {"rank_hashes": ["a" * 64] * 8, "slots": list(range(8))}
    records[unit] += [step(unit, 2, index, **wide) for index in range(10, 10_010)]
    bundle = seal(write_run(tmp_path / "run", records), tmp_path, pr=7)
    size = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())
    started = time.monotonic()
    assert problems(bundle) == []
    assert size > 10_000_000
    assert (time.monotonic() - started) * 100e6 / size < 60, "100 MB would take more than a minute"


def test_what_is_no_folder(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for path, what in ((tmp_path / "nowhere", "no such folder"), (tmp_path / "file", "is not a folder")):
        with pytest.raises(UsageError, match=what):
            verify(path)
