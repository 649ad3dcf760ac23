"""What the pictures need beside the runs: which charts there are, what metrics mean, and the colours."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from headrace.algorithms.observer import STAGES
from headrace.dashboard.palette import CHARTS, colour
from headrace.metric_names import METRICS


def about(run_names: Sequence[str]) -> dict[str, Any]:
    """Return it as JSON values."""
    known = [*STAGES, *(name for chart in CHARTS for name in chart.names)]
    return {
        "runs": list(run_names),
        "charts": [asdict(chart) for chart in CHARTS],
        "stages": list(STAGES),
        "meanings": METRICS,
        "colours": {name: colour(name) for name in known},
    }
