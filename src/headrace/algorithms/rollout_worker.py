"""What makes a run's samples and validates its policy: generator, environment and store client in one process.

In the driver's process it is used as it is; as an actor of its own it is driven by `RemoteRollouts`.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from transformers.utils import logging as hf_logging

from headrace.algorithms.validation import Validator
from headrace.config import DataPlaneConfig, RecipeConfig
from headrace.data_plane.factory import build_data_plane_client
from headrace.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from headrace.data_plane.schema import FieldSpec, added_fields, declare
from headrace.data_plane.worker_mixin import bytes_moved
from headrace.distributed.topology import policy_sharding
from headrace.distributed.worker_groups import WorkerSpec
from headrace.environments.interfaces import Environment
from headrace.errors import ConfigError, DataPlaneError
from headrace.experience.chat import ChatTokenizer
from headrace.experience.prompt_room import prompts_that_fit
from headrace.experience.rollouts import RolloutSettings
from headrace.experience.sync_rollout_actor import DriverCarry, SyncRolloutActor
from headrace.experience.types import Prompt
from headrace.models.automodel.setup import load_model, load_tokenizer
from headrace.models.generation.interfaces import build_generator
from headrace.models.policy.launch import rollout_gpus, start_on_ray
from headrace.models.policy.lm_policy import Policy

RolledOut = tuple[KVBatchMeta, DriverCarry, dict[str, float], dict[str, float]]


class Rollouts(Protocol):
    """What a loop asks of the side that makes samples."""

    def rollout_to_tq(
        self, input_batch: Mapping[str, Any], *, partition_id: str, group_size: int = 1
    ) -> RolledOut:
        """Roll out `prompts` with `seed` and `tag`, and put the rows; see `SyncRolloutActor`."""
        ...

    def validate(self, seed: int) -> dict[str, float]:
        """Return accuracy and mean reward on held-out prompts; see `Validator`."""
        ...

    def refresh(self, policy: Policy) -> None: ...

    def moved_bytes(self) -> dict[str, int]: ...

    @property
    def transferred_bytes(self) -> int: ...

    def shutdown(self) -> None:
        """Let go of everything; may be called twice."""
        ...


class RolloutWorker:
    """Makes samples in this process.

    Raises:
        ConfigError: a model, environment or generator that the recipe gets wrong, or router replay with a generator
            that records no routes.
    """

    transferred_bytes = 0

    def __init__(
        self,
        recipe: RecipeConfig,
        tokenizer: ChatTokenizer,
        environment: Environment,
        dp_client: DataPlaneClient | None = None,
    ) -> None:
        model = load_model(recipe.policy, seed=recipe.seed)
        replay = recipe.policy.router_replay.enabled
        self.generator = build_generator(recipe.generation, model, tokenizer, record_routes=replay)
        if replay and self.generator.route_shape is None:
            raise ConfigError(
                f"policy.router_replay.enabled=true, and generation.backend={recipe.generation.backend} records no "
                "routes; use one that does, or switch router replay off"
            )
        self.parts = (self.generator, tokenizer, environment, RolloutSettings.from_recipe(recipe))
        self._validator = Validator(recipe.validation, *self.parts)
        self._prompts: dict[str, Prompt] = {}
        self._dp_client: DataPlaneClient | None = None
        self._actor: SyncRolloutActor | None = None
        if dp_client is not None:
            self._actor = SyncRolloutActor(*self.parts, dp_client=dp_client)

    @staticmethod
    def start(recipe: RecipeConfig) -> "RolloutWorker":
        """Build all of it from a recipe, in a process of its own."""
        hf_logging.disable_progress_bar()
        tokenizer = load_tokenizer(recipe.policy)
        return RolloutWorker(recipe, tokenizer, prompts_that_fit(recipe, tokenizer))

    def setup_data_plane(
        self, cfg: DataPlaneConfig | Mapping[str, Any], columns: Sequence[FieldSpec] = ()
    ) -> None:
        """Attach to the store that the driver has started, with the columns that it declares there."""
        declare(*columns)
        self._dp_client = build_data_plane_client(cfg, bootstrap=False)
        self._actor = SyncRolloutActor(*self.parts, dp_client=self._dp_client)

    def rollout_to_tq(
        self, input_batch: Mapping[str, Any], *, partition_id: str, group_size: int = 1
    ) -> RolledOut:
        """Roll out and put the rows; see `SyncRolloutActor.rollout_to_tq`."""
        if self._actor is None:
            raise DataPlaneError("the rollout worker has no store; call setup_data_plane(cfg) first")
        return self._actor.rollout_to_tq(input_batch, partition_id=partition_id, group_size=group_size)

    def rollout_named(self, uids: Sequence[str], *, seed: int, tag: str, **where: Any) -> RolledOut:
        """Roll out prompts of the training split by their uids, so that no text comes from the driver."""
        prompts = self._prompts or self._by_uid()
        batch = {"prompts": [prompts[uid] for uid in uids], "seed": seed, "tag": tag}
        return self.rollout_to_tq(batch, **where)

    def _by_uid(self) -> dict[str, Prompt]:
        _, _, environment, _ = self.parts
        prompts = environment.prompts("train")
        self._prompts = {prompt.uid: prompt for prompt in prompts}
        if len(self._prompts) != len(prompts):
            raise ConfigError(
                f"the training split has {len(prompts)} prompts under {len(self._prompts)} uids; a rollout actor finds "
                "prompts by uid: make them unique, or set cluster.rollout=driver"
            )
        return self._prompts

    def validate(self, seed: int) -> dict[str, float]:
        return self._validator.run(seed=seed)

    def refresh(self, policy: Policy) -> None:
        policy.refresh_generator(self.generator)

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self.generator.update_weights(named_tensors, version)

    def moved_bytes(self) -> dict[str, int]:
        return bytes_moved(self._dp_client) if self._dp_client is not None else {}

    def shutdown(self) -> None:
        """Let go of the generator, and of the store's client if it is this worker's own."""
        self.generator.shutdown()
        if self._dp_client is not None:
            self._dp_client.close()
            self._dp_client = None


class RemoteRollouts:
    """A RolloutWorker in a Ray actor; bulk goes from there to the store, weights from the policy's actors to it.

    The policy's workers are Ray actors, too.

    Raises: what RolloutWorker and `start_on_ray` raise.
    """

    def __init__(self, recipe: RecipeConfig, dp_cfg: DataPlaneConfig | Mapping[str, Any]) -> None:
        gpus = rollout_gpus(recipe.policy, recipe.cluster)
        self._group = start_on_ray(
            WorkerSpec(RolloutWorker.start, (recipe,)),
            policy_sharding(1),
            device="cuda" if gpus else "cpu",
            alone="the rollout actor",
            gpus_per_node=gpus,
            cpus_per_worker=0,
            startup_timeout_s=recipe.cluster.startup_timeout_s,
            autoscales=recipe.cluster.autoscales,
        )
        with ExitStack() as undo:
            undo.callback(self._group.shutdown)
            self._group.run_all("setup_data_plane", dp_cfg, added_fields())
            undo.pop_all()

    def rollout_to_tq(
        self, input_batch: Mapping[str, Any], *, partition_id: str, group_size: int = 1
    ) -> RolledOut:
        """Have the actor roll out; only the prompts' uids go there."""
        uids = [prompt.uid for prompt in input_batch["prompts"]]
        rolled_out: RolledOut = self._group.run_all(
            "rollout_named",
            uids,
            seed=input_batch["seed"],
            tag=input_batch["tag"],
            partition_id=partition_id,
            group_size=group_size,
        )[0]
        return rolled_out

    def validate(self, seed: int) -> dict[str, float]:
        metrics: dict[str, float] = self._group.run_all("validate", seed)[0]
        return metrics

    def refresh(self, policy: Policy) -> None:
        policy.workers.stream_to(self._group, "named_weights", "update_weights", policy.weight_version)

    def moved_bytes(self) -> dict[str, int]:
        moved: dict[str, int] = self._group.run_all("moved_bytes")[0]
        return moved

    @property
    def transferred_bytes(self) -> int:
        return self._group.transferred_bytes

    def shutdown(self) -> None:
        """End the actor; may be called twice."""
        self._group.shutdown()
