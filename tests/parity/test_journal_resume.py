"""A checkpoint and the journal's position are one: a run that goes on has the rows that the store had then."""

from pathlib import Path
from typing import Any

import torch

from headrace.algorithms.loop import save_checkpoint
from headrace.algorithms.resume import prompts_state, restore
from headrace.algorithms.run import build_session, train
from headrace.data_plane import kv_first_write
from headrace.models.policy.tq_policy import TQPolicy
from headrace.utils.checkpoints import CheckpointManager
from headrace.utils.run_directory import RunDirectory
from headrace.utils.run_state import Progress, read_state
from recorder import NeverStop, Recorder, StopAfter
from tiny_recipe import tiny_recipe

JOURNAL = {"data_plane": {"journal": {"enabled": True, "segment_bytes": 20_000}}}


def put(client: Any, name: str) -> list[str]:
    rows = [torch.arange(3 + i) for i in range(2)]
    ids = [f"{name}_g{i}" for i in range(2)]
    batch = {"input_ids": rows, "input_lengths": torch.tensor([3, 4])}
    kv_first_write(
        batch, sample_ids=ids, dp_client=client, partition_id="buffer", tags=[{"weight_version": 0}] * 2
    )
    return ids


def test_a_resumed_run_has_the_rows_of_its_checkpoint(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, **JOURNAL)
    checkpoints = CheckpointManager(tmp_path / "checkpoints", keep_top_k=None, metric="m")
    first = build_session(recipe)
    assert isinstance(first.policy, TQPolicy)
    client = first.policy.dp_client
    restore(first, checkpoints, tmp_path / "reference")
    trained, waiting, dropped = (put(client, name) for name in "abc")
    client.clear_samples(trained, "buffer")
    progress = Progress.at_start().model_copy(update={"step": 1})
    save_checkpoint(first.policy, checkpoints, recipe, progress, prompts_state(first.environment))
    # What comes after the checkpoint goes with the crash, training on these rows, too.
    client.clear_samples(dropped, "buffer")
    put(client, "d")
    first.close()

    second = build_session(recipe)
    assert isinstance(second.policy, TQPolicy)
    assert restore(second, checkpoints, tmp_path / "reference").step == 1
    assert second.policy.dp_client.sample_ids("buffer") == [*waiting, *dropped]
    second.close()
    for path in (tmp_path / "checkpoints").iterdir():
        state = read_state(checkpoints.list()[0])
        assert state.journal is not None
        path.rename(tmp_path / "elsewhere")
    third = build_session(recipe)
    assert isinstance(third.policy, TQPolicy)
    restore(third, checkpoints, tmp_path / "reference")
    assert third.policy.dp_client.partition_ids() == [], "without a checkpoint a run begins with nothing"
    third.close()


def test_a_run_with_a_journal_is_the_run_without_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def run(name: str, stopper: Any, **settings: Any) -> Recorder:
        directory, seen = tmp_path / name, Recorder()
        directory.mkdir(exist_ok=True)
        recipe = tiny_recipe(
            directory,
            batching="packed",
            grpo={"max_num_steps": 4},
            checkpointing={"save_period": 1},
            validation={"at_start": False, "at_end": False},
            **settings,
        )
        train(recipe, directory, seen, stopper)
        return seen

    def numbers(*parts: Recorder) -> dict[int, dict[str, float]]:
        return {
            r.step: {k: v for k, v in r.metrics.items() if not k.endswith(("_s", "/seconds"))}
            for part in parts
            for r in part.steps
        }

    plain = run("plain", NeverStop())
    stopped = run("parts", StopAfter(12), **JOURNAL)
    assert 0 < len(stopped.steps) < 4
    resumed = run("parts", NeverStop(), **JOURNAL)
    assert numbers(stopped, resumed) == numbers(plain)
    size = sum(
        path.stat().st_size for path in RunDirectory(tmp_path / "parts").journal_dir.rglob("*.journal")
    )
    assert 0 < size < 100_000, "of four steps of 30 kB only what the last checkpoint needs is left"
