"""Options of the embedded engine that are not the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kimi_k3.names import SWITCH, SWITCH_OFF, SWITCH_ON


class OptionError(ValueError):
    """An option that cannot be used. ``str()`` says what is wrong and what would be right, ``where`` names it."""

    def __init__(self, what: str, *, where: str = "engine.options", expected: str = "") -> None:
        self.where = where
        super().__init__(f"{what}; expected {expected}" if expected else what)


class Unsupported(Exception):
    """The specialised path cannot serve a deployment; ``reasons`` lists every reason."""

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = list(reasons)
        super().__init__("; ".join(self.reasons))


@dataclass(frozen=True)
class EngineOptions:
    """Everything about an engine that is not the model. ``pages`` None: room for all requests at 1024 tokens."""

    decode_backend: str = SWITCH_OFF
    tp: int = 1
    dcp: int = 1
    draft_length: int = 0
    provider: str = "auto"
    max_requests: int = 64
    max_context: int = 4096
    max_tokens_per_step: int = 1024
    page_size: int = 16
    pages: int | None = None
    schedule: str = "mixed"
    prefix_caching: bool = False
    prefix_interval: int = 64  #: tokens between the states kept for prefix reuse, a multiple of the page size

    def __post_init__(self) -> None:
        if self.decode_backend not in (SWITCH_OFF, SWITCH_ON):
            raise OptionError(f"{SWITCH} {self.decode_backend!r}, expected {SWITCH_OFF!r} or {SWITCH_ON!r}")
        if self.schedule not in ("mixed", "pure"):
            raise OptionError(f"schedule {self.schedule!r}, expected 'mixed' or 'pure'")
        if self.draft_length < 0:
            raise OptionError(f"draft_length {self.draft_length}, expected at least 0")
        for name in ("max_requests", "max_context", "page_size", "tp", "dcp"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} {getattr(self, name)}, expected at least 1")
        if self.pages is not None and self.pages < 1:
            raise OptionError(f"pages {self.pages}, expected at least 1")
        if self.prefix_caching and (self.prefix_interval < 1 or self.prefix_interval % self.page_size):
            raise OptionError(
                f"prefix_interval {self.prefix_interval}, expected a multiple of the page size {self.page_size}"
            )
        if self.max_tokens_per_step < (rows := self.max_requests * (1 + self.draft_length)):
            raise OptionError(
                f"max_tokens_per_step {self.max_tokens_per_step}, expected at least {rows}: "
                f"one decode step of {self.max_requests} requests with {1 + self.draft_length} rows each"
            )

    @property
    def resolved_pages(self) -> int:
        if self.pages is not None:
            return self.pages
        return -(-max(self.max_context, self.max_requests * min(self.max_context, 1024)) // self.page_size)
