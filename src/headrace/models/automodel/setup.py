"""Models, tokenizers, optimizers and schedules from a recipe; what it gets wrong about the model shows here.

Weights are float32 and in evaluation mode, whatever the compute precision; a model made from a config draws
them from the run's seed, alike on every device and in every process.
"""

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from headrace.config import ModelConfig, OptimizerConfig, PolicyConfig, SchedulerConfig
from headrace.errors import ConfigError
from headrace.models.automodel.attention import choose_attention
from headrace.models.automodel.masters import HostAdamW, Masters
from headrace.models.automodel.optimizer_8bit import build_adamw_8bit
from headrace.models.automodel.probes import CHOSEN_EXPERTS, REFUSALS, check_runs, first_line
from headrace.models.hub import model_directory, tokenizer_directory
from headrace.models.tokenizers import build_character_tokenizer, known_ids
from headrace.utils.seeding import derive_seed

_COMPILED_VARIANTS = 64
"""Of one piece of code; beyond torch's own limit of 8 the rest of a run would go uncompiled."""

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Keys that models read, or that the hub writes, and that no config class declares.
_UNDECLARED_KEYS = {"auto_map", "head_dim", "rope_scaling", "rope_theta", "torch_dtype"}
_SIZES = {
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
}
_COUNTS = re.compile(r"^(num|n)_|_(size|dim|heads|layers|experts)$")
_OFF_IN_TRAINING = ("dropout", "pdrop", "layerdrop", "jitter")


def resolve_device(cfg: PolicyConfig) -> torch.device:
    """Return the device of `policy.device`; `auto` is CUDA where there is one."""
    available = torch.cuda.is_available()
    if cfg.device == "cuda" and not available:
        raise ConfigError("policy.device=cuda: no CUDA device is usable here; set policy.device=cpu or auto")
    if cfg.device == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


# Tokenizer and model.


def load_tokenizer(cfg: PolicyConfig) -> Any:
    """Return the policy's tokenizer, with a pad token: its own, or else end-of-text.

    Raises:
        ConfigError: no such directory, no tokenizer in it, none named for a model made from a config, or one
            with neither pad token nor end-of-text.
    """
    if cfg.tokenizer.builder == "characters":
        return build_character_tokenizer(cfg.tokenizer.characters)
    key, directory = tokenizer_directory(cfg)
    trusts = cfg.model.trust_remote_code
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=trusts)
    except (*REFUSALS, OSError, ImportError) as error:
        _refuse_code(key, directory, error)
        raise ConfigError(
            f"{key}={directory}: no tokenizer can be read there ({first_line(error)}); set policy.tokenizer.path"
        ) from error
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ConfigError(
                f"{key}={directory}: the tokenizer has neither a pad token nor end-of-text; add one"
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(
    cfg: PolicyConfig, *, seed: int, device: torch.device | None = None, tokenizer: Any = None
) -> Any:
    """Return the policy's causal LM: float32 weights, evaluation mode, on `device` (None: `policy.device`).

    A model made from a config without `vocab_size` takes size and special ids from the tokenizer (None: the
    policy's). Dropout and router noise are 0 in its config, and balancing losses off.

    Raises:
        ConfigError: a directory that is missing or lacks weights, a config that transformers refuses, a length
            or vocabulary that the model cannot hold, an attention or experts implementation that it lacks.
    """
    device = device or resolve_device(cfg)
    directory = model_directory(cfg.model)
    options = _model_options(cfg, directory, device, tokenizer)
    key = "policy.model" if directory is None else f"policy.model.path={directory}"
    with _building(options, cfg.model.config, key), torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "model"))
        build = partial(load_pretrained, directory) if directory else AutoModelForCausalLM.from_config
        model = build(**options)
    model = model.eval().to(device)
    key = "policy.model.config" if directory is None else key
    check_runs(model, COMPUTE_DTYPES[cfg.precision], key)
    return model


