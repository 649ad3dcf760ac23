"""What a run that goes on from a checkpoint rests on: its prompts, its state, its reference policy."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from full_disk import files_of_at_most
from headrace.algorithms.run import train
from headrace.config import RecipeConfig
from headrace.errors import ConfigError, WriteError
from headrace.utils.run_state import recipe_changes
from recorder import NeverStop, Recorder
from tiny_recipe import tiny_recipe

WORDS = [a + b + c for a in "abcd" for b in "efgh" for c in "ij"]
UNMEASURED = {"period": 0, "at_start": False, "at_end": False}


def write_data(folder: Path, words: list[str]) -> None:
    rows = [json.dumps({"question": word, "answer": word[::-1]}) for word in words]
    (folder / "words.jsonl").write_text("\n".join(rows))


def run(folder: Path, steps: int, *, file: str = "words.jsonl", **changes: Any) -> Recorder:
    """Train on the questions in a file of `folder` up to a step, or go on to it."""
    values = tiny_recipe(folder / "run", validation=UNMEASURED, **changes).model_dump(mode="json")
    values["env"] = {"kind": "dataset", "path": str(folder / file)}
    values["data"] = {"validation_size": 8, **changes.get("data", {})}
    values["grpo"]["max_num_steps"] = steps
    (folder / "run").mkdir(exist_ok=True)
    recorder = Recorder()
    train(RecipeConfig.model_validate(values), folder / "run", recorder, NeverStop())
    return recorder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of one step, which tests only read or refuse to go on from."""
    folder = tmp_path_factory.mktemp("trained")
    write_data(folder, WORDS)
    run(folder, 1)
    return folder


