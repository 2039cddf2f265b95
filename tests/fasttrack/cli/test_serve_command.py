"""What ``fasttrack serve`` builds, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from fasttrack.cli.serve import _is_loopback, _listen, spec_of
from fasttrack.errors import UsageError

CONFIG = Path(__file__).parents[3] / "configs" / "kimi-k3-embedded.yaml"


def test_a_target_or_a_manifest_names_the_engine() -> None:
    target, spec = spec_of("kimi_k3", "optimized", ["page_size=8", "drafter=rehearsal"], tp=2, draft_length=3)
    assert target.describe().name == "kimi_k3"
    assert (spec.kind, spec.switch_value, spec.tp, spec.draft_length) == ("embedded", target.describe().on, 2, 3)
    assert spec.options == {"prefix_caching": True, "page_size": 8, "drafter": "rehearsal"}
    _, spec = spec_of(str(CONFIG), "stock", ["prefix_caching=false"])
    assert spec.switch_value == target.describe().off
    assert spec.options["checkpoint"] == "tiny-a"
    assert spec.options["prefix_caching"] is False


@pytest.mark.parametrize(
    ("subject", "arm", "options", "message"),
    [
        ("nothing", "optimized", [], "unknown target 'nothing'"),
        ("missing.yaml", "optimized", [], "missing.yaml"),
        ("kimi_k3", "fast", [], "unknown arm 'fast'; expected stock, optimized or sabotaged:FAULT"),
        ("kimi_k3", "stock", ["a=["], "--option: 'a=\\['; expected NAME=VALUE with a YAML value"),
        ("kimi_k3", "stock", ["page_size"], "--option: 'page_size'; expected NAME=VALUE"),
        (str(CONFIG.with_name("kimi-k3-gb300-tp8.yaml")), "stock", [], "engine 'vllm' is served by itself"),
    ],
)
def test_bad_input_is_one_clear_line(subject: str, arm: str, options: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        spec_of(subject, arm, options)


def test_what_counts_as_loopback() -> None:
    assert all(map(_is_loopback, ("127.0.0.1", "127.8.0.1", "::1", "localhost")))
    assert not any(map(_is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org")))


def test_an_address_that_cannot_be_served_is_one_clear_line() -> None:
    with _listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"127.0.0.1:{port}: cannot listen .*; expected an address"):
            _listen("127.0.0.1", port)
    with pytest.raises(UsageError, match="cannot listen"):
        _listen("999.1.1.1", 0)
