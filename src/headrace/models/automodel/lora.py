"""LoRA: peft's low-rank matrices inside the model itself, beside frozen weights.

The model keeps its class, so that scoring, router replay and sharding treat it as any other. An adapter's first
product is 0, so that a fresh one changes nothing. Names outside are those of peft's files, without their prefix:
`model.layers.0.self_attn.q_proj.lora_A.weight`.

Source: Hu et al., LoRA (arXiv 2106.09685), section 4.1; peft, `inject_adapter_in_model`.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from headrace.config import LoraConfig
from headrace.errors import ConfigError
from headrace.models.automodel.sharding import local_part, own_part, whole_tensor
from headrace.models.saving import Saving
from headrace.utils.seeding import derive_seed
from headrace.utils.targets import load_optional

ADAPTER = "adapter"
"""The folder of a checkpoint that holds the adapter, as peft writes and reads one."""
_FILE, _PREFIX = "adapter_model.safetensors", "base_model.model."
_NAME = "default"
_BASE = ".base_layer."
_ALL = "all"
_ROUTERS = ("gate", "router")
_NAMES_SHOWN = 20


def import_peft() -> Any:
    remedy = "pip install 'headrace[lora]', or remove policy.lora"
    return load_optional("peft", f"policy.lora.rank needs peft ({{error}}); {remedy}")


def add_adapter(model: Any, cfg: LoraConfig, *, seed: int) -> None:
    """Freeze the model and give it an adapter, drawn from the run's seed alike on every device and in every process."""
    peft = import_peft()
    names = [name for name, _ in target_layers(model, cfg)]
    config = peft.LoraConfig(
        r=cfg.rank, lora_alpha=cfg.alpha, lora_dropout=cfg.dropout, target_modules=sorted(names)
    )
    empty = next(model.parameters()).is_meta
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "lora"))
        peft.inject_adapter_in_model(config, model, adapter_name=_NAME, low_cpu_mem_usage=empty)
    for layer in _layers(model):
        layer.eval()  # and nothing else: checkpointed layers are in training mode


def target_layers(model: Any, cfg: LoraConfig) -> list[tuple[str, torch.nn.Linear]]:
    """Return the linear layers that `cfg.targets` names.

    Raises:
        ConfigError: a target that is no linear layer of the model.
    """
    head, modules = model.get_output_embeddings(), dict(model.named_modules())
    layers = [n for n, m in modules.items() if isinstance(m, torch.nn.Linear) and m is not head]
    kept = [n for n in layers if n.rpartition(".")[2] not in _ROUTERS]
    found: set[str] = set()
    for target in cfg.targets:
        matching = kept if target == _ALL else [n for n in layers if n == target or n.endswith(f".{target}")]
        if not matching:
            known = sorted({n.rpartition(".")[2] for n in layers})
            raise ConfigError(
                f"policy.lora.targets={target}: {type(model).__name__} has no such linear layer; choose among "
                f"{', '.join(known[:_NAMES_SHOWN]) or 'none'}, or all (output head and fused experts get no adapter)"
            )
        found.update(matching)
    return [(name, modules[name]) for name in layers if name in found]


# Names and values.


