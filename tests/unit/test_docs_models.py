"""What docs/models.md shows runs as it stands there."""

import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from headrace.cli import app
from headrace.config_policy import ModelConfig
from headrace.utils.recipe import dump_recipe, load_recipe
from tiny_models import save_tiny_model
from tiny_recipe import tiny_recipe

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
]


def headrace(line: str) -> str:
    _, *arguments = shlex.split(line, comments=True)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code in (0, 1), done.stderr
    assert "error" not in done.stderr
    return done.stdout


def command(*words: str) -> str:
    (found,) = (line for line in COMMANDS if all(word in line for word in words))
    return found


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "model", "qwen2")
    recipe = tiny_recipe(
        Path("runs/mine"), grpo={"max_num_steps": 2}, data={"train_size": 16, "validation_size": 4}
    )
    changes = {"model": ModelConfig(path="model"), "tokenizer": type(recipe.policy.tokenizer)()}
    recipe = recipe.model_copy(update={"policy": recipe.policy.model_copy(update=changes)})
    path = tmp_path / "mine.yaml"
    path.write_text(dump_recipe(recipe).replace("score: exact", "score: task"))
    return path


def test_an_adapter_trains_and_is_exported_merged(mine: Path) -> None:
    headrace(command("train mine.yaml", "alpha=32"))
    folders = sorted(Path("runs/mine/checkpoints").glob("*/policy"))
    assert all((f / "adapter").is_dir() and not (f / "model").exists() for f in folders)
    headrace(command("export runs/mine exported"))
    whole, base = (AutoModelForCausalLM.from_pretrained(p).state_dict() for p in ("exported", "model"))
    changed = {n for n in base if not torch.equal(whole[n], base[n])}
    assert whole.keys() == base.keys()
    assert {n.split(".")[-2] for n in changed} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    done = CliRunner().invoke(app, ["export", "runs/mine", "exported"])
    assert done.exit_code == 2
    assert "exported: is there already" in done.stderr
    more = CliRunner().invoke(app, ["train", "mine.yaml", "policy.lora.rank=8", "grpo.max_num_steps=3"])
    assert more.exit_code == 2
    assert "policy.lora.rank differs from that of the checkpoint (16 -> 8)" in more.stderr


def test_a_run_without_adapter_is_exported_as_it_is(mine: Path) -> None:
    headrace("headrace train mine.yaml")
    headrace("headrace export runs/mine exported --checkpoint latest")
    (latest,) = Path("runs/mine/checkpoints").glob("*2/policy/model")
    whole, saved = (AutoModelForCausalLM.from_pretrained(p).state_dict() for p in ("exported", latest))
    assert all(torch.equal(whole[n], saved[n]) for n in saved)


def test_a_plan_of_memory_says_what_fits(mine: Path) -> None:
    told = headrace(command("plan --memory"))
    assert re.search(r"weights .*\n", told)
    assert "fits a GPU of 80 GiB" in told
    large = [
        "policy.model.path=null",
        "policy.model.config={model_type: llama, hidden_size: 64, num_hidden_layers: 2, vocab_size: 64}",
        "policy.tokenizer.builder=characters",
        "policy.logprob_batch_size=20000",
        "policy.max_total_sequence_length=64",
    ]
    done = CliRunner().invoke(app, ["plan", "--memory", "mine.yaml", "--gpu-gib", "1", *large])
    assert done.exit_code == 1, done.stderr
    assert "does not fit a GPU of 1 GiB" in done.stdout


def test_the_recipe_that_is_shown_is_one(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    values = yaml.safe_load(block)
    recipe = {"run_dir": "r", **values, "env": {"kind": "dataset", "path": "d"}}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    model = load_recipe(tmp_path / "r.yaml").policy.model
    assert (model.path, model.revision) == ("Qwen/Qwen3-0.6B", "main")


def test_the_demo_with_an_adapter_is_a_recipe() -> None:
    line = command("demo_lora", "policy.lora.rank=16")
    _, _, name, *overrides = shlex.split(line)
    recipe = load_recipe(name, overrides)
    assert recipe.policy.lora.rank == 16
    assert recipe.policy.model.path == "base"
