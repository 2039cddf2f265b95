"""YAML with line numbers: the plain data, and the line on which each key path stands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from fasttrack.errors import ManifestError

MAX_BYTES = 4 << 20
MAX_DEPTH = 50
Path_ = tuple[str | int, ...]


class LineMap:
    """Lines (1-based) of key paths such as ``("scope", 0, "tp")``; the nearest parent's line for unknown ones."""

    def __init__(self) -> None:
        self._lines: dict[Path_, int] = {(): 1}

    def add(self, path: Path_, line: int) -> None:
        self._lines[path] = line

    def line(self, path: Sequence[str | int]) -> int:
        parts = tuple(path)
        while parts not in self._lines:
            parts = parts[:-1]
        return self._lines[parts]


def read_yaml(path: Path) -> tuple[Any, LineMap, bytes]:
    """Read one YAML document. Refuses unreadable files, bad syntax, duplicate keys and aliases."""
    try:
        if path.is_dir():
            raise ManifestError("is a folder", where=str(path), expected="a YAML file")
        if path.exists() and not path.is_file():
            raise ManifestError("is no regular file", where=str(path), expected="a YAML file")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ManifestError(f"is larger than {MAX_BYTES} bytes", where=str(path), expected="a manifest")
    except FileNotFoundError:
        raise ManifestError("no such file", where=str(path), expected="a manifest, e.g. one of configs/") from None
    except OSError as error:
        raise ManifestError(f"cannot be read ({error.strerror})", where=str(path)) from None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ManifestError("is not UTF-8", where=f"{path}:{line}", expected="UTF-8 text") from None
    try:
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise ManifestError("nested too deeply", where=str(path), expected=f"at most {MAX_DEPTH} levels")
            if isinstance(event, yaml.AliasEvent):  # a few nested ones expand to gigabytes
                line = event.start_mark.line + 1 if event.start_mark else 1
                raise ManifestError("uses a YAML alias", where=f"{path}:{line}", expected="every value written out")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ManifestError(f"malformed YAML: {error.problem or error}", where=where) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ManifestError(f"malformed YAML: {str(error).splitlines()[0]}", where=str(path)) from None
    lines = LineMap()
    if node is not None:
        _walk(node, (), lines, path)
    return data, lines, raw


def _walk(node: yaml.Node, path: Path_, lines: LineMap, file: Path) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key_node, value_node in node.value:
            key = str(key_node.value)
            line = key_node.start_mark.line + 1
            if key in seen:
                raise ManifestError(f"{key}: given twice", where=f"{file}:{line}", expected="each key once")
            seen.add(key)
            lines.add((*path, key), line)
            _walk(value_node, (*path, key), lines, file)
    elif isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            lines.add((*path, index), child.start_mark.line + 1)
            _walk(child, (*path, index), lines, file)
