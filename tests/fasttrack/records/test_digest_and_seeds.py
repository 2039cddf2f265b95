"""Unit digests and derived seeds: stable across versions, sensitive to everything that goes in."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from fasttrack.records.digest import UnitDigest, unit_digest
from fasttrack.records.seeds import derive_seed, root_seed

lines = st.lists(
    st.text(st.characters(blacklist_characters="\r\n", blacklist_categories=("Cs",)), max_size=12), max_size=6
)


def test_the_digest_is_sha256_over_lines():
    assert unit_digest(["{}", '{"a":"é"}']) == hashlib.sha256('{}\n{"a":"é"}\n'.encode()).hexdigest()
    assert unit_digest([]) == hashlib.sha256(b"").hexdigest()


@given(lines)
def test_running_and_whole_digest_agree_with_or_without_newlines(texts: list[str]):
    running = UnitDigest()
    for text in texts:
        running.update(text + "\n")
    assert running.records == len(texts)
    assert running.hexdigest() == unit_digest(texts) == unit_digest(text.encode() for text in texts)


@given(lines, lines)
def test_other_lines_or_another_order_give_another_digest(one: list[str], other: list[str]):
    assert (unit_digest(one) == unit_digest(other)) == (one == other)


def test_the_root_depends_on_every_part_and_parts_do_not_run_together():
    base = {"head": "a" * 40, "manifest_sha256": "b" * 64, "nonce": "c"}
    roots = {root_seed(**{**base, key: value}) for key in base for value in (base[key], "d" * 40)}
    roots.add(root_seed(head=None, manifest_sha256="b" * 64, nonce=None))
    roots.add(root_seed(head="a", manifest_sha256="ab", nonce="c"))
    roots.add(root_seed(head="aa", manifest_sha256="b", nonce="c"))
    assert len(roots) == 7
    assert all(len(root) == 64 for root in roots)


def test_the_derivation_never_changes():
    """Bundles sealed by earlier versions must verify: these values are fixed."""
    root = root_seed(head="a" * 40, manifest_sha256="b" * 64, nonce=None)
    assert root == "a9512f3de1427ad14b8267e7db8393a44021192d56c8676ab37b4c89ac3fc6d5"
    assert derive_seed(root, "engine", 3) == 4712118676431081090


def test_seeds_differ_by_label_and_stay_in_range():
    root = root_seed(head=None, manifest_sha256="b" * 64, nonce=None)
    seeds = {derive_seed(root, "unit", n) for n in range(500)} | {derive_seed(root, "un", "it", n) for n in range(500)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 1 << 63 for seed in seeds)
