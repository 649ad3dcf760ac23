"""A policy on disk: the model in Hugging Face layout, and what training needs to go on bit for bit.

    model/                   config.json, model.safetensors, tokenizer files: loads with AutoModelForCausalLM
    optimizer.safetensors    AdamW's moments and step counts, by parameter name; 8-bit ones as codes and scales
    rng.safetensors          torch's generator states
    trainer.json             counters

Of a policy that trains an adapter, `adapter/` (as peft has it) takes the place of `model/`, whatever the ranks.
Several ranks write, in place of `optimizer.safetensors`, what torch.distributed.checkpoint makes of their parts:

    sharded/                 weights and AdamW's state by parameter name; loads at any number of ranks, one included

`sharded/.metadata` is torch's own pickled index; everything else is plain tensors and JSON. Hyperparameters come from
the recipe, not from here. What cannot be written is a WriteError; what is missing, damaged or of another model or
adapter is a ConfigError.
"""

import json
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from pydantic import ConfigDict, NonNegativeInt, ValidationError
from pydantic.dataclasses import dataclass
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from headrace.distributed.collectives import from_first_rank
from headrace.errors import ConfigError
from headrace.models.automodel.lora import ADAPTER, Adapter
from headrace.models.automodel.masters import Masters
from headrace.models.automodel.optimizer_8bit import (
    Quantized,
    as_plain,
    forget_lost,
    from_plain,
    is_8bit,
    new_moments,
)
from headrace.models.automodel.probes import REFUSALS
from headrace.models.automodel.setup import load_pretrained, no_progress_bars, runs_own_code
from headrace.models.automodel.sharding import ShardedModel, named_tensors, part_like, whole_tensor
from headrace.models.saving import Saving
from headrace.utils.json_text import read_json

logger = logging.getLogger(__name__)

MODEL, SHARDED = "model", "sharded"
_OPTIMIZER = "optimizer.safetensors"
_RNG = "rng.safetensors"
_STATE = "trainer.json"
_WEIGHT, _SLOT = "weight", "optimizer"


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class TrainerState:
    """Counters of a run: updates since the first weights, and updates of the present schedule."""

    weight_version: NonNegativeInt
    scheduler_updates: NonNegativeInt


def save_model(
    directory: Path, model: Any, tokenizer: Any, weights: Iterable[tuple[str, torch.Tensor]] | None = None
) -> None:
    """Write `directory` as a Hugging Face model directory, with float32 safetensors and the tokenizer.

    Of a sharded model one process calls this, with its whole `weights`; all are in host memory at once.
    """
    whole = None
    if weights is not None:
        whole = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights}
        with torch.device("meta"):
            # Only the class and its way of naming weights are wanted.
            skeleton = AutoModelForCausalLM.from_config(
                model.config, dtype=torch.float32, trust_remote_code=runs_own_code(model)
            )
        skeleton.generation_config = model.generation_config
        model = skeleton
    with Saving(directory), no_progress_bars():
        model.save_pretrained(directory, state_dict=whole)
        tokenizer.save_pretrained(directory)


def load_weights(
    directory: Path, model: Any, sharded: ShardedModel | None = None, masters: Masters | None = None
) -> None:
    """Copy the weights of a Hugging Face model directory into `model`, or into its `masters`, bit for bit.

    Of a `sharded` model rank 0 reads them, and every rank gets its part; all ranks call this together.
    """
    if sharded is None:
        _read_weights(directory, model, model.load_state_dict if masters is None else masters.take)
        return
    kept: list[Mapping[str, torch.Tensor]] = []

    def keep(weights: Mapping[str, torch.Tensor]) -> None:
        sharded.check_weights(weights)
        kept.append(weights)

    from_first_rank(lambda: _read_weights(directory, model, keep))
    sharded.take_full_weights(kept[0] if kept else None)


def _read_weights(directory: Path, model: Any, use: Callable[[Mapping[str, torch.Tensor]], object]) -> None:
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such directory; the checkpoint must be whole")
    try:
        with no_progress_bars():
            trusts = runs_own_code(model)
            saved = load_pretrained(directory, dtype=torch.float32, trust_remote_code=trusts)
        use(saved.state_dict())
    except (OSError, SafetensorError, StrictDataclassError, *REFUSALS) as error:
        raise ConfigError(
            f"{directory}: cannot load these weights ({' '.join(str(error).split())[:300]}); the checkpoint must "
            "be whole and of the recipe's policy.model"
        ) from error


