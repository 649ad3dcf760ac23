"""One colour per stage, column and metric, the same in every picture; and the charts that come first."""

import colorsys
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headrace.algorithms import observer
from headrace.metric_names import METRICS

_COLOURS = {
    # Stages of a step.
    "rollout": "#4477aa",
    "prev_logprobs": "#56b4d3",
    "reference_logprobs": "#aa3377",
    "advantages": "#ccaa33",
    "train": "#e5606f",
    "update_weights": "#228833",
    "validation": "#ee8866",
    "checkpoint": "#8c8c8c",
    "wait": "#b4b4b4",
    # Columns; some are named like the stage that makes them.
    "input_ids": "#4477aa",
    "input_lengths": "#7f9fc6",
    "token_mask": "#66a182",
    "sample_mask": "#99944d",
    "generation_logprobs": "#e5606f",
    "reference_policy_logprobs": "#aa3377",
    "mean_advantages": "#b08a2e",
    "prev_unfiltered_logprobs": "#88ccc4",
    "routed_experts": "#8860b0",
    "message_log": "#8c8c8c",
    # Metrics of the charts that come first.
    observer.REWARD: "#4477aa",
    observer.GREEDY_ACCURACY: "#228833",
    observer.SAMPLED_ACCURACY: "#e5606f",
    observer.GREEDY_REWARD: "#228833",
    observer.SAMPLED_REWARD: "#e5606f",
    "rollout/accuracy": "#ccaa33",
    observer.LOSS: "#aa3377",
    observer.GENERATION_KL: "#ee8866",
    "train/kl": "#8860b0",
    "train/approx_kl": "#56b4d3",
    observer.GRAD_NORM: "#99944d",
    observer.TOKENS_PER_S: "#228833",
    observer.LAG: "#4477aa",
    "async/lag_max": "#ee8866",
    "time_s/wait": "#e5606f",
    observer.COLLECTORS_WAIT_S: "#4477aa",
    "async/ready_groups": "#228833",
    "async/room_groups": "#8c8c8c",
}


def colour(name: str) -> str:
    """Return the colour of a stage, column or metric as `#rrggbb`; one that has none gets one by its name."""
    return _COLOURS.get(name) or _made(zlib.crc32(name.encode()))


def _made(number: int) -> str:
    lightness, saturation = 0.42 + number // 997 % 4 * 0.05, 0.4 + number // 3989 % 3 * 0.1
    parts = colorsys.hls_to_rgb(number % 997 / 997, lightness, saturation)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


@dataclass(frozen=True)
class Chart:
    """Metrics that share a picture; `of` is the kind of lines that they stand in, `key` what writes them.

    `instead`: it is drawn only where the chart of that title is not. `is_rare`: only once a value is not 0.
    """

    title: str
    names: tuple[str, ...]
    labels: tuple[str, ...] = ("",)
    of: str = "steps"
    key: str = ""
    instead: str = ""
    is_rare: bool = False


CHARTS = (
    Chart("Reward", (observer.REWARD,)),
    Chart(
        "Held-out accuracy",
        (observer.GREEDY_ACCURACY, observer.SAMPLED_ACCURACY),
        ("greedy", "sampled"),
        "validations",
        "validation.period, and an environment that gives verdicts",
    ),
    Chart(
        "Held-out reward",
        (observer.GREEDY_REWARD, observer.SAMPLED_REWARD),
        ("greedy", "sampled"),
        "validations",
        "validation.period",
        "Held-out accuracy",
    ),
    Chart("Loss", (observer.LOSS,)),
    Chart("KL of generator and trainer", (observer.GENERATION_KL,)),
    Chart("KL to the reference", ("train/kl",), key="loss.kl_coefficient"),
    Chart("Gradient norm", (observer.GRAD_NORM,)),
    Chart("Entropy", ("train/entropy", "train/approx_entropy"), ("exact", "by the sampled tokens")),
    Chart(
        "Response tokens",
        ("rollout/response_tokens_mean", "rollout/response_tokens_max"),
        ("mean", "longest"),
    ),
    Chart("Generated tokens/s", (observer.TOKENS_PER_S,)),
    Chart(
        "Routes as the trainer would choose them",
        (observer.ROUTE_AGREEMENT,),
        key="policy.router_replay.enabled",
    ),
    Chart("Lag of samples, in steps", (observer.LAG, "async/lag_max"), ("mean", "oldest")),
    Chart(
        "Seconds of waiting",
        ("time_s/wait", observer.COLLECTORS_WAIT_S),
        ("trainer for samples", "collectors for room or weights"),
    ),
    Chart("Groups in the store", ("async/ready_groups", "async/room_groups"), ("ready", "room for more")),
    Chart(
        "Lost work",
        (observer.FAILED_CALLS, "async/dropped_groups"),
        ("failed calls", "groups dropped"),
        is_rare=True,
    ),
    Chart("Loss of the warm start", ("warm_start/loss",), of="phases"),  # until the first step
)
"""What a person looks at first, in this order; every other metric has a chart under its name."""

MAIN_METRICS = tuple(name for chart in CHARTS for name in chart.names)


def about(run_names: Sequence[str]) -> dict[str, Any]:
    """Return what the pictures need beside the runs, as JSON values: charts, what metrics mean, colours."""
    return {
        "runs": list(run_names),
        "charts": [asdict(chart) for chart in CHARTS],
        "stages": list(observer.STAGES),
        "meanings": METRICS,
        "colours": {name: colour(name) for name in (*observer.STAGES, *MAIN_METRICS)},
    }