def build_skeleton(cfg: PolicyConfig, *, tokenizer: Any = None) -> Any:
    """Return the model of `load_model` with its weights on the meta device: no memory, no values.

    Buffers are on the CPU, and have values where the model computes them by itself.
    """
    directory = model_directory(cfg.model, weights=False)
    options = _model_options(cfg, directory, torch.device("cpu"), tokenizer)
    building = _building(options, cfg.model.config)
    with building, torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(**options)
    # Each place of a tied weight has got an empty one of its own.
    model.tie_weights()
    return model.eval()


def _model_options(
    cfg: PolicyConfig, directory: Path | None, device: torch.device, tokenizer: Any
) -> dict[str, Any]:
    """Return what transformers builds the model from: its config and implementations."""
    tokenizer = load_tokenizer(cfg) if tokenizer is None else tokenizer
    config = (
        _read_config(cfg.model, directory) if directory else _build_config(cfg.model.config or {}, tokenizer)
    )
    check_fit(cfg, config, tokenizer)
    _switch_off_noise(config)
    return {
        "config": config,
        "dtype": torch.float32,
        "attn_implementation": _first_attention(cfg, config, device),
        "experts_implementation": cfg.model.experts_implementation,
        "trust_remote_code": cfg.model.trust_remote_code,
    }


@contextmanager
def _building(
    options: Mapping[str, Any], values: Mapping[str, Any] | None, key: str = "policy.model"
) -> Iterator[None]:
    """Tell what transformers refuses as a mistake under `key`; `values` are the recipe's `policy.model.config`."""
    try:
        with no_progress_bars():
            yield
    except (*REFUSALS, OSError, ImportError, SafetensorError) as error:
        text = first_line(error)
        suspect, lower = "", text.lower()
        if "experts implementation" in lower:
            suspect = f" with experts_implementation={options['experts_implementation']}"
        elif "attention" in lower or "attn" in lower:
            suspect = f" with attn_implementation={options['attn_implementation']} (eager works for most)"
        elif isinstance(error, KeyError) and (name := _key_of(values or {}, error.args[0])):
            text = f"config.{name}={error.args[0]} is no name that it knows"
        raise ConfigError(f"{key}: transformers cannot build this model{suspect}: {text}") from error


def _key_of(values: Mapping[str, Any], value: object) -> str | None:
    """Return the dotted key of a config that has this value."""
    for key, found in values.items():
        if found == value:
            return key
        if isinstance(found, Mapping) and (inner := _key_of(found, value)):
            return f"{key}.{inner}"
    return None


def _first_attention(cfg: PolicyConfig, config: Any, device: torch.device) -> str:
    """Return the attention to build a model with; one for packed rows may take its place later."""
    wanted = cfg.model.attn_implementation
    packed = cfg.sequence_packing.enabled or cfg.parallel.tensor * cfg.parallel.context > 1
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    # transformers has no SDPA for attention sinks; that of packed rows knows them.
    if wanted == "sdpa" and packed and not getattr(kind, "_supports_sdpa", True):
        return "eager"
    return choose_attention(device, COMPUTE_DTYPES[cfg.precision], False, wanted)


