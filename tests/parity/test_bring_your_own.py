"""docs/bring_your_own.md, done by a stranger: its files in an empty folder, its commands by the installed wheel."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from wheel_session import InstalledWheel

PAGE = Path(__file__).parents[2] / "docs" / "bring_your_own.md"
_BLOCK = re.compile(r"```(\w+)(?: (\S+))?\n(.*?)```", re.DOTALL)
BLOCKS = [match.groups() for match in _BLOCK.finditer(PAGE.read_text(encoding="utf-8"))]
MOST_LINES = 15


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for _, name, text in BLOCKS:
        if name:
            (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def train(wheel: InstalledWheel, folder: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    """Run a recipe of the page; return the records of its metrics."""
    done = wheel.headrace("train", f"{name}.yaml", *overrides, cwd=folder)
    assert done.returncode == 0, done.stderr
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def last(records: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return [record for record in records if record["kind"] == kind][-1]


def test_every_command_of_the_page_is_one_that_is_run_here_and_code_is_short() -> None:
    commands = [text.strip() for language, _, text in BLOCKS if language == "bash"]
    trained = [f"headrace train {name}.yaml" for name in ("sets", "reward", "env", "loss")]
    assert commands == ["headrace data preview data.yaml", *trained, "python train.py"]
    for language, name, text in BLOCKS:
        if language == "python":
            assert sum(bool(line.strip()) for line in text.splitlines()) <= MOST_LINES, name


def test_rewards_of_ones_own_on_a_csv_of_ones_own(installed_wheel: InstalledWheel, folder: Path) -> None:
    step = last(train(installed_wheel, folder, "reward"), "step")
    parts = [step[f"reward/{name}"] for name in ("right", "short", "easy_first")]
    assert step["reward/mean"] == pytest.approx(parts[0] + 0.1 * parts[1] + 0.1 * parts[2], abs=1e-6)
    assert {"reward/right/tens", "reward/short_errors"} <= {*step}
    assert step["reward/right_errors"] == 0


def test_an_environment_of_ones_own_with_two_turns(installed_wheel: InstalledWheel, folder: Path) -> None:
    records = train(installed_wheel, folder, "env")
    assert 1 < last(records, "step")["rollout/turns_mean"] <= 2
    assert "validation/accuracy" in last(records, "validation")


def test_a_loss_with_a_column_of_ones_own(installed_wheel: InstalledWheel, folder: Path) -> None:
    step = last(train(installed_wheel, folder, "loss", "grpo.max_num_steps=1"), "step")
    assert 1 <= step["train/difficulty"] <= 3
    assert step["dynamic_sampling/rounds"] >= 1


@pytest.mark.slow
def test_a_loss_of_ones_own_is_the_same_with_two_workers(
    installed_wheel: InstalledWheel, folder: Path
) -> None:
    changes = (["grpo.max_num_steps=1"], ["grpo.max_num_steps=1", "overwrite=true", "policy.workers=2"])
    one, two = (last(train(installed_wheel, folder, "loss", *overrides), "step") for overrides in changes)
    assert two["train/loss"] == pytest.approx(one["train/loss"], abs=1e-6)


def test_two_validation_sets_with_pass_at_k(installed_wheel: InstalledWheel, folder: Path) -> None:
    measured = last(
        train(installed_wheel, folder, "sets", "checkpointing.metric=validation/hard/pass@4"), "validation"
    )
    assert {"validation/easy/pass@1", "validation/easy/maj@4", "validation/hard/pass@4"} <= {*measured}
    assert measured["validation/easy/pass@1"] <= measured["validation/easy/pass@4"]
    # Of one sample, the chance is the accuracy of samples.
    assert measured["validation/easy/pass@1"] == pytest.approx(measured["validation/easy/sampled_accuracy"])
    both = [measured[f"validation/{name}/reward"] for name in ("easy", "hard")]
    assert measured["validation/reward"] == pytest.approx(sum(both) / 2)


def test_the_preview_shows_prompts_with_tokens_answers_and_template(
    installed_wheel: InstalledWheel, folder: Path
) -> None:
    done = installed_wheel.headrace("data", "preview", "data.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "train: 6 prompts (sums 6) of 6 to 6 tokens" in done.stdout
    assert re.search(r"sums-\d, line \d: 6 tokens, answer '\d'\n<\|begin\|>\d\+\d=<\|answer\|>", done.stdout)
    assert "chat template: {{ bos_token }}" in done.stdout


def test_a_script_trains_with_a_function_of_its_own(installed_wheel: InstalledWheel, folder: Path) -> None:
    done = installed_wheel.python("train.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "step 1 True\n" in done.stdout
    assert "True 2 runs/python/checkpoints/step_000002/policy/model\n" in done.stdout
    assert (folder / "runs/python/checkpoints/step_000002/policy/model/config.json").is_file()
