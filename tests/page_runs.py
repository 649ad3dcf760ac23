"""Run directories as a long run leaves them, written in a second; also a script: DIRECTORY STEPS SAMPLES_PER_STEP."""

import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORDS = "water wheel mill race sluice gate river dam turbine channel flow stone Größe naïve".split()  # noqa: SIM905
STAGES = {"rollout": 0.9, "prev_logprobs": 0.2, "advantages": 0.01, "train": 0.6, "update_weights": 0.02}
COLUMNS = {"input_ids": 84_000, "generation_logprobs": 42_000, "token_mask": 14_000, "advantages": 2_000}
LAYERS = 12

DESKTOP, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
OpenPage = Callable[..., Any]
"""From an address to a page of playwright."""


def metrics_of(step: int, rng: random.Random) -> dict[str, float]:
    """Return the numbers of a step: noise around a curve that saturates, and a dozen of other metrics."""
    grown = 1 - math.exp(-step / 400)
    return {
        "reward/mean": 0.3 + 0.6 * grown + rng.gauss(0, 0.04),
        "train/loss": rng.gauss(0, 0.01),
        "train/grad_norm": abs(rng.gauss(1.0, 0.2)),
        "train/entropy": 2 - grown + rng.gauss(0, 0.05),
        "mismatch/generation_kl": abs(rng.gauss(2e-3, 4e-4)),
        "rollout/response_tokens_mean": 120 + 200 * grown + rng.gauss(0, 9),
        "rollout/response_tokens_max": 512.0,
        "rollout/tokens_per_s": 5200 + rng.gauss(0, 300),
        "router_replay/route_exact": 0.98 + rng.gauss(0, 0.002),
        **{f"router_replay/exact_layer_{i}": 0.99 - i * 0.004 + rng.gauss(0, 0.002) for i in range(LAYERS)},
        **{f"environment/part_{i}": rng.random() for i in range(12)},
        "tokens": 40_000,
        **{f"time_s/{stage}": seconds * rng.uniform(0.9, 1.2) for stage, seconds in STAGES.items()},
        **{f"bytes/{column}": size for column, size in COLUMNS.items()},
    }


def sample_of(step: int, number: int, rng: random.Random) -> dict[str, Any]:
    prompt, answer = (" ".join(rng.choices(WORDS, k=count)) for count in (12, 30))
    right = rng.random() < 0.5
    return {
        "step": step,
        "split": "train",
        "sample_id": f"p{step}@{step}.0_g{number}",
        "messages": [
            {"role": "user", "content": f'Say "{prompt}"\nbackward.'},
            {"role": "assistant", "content": f"{answer} {step * 1000 + number}"},
        ],
        "reward": float(right) + rng.random() / 4,
        "advantage": rng.gauss(0, 1),
        "truncated": rng.random() < 0.1,
        "expected": prompt[::-1],
        "correct": right,
        "parts": {"format": rng.random()},
    }


def write_long_run(
    path: Path, steps: int, samples_per_step: int, *, seed: int = 0, recipe: str = "seed: 0\n"
) -> Path:
    rng = random.Random(seed)
    path.mkdir(parents=True, exist_ok=True)
    (path / ".headrace-run").touch()
    (path / "config.yaml").write_text(recipe)
    with (path / "metrics.jsonl").open("w") as metrics, (path / "samples.jsonl").open("w") as samples:
        for step in range(1, steps + 1):
            record = {"kind": "step", "step": step, "phase": "grpo", **metrics_of(step, rng)}
            metrics.write(json.dumps(record) + "\n")
            if step % 100 == 0:
                accuracy = {
                    "validation/accuracy": 0.4 + step / steps / 2,
                    "validation/sampled_accuracy": 0.35 + step / steps / 2,
                }
                metrics.write(json.dumps({"kind": "validation", "step": step, **accuracy}) + "\n")
            for number in range(samples_per_step):
                samples.write(json.dumps(sample_of(step, number, rng), ensure_ascii=False) + "\n")
    return path


if __name__ == "__main__":
    write_long_run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
