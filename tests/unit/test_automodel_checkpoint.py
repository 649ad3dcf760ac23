"""Checkpoints: whole, exact, readable by transformers, and refused when damaged."""

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from full_disk import files_of_at_most
from headrace.config import OptimizerConfig
from headrace.errors import ConfigError, WriteError
from headrace.models.automodel.checkpoint import (
    TrainerState,
    load_checkpoint,
    load_shards,
    load_weights,
    save_checkpoint,
    save_shards,
)
from headrace.models.automodel.export import export_model
from headrace.models.automodel.setup import build_optimizer
from tiny_models import tiny_model, tiny_tokenizer
from tiny_recipe import tiny_recipe

CONFIG = OptimizerConfig(lr=0.05)


def _trained(name: str) -> tuple[Any, torch.optim.Optimizer]:
    model = tiny_model(name)
    optimizer = build_optimizer(model, CONFIG)
    _train_once(model, optimizer)
    return model, optimizer


def _train_once(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(input_ids=torch.arange(5, 25).view(2, 10), use_cache=False).logits.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _same_weights(a: Any, b: Any) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_weights_and_optimizer_come_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    model, optimizer = _trained(name)
    save_checkpoint(tmp_path / "c", model, tiny_tokenizer(), optimizer, TrainerState(7, 3))
    other = tiny_model(name, seed=9)
    fresh = build_optimizer(other, CONFIG)
    assert load_checkpoint(tmp_path / "c", other, fresh) == TrainerState(7, 3)
    assert _same_weights(model, other)
    for _ in range(2):
        _train_once(model, optimizer)
        _train_once(other, fresh)
    assert _same_weights(model, other)


def test_the_model_folder_loads_with_transformers_alone(tmp_path: Path) -> None:
    model, optimizer = _trained("qwen3_moe")
    save_checkpoint(tmp_path, model, tiny_tokenizer(), optimizer, TrainerState(1, 1))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert _same_weights(model, loaded)
    assert AutoTokenizer.from_pretrained(tmp_path / "model").get_vocab() == tiny_tokenizer().get_vocab()


def test_nothing_on_disk_is_pickled(tmp_path: Path) -> None:
    model, optimizer = _trained("llama")
    save_checkpoint(tmp_path, model, tiny_tokenizer(), optimizer, TrainerState(1, 1))
    kinds = {file.suffix for file in tmp_path.rglob("*") if file.is_file()}
    assert kinds <= {".safetensors", ".json", ".jinja"}


def test_the_random_state_continues_where_it_was_saved(tmp_path: Path) -> None:
    model, optimizer = _trained("llama")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        save_checkpoint(tmp_path, model, tiny_tokenizer(), optimizer, TrainerState(1, 1))
        expected = torch.rand(3)
        torch.manual_seed(5)
        load_checkpoint(tmp_path, model, build_optimizer(model, CONFIG))
        assert torch.equal(torch.rand(3), expected)


def test_a_checkpoint_without_optimizer_state_says_so_and_starts_it_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, _ = _trained("llama")
    save_checkpoint(tmp_path, model, tiny_tokenizer(), None, TrainerState(2, 2))
    fresh = build_optimizer(model, CONFIG)
    assert load_checkpoint(tmp_path, model, fresh) == TrainerState(2, 2)
    assert not fresh.state
    assert "without optimizer state" in caplog.text


def test_an_untrained_policy_can_be_saved_and_loaded(tmp_path: Path) -> None:
    model = tiny_model("llama")
    save_checkpoint(tmp_path, model, tiny_tokenizer(), build_optimizer(model, CONFIG), TrainerState(0, 0))
    other = tiny_model("llama", seed=1)
    load_checkpoint(tmp_path, other, build_optimizer(other, CONFIG))
    assert _same_weights(model, other)


@pytest.mark.parametrize(
    "file", ["trainer.json", "rng.safetensors", "optimizer.safetensors", "model/model.safetensors"]
)
def test_a_damaged_file_is_named(file: str, tmp_path: Path) -> None:
    model, optimizer = _trained("llama")
    save_checkpoint(tmp_path, model, tiny_tokenizer(), optimizer, TrainerState(1, 1))
    (tmp_path / file).write_bytes(b"{")
    with pytest.raises(ConfigError, match=file.split("/")[0]) as caught:
        load_checkpoint(tmp_path, model, build_optimizer(model, CONFIG))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[]",
        "null",
        '{"weight_version": "7", "scheduler_updates": 3}',
        '{"weight_version": -1, "scheduler_updates": 3}',
    ],
)
def test_counters_that_are_none_are_named(tmp_path: Path, content: str) -> None:
    model, optimizer = _trained("llama")
    save_checkpoint(tmp_path, model, tiny_tokenizer(), optimizer, TrainerState(7, 3))
    (tmp_path / "trainer.json").write_text(content)
    with pytest.raises(
        ConfigError, match=r"trainer.json: missing or damaged .* use another checkpoint"
    ) as caught:
        load_checkpoint(tmp_path, model, build_optimizer(model, CONFIG))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["null", "5", '{"model_type": []}', '{"hidden_act": null}', "HIDDEN_ACT"])
