"""What `nemo_rl.algorithms.async_utils` names itself; its modules have the rest."""

from types import ModuleType

from headrace.compat.replay_buffer import ReplayBuffer
from headrace.compat.submodules import submodule
from headrace.compat.trajectory_collector import AsyncTrajectoryCollector

__all__ = ["AsyncTrajectoryCollector", "ReplayBuffer"]

__path__: list[str] = []
"""Makes it a package: modules below it are found by their own names."""


def __getattr__(name: str) -> ModuleType:
    return submodule("algorithms.async_utils", name)
