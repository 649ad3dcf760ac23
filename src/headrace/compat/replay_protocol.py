"""What `nemo_rl.algorithms.async_utils.interfaces` names: what a trainer asks of a buffer of trajectories."""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class ReplayBufferProtocol(Protocol):
    """Holds trajectories until the step that they are meant for."""

    def add(self, trajectory: dict[str, Any], weight_version: int, target_weight_version: int) -> str: ...

    def sample(
        self, num_prompt_groups: int, current_weight_version: int, max_age_steps: int
    ) -> dict[str, Any] | None: ...

    def size(self) -> int: ...

    def clear(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(
        self,
        state: dict[str, Any],
        num_prompts_per_step: int | None = None,
        current_training_step: int | None = None,
        max_age_steps: int | None = None,
    ) -> None: ...

    def save_to_path(self, path: str) -> None: ...

    def load_from_path(
        self,
        path: str,
        num_prompts_per_step: int | None = None,
        current_training_step: int | None = None,
        max_age_steps: int | None = None,
    ) -> None: ...

    def get_trajectories_needed(
        self, target_step: int, num_prompts_per_step: int, max_age_steps: int | None = None
    ) -> int: ...

    def has_complete_batch(
        self, target_step: int, num_prompts_per_step: int, max_age_steps: int | None = None
    ) -> bool: ...
