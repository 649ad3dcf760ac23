"""Import this module first, and `import nemo_rl.data_plane.codec` and the like give headrace's modules.

An alias is the very module it stands for: classes, functions and state are shared, and a module is loaded when
it is first asked for. Paths that headrace has no counterpart of are not found, as any missing module. Nothing
is installed under the name `nemo_rl`; without this import it does not exist.

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
    "algorithms.interfaces": "headrace.algorithms.interfaces",
    "algorithms.loss.interfaces": "headrace.algorithms.interfaces",
    "data.llm_message_utils": "headrace.compat.message_log",
    "data.multimodal_utils": "headrace.distributed.multimodal",
    "data.packing.algorithms": "headrace.compat.packing_algorithms",
    "data_plane": "headrace.data_plane",
    "distributed.batched_data_dict": "headrace.distributed.batched_data_dict",
    "distributed.named_sharding": "headrace.compat.named_sharding",
    "experience.sync_rollout_actor": "headrace.experience.sync_rollout_actor",
    "models.automodel": "headrace.models.automodel",
    "models.huggingface": "headrace.models.huggingface",
    "models.policy.lm_policy": "headrace.models.policy.lm_policy",
    "models.policy.tq_policy": "headrace.models.policy.tq_policy",
    "utils.routed_experts_codec": "headrace.data_plane.routes_codec",
    "utils.timer": "headrace.utils.timer",
}
"""Path under `nemo_rl` to headrace module; a package brings its submodules along."""


def _packages_above(paths: Sequence[str]) -> frozenset[str]:
    parts = [path.split(".")[:-1] for path in paths]
    return frozenset(".".join(above[:n]) for above in parts for n in range(1, len(above) + 1))


_PACKAGES = _packages_above(list(ALIASES))
"""Packages that only lead to an alias; they are empty."""


def resolve(name: str) -> str | None:
    """Return the headrace module that `name`, a full path, stands for; None if there is none.

    >>> resolve("nemo_rl.data_plane.adapters.noop")
    'headrace.data_plane.adapters.noop'
    """
    parts = name.split(".")
    if parts[0] != ROOT:
        return None
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
    """Finds the modules of `ALIASES` and the packages above them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for an alias or a package on the way to one, and None for all else."""
        if fullname == ROOT or fullname.removeprefix(f"{ROOT}.") in _PACKAGES:
            return ModuleSpec(fullname, _EmptyLoader(), is_package=True)
        module = resolve(fullname)
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
