"""Engines are built once per deployment and arm, and reset between the units that share them."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fasttrack.engines.build import build_engine
from fasttrack.gates.base import Scope
from fasttrack.target import Engine, EngineSpec, Target


class EngineCache:
    """The most recently used engines of one process; older ones are closed."""

    def __init__(self, target: Target, scope: Scope, workdir: Path, seed: int, capacity: int = 4) -> None:
        self.target, self.scope, self.workdir, self.seed, self.capacity = target, scope, workdir, seed, capacity
        self._engines: OrderedDict[tuple[object, ...], Engine] = OrderedDict()

    def switch_value(self, arm: str) -> str:
        description = self.scope.description
        return description.on if arm == "optimized" or arm.startswith("sabotaged:") else description.off

    @property
    def max_requests(self) -> int:
        """One size for every engine of a run, so that the arms do not differ in it."""
        keys = [*self.scope.cells(), *(probe.key for probe in self.scope.probes())]
        return max(key.requests for key in keys)

    def spec(
        self,
        arm: str,
        *,
        tp: int,
        dcp: int,
        draft_length: int,
        acceptance: str,
        options: Mapping[str, Any] | None = None,
    ) -> EngineSpec:
        """``options`` override those of the manifest, for this engine only."""
        engine = self.scope.manifest.engine
        return EngineSpec(
            kind=engine.kind,
            arm=arm,
            switch_value=self.switch_value(arm),
            tp=tp,
            dcp=dcp,
            draft_length=draft_length,
            max_requests=self.max_requests,
            acceptance=acceptance,
            options={**engine.options, **(options or {})},
            workdir=self.workdir,
            seed=self.seed,
        )

    def get(
        self,
        arm: str,
        *,
        tp: int,
        dcp: int,
        draft_length: int,
        acceptance: str,
        options: Mapping[str, Any] | None = None,
    ) -> Engine:
        """The engine of ``arm`` in this deployment, with nothing left over from its last use."""
        key = (arm, tp, dcp, draft_length, acceptance, json.dumps(dict(options or {}), sort_keys=True))
        if key in self._engines:
            self._engines.move_to_end(key)
        else:
            while len(self._engines) >= self.capacity:
                self._engines.popitem(last=False)[1].close()
            spec = self.spec(arm, tp=tp, dcp=dcp, draft_length=draft_length, acceptance=acceptance, options=options)
            self._engines[key] = build_engine(self.target, spec)
        engine = self._engines[key]
        engine.reset()
        engine.drain_ledger()
        return engine

    def close(self) -> None:
        while self._engines:
            self._engines.popitem()[1].close()
