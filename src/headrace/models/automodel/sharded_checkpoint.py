"""A sharded policy on disk, by torch.distributed.checkpoint: every rank writes and reads its own part.

    sharded/                 weights and AdamW's state by parameter name; loads at any number of ranks, one included
    model/                   the same weights in Hugging Face layout
    rng.safetensors, trainer.json   as a single process writes them

`sharded/.metadata` is torch's own pickled index; everything else is plain tensors and JSON.
"""

import logging
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoModelForCausalLM

from headrace.errors import ConfigError
from headrace.models.automodel.setup import no_progress_bars
from headrace.models.automodel.sharding import named_tensors
from headrace.models.saving import Saving

logger = logging.getLogger(__name__)

SHARDED = "sharded"
_WEIGHT, _SLOT = "weight", "optimizer"


def save_shards(directory: Path, model: Any, optimizer: torch.optim.Optimizer | None) -> None:
    """Write this rank's part into `directory`/sharded; every rank calls this together.

    Raises:
        WriteError: a full disk, or no permission.
    """
    state = _weights(model)
    if optimizer is not None:
        state |= _slots(model, optimizer)
    with Saving(directory / SHARDED):
        save(state, checkpoint_id=directory / SHARDED, no_dist=not dist.is_initialized())


def load_shards(directory: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Read this rank's part in place; `optimizer` must be fresh, and stays so, with a warning, if none was saved.

    Raises:
        ConfigError: files that are missing or damaged, or of another model.
    """
    source = directory / SHARDED
    try:
        saved = FileSystemReader(source).read_metadata().state_dict_metadata
        with_optimizer = any(key.startswith(f"{_SLOT}/") for key in saved)
        state = _weights(model)
        if with_optimizer:
            _make_slots(optimizer)
            state |= {key: value for key, value in _slots(model, optimizer).items() if key in saved}
        with warnings.catch_warnings():
            # One process is meant, not fallen back to.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(state, checkpoint_id=source, no_dist=not dist.is_initialized())
    except (OSError, EOFError, ValueError, RuntimeError, KeyError, CheckpointException) as error:
        raise ConfigError(
            f"{source}: cannot load this checkpoint ({' '.join(str(error).split())[:300]}); it must be whole and of "
            "the recipe's policy.model"
        ) from error
    if not with_optimizer:
        logger.warning("%s was saved without optimizer state; AdamW starts anew from its weights", source)


def export_model(
    directory: Path, model: Any, weights: Iterable[tuple[str, torch.Tensor]], tokenizer: Any
) -> None:
    """Write whole `weights` of a sharded model as a Hugging Face model directory; one process calls this.

    All weights are in host memory at once.
    """
    whole = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights}
    with torch.device("meta"):
        # Only the class and its way of naming weights are wanted.
        skeleton = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    skeleton.generation_config = model.generation_config
    with Saving(directory), no_progress_bars():
        skeleton.save_pretrained(directory, state_dict=whole)
        tokenizer.save_pretrained(directory)


def _weights(model: Any) -> dict[str, Any]:
    return {f"{_WEIGHT}/{name}": tensor.detach() for name, tensor in named_tensors(model)}


def _slots(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{_SLOT}/{names[id(parameter)]}/{key}": value
        for parameter, slots in optimizer.state.items()
        for key, value in slots.items()
    }


def _make_slots(optimizer: torch.optim.Optimizer) -> None:
    """Give AdamW the state that its first step makes, so that it can be read in place."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=local.device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }
