"""The rows of this task for lm-eval's own command line."""

from __future__ import annotations

from typing import Any

from fasttrack.tasks.sources import lm_eval_documents


def load(**metadata: Any) -> Any:
    return lm_eval_documents("mrcr", **metadata)
