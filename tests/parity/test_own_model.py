"""A model of one's own, by its name on the hub, with LoRA: from a wheel, in an empty folder."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from hub_cache import publish
from tiny_models import save_tiny_model
from wheel_session import InstalledWheel

RECIPE = """\
run_dir: run
policy:
  model: {path: some-team/tiny-qwen}
  lora: {rank: 4, alpha: 8.0, targets: [q_proj, v_proj]}
  max_total_sequence_length: 32
  train_global_batch_size: 8
  optimizer: {lr: 1.0e-2}
generation: {max_new_tokens: 4}
grpo: {num_prompts_per_step: 2, num_generations_per_prompt: 4, max_num_steps: 2}
env: {kind: dataset, path: sums.jsonl, match: contains}
data: {validation_size: 2}
"""


@pytest.mark.timeout(400)
def test_a_model_by_name_trains_with_lora_and_loads_in_transformers(
    installed_wheel: InstalledWheel, tmp_path: Path
) -> None:
    publish(tmp_path / "hub", "some-team/tiny-qwen", save_tiny_model(tmp_path / "source", "qwen2"))
    home = tmp_path / "empty"
    home.mkdir()
    (home / "mine.yaml").write_text(RECIPE)
    rows = [{"question": f"{i} + 1 =", "answer": str(i % 10)} for i in range(12)]
    (home / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    env = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    commands = (("headrace", "train", "mine.yaml"), ("headrace", "export", "run", "exported"))
    for done in installed_wheel.each(*commands, cwd=home, env=env):
        assert done.returncode == 0, done.stderr
    metrics = [json.loads(line) for line in (home / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [m["weights/update_bytes"] for m in metrics if "weights/update_bytes" in m] == [
        2 * 2 * 4 * 4 * (32 + 32) - 2 * 4 * 4 * 16
    ] * 2
    assert AutoModelForCausalLM.from_pretrained(home / "exported").config.model_type == "qwen2"
    assert len(RECIPE.splitlines()) <= 15
