"""Every example runs, at a size of seconds, and is short."""

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = (
    "policy.train_global_batch_size=16",
    "policy.model.config.hidden_size=32",
    "policy.model.config.moe_intermediate_size=32",
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "grpo.max_num_steps=2",
    "warm_start.enabled=false",
    "data.validation_size=4",
    "logging.trackers=[]",
)


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.stem)
def test_an_example_is_short(file: Path) -> None:
    if file.stem != "router_replay_kl":  # the experiment of docs/router_replay.md
        assert len(file.read_text().splitlines()) <= 80


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("own_reward", "reward/vowels"),
        ("own_environment", "rollout/turns_mean"),
        ("own_loss", "train/logprob"),
        ("lora", "reward/mean"),
    ],
)
def test_a_run_with_parts_of_ones_own(name: str, metric: str, tmp_path: Path) -> None:
    if name == "lora":
        pytest.importorskip("peft")
    small = () if name.startswith(("own_reward", "own_env")) else ("data.train_size=64",)
    result = example(name).main(tmp_path / "run", *TINY, *small)
    assert (result.completed, result.steps) == (True, 2)
    assert metric in result.metrics
    if name == "own_loss":
        losses = example("continue_in_transformers").main(result.run_dir)
        assert losses[-1] < losses[0]


def test_router_replay_alone_brings_the_logits_nearer() -> None:
    own, replayed = example("router_replay_alone").main()
    assert replayed < own / 2


def told_steps(output: str) -> list[str]:
    return [line.split(" of ")[0] for line in output.splitlines() if line.startswith("step")]


def test_a_plain_loop_trains_on_what_another_process_makes(
    ray_cluster: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)  # where the other process finds its function
    losses = importlib.import_module("two_processes").main()
    assert len(losses) == 3
    assert told_steps(capsys.readouterr().out) == ["step 0: 16 rows", "step 1: 16 rows", "step 2: 16 rows"]


@pytest.mark.slow  # as a script, with a Ray cluster of its own
def test_a_plain_loop_starts_ray_by_itself() -> None:
    pytest.importorskip("ray")
    command = [sys.executable, EXAMPLES / "two_processes.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert told_steps(done.stdout) == ["step 0: 16 rows", "step 1: 16 rows", "step 2: 16 rows"]


def test_the_store_under_trl_holds_less_than_padded_batches(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    done = example("trl_store").main(str(tmp_path))
    assert 0 < done.stored_tokens < done.padded_tokens
    assert done.state.global_step == 2