def _is_adapter_weight(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _outer_name(name: str) -> str:
    return name.replace(f".{_NAME}.", ".")


def merged(pairs: Iterable[tuple[str, torch.Tensor]], cfg: LoraConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the float32 weights of a model without adapter, those under one as W + (alpha / rank) B A.

    `pairs` are the whole weights of the model with its adapter, by their names in it.
    """
    assert cfg.rank is not None
    weights = dict(pairs)
    for name, tensor in weights.items():
        if _is_adapter_weight(name):
            continue
        whole = tensor.detach().float() if tensor.is_floating_point() else tensor
        module = name.removesuffix(f"{_BASE}weight")
        if module != name:
            a, b = (weights[f"{module}.lora_{part}.{_NAME}.weight"].detach().float() for part in "AB")
            whole = whole + (b * (cfg.alpha / cfg.rank)) @ a
        yield name.replace(_BASE, "."), whole


class Adapter:
    """The adapter in a worker's model, whole or sharded: its weights as others know them, and its state as reference.

    The reference policy is the model with its adapter off, or, once `snapshot` has been called, with the adapter's
    values of then. Of a sharded model, all ranks call every method together.
    """

    def __init__(self, model: Any, cfg: LoraConfig, device: torch.device, base: str | None) -> None:
        """`base`: name or directory of the model below, which peft's file tells."""
        self._model, self._cfg, self._device, self._base = model, cfg, device, base
        self._reference: list[torch.Tensor] | None = None

    def weights(self, *, scaled: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield copies of the whole weights, under outer names; `scaled` ones add up with the matrix below to W + B A.

        Who merges scaled ones needs to know neither rank nor alpha.
        """
        assert self._cfg.rank is not None
        for name, weight in self._own():
            factor = self._cfg.alpha / self._cfg.rank if scaled and ".lora_B." in name else 1
            yield _outer_name(name), whole_tensor(weight.detach(), self._device) * factor

    def _own(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in self._model.named_parameters():
            if _is_adapter_weight(name):
                yield name, weight

    @torch.no_grad()
    def load(self, source: Path) -> None:
        """Copy the weights of an adapter directory into the adapter."""
        weights = read_adapter(source, self._cfg)
        own = {_outer_name(name): weight for name, weight in self._own()}
        wrong = [n for n in own.keys() | weights.keys() if _shape(own.get(n)) != _shape(weights.get(n))]
        if wrong:
            name = min(wrong)
            raise ConfigError(
                f"{source}: {name} has shape {_shape(weights.get(name))} there and {_shape(own.get(name))} in this "
                f"run; put policy.lora and policy.model back as they were, or start anew in another run_dir"
            )
        for name, weight in own.items():
            whole = weights[name].to(self._device)
            local_part(weight).copy_(own_part(whole, weight) if isinstance(weight, DTensor) else whole)

    def write(self, directory: Path, weights: Mapping[str, torch.Tensor]) -> None:
        """Have rank 0 write `weights`, whole and under outer names, as an adapter directory that peft reads."""
        if dist.is_initialized() and dist.get_rank() > 0:
            return
        config = import_peft().LoraConfig(
            r=self._cfg.rank,
            lora_alpha=self._cfg.alpha,
            lora_dropout=self._cfg.dropout,
            target_modules=sorted({name.rpartition(".lora_")[0] for name in weights}),
            base_model_name_or_path=self._base,
            task_type="CAUSAL_LM",
            inference_mode=True,
        )
        with Saving(directory):
            config.save_pretrained(directory)
            tensors = {f"{_PREFIX}{n}": w.cpu().contiguous() for n, w in weights.items()}
            save_file(tensors, directory / _FILE, metadata={"format": "pt"})

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Drop inputs of the adapter, as `policy.lora.dropout` says."""
        parts = [layer.lora_dropout for layer in _layers(self._model)]
        for part in parts:
            part.train()
        try:
            yield
        finally:
            for part in parts:
                part.eval()

    # As reference.

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Let the model compute as the reference policy."""
        if self._reference is not None:
            self._exchange(self._reference)
            try:
                yield
            finally:
                self._exchange(self._reference)
            return
        layers = _layers(self._model)
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)

    def snapshot(self) -> None:
        self._reference = [local_part(weight.detach()).clone() for _, weight in self._own()]

    def save_reference(self, directory: Path) -> None:
        with self.as_reference():
            weights = dict(self.weights())
        if self._reference is None:
            weights = {n: w.zero_() if ".lora_B." in n else w for n, w in weights.items()}
        self.write(directory, weights)

    def load_reference(self, directory: Path) -> None:
        self.snapshot()
        self.load(directory)
        assert self._reference is not None
        self._exchange(self._reference)

    @torch.no_grad()
    def _exchange(self, others: list[torch.Tensor]) -> None:
        for (_, weight), other in zip(self._own(), others):
            local = local_part(weight)
            kept = local.clone()
            local.copy_(other)
            other.copy_(kept)


def _layers(model: Any) -> list[Any]:
    return [m for m in model.modules() if hasattr(m, "lora_A") and hasattr(m, "enable_adapters")]


def _shape(weight: torch.Tensor | None) -> tuple[int, ...] | None:
    return None if weight is None else tuple(weight.shape)


# On disk.


def read_adapter(directory: Path, cfg: LoraConfig) -> dict[str, torch.Tensor]:
    """Return the weights of an adapter directory under outer names.

    Raises:
        ConfigError: nothing there that can be read, or an adapter of another rank or alpha.
    """
    try:
        tensors: dict[str, torch.Tensor] = load_file(directory / _FILE)
        config = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("adapter_config.json holds no JSON object")
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(
            f"{directory}: missing or damaged ({' '.join(str(error).split())[:200]}); use another checkpoint"
        ) from error
    for key, name, mine in (("r", "rank", cfg.rank), ("lora_alpha", "alpha", cfg.alpha)):
        if config.get(key) != mine:
            raise ConfigError(
                f"policy.lora.{name}={mine}: the adapter in {directory} has {name} {config.get(key)}; set that, or "
                "start anew with overwrite=true or another run_dir"
            )
    return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