CHANGED = {
    "a row more": (
        [*WORDS, "zzz"],
        "the training prompts (24 then, 25 now) and the held-out prompts (8 then, 8 now)",
    ),
    "another order": (
        WORDS[::-1],
        "the training prompts (24 then, 24 now) and the held-out prompts (8 then, 8 now)",
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_run_does_not_go_on_with_other_prompts(trained: Path, name: str) -> None:
    words, told = CHANGED[name]
    write_data(trained, words)
    with pytest.raises(ConfigError) as caught:
        run(trained, 2)
    write_data(trained, WORDS)
    assert told in str(caught.value)
    for part in (
        "step_000001",
        "measured on what it was trained on",
        "put env and data back",
        "allow_changes=true",
    ):
        assert part in str(caught.value)


def test_an_answer_that_changed_is_seen_too(trained: Path) -> None:
    file = trained / "words.jsonl"
    file.write_text(file.read_text().replace('"answer": "iea"', '"answer": "x"'))
    with pytest.raises(ConfigError, match=r"the (training|held-out) prompts \((\d+) then, \2 now\) are not"):
        run(trained, 2)
    write_data(trained, WORDS)


def test_a_resumed_run_says_that_prompts_come_in_another_order_or_by_other_weights(tmp_path: Path) -> None:
    def recipe(weight: float, order: str | None) -> dict[str, Any]:
        values = tiny_recipe(tmp_path).model_dump(mode="json")
        values["env"] = {"kind": "dataset"}
        sets = {"a": {"path": "a.jsonl", "weight": weight}}
        values["data"] = {"train": sets, "order": order, "train_size": 8}
        return RecipeConfig.model_validate(values).model_dump(mode="json")

    changes = recipe_changes(recipe(1.0, None), recipe(2.0, "my:order"), allowed=False)
    assert {str(c): c.matters for c in changes} == {
        "data.train.a.weight 1.0 -> 2.0": True,
        "data.order null -> my:order": True,
    }


def test_a_file_that_was_moved_is_the_same_data(trained: Path) -> None:
    (trained / "words.jsonl").rename(trained / "moved.jsonl")
    assert run(trained, 1, file="moved.jsonl").steps == []
    write_data(trained, WORDS)


def test_other_prompts_are_gone_on_with_and_told_where_that_is_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_data(tmp_path, WORDS)
    run(tmp_path, 1)
    write_data(tmp_path, [*WORDS, "zzz"])
    with caplog.at_level(logging.WARNING):
        second = run(tmp_path, 2, allow_changes=True)
    assert [record.step for record in second.steps] == [2]
    assert "the training prompts (24 then, 25 now)" in caplog.text
    assert "may be measured on what it was trained on" in caplog.text
    run(tmp_path, 2)  # the new checkpoint is of the new prompts


def test_an_empty_state_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    write_data(tmp_path, WORDS)
    run(tmp_path, 1)
    file = tmp_path / "run" / "checkpoints" / "step_000001" / "checkpoint.json"
    file.write_text(json.dumps({"step": 1, "metrics": {}, "state": {}}))
    with pytest.raises(ConfigError, match=r"checkpoint.json: damaged, state.progress: Field required"):
        run(tmp_path, 2)


def test_a_run_directory_of_an_earlier_version_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_data(tmp_path, WORDS)
    run(tmp_path, 1)
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000001" / "checkpoint.json"
    meta = json.loads(checkpoint.read_text())
    recipe = meta["state"]["recipe"]
    replay = recipe["policy"]["router_replay"]
    replay["max_missing_share"] = replay.pop("max_missing_fraction")
    checkpoint.write_text(json.dumps(meta))
    assert [record.step for record in run(tmp_path, 2).steps] == [2]
    # One of the first versions kept the progress alone; the recipe stood in the run's config.yaml.
    progress = {key: value for key, value in meta["state"]["progress"].items() if not key.startswith("idle_")}
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000002")
    checkpoint.write_text(json.dumps({"step": 1, "metrics": {}, "state": progress}))
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(recipe))
    with caplog.at_level(logging.WARNING):
        assert [record.step for record in run(tmp_path, 2).steps] == [2]
    assert "kept no digest of its prompts" in caplog.text


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def test_a_reference_that_is_switched_on_later_is_the_model_before_training(tmp_path: Path) -> None:
    write_data(tmp_path, WORDS)
    learns = {"grpo": {"reward": {"overlong_penalty": 1.0, "overlong_buffer_tokens": 4}}}
    run(tmp_path, 1, **learns)
    second = run(tmp_path, 2, loss={"kl_coefficient": 0.1}, **learns)
    assert second.steps[0].metrics["train/kl"] > 0
    (tmp_path / "from_the_start").mkdir()
    write_data(tmp_path / "from_the_start", WORDS)
    run(tmp_path / "from_the_start", 1, loss={"kl_coefficient": 0.1}, **learns)
    fresh = weights(tmp_path / "from_the_start" / "run" / "reference")
    reference = weights(tmp_path / "run" / "reference")
    trained = weights(tmp_path / "run" / "checkpoints" / "step_000001" / "policy" / "model")
    assert all(torch.equal(reference[name], fresh[name]) for name in fresh)
    assert not all(torch.equal(reference[name], trained[name]) for name in trained)


def test_after_a_warm_start_a_reference_that_was_not_kept_is_refused_with_the_reason(tmp_path: Path) -> None:
    write_data(tmp_path, WORDS)
    warm = {"enabled": True, "steps": 2, "batch_size": 16}
    run(tmp_path, 1, warm_start=warm)
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, 2, warm_start=warm, loss={"kl_coefficient": 0.1})
    for part in ("reference", "what its warm start ended with", "set it to 0", "overwrite=true"):
        assert part in str(caught.value)


def test_a_disk_that_is_full_at_a_checkpoint_costs_that_checkpoint_only(tmp_path: Path) -> None:
    write_data(tmp_path, WORDS)
    run(tmp_path, 1)
    with files_of_at_most(100_000), pytest.raises(WriteError) as caught:
        run(tmp_path, 2)
    checkpoints = tmp_path / "run" / "checkpoints"
    assert str(caught.value).startswith(f"{checkpoints}/step_000002/policy/model: cannot write it (")
    assert "File too large" in str(caught.value)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000001"]
    assert [record.step for record in run(tmp_path, 2).steps] == [2]


def test_prompts_that_are_too_long_are_refused_by_line_or_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_data(tmp_path, [*WORDS, "long" * 10])
    with pytest.raises(
        ConfigError, match=r"prompt 'words-33' \(line 33\) has 4\d tokens .*data.overlong_prompts=skip"
    ):
        run(tmp_path, 1)
    with caplog.at_level(logging.WARNING):
        run(tmp_path, 1, data={"overlong_prompts": "skip"})
    assert "1 of train prompts, first 'words-33'" in caplog.text or "1 of validation prompts" in caplog.text
    write_data(tmp_path, [word * 10 for word in WORDS])
    with pytest.raises(ConfigError, match="max_total_sequence_length=24: every prompt of train is too long"):
        run(tmp_path, 1, data={"overlong_prompts": "skip"}, allow_changes=True)
