"""The hash list: parsing accepts exactly what writing gives."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasttrack.bundle.files import canonical_json, name_problem, parse_json, printable
from fasttrack.bundle.hashes import FileHash, HashList, parse_hashes
from fasttrack.errors import BundleError

segments = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,12}[A-Za-z0-9]", fullmatch=True)
names = st.lists(segments, min_size=1, max_size=4).map("/".join).filter(lambda n: n != "hashes.json")
contents = st.dictionaries(names, st.binary(max_size=40), max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)


@given(contents)
def test_round_trip(files: dict[str, bytes]):
    hashes = HashList.of(files)
    assert parse_hashes(hashes.to_bytes()) == hashes
    assert {f.name: f.bytes for f in hashes.files} == {name: len(data) for name, data in files.items()}


@given(contents, st.randoms())
def test_order_of_files_does_not_matter(files: dict[str, bytes], random):
    shuffled = list(files.items())
    random.shuffle(shuffled)
    assert HashList.of(dict(shuffled)).to_bytes() == HashList.of(files).to_bytes()


@given(contents, contents)
def test_different_contents_have_different_roots(one: dict[str, bytes], other: dict[str, bytes]):
    assert (HashList.of(one).root == HashList.of(other).root) == (one == other)


@given(contents.filter(bool), st.data())
def test_any_changed_byte_is_refused_or_changes_the_root(files: dict[str, bytes], data):
    hashes = HashList.of(files)
    raw = bytearray(hashes.to_bytes())
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position] ^= data.draw(st.integers(1, 255))
    refused, changed = "hashes.json: ", None
    try:
        changed = parse_hashes(bytes(raw))
    except BundleError as error:
        refused = str(error)
    assert refused.startswith("hashes.json: ")
    assert refused.isprintable()
    assert changed != hashes


@given(st.binary(max_size=200))
def test_any_bytes_end_in_one_line(data: bytes):
    with pytest.raises(BundleError, match=r"^hashes\.json: "):
        parse_hashes(data)


@given(json_values)
def test_any_json_ends_in_one_line(value):
    with pytest.raises(BundleError, match=r"^hashes\.json"):
        parse_hashes(json.dumps(value).encode())


@given(st.text(max_size=60))
def test_accepted_names_stay_inside(name: str):
    if name_problem(name) is None:
        assert not name.startswith("/")
        assert "\\" not in name
        assert ".." not in name.split("/")
        assert name.isascii()


@given(st.text(max_size=60))
def test_printable_is(text: str):
    assert printable(text).isprintable()


@given(json_values)
def test_canonical_json_reads_back(value):
    try:
        data = canonical_json(value)
    except ValueError:  # NaN and infinities are never written
        return
    with contextlib.suppress(BundleError):  # half surrogates and numbers past the range of a float
        assert parse_json(data, where="x") == value


def _listed(**changes) -> bytes:
    entry = {"name": "a", "bytes": 1, "sha256": "0" * 64, **changes}
    return canonical_json({"schema_version": 1, "algorithm": "sha256", "files": [entry]})


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (_listed(name="../a"), "leaves or re-enters"),
        (_listed(name="/a"), "absolute"),
        (_listed(name="c:a"), "absolute"),
        (_listed(name="a\\b"), "not portable"),
        (_listed(name=".a"), "not portable"),
        (_listed(name="a."), "not portable"),
        (_listed(name="/".join("abcdefghij")), "deep"),
        (_listed(name="hashes.json"), "cannot list itself"),
        (_listed(name=1), "not text"),
        (_listed(bytes=-1), "not a size"),
        (_listed(bytes=True), "not a size"),
        (_listed(sha256="A" * 64), "hex"),
        (_listed(more=1), "entry"),
        (canonical_json({"schema_version": 2, "algorithm": "sha256", "files": []}), "schema_version 1"),
        (canonical_json({"schema_version": 1, "algorithm": "md5", "files": []}), "sha256"),
        (canonical_json({"schema_version": 1, "algorithm": "sha256", "files": {}}), "not a list"),
        (_listed().replace(b'"bytes"', b'"bytes": 1, "bytes"'), "given twice"),
        (_listed() + b" ", "canonical"),
        (_listed().replace(b"\n", b"\r\n"), "canonical"),
    ],
)
def test_refused(data: bytes, named: str):
    with pytest.raises(BundleError, match=named) as error:
        parse_hashes(data)
    assert "\n" not in str(error.value)


def test_doubled_and_unsorted_lists_are_refused():
    a, b = FileHash("a", 1, "0" * 64), FileHash("b", 1, "1" * 64)
    with pytest.raises(BundleError, match="lists a twice"):
        parse_hashes(HashList((a, a)).to_bytes())
    with pytest.raises(BundleError, match="canonical"):
        parse_hashes(HashList((b, a)).to_bytes())
    assert parse_hashes(HashList((a, b)).to_bytes()).files == (a, b)
