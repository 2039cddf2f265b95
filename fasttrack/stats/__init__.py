"""Statistics of paired evaluations: bounds that hold at zero discordance, corrections, and power. A leaf."""

from fasttrack.stats.paired import (
    Bounds,
    PairedScores,
    bootstrap_bound,
    breach_p_value,
    holm,
    lower_bound,
    mcnemar_exact,
    score_bound,
    score_bounds,
    score_z,
    t_bounds,
)
from fasttrack.stats.power import Design, joint_pass_probability, pass_probability, repeats_needed

__all__ = [
    "Bounds",
    "Design",
    "PairedScores",
    "bootstrap_bound",
    "breach_p_value",
    "holm",
    "joint_pass_probability",
    "lower_bound",
    "mcnemar_exact",
    "pass_probability",
    "repeats_needed",
    "score_bound",
    "score_bounds",
    "score_z",
    "t_bounds",
]
