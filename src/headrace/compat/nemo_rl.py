"""Import this module first, and `import nemo_rl.data_plane.codec` and the like give headrace's modules.

An alias is the very module it stands for: classes, functions and state are shared, and a module is loaded when
it is first asked for. Where callers have habits that headrace does not share, the path leads to a module of
`headrace.compat` that translates them. Other paths are not found, as any missing module. Nothing is installed
under the name `nemo_rl`; without this import it does not exist.

    import headrace.compat.nemo_rl
    from nemo_rl.data_plane.codec import materialize
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

ROOT = "nemo_rl"

ALIASES = {
    "data.llm_message_utils": "headrace.compat.message_log",
    "data_plane": "headrace.data_plane",
    "distributed.named_sharding": "headrace.compat.named_sharding",
    "experience.sync_rollout_actor": "headrace.experience.sync_rollout_actor",
    "models.automodel": "headrace.models.automodel",
    "models.huggingface.common": "headrace.compat.packing",
    "models.policy.lm_policy": "headrace.models.policy.lm_policy",
    "utils.timer": "headrace.compat.timer",
}
"""Path under `nemo_rl` to headrace module; a package brings its submodules along."""

TRANSLATED = {
    "algorithms.async_utils": "headrace.compat.async_utils",
    "algorithms.async_utils.interfaces": "headrace.compat.replay_protocol",
    "algorithms.async_utils.replay_buffer": "headrace.compat.replay_buffer",
    "algorithms.async_utils.staleness_sampler": "headrace.compat.staleness_sampler",
    "algorithms.async_utils.trajectory_collector": "headrace.compat.trajectory_collector",
    "algorithms.interfaces": "headrace.compat.losses",
    "algorithms.loss.interfaces": "headrace.compat.losses",
    "algorithms.utils": "headrace.compat.tokenizer",
    "data.interfaces": "headrace.compat.data_specs",
    "data.multimodal_utils": "headrace.compat.multimodal_utils",
    "data.packing": "headrace.compat.packing_algorithms",
    "data.packing.algorithms": "headrace.compat.packing_algorithms",
    "data_plane": "headrace.compat.data_plane",
    "data_plane.adapters.noop": "headrace.compat.noop",
    "data_plane.codec": "headrace.compat.codec",
    "data_plane.column_io": "headrace.compat.column_io",
    "data_plane.factory": "headrace.compat.factory",
    "data_plane.interfaces": "headrace.compat.interfaces",
    "data_plane.observability": "headrace.compat.observability",
    "data_plane.preshard": "headrace.compat.preshard",
    "data_plane.worker_mixin": "headrace.compat.worker_mixin",
    "distributed.batched_data_dict": "headrace.compat.batched_data_dict",
    "experience.interfaces": "headrace.compat.prompt_groups",
    "experience.payload": "headrace.compat.payload",
    "models.automodel.data": "headrace.compat.automodel_data",
    "models.megatron.router_replay": "headrace.compat.megatron_replay",
    "models.policy.tq_policy": "headrace.compat.tq_policy",
    "utils.routed_experts_codec": "headrace.compat.routed_experts_codec",
}
"""Path under `nemo_rl` to the module that translates it; this path alone, none below it."""


def _packages_above(paths: Sequence[str]) -> frozenset[str]:
    parts = [path.split(".")[:-1] for path in paths]
    return frozenset(".".join(above[:n]) for above in parts for n in range(1, len(above) + 1))


_PACKAGES = _packages_above([f"{ROOT}.{path}" for path in (*ALIASES, *TRANSLATED)])
"""Packages that only lead to an alias; they are empty."""


def resolve(name: str) -> str | None:
    """Return the headrace module that `name`, a full path, stands for; None if there is none.

    >>> resolve("nemo_rl.data_plane.adapters.local")
    'headrace.data_plane.adapters.local'
    """
    parts = name.split(".")
    if parts[0] != ROOT:
        return None
    if translated := TRANSLATED.get(".".join(parts[1:])):
        return translated
    for end in range(len(parts), 1, -1):
        target = ALIASES.get(".".join(parts[1:end]))
        if target is not None:
            return ".".join((target, *parts[end:]))
    return None


class _AliasLoader(Loader):
    """Puts an existing module in the place of the one that is being imported."""

    def __init__(self, target: str) -> None:
        self._target = target

    def exec_module(self, module: ModuleType) -> None:
        # The import system takes what stands in sys.modules under the name once this returns.
        sys.modules[module.__name__] = importlib.import_module(self._target)


class _EmptyLoader(Loader):
    """Leaves a package empty."""

    def exec_module(self, module: ModuleType) -> None:
        pass


class NemoRLFinder(MetaPathFinder):
    """Finds the modules of `ALIASES` and `TRANSLATED`, and the packages above them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for an alias or a package on the way to one, and None for all else."""
        module = resolve(fullname)
        if module is None and fullname in _PACKAGES:
            return ModuleSpec(fullname, _EmptyLoader(), is_package=True)
        if module is None or importlib.util.find_spec(module) is None:
            return None
        return ModuleSpec(fullname, _AliasLoader(module))


def install() -> None:
    """Put the finder before all others, once.

    Raises:
        ImportError: a package of the name `nemo_rl` has been imported already.
    """
    if any(isinstance(finder, NemoRLFinder) for finder in sys.meta_path):
        return
    loaded = sys.modules.get(ROOT)
    if loaded is not None:
        raise ImportError(
            f"{ROOT} is imported already (from {getattr(loaded, '__file__', None)}); "
            "import headrace.compat.nemo_rl before it"
        )
    sys.meta_path.insert(0, NemoRLFinder())


install()
