"""An engine of transformers' models, for a process of its own."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

# Their attention and experts have names in transformers that a config may have.
from headrace.models.automodel import attention as _attention  # noqa: F401
from headrace.models.automodel import experts as _experts  # noqa: F401
from headrace.models.generation.engine import Completions, EngineSpec, Request
from headrace.models.generation.hf import HFGenerator
from headrace.models.generation.weight_group import WeightGroup, WeightRoute


class HFEngine:
    """An Engine over an `HFGenerator`, whose weights are random before the first update."""

    def __init__(self, spec: EngineSpec) -> None:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(spec.folder), dtype=torch.float32, **spec.implementations
        )
        model.generation_config.eos_token_id = None  # requests have all ids that end a completion
        self._batch_size = spec.cfg.batch_size
        self._weights = WeightGroup()
        self._generator = HFGenerator(
            model.to(spec.device),
            AutoTokenizer.from_pretrained(spec.folder),
            spec.cfg,
            record_routes=spec.record_routes,
        )

    def answer(self, request: Request) -> Iterator[Completions]:
        """Yield the completions of a batch at a time, longest prompts first."""
        at = dict(zip(request.places, request.prompts))
        places = sorted(at, key=lambda place: (-len(at[place]), tuple(at[place])))
        for begin in range(0, len(places), self._batch_size):
            part = places[begin : begin + self._batch_size]
            output = self._generator.generate(
                [at[place] for place in part],
                replace(request.params, stop_token_ids=tuple(request.params.stop_token_ids)),
                seed=request.seed,
                places=part,
            )
            yield Completions.of(
                part, output.token_ids, output.logprobs, output.truncated, routes=output.routes
            )

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self._generator.update_weights(named_tensors, version)

    def receive_weights(self, route: WeightRoute, rank: int, version: int) -> list[list[float]]:
        with self._weights.receiving(route, rank) as weights:
            self.update_weights(weights, version)
        return [self._weights.seconds]

    def release(self, *, weights_follow: bool = False) -> None:
        self._generator.release()

    def take_metrics(self) -> dict[str, float]:
        """Nothing is counted."""
        return {}

    def shutdown(self) -> None:
        self._generator.shutdown()
