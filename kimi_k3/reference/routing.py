"""Which experts a step chose, whichever path ran it: kept only while somebody wants to know."""

from __future__ import annotations

from typing import Any


class RoutingTap:
    """Taps the MoE layers of the reference and the ``route`` op of an executor. ``model`` and ``executor`` are an
    engine's; an executor may be None. Without speculation only: a drafter may run the model between steps."""

    def __init__(self, model: Any, executor: Any) -> None:
        layers = getattr(model, "layers", ())
        self.layers = {layer.index: layer.ffn for layer in layers if hasattr(layer.ffn, "chosen")}
        self.context = getattr(executor, "context", None)

    def switch(self, on: bool) -> None:
        for recorder in (*self.layers.values(), self.context):
            if recorder is not None:
                recorder.chosen = [] if on else None

    def take(self, rows: int) -> dict[int, list[list[int]]]:
        """Layer -> expert ids per row, ascending, of the step that just ran; padding rows are left out."""
        fast = list(self.context.chosen) if self.context is not None else []
        taken = {}
        for place, (layer, moe) in enumerate(self.layers.items()):
            ids = (moe.chosen or fast[place:])[0]
            taken[layer] = ids[:rows].sort(dim=-1).values.tolist()
            moe.chosen.clear()
        if self.context is not None:
            self.context.chosen.clear()
        return taken
