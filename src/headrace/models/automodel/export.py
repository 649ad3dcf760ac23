"""A checkpoint's policy as a Hugging Face model directory that knows nothing of this project."""

import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from headrace.config import RecipeConfig
from headrace.errors import ConfigError
from headrace.models.automodel.checkpoint import MODEL, save_model
from headrace.models.automodel.lora import ADAPTER, Adapter, add_adapter, merged
from headrace.models.automodel.quantized_base import round_base
from headrace.models.automodel.setup import COMPUTE_DTYPES, load_model, load_tokenizer
from headrace.models.automodel.sharding import named_tensors
from headrace.utils import atomic
from headrace.utils.json_text import read_json


def export_model(recipe: RecipeConfig, policy: Path, target: Path) -> None:
    """Write the model of the checkpoint directory `policy` to `target`, float32, with its tokenizer.

    An adapter is merged into the recipe's model, whose matrices below it are rounded as they were in training.

    Raises:
        ConfigError: `target` is there already, or nothing in `policy` that can be read.
        WriteError: a full disk, or no permission.
    """
    if target.exists():
        raise ConfigError(f"{target}: is there already; give a directory that is not, or remove it")
    if (policy / MODEL).is_dir():
        _check_readable(policy / MODEL)
        with atomic.writing_directory(target) as draft:
            shutil.copytree(policy / MODEL, draft, dirs_exist_ok=True)
        return
    if not (policy / ADAPTER).is_dir():
        raise ConfigError(f"{policy}: holds no model; give another checkpoint")
    cfg, host = recipe.policy.model_copy(update={"precision": "float32"}), torch.device("cpu")
    tokenizer = load_tokenizer(cfg)
    model = load_model(cfg, seed=recipe.seed, device=host, tokenizer=tokenizer)
    round_base(model, cfg.lora, COMPUTE_DTYPES[recipe.policy.precision])
    add_adapter(model, cfg.lora, seed=recipe.seed)
    Adapter(model, cfg.lora, host, cfg.model.path).load(policy / ADAPTER)
    with atomic.writing_directory(target) as draft:
        save_model(draft, model, tokenizer, merged(named_tensors(model), cfg.lora))


def _check_readable(model: Path) -> None:
    """Look at what says how long the weights' files are, and not at the weights."""
    weights = sorted(model.glob("*.safetensors"))
    try:
        if not weights:
            raise FileNotFoundError("no .safetensors there")
        read_json(model / "config.json", remedy="it says what the weights are of")
        for file in weights:
            with safe_open(file, "pt"):
                pass
    except (OSError, ConfigError, SafetensorError) as error:
        raise ConfigError(f"{model}: cannot be read ({error}); give another checkpoint") from error