def test_a_config_that_describes_no_model_is_a_damaged_checkpoint(tmp_path: Path, content: str) -> None:
    model, optimizer = _trained("llama")
    save_checkpoint(tmp_path, model, tiny_tokenizer(), optimizer, TrainerState(7, 3))
    config = tmp_path / "model" / "config.json"
    whole = json.loads(config.read_text())
    if content.startswith("{"):
        content = json.dumps({**whole, **json.loads(content)})
    config.write_text(content.replace("HIDDEN_ACT", json.dumps({**whole, "hidden_act": "zz"})))
    with pytest.raises(ConfigError, match=r"/model: cannot load these weights") as caught:
        load_checkpoint(tmp_path, model, build_optimizer(model, CONFIG))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", pickle.dumps([]), "half", "turned"])
def test_a_damaged_index_of_shards_is_named(tmp_path: Path, content: bytes | str) -> None:
    model, optimizer = _trained("llama")
    save_shards(tmp_path, model, optimizer)
    index = tmp_path / "sharded" / ".metadata"
    whole = index.read_bytes()
    damaged = {"half": whole[: len(whole) // 2], "turned": whole[::-1]}
    index.write_bytes(content if isinstance(content, bytes) else damaged[content])
    with pytest.raises(ConfigError, match=r"sharded: cannot load this checkpoint .* must be whole") as caught:
        load_shards(tmp_path, model, build_optimizer(model, CONFIG))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("kept", [0, 100, None])
def test_a_checkpoint_whose_model_cannot_be_read_is_not_exported(
    tmp_path: Path, file: str, kept: int | None
) -> None:
    model, optimizer = _trained("llama")
    save_checkpoint(tmp_path, model, tiny_tokenizer(), optimizer, TrainerState(7, 3))
    if kept is None:
        (tmp_path / "model" / file).unlink()
    else:
        (tmp_path / "model" / file).write_bytes((tmp_path / "model" / file).read_bytes()[:kept])
    with pytest.raises(ConfigError, match=r"/model: .*; give another checkpoint") as caught:
        export_model(tiny_recipe(tmp_path), tmp_path, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_tensors_that_are_not_those_of_a_run_are_named(tmp_path: Path) -> None:
    model, optimizer = _trained("llama")
    save_checkpoint(tmp_path, model, tiny_tokenizer(), optimizer, TrainerState(7, 3))
    for name, fault in (
        ("rng", "no state of torch's generator"),
        ("optimizer", r"has shape \(3,\), and the parameter"),
    ):
        whole = load_file(tmp_path / f"{name}.safetensors")
        save_file(
            {f"{key}x" if name == "rng" else key: torch.zeros(3) for key in whole},
            tmp_path / f"{name}.safetensors",
        )
        with pytest.raises(ConfigError, match=rf"{name}.safetensors: .*{fault}"):
            load_checkpoint(tmp_path, model, build_optimizer(model, CONFIG))
        save_file(whole, tmp_path / f"{name}.safetensors")


def test_weights_that_are_not_there_are_no_name_on_a_hub(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: no such directory"):
        load_weights(tmp_path / "nowhere", tiny_model("llama"))


def test_a_file_that_does_not_fit_on_the_disk_is_an_error_with_its_directory(tmp_path: Path) -> None:
    model, optimizer = _trained("llama")
    tokenizer = tiny_tokenizer()
    save_checkpoint(tmp_path / "whole", model, tokenizer, optimizer, TrainerState(1, 1))
    files = [file for file in (tmp_path / "whole").rglob("*") if file.is_file()]
    assert {"model.safetensors", "tokenizer.json", "rng.safetensors"} <= {file.name for file in files}
    for file in files:
        again = tmp_path / file.name
        with files_of_at_most(file.stat().st_size - 1), pytest.raises(WriteError) as caught:
            save_checkpoint(again, model, tokenizer, optimizer, TrainerState(1, 1))
        assert re.match(
            rf"{again}(/model)?: cannot write it \(.*[Ff]ile too large.*\); make room", str(caught.value)
        )
    with (
        files_of_at_most(1000),
        pytest.raises(WriteError, match=r"sharded: cannot write it .*File too large"),
    ):
        save_shards(tmp_path / "shards", model, optimizer)


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    model, optimizer = _trained("llama")
    save_checkpoint(tmp_path, model, tiny_tokenizer(), optimizer, TrainerState(1, 1))
    other = tiny_model("qwen3_moe")
    with pytest.raises(ConfigError, match=r"of the recipe's policy\.model"):
        load_weights(tmp_path / "model", other)


def test_counters_are_plain_json(tmp_path: Path) -> None:
    model, optimizer = _trained("llama")
    save_checkpoint(tmp_path, model, tiny_tokenizer(), optimizer, TrainerState(7, 3))
    assert json.loads((tmp_path / "trainer.json").read_text()) == {
        "weight_version": 7,
        "scheduler_updates": 3,
    }
