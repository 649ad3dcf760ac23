"""What this machine can run: versions, devices, optional parts, memory, and where files go."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
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
from headrace.run_tables import format_bytes

State = Literal["ok", "missing", "unused", "warning"]

_STYLES: dict[State, str] = {"ok": "green", "missing": "yellow", "unused": "dim", "warning": "bold red"}
_LOW_MEMORY_BYTES = 2 * 1024**3
_LOW_DISK_BYTES = 2 * 1024**3
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


@dataclass(frozen=True)
class _Package:
    """A distribution, what it is for, and how to get it; one without `remedy` comes with headrace."""

    name: str
    purpose: str
    remedy: str | None = None
    variants: tuple[str, ...] = ()
    """Other distributions that bring the same modules."""
    user: str | None = None
    """Path of the code in headrace that uses it, where not every version of headrace has that."""


_TRAIN, _RAY = "pip install 'headrace[train]'", "pip install 'headrace[ray]'"
_QUEUE = "data_plane/adapters/transfer_queue.py"
_PACKAGES = (
    _Package("torch", "tensors"),
    _Package("tensordict", "what the store carries"),
    _Package("msgspec", "object columns"),
    _Package("transformers", "models", _TRAIN),
    _Package("safetensors", "weights on disk", _TRAIN),
    _Package("reasoning-gym", "generated tasks", _TRAIN, ("reasoning_gym",)),
    _Package("math-verify", "math answers", _TRAIN),
    _Package("datasets", "saved Hugging Face datasets", _TRAIN),
    _Package("tensorboard", "event files", _TRAIN),
    _Package("matplotlib", "plots", _TRAIN),
    _Package("gguf", "weights in GGUF files", _TRAIN),
    _Package("ray", "workers on a cluster", _RAY, user="distributed/virtual_cluster.py"),
    _Package("TransferQueue", "a store for several processes", _RAY, user=_QUEUE),
    _Package(
        "mooncake",
        "a store over RDMA",
        "pip install 'headrace[mooncake]'",
        ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"),
        user=_QUEUE,
    ),
    _Package("flash-attn", "packed attention on CUDA", "pip install flash-attn"),
    _Package("vllm", "fast generation", "pip install vllm", user="models/generation/vllm.py"),
    _Package("sglang", "fast generation", "pip install sglang", user="models/generation/sglang.py"),
    _Package("megatron-core", "large models", "pip install megatron-core", user="models/megatron"),
)


def run_checks() -> list[Check]:
    """Look at this machine; nothing is changed and nothing raises."""
    return [*_software(), *_devices(), *_packages(), *_places()]


def doctor_table(checks: list[Check]) -> RenderableType:
    """Return the checks as a table per section."""
    sections = dict.fromkeys(check.section for check in checks)
    return Group(*(_section_table(name, [c for c in checks if c.section == name]) for name in sections))


def _section_table(section: str, checks: list[Check]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", expand=True)
    table.add_column(section, width=17, no_wrap=True)
    table.add_column("", width=7)
    table.add_column("", ratio=5, overflow="fold")
    table.add_column("", ratio=3, overflow="fold", style="cyan")
    for check in checks:
        table.add_row(check.name, Text(check.state, style=_STYLES[check.state]), check.detail, check.remedy)
    return table


def _software() -> Iterator[Check]:
    section = "software"
    yield Check(section, "headrace", "ok", f"{headrace.__version__} in {_SOURCE}")
    yield Check(section, "python", "ok", f"{platform.python_version()}, {sys.executable}")
    yield Check(section, "system", "ok", f"{platform.system()} {platform.release()}, {platform.machine()}")


def _devices() -> Iterator[Check]:
    section = "devices"
    torch = _torch()
    if torch is None:
        yield Check(section, "torch", "warning", "cannot be imported", "pip install torch")
        return
    yield Check(section, "cpu", "ok", f"{_cores()} cores, torch takes {torch.get_num_threads()} threads")
    yield _memory(section)
    if not torch.cuda.is_available():
        built = (
            f"torch is built for CUDA {torch.version.cuda}"
            if torch.version.cuda
            else "torch is built for CPU"
        )
        yield Check(section, "cuda", "missing", f"no device; {built}", "policy.device=cpu runs without")
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        detail = f"{device.name}, {format_bytes(device.total_memory)}"
        yield Check(section, f"cuda:{index}", "ok", detail)
    yield _packed_attention(section, "cuda" if torch.cuda.is_available() else "cpu")


def _torch() -> ModuleType | None:
    try:
        import torch  # noqa: PLC0415  (a second; `headrace --help` must not pay for it)
    except ImportError:
        return None
    return torch


def _packed_attention(section: str, device: str) -> Check:
    """Say which attention packed rows would take, by asking the code that chooses it."""
    name = "packed attention"
    try:
        import torch  # noqa: PLC0415

        from headrace.models.automodel.attention import choose_attention  # noqa: PLC0415  (imports transformers)
    except ImportError as error:
        return Check(section, name, "missing", str(error), "pip install 'headrace[train]'")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    chosen = choose_attention(torch.device(device), dtype, packed=True, wanted="sdpa")
    return Check(section, name, "ok", f"{chosen} on {device} in {str(dtype).removeprefix('torch.')}")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory(section: str) -> Check:
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    detail = format_bytes(total)
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        detail += f", {format_bytes(page * os.sysconf('SC_AVPHYS_PAGES'))} of it unused"
    low = total < _LOW_MEMORY_BYTES
    remedy = "lower grpo.num_prompts_per_step and generation.batch_size" if low else ""
    return Check(section, "memory", "warning" if low else "ok", detail, remedy)


def _packages() -> Iterator[Check]:
    for package in _PACKAGES:
        section = "needed" if package.remedy is None else "optional"
        found = next(filter(None, map(_version, (package.name, *package.variants))), None)
        if package.user is not None and not (_SOURCE / package.user).exists():
            detail = f"{found or 'not installed'}; this headrace does not use it"
            yield Check(section, package.name, "unused", detail)
        elif found is not None:
            yield Check(section, package.name, "ok", f"{found}, {package.purpose}")
        elif package.remedy is None:
            yield Check(section, package.name, "warning", package.purpose, "pip install headrace")
        else:
            yield Check(section, package.name, "missing", package.purpose, package.remedy)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _places() -> Iterator[Check]:
    section = "places"
    cache = Path(ModelConfig.model_fields["cache_dir"].default).expanduser()
    yield _place(section, "model cache", cache, "set policy.model.cache_dir to a writable directory")
    yield _place(section, "working directory", Path.cwd(), "set run_dir to a writable directory")
    if _SHARED_MEMORY.exists():
        yield _place(section, "shared memory", _SHARED_MEMORY, "start the container with a larger --shm-size")


def _place(section: str, name: str, path: Path, remedy: str) -> Check:
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        return Check(section, name, "warning", f"{path} is not writable", remedy)
    free = shutil.disk_usage(existing).free
    low = free < _LOW_DISK_BYTES
    detail = f"{path}, {format_bytes(free)} free"
    return Check(section, name, "warning" if low else "ok", detail, remedy if low else "")
