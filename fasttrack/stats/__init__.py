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
from fasttrack.stats.power import (
    Design,
    Odds,
    joint_odds,
    joint_pass_probability,
    odds,
    pass_probability,
    repeats_for_all,
    repeats_needed,
)

__all__ = [
    "Bounds",
    "Design",
    "Odds",
    "PairedScores",
    "bootstrap_bound",
    "breach_p_value",
    "holm",
    "joint_odds",
    "joint_pass_probability",
    "lower_bound",
    "mcnemar_exact",
    "odds",
    "pass_probability",
    "repeats_for_all",
    "repeats_needed",
    "score_bound",
    "score_bounds",
    "score_z",
    "t_bounds",
]
