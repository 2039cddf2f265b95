"""A target whose optimised arm carries a fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fasttrack.target import Engine, EngineSpec


class PlantedTarget:
    """``target`` with ``plant`` applied to every engine of its optimised arm; with None, the target as it is."""

    def __init__(self, target: Any, plant: Callable[[Any], None] | None) -> None:
        self.target, self.plant = target, plant

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def engine(self, spec: EngineSpec) -> Engine:
        engine: Engine = self.target.engine(spec)
        if spec.arm == "optimized" and self.plant is not None:
            self.plant(engine)
        return engine