def save_checkpoint(
    directory: Path,
    model: Any,
    tokenizer: Any,
    optimizer: torch.optim.Optimizer | None,
    state: TrainerState,
    masters: Masters | None = None,
) -> None:
    """Write everything into `directory`, made if absent; with `optimizer` None its state is left out.

    `masters` are the float32 weights, where the model does not hold them itself.
    """
    save_model(directory / MODEL, model, tokenizer, None if masters is None else masters.weights().items())
    if optimizer is not None:
        with Saving(directory):
            slots = as_plain(_slots(model, optimizer)).items()
            tensors = {name: value.detach().to("cpu").contiguous() for name, value in slots}
            save_file(tensors, directory / _OPTIMIZER)
    save_counters(directory, state)


def save_adapter_checkpoint(
    directory: Path,
    adapter: Adapter,
    model: Any,
    optimizer: torch.optim.Optimizer | None,
    state: TrainerState,
    device: torch.device,
) -> None:
    """Write adapter, its optimizer state, counters and RNG; of several ranks, all call this together."""
    weights = dict(adapter.weights())
    slots = {} if optimizer is None else _slots(model, optimizer)
    tensors = {
        name: whole_tensor(value.detach(), device).to("cpu").contiguous() for name, value in slots.items()
    }
    adapter.write(directory / ADAPTER, weights)
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    if optimizer is not None:
        with Saving(directory):
            save_file(tensors, directory / _OPTIMIZER)
    save_counters(directory, state)


def save_counters(directory: Path, state: TrainerState) -> None:
    """Write the counters and this process's RNG."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    with Saving(directory):
        save_file(states, directory / _RNG)
        (directory / _STATE).write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")


def load_counters(directory: Path) -> TrainerState:
    """Restore this process's RNG, and return the counters."""
    file, rng = directory / _STATE, directory / _RNG
    try:
        state = TrainerState(**read_json(file, remedy="use another checkpoint"))
    except (OSError, TypeError, ValidationError) as error:
        raise _damaged(file, " ".join(str(error).split())[:200]) from error
    states = _read(rng)
    try:
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
    except (KeyError, TypeError, RuntimeError) as error:
        raise _damaged(rng, f"no state of torch's generator ({error})") from error
    return state


def load_checkpoint(
    directory: Path,
    model: Any,
    optimizer: torch.optim.Optimizer,
    sharded: ShardedModel | None = None,
    masters: Masters | None = None,
) -> TrainerState:
    """Restore weights, optimizer and this process's RNG, and return the counters.

    `optimizer` must be fresh and built for `model`; it stays so, with a warning, if none was saved. Of a `sharded`
    model every rank restores its part.
    """
    load_weights(directory / MODEL, model, sharded, masters)
    return load_rest(directory, model, optimizer)


def load_rest(directory: Path, model: Any, optimizer: torch.optim.Optimizer) -> TrainerState:
    """Restore all but the weights, as `load_checkpoint` does."""
    state = load_counters(directory)
    file = directory / _OPTIMIZER
    if file.is_file():
        _restore_optimizer(model, optimizer, _read(file), file)
    else:
        logger.warning("%s was saved without optimizer state; AdamW starts anew from its weights", directory)
    return state


def save_shards(directory: Path, model: Any, optimizer: torch.optim.Optimizer | None) -> None:
    """Write this rank's part into `directory`/sharded; every rank calls this together."""
    state = _tensors(model, optimizer)
    with Saving(directory / SHARDED):
        save(state, checkpoint_id=directory / SHARDED, no_dist=not dist.is_initialized())


