"""What a run folder or a bundle says, parsed from the bytes of its files."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from fasttrack import SCHEMA_VERSION
from fasttrack.bundle.files import MAX_DOCUMENT_BYTES, MAX_LINE_BYTES, list_files, parse_json, printable, read_bytes
from fasttrack.bundle.files import sha256 as digest
from fasttrack.bundle.journal import Journal, RecordCensus, parse_journal
from fasttrack.bundle.layout import DIFF
from fasttrack.errors import BundleError, FasttrackError
from fasttrack.manifest import Manifest, load_manifest
from fasttrack.records import parse_record

MANIFEST, RUN, ENVIRONMENT, JOURNAL, GATES = (
    "manifest.yaml",
    "run.json",
    "environment.json",
    "journal.jsonl",
    "gates.json",
)
REQUIRED_FILES = (MANIFEST, RUN, ENVIRONMENT, JOURNAL, GATES)
#: Folders of a run that go into a bundle; anything else in a run folder is scratch.
FOLDERS = ("records", "samples", "logs")
MAX_MANIFEST_BYTES = 1 << 20
MAX_MANIFEST_NODES = 200_000

Read = Callable[[str], bytes]


class SeedsInfo(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    head: str | None
    manifest_sha256: str
    nonce: str | None = None
    root: str


class RunInfo(BaseModel):
    """The part of ``run.json`` that verification and the report read; ``facts`` keeps the rest."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    schema_version: int
    name: str
    tier: str
    started: str
    finished: str | None = None
    argv: list[str] = []
    seeds: SeedsInfo
    target: dict[str, Any] = {}
    plan: list[Any]

    @property
    def units(self) -> list[str]:
        """The names of the planned work units, in order."""
        return [unit if isinstance(unit, str) else unit["name"] for unit in self.plan]

    @property
    def facts(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


@dataclass(frozen=True)
class Run:
    """Everything a run recorded but its records."""

    manifest: Manifest
    manifest_sha256: str
    info: RunInfo
    environment: dict[str, Any]
    journal: Journal

    @property
    def unfinished(self) -> list[str]:
        """Planned units without a finished attempt."""
        return self.journal.unfinished(self.info.units)


@dataclass
class Records:
    """The records of finished attempts, in file and line order, and what was found beside them."""

    records: list[Any] = field(default_factory=list)
    census: RecordCensus = field(default_factory=RecordCensus)
    problems: list[str] = field(default_factory=list)
    torn: int = 0  #: half-written lines left by a kill
    unused: int = 0  #: records of attempts that did not finish


def load_run(read: Read) -> Run:
    """Parse the documents of a run. Raises :class:`BundleError` for the first that cannot be used."""
    raw = read(MANIFEST)
    info = parse_run_info(read(RUN))
    environment = parse_environment(read(ENVIRONMENT))
    return Run(parse_manifest(raw), digest(raw), info, environment, parse_journal(read(JOURNAL)))


def parse_environment(data: bytes) -> dict[str, Any]:
    environment = parse_json(data, where=ENVIRONMENT)
    if not isinstance(environment, dict):
        raise BundleError(f"{ENVIRONMENT}: is not a JSON object")
    return environment


def parse_manifest(raw: bytes) -> Manifest:
    """The manifest in ``raw``; its errors name ``manifest.yaml`` and the line."""
    if len(raw) > MAX_MANIFEST_BYTES:
        raise BundleError(f"{MANIFEST}: is larger than {MAX_MANIFEST_BYTES} bytes")
    if _expanded_nodes(raw) > MAX_MANIFEST_NODES:
        raise BundleError(f"{MANIFEST}: its aliases expand to more than {MAX_MANIFEST_NODES} nodes")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / MANIFEST
        path.write_bytes(raw)
        try:
            return load_manifest(path)[0]
        except FasttrackError as error:
            raise BundleError(printable(str(error).replace(f"{folder}/", "").replace(f"{folder}\\", ""), 400)) from None


def _expanded_nodes(raw: bytes) -> int:
    """How many nodes a YAML document has once every alias is written out; 0 when it does not parse at all."""
    try:
        root = yaml.compose(raw, Loader=yaml.SafeLoader)
        return _node_count(root, {}) if root is not None else 0
    except RecursionError:
        raise BundleError(f"{MANIFEST}: is nested too deeply") from None
    except (yaml.YAMLError, ValueError):
        return 0  # the manifest reader words the complaint


def _node_count(node: yaml.Node, known: dict[int, int]) -> int:
    if id(node) in known:
        if known[id(node)] < 0:
            raise BundleError(f"{MANIFEST}: an alias contains itself")
        return known[id(node)]
    known[id(node)] = -1
    children: Iterable[yaml.Node] = ()
    if isinstance(node, yaml.MappingNode):
        children = [child for pair in node.value for child in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    known[id(node)] = 1 + sum(_node_count(child, known) for child in children)
    return known[id(node)]


def parse_run_info(data: bytes) -> RunInfo:
    document = parse_json(data, where=RUN)
    version = document.get("schema_version") if isinstance(document, dict) else None
    if isinstance(version, int) and version != SCHEMA_VERSION:
        raise BundleError(f"{RUN}: schema_version {version} is not the {SCHEMA_VERSION} this fasttrack reads")
    try:
        info = RunInfo.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "document"
        raise BundleError(f"{RUN}: {printable(place)}: {first['msg']}") from None
    for index, unit in enumerate(info.plan):
        if not isinstance(unit, str) and not (isinstance(unit, dict) and isinstance(unit.get("name"), str)):
            raise BundleError(f"{RUN}: plan[{index}]: is neither a unit name nor an object with one")
    return info


def load_records(files: Iterable[str], read: Read, journal: Journal) -> Records:
    """Parse every ``records/*.jsonl`` among ``files``.

    Lines of finished attempts must be records. A half-written line is what a kill leaves and is counted; a
    whole line that is no record, or that a strict JSON reader refuses, is a problem.
    """
    found = Records()
    finished = journal.finished()
    for name in sorted(name for name in files if name.startswith("records/")):
        try:
            data = read(name)
        except BundleError as error:
            found.problems.append(str(error))
            continue
        for number, line in enumerate(data.split(b"\n"), start=1):
            if line.strip():
                _record(line, f"{name}:{number}", finished, found)
    killed = sum(attempt.state in ("killed", "interrupted", "failed") for attempt in journal.attempts())
    if found.torn > killed:
        found.problems.append(f"records: {found.torn} half-written lines, but only {killed} attempts did not finish")
    return found


def _record(line: bytes, where: str, finished: Mapping[str, int], found: Records) -> None:
    if len(line) > MAX_LINE_BYTES:
        found.problems.append(f"{where}: has more than {MAX_LINE_BYTES} bytes")
        return
    try:
        value = parse_json(line, where=where)
    except BundleError as error:
        if _is_json(line):
            found.problems.append(str(error))
        else:
            found.torn += 1
        return
    try:
        record = parse_record(line.decode("utf-8"), where=where)
    except FasttrackError as error:
        found.problems.append(printable(str(error), 400))
        return
    found.census.add(record.unit, record.attempt, line)
    if value.get("schema_version", 1) != SCHEMA_VERSION:
        found.problems.append(f"{where}: schema_version is not {SCHEMA_VERSION}")
    elif finished.get(record.unit) == record.attempt:
        found.records.append(record)
    else:
        found.unused += 1


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except RecursionError:
        return True
    except ValueError:
        return False
    return True


def run_files(folder: Path) -> Iterator[str]:
    """The files of a run folder that belong into a bundle, sorted. Raises :class:`BundleError` for links and the like.

    Hidden files and unknown folders are scratch and stay out.
    """
    present = sorted(path.name for path in folder.iterdir())
    names = [name for name in (*REQUIRED_FILES, DIFF) if name in present]
    yield from names
    for sub in (name for name in FOLDERS if name in present):
        files, problems = list_files(folder / sub)
        links = [line for line in problems if not line.endswith("is an empty folder")]
        if links:
            raise BundleError(f"{sub}/{links[0]}")
        yield from (f"{sub}/{name}" for name in sorted(files))


def reader(folder: Path) -> Read:
    """Reads files below ``folder`` by relative name; JSON and YAML documents have a smaller cap."""

    def read(name: str) -> bytes:
        return read_bytes(folder, name, MAX_DOCUMENT_BYTES) if name in REQUIRED_FILES else read_bytes(folder, name)

    return read
