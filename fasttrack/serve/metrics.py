"""Counters of a served engine, and their Prometheus text form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fasttrack.target import LedgerStep

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class Metrics:
    """Everything counted since the start. Written by the engine's thread, read by any."""

    requests: Counter[str] = field(default_factory=Counter)  #: finish reason -> requests
    steps: Counter[tuple[str, str, str]] = field(default_factory=Counter)  #: kind, path, reason -> steps
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    step_seconds: float = 0.0
    verified: int = 0  #: times a request had drafts verified
    accepted: Counter[int] = field(default_factory=Counter)  #: place in the draft -> times a draft there stood
    active: int = 0

    def step(self, steps: Iterable[LedgerStep]) -> None:
        for step in steps:
            self.steps[step.kind, step.path, step.reason or ""] += 1
            self.step_seconds += step.wall
            self.verified += len(step.accepted)
            for count in step.accepted:
                self.accepted.update(range(count))

    def admitted(self, prompt_tokens: int, cached_tokens: int) -> None:
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens

    def finished(self, reason: str) -> None:
        self.requests[reason] += 1

    def render(self) -> str:
        """The Prometheus exposition format, version 0.0.4."""
        lines: list[str] = []

        def family(name: str, kind: str, text: str, samples: Mapping[str, float]) -> None:
            lines.append(f"# HELP fasttrack_{name} {text}")
            lines.append(f"# TYPE fasttrack_{name} {kind}")
            lines.extend(f"fasttrack_{name}{labels} {value:g}" for labels, value in samples.items())

        def total(name: str, text: str, value: float) -> None:
            family(f"{name}_total", "counter", text, {"": value})

        family("requests_active", "gauge", "Requests queued or running.", {"": self.active})
        finished = {_labels(reason=r): n for r, n in sorted(self.requests.items())}
        family("requests_total", "counter", "Finished requests.", finished)
        total("prompt_tokens", "Prompt tokens of admitted requests.", self.prompt_tokens)
        total("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", self.prompt_tokens)
        total("prefix_cache_hits", "Prompt tokens found in the prefix cache.", self.cached_tokens)
        total("generation_tokens", "Tokens emitted.", self.generated_tokens)
        steps = {_labels(kind=k, path=p, reason=r): n for (k, p, r), n in sorted(self.steps.items())}
        family("steps_total", "counter", "Engine steps.", steps)
        total("step_seconds", "Time spent in engine steps.", self.step_seconds)
        total("drafts_verified", "Times a request had drafts verified.", self.verified)
        total("draft_tokens_accepted", "Draft tokens that stood.", self.accepted.total())
        places = {_labels(position=str(p)): n for p, n in sorted(self.accepted.items())}
        family("draft_tokens_accepted_per_position_total", "counter", "Draft tokens that stood, by place.", places)
        return "\n".join(lines) + "\n"


def _labels(**values: str) -> str:
    quoted = ((k, v.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for k, v in values.items())
    return "{" + ",".join(f'{k}="{v}"' for k, v in quoted) + "}"
