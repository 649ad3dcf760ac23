"""How far trainer and generator are apart with and without router replay, from the same warm-started weights.

    python examples/router_replay_kl.py run --seed 0 --out /tmp/r3      # a few minutes per seed on one core
    python examples/router_replay_kl.py plot /tmp/r3 --png docs/router_replay_kl.png

`run` warm-starts the model of the recipe demo_moe_r3 once, then trains it twice from there: the rollout in bfloat16,
the trainer in float32, router replay on and off. It writes one JSON file per seed: the metrics of every step.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from headrace.algorithms.observer import StepRecord
from headrace.algorithms.run import build_session, start_loop
from headrace.algorithms.warm_start import warm_start, warm_start_optimizer
from headrace.config import RecipeConfig
from headrace.utils.recipe import load_recipe

RECIPE = "demo_moe_r3"
KL = "mismatch/generation_kl"
KEPT = ("mismatch/", "router_replay/", "rollout/accuracy")
ARMS = {"replay": "true", "native": "false"}


class NeverStop:
    """Lets a run go to its end."""

    def is_set(self) -> bool:
        return False


class Steps:
    """An observer that keeps the metrics of every step, and prints one of them."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.metrics: list[dict[str, float]] = []

    def on_step(self, record: StepRecord) -> None:
        self.metrics.append(record.metrics)
        print(f"{self.label}: step {record.step}, k3 KL {record.metrics[KL]:.3e}", flush=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *args, **kwargs: None
        raise AttributeError(name)


def recipe_of(seed: int, arm: str, steps: int, overrides: list[str]) -> RecipeConfig:
    return load_recipe(
        RECIPE,
        [
            f"seed={seed}",
            f"policy.router_replay.enabled={ARMS[arm]}",
            f"grpo.max_num_steps={steps}",
            "validation.at_start=false",
            "validation.at_end=false",
            "validation.period=0",
            *overrides,
        ],
    )


def warm_up(recipe: RecipeConfig, directory: Path) -> None:
    """Take the recipe's supervised steps and save the weights."""
    session = build_session(recipe)
    try:
        cfg = recipe.warm_start
        session.policy.reset_optimizer(*warm_start_optimizer(recipe.policy, cfg))
        warm_start(
            session.policy,
            session.environment.prompts("train"),
            cfg,
            seed=recipe.seed,
            first=0,
            on_non_finite=recipe.loss.on_non_finite,
            filtered=recipe.generation.filters,
            on_progress=lambda done, metrics: print(f"warm start {done}/{cfg.steps}", metrics, flush=True),
            should_stop=lambda: False,
        )
        session.policy.reset_optimizer(recipe.policy.optimizer, recipe.policy.scheduler)
        session.policy.save_checkpoint(directory)
    finally:
        session.close()


def train_arm(recipe: RecipeConfig, weights: Path, label: str) -> list[dict[str, float]]:
    """Train from the warm-started weights and return the kept metrics of every step."""
    session = build_session(recipe)
    observer = Steps(label)
    try:
        session.policy.load_checkpoint(weights)
        start_loop(session, observer, NeverStop()).run()
    finally:
        session.close()
    return [{k: v for k, v in step.items() if k.startswith(KEPT)} for step in observer.metrics]


def run(seed: int, out: Path, steps: int, overrides: list[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    weights = out / f"warm_seed{seed}"
    if not weights.is_dir():
        warm_up(recipe_of(seed, "native", steps, overrides), weights)
    arms = {
        arm: train_arm(recipe_of(seed, arm, steps, overrides), weights, f"seed {seed}, {arm}") for arm in ARMS
    }
    (out / f"seed{seed}.json").write_text(json.dumps({"seed": seed, "steps": steps, "arms": arms}, indent=1))
    print(table([json.loads((out / f"seed{seed}.json").read_text())]))


def mean_kl(result: dict[str, Any], arm: str) -> float:
    return statistics.fmean(step[KL] for step in result["arms"][arm])


def table(results: list[dict[str, Any]]) -> str:
    lines = ["seed  k3 KL native  k3 KL replay  ratio"]
    for result in results:
        native, replay = (mean_kl(result, arm) for arm in ("native", "replay"))
        lines.append(f"{result['seed']:4d}  {native:12.3e}  {replay:12.3e}  {replay / native:5.2f}")
    return "\n".join(lines)


def plot(directory: Path, png: Path) -> None:
    from matplotlib.figure import Figure

    results = [json.loads(path.read_text()) for path in sorted(directory.glob("seed*.json"))]
    figure = Figure(figsize=(7.5, 3.8), dpi=110, layout="constrained")
    axis = figure.subplots()
    for arm, color, label in (("native", "#ee6677", "without replay"), ("replay", "#4477aa", "with replay")):
        curves = [[step[KL] for step in result["arms"][arm]] for result in results]
        for curve in curves:
            axis.plot(range(1, len(curve) + 1), curve, color=color, alpha=0.25, linewidth=1)
        middle = [statistics.fmean(values) for values in zip(*curves, strict=True)]
        axis.plot(range(1, len(middle) + 1), middle, color=color, linewidth=2, label=label)
    axis.set_yscale("log")
    axis.set_xlabel("step", fontsize=9)
    axis.set_title(
        f"k3 estimate of KL(generator || trainer) per token, {len(results)} seeds", loc="left", fontsize=10
    )
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9)
    figure.savefig(png)
    print(table(results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--seed", type=int, default=0)
    runs.add_argument("--out", type=Path, required=True)
    runs.add_argument("--steps", type=int, default=80)
    runs.add_argument("overrides", nargs="*", help="key=value, as headrace train takes them")
    plots = commands.add_parser("plot")
    plots.add_argument("directory", type=Path)
    plots.add_argument("--png", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "run":
        run(args.seed, args.out, args.steps, args.overrides)
    else:
        plot(args.directory, args.png)


if __name__ == "__main__":
    main()
