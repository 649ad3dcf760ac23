"""A buffer of whole trajectories in memory, each meant for the step of one version of the weights."""

import io
import threading
from collections import Counter
from pathlib import Path
from pickle import UnpicklingError
from statistics import fmean
from typing import Any, NamedTuple

import torch

from headrace.compat.actors import ActorClass
from headrace.compat.replay_protocol import ReplayBufferProtocol
from headrace.errors import ConfigError, SchemaError
from headrace.utils.atomic import write_bytes

_STATE = (
    "trajectories",
    "trajectory_versions",
    "target_weight_versions",
    "last_target_weight_already_generated",
)


class Entry(NamedTuple):
    """A trajectory, the version of the weights that made it, and the version whose step it is meant for."""

    trajectory: dict[str, Any]
    version: int
    target: int

    def is_fresh(self, oldest: int | None) -> bool:
        return oldest is None or self.version >= oldest


class ReplayBufferImpl(ReplayBufferProtocol):
    """Holds up to `max_size` trajectories; may be used by several threads.

    With `drop_incomplete_targets_on_restore`, a step of which only some trajectories were saved starts anew after a
    restore that knows how many it takes.

    Raises:
        ConfigError: no room.
    """

    def __init__(self, max_size: int, drop_incomplete_targets_on_restore: bool) -> None:
        if max_size <= 0:
            raise ConfigError(f"max_size={max_size}; expected at least 1")
        self.max_size = max_size
        self._drops_incomplete = drop_incomplete_targets_on_restore
        self._entries: list[Entry] = []
        self._consumed = -1
        self._lock = threading.RLock()

    def add(self, trajectory: dict[str, Any], weight_version: int, target_weight_version: int) -> str:
        """Add a trajectory; returns `success`, or `full` if there is no room."""
        with self._lock:
            if len(self._entries) >= self.max_size:
                return "full"
            self._entries.append(Entry(trajectory, weight_version, target_weight_version))
            return "success"

    def sample(
        self, num_prompt_groups: int, current_weight_version: int, max_age_steps: int
    ) -> dict[str, Any] | None:
        """Take the oldest trajectories that are meant for this version; None, and none is taken, if they are too few.

        Trajectories of weights that are more than `max_age_steps` older are dropped.

        Returns:
            `trajectories`, and `avg_trajectory_age` in versions.
        """
        with self._lock:
            self._entries = [e for e in self._entries if e.is_fresh(current_weight_version - max_age_steps)]
            meant = [e for e in self._entries if e.target == current_weight_version][:num_prompt_groups]
            if len(meant) < num_prompt_groups:
                return None
            self._entries = [e for e in self._entries if not any(e is taken for taken in meant)]
            self._consumed = max(self._consumed, current_weight_version)
        ages = [current_weight_version - e.version for e in meant]
        return {
            "trajectories": [e.trajectory for e in meant],
            "avg_trajectory_age": fmean(ages) if ages else 0.0,
        }

    def size(self) -> int:
        with self._lock:
            return len(self._entries)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()

    def get_debug_info(self) -> dict[str, Any]:
        with self._lock:
            return {
                "total_trajectories": len(self._entries),
                "trajectory_versions": [e.version for e in self._entries],
                "target_weight_versions": [e.target for e in self._entries],
                "target_weight_counts": dict(Counter(e.target for e in self._entries)),
                "last_target_weight_already_generated": self._consumed,
                "max_size": self.max_size,
            }

    def get_last_target_weight_already_generated(self) -> int:
        """Return the last version whose step has taken its trajectories; -1: none has."""
        with self._lock:
            return self._consumed

    def get_existing_target_weights(self) -> set[int]:
        with self._lock:
            return {e.target for e in self._entries}

    def get_trajectories_needed(
        self, target_step: int, num_prompts_per_step: int, max_age_steps: int | None = None
    ) -> int:
        """Return how many trajectories a step still lacks, those that are too old for it not counted."""
        oldest = None if max_age_steps is None else target_step - max_age_steps
        with self._lock:
            there = sum(e.target == target_step and e.is_fresh(oldest) for e in self._entries)
        return max(0, num_prompts_per_step - there)

    def has_complete_batch(
        self, target_step: int, num_prompts_per_step: int, max_age_steps: int | None = None
    ) -> bool:
        return self.get_trajectories_needed(target_step, num_prompts_per_step, max_age_steps) == 0

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return {
                "trajectories": [e.trajectory for e in self._entries],
                "trajectory_versions": [e.version for e in self._entries],
                "target_weight_versions": [e.target for e in self._entries],
                "last_target_weight_already_generated": self._consumed,
                "max_size": self.max_size,
            }

    def load_state_dict(
        self,
        state: dict[str, Any],
        num_prompts_per_step: int | None = None,
        current_training_step: int | None = None,
        max_age_steps: int | None = None,
    ) -> None:
        """Replace the content by a saved one, without what the step to go on from can no longer use.

        Left out are trajectories for steps before `current_training_step`; those that are more than `max_age_steps`
        older than that step, or than their own where it is not known; steps of which some are missing, as said at
        the class, and always where the step to go on from is not known; and, at last, what exceeds the room.

        Raises:
            SchemaError: keys that are missing, or lists of different lengths.
        """
        entries = _entries(state)
        now = current_training_step
        if now is not None:
            entries = [e for e in entries if e.target >= now]
        if max_age_steps is not None:
            entries = [e for e in entries if e.is_fresh((e.target if now is None else now) - max_age_steps)]
        if num_prompts_per_step is not None and (self._drops_incomplete or now is None):
            counts = Counter(e.target for e in entries)
            entries = [e for e in entries if counts[e.target] >= num_prompts_per_step]
        entries = sorted(entries, key=lambda e: e.target)[: self.max_size]
        with self._lock:
            self._entries = entries
            if now is not None:
                self._consumed = now - 1
            elif num_prompts_per_step is None:
                self._consumed = int(state["last_target_weight_already_generated"])
            else:
                self._consumed = min((e.target for e in entries), default=0) - 1

    def save_to_path(self, path: str) -> None:
        """Write the content to a file, which is there as a whole or not at all."""
        data = io.BytesIO()
        torch.save(self.state_dict(), data)
        write_bytes(Path(path), data.getvalue())

    def load_from_path(
        self,
        path: str,
        num_prompts_per_step: int | None = None,
        current_training_step: int | None = None,
        max_age_steps: int | None = None,
    ) -> None:
        """Replace the content by that of a file, which is a pickle: load only what you have written.

        Raises:
            SchemaError: a damaged file, or one of something else.
        """
        try:
            state = torch.load(path, map_location="cpu", weights_only=False)
        except (EOFError, RuntimeError, UnpicklingError) as error:
            reason = str(error).split(".")[0]
            raise SchemaError(f"{path}: missing parts or damaged ({reason}); restore another file") from error
        self.load_state_dict(state, num_prompts_per_step, current_training_step, max_age_steps)


def _entries(state: dict[str, Any]) -> list[Entry]:
    if missing := [key for key in _STATE if key not in state]:
        raise SchemaError(f"Checkpoint missing required keys: {', '.join(missing)}")
    columns = [state[key] for key in _STATE[:3]]
    lengths = [len(column) for column in columns]
    if len(set(lengths)) != 1:
        raise SchemaError(f"inconsistent replay buffer lengths: {dict(zip(_STATE, lengths))}")
    return [Entry(*parts) for parts in zip(*columns)]


class ReplayBuffer(ReplayBufferImpl, ActorClass):
    """The buffer as callers start it: `ReplayBuffer.remote(...)` is an actor, `ReplayBuffer(...)` an object here."""
