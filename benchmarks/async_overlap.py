"""How much faster are steps when samples are made beside training, where the two take equally long?

The demo's model on a CPU, with the engine in a process of its own (`generation.placement=beside`), one thread there and
one here. The same number of steps in turn by the synchronous loop and by the asynchronous one with a lag of 1, from the
first wait for samples to the last update: what the asynchronous loop needs until its first samples are there is in it.
Wall-clock seconds, since two processes work.
"""

import tempfile
import time
from functools import partial
from pathlib import Path

from run import Bench, main

from headrace.algorithms import grpo, grpo_async
from headrace.algorithms.async_utils.producers import Producers
from headrace.algorithms.loop import update_weights
from headrace.algorithms.run import build_session
from headrace.models.policy.tq_policy import TQPolicy
from headrace.utils.recipe import load_recipe
from headrace.utils.run_state import Progress
from headrace.utils.timer import Timer

FASTER = 1.5
STEPS, QUICK_STEPS = 6, 3
_SMALL = ["grpo.num_prompts_per_step=8", "policy.train_global_batch_size=64"]


class Way:
    """The demo's session with an engine beside it, whose `run` makes further steps."""

    def __init__(self, folder: str, steps: int, *, is_async: bool, quick: bool) -> None:
        changes = [
            f"run_dir={folder}",
            "generation.placement=beside",
            "generation.guard.enabled=false",
            "loss.importance_correction=tis",
            "warm_start.enabled=false",
            # So that samples take as long as scoring and training.
            "generation.max_new_tokens=16",
            "generation.batch_size=40",
            f"async.enabled={str(is_async).lower()}",
            f"data_plane.store_name={Path(folder).name}",
            *(_SMALL if quick else []),
        ]
        self.steps, self.timer, self.lags = steps, Timer(), list[float]()
        self.session = build_session(load_recipe("demo_moe", changes))
        self.progress = Progress.at_start()

    def run(self) -> None:
        """Make the next steps."""
        first = self.progress.step + 1
        (self._asynchronous if self.session.recipe.asynchrony.enabled else self._synchronous)(first)
        self.progress.step += self.steps

    def _synchronous(self, first: int) -> None:
        update_weights(self.session)
        for step in range(first, first + self.steps):
            grpo.run_step(self.session, step, self.timer)
            update_weights(self.session)

    def _asynchronous(self, first: int) -> None:
        session, policy = self.session, self.session.policy
        assert isinstance(policy, TQPolicy)
        last = session.recipe.grpo.model_copy(update={"max_num_steps": first + self.steps - 1})
        producers = Producers(
            session.recipe.model_copy(update={"grpo": last}),
            policy.dp_client,
            policy.tq_partition_id,
            session.prompts,
            [session.rollouts],
            self.progress,
        )
        producers.start()
        grpo_async.publish(self.session, producers, first - 1)
        for step in range(first, first + self.steps):
            result = grpo_async.run_step(session, producers, step, self.timer)
            grpo_async.publish(self.session, producers, step)
            self.lags.append(result.metrics["async/lag_max"])
        self.progress.prompt_position, self.progress.prompts_ahead = producers.tickets.progress()
        producers.close()


def measure(bench: Bench) -> None:
    """Race both loops."""
    steps = QUICK_STEPS if bench.quick else STEPS
    with tempfile.TemporaryDirectory() as folder:
        build = partial(Way, steps=steps, quick=bench.quick)
        ways = {
            "synchronous": build(f"{folder}/sync", is_async=False),
            "asynchronous": build(f"{folder}/async", is_async=True),
        }
        try:
            times = bench.race(
                "steps", {name: way.run for name, way in ways.items()}, clock=time.perf_counter
            )
        finally:
            for way in ways.values():
                way.session.close()
    made = steps * (bench.repeats + 1)
    spent = {name: way.timer.totals() for name, way in ways.items()}
    sync = {stage: seconds / made for stage, seconds in spent["synchronous"].items()}
    learning = sum(seconds for stage, seconds in sync.items() if stage != "rollout")
    assert max(ways["asynchronous"].lags) <= 1
    bench.notes["seconds_per_step"] = {
        name: {stage: round(seconds / made, 4) for stage, seconds in stages.items()}
        for name, stages in spent.items()
    }
    bench.figure(
        "overlap.speedup",
        1 / times["asynchronous"].ratio,
        "x",
        at_least=FASTER,
        note=f"{steps} steps of 256 samples" if not bench.quick else "",
    )
    bench.figure("overlap.generation_share", sync["rollout"] / (sync["rollout"] + learning), "")
    bench.figure("overlap.lag_mean", sum(ways["asynchronous"].lags) / made, "steps")


if __name__ == "__main__":
    main(measure, __doc__)
