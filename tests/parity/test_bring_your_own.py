"""docs/bring_your_own.md, done by a stranger: its files in an empty folder, its commands by the installed wheel."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from wheel_session import Done, InstalledWheel

PAGE = Path(__file__).parents[2] / "docs" / "bring_your_own.md"
_BLOCK = re.compile(r"```(\w+)(?: (\S+))?\n(.*?)```", re.DOTALL)
BLOCKS = [match.groups() for match in _BLOCK.finditer(PAGE.read_text(encoding="utf-8"))]
MOST_LINES = 15


RUNS = {
    "sets": ("checkpointing.metric=validation/hard/pass@4",),
    "reward": (),
    "env": (),
    "loss": ("grpo.max_num_steps=1",),
}
PREVIEW, SCRIPT = ("headrace", "data", "preview", "data.yaml"), ("train.py",)


def write_page(folder: Path) -> Path:
    for _, name, text in BLOCKS:
        if name:
            (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def done(installed_wheel: InstalledWheel, folder: Path) -> dict[str, Done]:
    """How the commands of the page end, by their recipes."""
    trained = [("headrace", "train", f"{name}.yaml", *more) for name, more in RUNS.items()]
    ends = installed_wheel.each(PREVIEW, *trained, SCRIPT, cwd=folder)
    return dict(zip(("data", *RUNS, "script"), ends, strict=True))


def records(done: Done, folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the records of a run's metrics."""
    assert done.returncode == 0, done.stderr
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def last(records: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return [record for record in records if record["kind"] == kind][-1]


def test_every_command_of_the_page_is_one_that_is_run_here_and_code_is_short() -> None:
    commands = [text.strip() for language, _, text in BLOCKS if language == "bash"]
    trained = [f"headrace train {name}.yaml" for name in RUNS]
    assert commands == ["headrace data preview data.yaml", *trained, "python train.py"]
    for language, name, text in BLOCKS:
        if language == "python":
            assert sum(bool(line.strip()) for line in text.splitlines()) <= MOST_LINES, name


def test_rewards_of_ones_own_on_a_csv_of_ones_own(done: dict[str, Done], folder: Path) -> None:
    step = last(records(done["reward"], folder, "reward"), "step")
    parts = [step[f"reward/{name}"] for name in ("right", "short", "easy_first")]
    assert step["reward/mean"] == pytest.approx(parts[0] + 0.1 * parts[1] + 0.1 * parts[2], abs=1e-6)
    assert {"reward/right/tens", "reward/short_errors"} <= {*step}
    assert step["reward/right_errors"] == 0


def test_an_environment_of_ones_own_with_two_turns(done: dict[str, Done], folder: Path) -> None:
    found = records(done["env"], folder, "env")
    assert 1 < last(found, "step")["rollout/turns_mean"] <= 2
    assert "validation/accuracy" in last(found, "validation")


def test_a_loss_with_a_column_of_ones_own(done: dict[str, Done], folder: Path) -> None:
    step = last(records(done["loss"], folder, "loss"), "step")
    assert 1 <= step["train/difficulty"] <= 3
    assert step["dynamic_sampling/rounds"] >= 1


@pytest.mark.slow
def test_a_loss_of_ones_own_is_the_same_with_two_workers(
    installed_wheel: InstalledWheel, tmp_path: Path
) -> None:
    steps = []
    for workers in (1, 2):
        options = ("grpo.max_num_steps=1", "overwrite=true", f"policy.workers={workers}")
        end = installed_wheel.headrace("train", "loss.yaml", *options, cwd=write_page(tmp_path))
        steps.append(last(records(Done(end.returncode, end.stdout, end.stderr), tmp_path, "loss"), "step"))
    one, two = steps
    assert two["train/loss"] == pytest.approx(one["train/loss"], abs=1e-6)


def test_two_validation_sets_with_pass_at_k(done: dict[str, Done], folder: Path) -> None:
    measured = last(records(done["sets"], folder, "sets"), "validation")
    assert {"validation/easy/pass@1", "validation/easy/maj@4", "validation/hard/pass@4"} <= {*measured}
    assert measured["validation/easy/pass@1"] <= measured["validation/easy/pass@4"]
    # Of one sample, the chance is the accuracy of samples.
    assert measured["validation/easy/pass@1"] == pytest.approx(measured["validation/easy/sampled_accuracy"])
    both = [measured[f"validation/{name}/reward"] for name in ("easy", "hard")]
    assert measured["validation/reward"] == pytest.approx(sum(both) / 2)


def test_the_preview_shows_prompts_with_tokens_answers_and_template(done: dict[str, Done]) -> None:
    code, shown, told = done["data"]
    assert code == 0, told
    assert "train: 6 prompts (sums 6) of 6 to 6 tokens" in shown
    assert re.search(r"sums-\d, line \d: 6 tokens, answer '\d'\n<\|begin\|>\d\+\d=<\|answer\|>", shown)
    assert "chat template: {{ bos_token }}" in shown


def test_a_script_trains_with_a_function_of_its_own(done: dict[str, Done], folder: Path) -> None:
    code, shown, told = done["script"]
    assert code == 0, told
    assert "step 1 True\n" in shown
    assert "True 2 runs/python/checkpoints/step_000002/policy/model\n" in shown
    assert (folder / "runs/python/checkpoints/step_000002/policy/model/config.json").is_file()