def load_pretrained(directory: Path, **options: Any) -> Any:
    """Return the model of a Hugging Face directory.

    Raises:
        ConfigError: weights that the files do not hold, or of other shapes; transformers would draw them at random.
    """
    model, report = AutoModelForCausalLM.from_pretrained(
        directory, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    missing, others = sorted(report["missing_keys"]), sorted(report["mismatched_keys"])
    if missing or others:
        fault = f"no weights for {', '.join(missing[:3])} ({len(missing)} in all)"
        if not missing:
            name, held, wanted = others[0]
            fault = f"{name} has the shape {(*held,)}, and {(*wanted,)} by the config ({len(others)} such weights)"
        raise ConfigError(f"{fault}; the files must be whole and of the config beside them")
    return model


def runs_own_code(model: Any) -> bool:
    """Return whether the model's class came with it, and was allowed to (`policy.model.trust_remote_code`)."""
    return type(model).__module__.startswith("transformers_modules")


def check_fit(cfg: PolicyConfig, config: Any, tokenizer: Any) -> None:
    """Check that a model config can take the recipe's lengths and the tokenizer's ids."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if limit is not None and cfg.max_total_sequence_length > limit:
        raise ConfigError(
            f"policy.max_total_sequence_length={cfg.max_total_sequence_length} is more than the model's "
            f"max_position_embeddings={limit}; lower the first"
        )
    size = len(known_ids(tokenizer))
    if size > text.vocab_size:
        raise ConfigError(
            f"the tokenizer has {size} tokens and the model vocab_size={text.vocab_size}; set policy.tokenizer to the "
            "model's own, or raise vocab_size in policy.model.config"
        )
    _check_rope(text)
    pad = getattr(text, "pad_token_id", None)
    if isinstance(pad, int) and pad >= text.vocab_size:
        raise ConfigError(
            f"the model's pad_token_id={pad} is beyond its vocab_size={text.vocab_size}; lower the first, or raise the "
            "second (policy.model.config, or config.json in policy.model.path)"
        )


def _check_rope(text: Any) -> None:
    parameters = getattr(text, "rope_parameters", None) or {}
    # Some families have one dict per kind of layer.
    for part in (parameters, *parameters.values()):
        kind = part.get("rope_type", "default") if isinstance(part, Mapping) else "default"
        if kind not in ("default", *ROPE_INIT_FUNCTIONS):
            raise ConfigError(
                f"the model's rope_type={kind!r} is unknown to transformers; known: default, "
                f"{', '.join(ROPE_INIT_FUNCTIONS)} (policy.model.config, or config.json in policy.model.path)"
            )


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers' progress bars off the terminal for a while."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def enable_activation_checkpointing(model: Any, **options: Any) -> None:
    """Have each layer keep only its inputs, and compute the rest again in the backward pass.

    `options` are those of `torch.utils.checkpoint.checkpoint`.
    """
    # The second name is that of older transformers.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False, **options})
    # transformers checkpoints layers in training mode only; what is inside a layer stays in evaluation mode.
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


def compile_layers(model: Any) -> None:
    """Have the decoder layers run compiled. They share their code; lengths may vary.

    Hooks on a layer, as FSDP2's, stay outside of what is compiled. A process compiles the same code several times:
    for the policy and its reference, with gradients and without, by the arguments that the batching gives.
    """
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, _COMPILED_VARIANTS)
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.forward = torch.compile(module.forward, dynamic=True)


def _read_config(cfg: ModelConfig, directory: Path) -> Any:
    key = f"policy.model.path={cfg.path or directory}"
    try:
        config = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=cfg.trust_remote_code
        )
    except (StrictDataclassError, *REFUSALS, OSError, ImportError) as error:
        _refuse_code(key, directory, error)
        raise ConfigError(f"{key}: {first_line(error)}") from error
    names = list(config.architectures or ())
    entries = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    known = {name for entry in entries for name in ([entry] if isinstance(entry, str) else entry)}
    own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if names and not own_code and known.isdisjoint(names):
        raise ConfigError(
            f"{key}: its config.json is of {', '.join(names)}, which is no causal language model; give one whose "
            "architecture ends in ForCausalLM"
        )
    return config


def _refuse_code(key: str, directory: Path, error: Exception) -> None:
    """Raise a ConfigError if transformers wants to run Python files of the model."""
    if "trust_remote_code" in str(error):
        raise ConfigError(
            f"{key}: the model is defined by Python files of its own; read those, and set "
            "policy.model.trust_remote_code=true to run them"
        ) from error


def _build_config(values: Mapping[str, Any], tokenizer: Any) -> Any:
    given = dict(values)
    model_type = given.pop("model_type", None)
    if model_type is None:
        raise ConfigError("policy.model.config has no model_type; set it, for example to qwen3_moe or llama")
    if "vocab_size" not in given:
        given["vocab_size"] = len(tokenizer)
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            given.setdefault(name, getattr(tokenizer, name))
    if model_type not in CONFIG_MAPPING:
        close = difflib.get_close_matches(str(model_type), CONFIG_MAPPING.keys(), n=3)
        raise ConfigError(
            f"policy.model.config.model_type={model_type}: transformers knows no such model; close names: "
            f"{', '.join(close) or 'none'}"
        )
    _refuse_sizes(given)
    try:
        config = AutoConfig.for_model(model_type, **given)
    except (StrictDataclassError, *REFUSALS) as error:
        raise ConfigError(f"policy.model.config: {first_line(error)}") from error
    _refuse_unknown_keys(config, given)
    return config


def _refuse_sizes(given: Mapping[str, Any]) -> None:
    # transformers builds a model without layers from a negative number of them.
    for key, value in given.items():
        least = 1 if key in _SIZES or key in CHOSEN_EXPERTS else 0 if _COUNTS.search(key) else None
        if least is not None and isinstance(value, int) and value < least:
            raise ConfigError(f"policy.model.config.{key}={value}: expected {least} or more")


def _refuse_unknown_keys(config: Any, given: Mapping[str, Any]) -> None:
    # transformers keeps any key as an attribute, so a misspelt one would silently do nothing.
    known = {
        *type(config).__dataclass_fields__,
        *config.attribute_map,
        *config.sub_configs,
        *_UNDECLARED_KEYS,
    }
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known keys: {', '.join(sorted(known))}"
            raise ConfigError(f"policy.model.config.{key}: {type(config).__name__} has no such key; {hint}")


def _switch_off_noise(config: Any) -> None:
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, value in vars(part).items():
            if isinstance(value, float) and any(word in name for word in _OFF_IN_TRAINING):
                setattr(part, name, 0.0)
        if getattr(part, "output_router_logits", False):
            part.output_router_logits = False


# Optimizer and schedule.


def build_optimizer(
    model: torch.nn.Module, cfg: OptimizerConfig, masters: Masters | None = None
) -> torch.optim.Optimizer:
    """Return AdamW over all trainable weights, or over their `masters`; weight decay on matrices only.

    Raises:
        ConfigError: 8-bit moments without torchao.

    Source: Loshchilov & Hutter, Decoupled Weight Decay Regularization (arXiv 1711.05101).
    """
    held = model.parameters() if masters is None else masters.parameters.values()
    weights = [p for p in held if p.requires_grad]
    # One fused step takes tensors of one mesh; of a model that is not sharded there is none.
    meshes = list(dict.fromkeys(getattr(p, "device_mesh", None) for p in weights))
    groups = [
        {
            "params": [
                p for p in weights if (p.dim() >= 2) == decayed and getattr(p, "device_mesh", None) == mesh
            ],
            "weight_decay": cfg.weight_decay if decayed else 0.0,
        }
        for decayed in (True, False)
        for mesh in meshes
    ]
    options: dict[str, Any] = {"lr": cfg.lr, "betas": cfg.betas, "eps": cfg.eps, "fused": True}
    used = [g for g in groups if g["params"]]
    if cfg.kind == "adamw_8bit":
        return build_adamw_8bit(used, cfg)
    return torch.optim.AdamW(used, **options) if masters is None else HostAdamW(masters, used, **options)


def build_scheduler(
    optimizer: torch.optim.Optimizer, cfg: SchedulerConfig, *, updates_done: int = 0
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the schedule of a fresh optimizer, as it stands after `updates_done`; it advances once per update."""
    for group in optimizer.param_groups:
        group["initial_lr"] = float(group["lr"])
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda update: lr_factor(update, cfg), last_epoch=updates_done - 1
    )


def lr_factor(update: int, cfg: SchedulerConfig) -> float:
    """Return the learning rate of an update (from 0) as a fraction of the peak.

    The last update of warm-up has the peak; decay reaches `min_lr_ratio` after `decay_steps` more, and stays.

    >>> [lr_factor(u, SchedulerConfig(kind="linear", warmup_steps=2, decay_steps=4)) for u in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if update < cfg.warmup_steps:
        return (update + 1) / cfg.warmup_steps
    if cfg.kind == "constant" or cfg.decay_steps is None:
        return 1.0
    progress = min((update - cfg.warmup_steps) / cfg.decay_steps, 1.0)
    left = 1 - progress if cfg.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * left