def load_shards(directory: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Read this rank's part in place; `optimizer` must be fresh, and stays so, with a warning, if none was saved."""
    source = directory / SHARDED
    try:
        saved = FileSystemReader(source).read_metadata().state_dict_metadata
        with_optimizer = any(key.startswith(f"{_SLOT}/") for key in saved)
        if with_optimizer:
            _make_slots(optimizer)
        wanted = _tensors(model, optimizer if with_optimizer else None)
        # A weight that is not there is an error; of AdamW's state a frozen weight has none.
        state = {key: value for key, value in wanted.items() if key in saved or key.startswith(f"{_WEIGHT}/")}
        with warnings.catch_warnings():
            # One process is meant, not fallen back to.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(state, checkpoint_id=source, no_dist=not dist.is_initialized())
    except (OSError, EOFError, ImportError, UnpicklingError, CheckpointException, *REFUSALS) as error:
        raise ConfigError(
            f"{source}: cannot load this checkpoint ({' '.join(str(error).split())[:300]}); it must be whole and of "
            "the recipe's policy.model"
        ) from error
    if is_8bit(optimizer):
        for slots in optimizer.state.values():
            forget_lost(slots)
    if not with_optimizer:
        logger.warning("%s was saved without optimizer state; AdamW starts anew from its weights", source)


def _tensors(model: Any, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Return this rank's parts of weights and optimizer, which loading fills in place."""
    state = {f"{_WEIGHT}/{name}": tensor.detach() for name, tensor in named_tensors(model)}
    slots = {} if optimizer is None else _slots(model, optimizer)
    return state | {f"{_SLOT}/{name}": value for name, value in slots.items()}


def _slots(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in _trained(model, optimizer).items()}
    return {
        f"{names[id(parameter)]}/{key}": value
        for parameter, slots in optimizer.state.items()
        for key, value in slots.items()
    }


def _trained(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.nn.Parameter]:
    """Return by name what the optimizer has state of."""
    masters = getattr(optimizer, "masters", None)
    return dict(model.named_parameters()) if masters is None else masters.parameters


def _make_slots(optimizer: torch.optim.Optimizer) -> None:
    """Give AdamW the state that its first step makes, so that it can be read in place."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if is_8bit(optimizer):
                optimizer.state[parameter] = new_moments(optimizer, parameter)
                continue
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=local.device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }


def _restore_optimizer(
    model: Any, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor], source: Path
) -> None:
    slots: dict[str, dict[str, torch.Tensor | Quantized]] = {}
    for name, value in from_plain(tensors).items():
        parameter, _, key = name.rpartition("/")
        slots.setdefault(parameter, {})[key] = value
    parameters = _trained(model, optimizer)
    if slots.keys() - parameters.keys():
        raise ConfigError(
            f"{source}: has state of {sorted(slots.keys() - parameters.keys())[0]}, which the model does not have; "
            "resume with the recipe's own policy.model"
        )
    for name, values in slots.items():
        for key, value in values.items():
            shape = value.codes.shape if isinstance(value, Quantized) else value.shape
            if len(shape) and shape != parameters[name].shape:
                raise ConfigError(
                    f"{source}: {key} of {name} has shape {tuple(shape)}, and the parameter "
                    f"{tuple(parameters[name].shape)}; resume with the recipe's own policy.model"
                )
    if is_8bit(optimizer):
        for name, values in slots.items():
            optimizer.state[parameters[name]] = _filled(optimizer, parameters[name], values)
        return
    plain = {
        name: {key: _own_value(value, parameters[name]) for key, value in values.items()}
        for name, values in slots.items()
    }
    order = {id(p): i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    state = {order[id(parameters[name])]: values for name, values in plain.items()}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


@torch.no_grad()
def _filled(
    optimizer: torch.optim.Optimizer,
    parameter: torch.nn.Parameter,
    values: Mapping[str, torch.Tensor | Quantized],
) -> dict[str, torch.Tensor]:
    """Return 8-bit state with these values."""
    moments = new_moments(optimizer, parameter)
    for key, moment in moments.items():
        value = values[key]
        if isinstance(value, Quantized) and not isinstance(moment, DTensor):
            value.fill(moment)
        else:
            moment.copy_(_own_value(value, parameter))
    forget_lost(moments)
    return moments


def _own_value(value: torch.Tensor | Quantized, parameter: torch.Tensor) -> torch.Tensor:
    """Return a whole value of a checkpoint as this rank's optimizer has it."""
    whole = value.whole() if isinstance(value, Quantized) else value
    return part_like(whole, parameter) if isinstance(parameter, DTensor) else whole


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
        return tensors
    except (OSError, SafetensorError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"{path}: missing or damaged ({reason}); use another checkpoint")
