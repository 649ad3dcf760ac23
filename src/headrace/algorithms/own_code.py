"""A loss, an advantage estimator and a filter of groups of the user's own; each is tried before anything is trained."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headrace.algorithms.advantages import compute_advantages
from headrace.algorithms.filtering import own_filter
from headrace.algorithms.loss import (
    MASKS,
    PolicyGradientLoss,
    aggregation_weights,
    importance_correction,
    read_inputs,
    weighted_sum,
)
from headrace.config import LossConfig, RecipeConfig
from headrace.data_plane.schema import FIELDS, UNFILTERED_LOGPROBS, Kind
from headrace.errors import ConfigError
from headrace.models.interfaces import LossFn, LossType
from headrace.utils.targets import check_parameters, extend_import_path, load_callable, user_code

_PER_TOKEN = ("inputs", "cfg")
_WHOLE = ("logprobs", "data", "global_valid_seqs", "global_valid_toks")
_COLUMNS = frozenset({"advantages", "prev_logprobs", "generation_logprobs"})


def build_loss(recipe: RecipeConfig) -> LossFn:
    """Return the loss of a recipe, its own or the user's; raises as `OwnLoss`."""
    if recipe.loss.target is None:
        return PolicyGradientLoss(recipe.loss, filtered=recipe.generation.filters)
    loss = OwnLoss.of(recipe.loss, tuple(recipe.code_path or ()))
    if "reference_policy_logprobs" in loss.required_columns and not recipe.needs_reference:
        raise ConfigError(
            f"loss.target={recipe.loss.target} asks for reference_policy_logprobs, and no reference is kept; set "
            "loss.kl_coefficient above 0, which the function finds in cfg"
        )
    loss.probe()
    return loss


def check_own_code(recipe: RecipeConfig) -> None:
    """Try the functions of the user's own that a step calls.

    Raises:
        ConfigError: one of them cannot be called so, raises, or returns something else than it should.
    """
    build_loss(recipe)
    if recipe.grpo.advantage.target is not None:
        two, ones = torch.tensor([0, 0, 1, 1]), torch.ones(4)
        compute_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), two, ones, ones, recipe.grpo.advantage)
    if recipe.grpo.dynamic_sampling.target is not None:
        own_filter(recipe.grpo.dynamic_sampling.target)([1.0, 0.0])


@dataclass
class OwnLoss:
    """The loss that `loss.target` names; it goes to workers by its name, and each imports it.

    A function of `(inputs, cfg)` gives the loss per token, (b, S-1), or that with metrics (values per token, or 0-D);
    `loss.aggregation` says how tokens weigh, and `loss.importance_correction` weighs them as those of the usual loss.
    One of `(logprobs, data, global_valid_seqs, global_valid_toks)` is called as `models.interfaces.LossFn` is. Its
    attribute `required_columns` names what it reads; the masks, advantages and logprobs of the usual loss are there in
    any case. With the attribute `corrects_importance`, the correction is the function's own business.
    """

    cfg: LossConfig
    code_path: tuple[str, ...]
    is_whole: bool
    names: tuple[str, ...]
    required_columns: frozenset[str]
    loss_type: LossType
    per_sequence_metrics: frozenset[str]
    corrects: bool

    @classmethod
    def of(cls, cfg: LossConfig, code_path: tuple[str, ...]) -> "OwnLoss":
        assert cfg.target is not None
        function, who = load_callable(cfg.target, "loss.target"), f"loss.target={cfg.target}"
        if inspect.isclass(function):
            raise ConfigError(
                f"{who} is a class; expected a function (inputs, cfg), or an object that can be called so"
            )
        example = f"({', '.join(_PER_TOKEN)}), or ({', '.join(_WHOLE)})"
        taken = check_parameters(function, (*_PER_TOKEN, *_WHOLE), who, example=example) or set()
        is_whole = not taken & {*_PER_TOKEN}
        names = tuple(name for name in (_WHOLE if is_whole else _PER_TOKEN) if name in taken)
        if taken - {*names} or (is_whole and len(names) < len(_WHOLE)):
            raise ConfigError(f"{who} takes {', '.join(sorted(taken)) or 'nothing'}; write it as {example}")
        asked: Any = getattr(function, "required_columns", ())
        if isinstance(asked, str) or not all(isinstance(name, str) for name in asked):
            raise ConfigError(f"{who}: required_columns={asked!r}: expected a list of names of columns")
        usual = _COLUMNS - {"prev_logprobs"} if cfg.force_on_policy_ratio else _COLUMNS
        usual = usual | ({"reference_policy_logprobs"} if cfg.kl_coefficient else set())
        by_token = cfg.aggregation == "token_mean"
        loss_type = getattr(
            function, "loss_type", LossType.TOKEN_LEVEL if by_token else LossType.SEQUENCE_LEVEL
        )
        corrects = bool(getattr(function, "corrects_importance", False))
        if is_whole and not corrects and cfg.importance_correction != "none":
            raise ConfigError(
                f"{who} weighs the tokens itself, so that loss.importance_correction={cfg.importance_correction} would "
                "have no effect; weigh them by it in the function (algorithms.loss.importance_correction) and set its "
                "attribute corrects_importance = True, write it as (inputs, cfg), or set the key to none"
            )
        by_row = {"policy_loss"} if not is_whole and loss_type is LossType.SEQUENCE_LEVEL else set()
        per_sequence = frozenset({*getattr(function, "per_sequence_metrics", by_row)})
        columns = MASKS | usual | {*asked}
        return cls(cfg, code_path, is_whole, names, columns, loss_type, per_sequence, corrects)

    def __call__(
        self, logprobs: torch.Tensor, data: Mapping[str, Any], **counts: torch.Tensor
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor | float]]:
        extend_import_path(self.code_path)
        function = load_callable(str(self.cfg.target), "loss.target")
        if self.is_whole:
            with user_code(self._who):
                loss, metrics = self._pair(function(logprobs=logprobs, data=data, **counts))
            self._check(loss, (), "the loss of the rows")
        else:
            loss, metrics = self._per_token(function, logprobs, data, counts)
        return loss, {n: v.detach().float() if isinstance(v, torch.Tensor) else v for n, v in metrics.items()}

    @property
    def _who(self) -> str:
        return f"loss.target={self.cfg.target}"

    def _per_token(
        self,
        function: Callable[..., Any],
        logprobs: torch.Tensor,
        data: Mapping[str, Any],
        counts: Mapping[str, torch.Tensor],
    ) -> tuple[torch.Tensor, Mapping[str, Any]]:
        every = read_inputs(logprobs, data, self.required_columns, **counts).with_current()
        inputs = every.possible()
        with user_code(self._who):
            values, metrics = self._pair(
                function(**{n: {"inputs": inputs, "cfg": self.cfg}[n] for n in self.names})
            )
        self._check(
            values, tuple(inputs.logprobs.shape), "the loss per token, of the shape of inputs.logprobs"
        )
        weights = aggregation_weights(every, self.cfg.aggregation, self.cfg.constant_tokens)
        kept = inputs.loss_mask
        if not self.corrects:
            correction, keep = importance_correction(inputs, self.cfg)
            values, kept = values * correction, kept & keep[:, None]
        loss = weighted_sum(values, weights, kept)
        shares = aggregation_weights(every, "token_mean")
        told = {
            name: weighted_sum(value, shares, inputs.loss_mask)
            if getattr(value, "dim", int)() == 2
            else value
            for name, value in metrics.items()
        }
        return loss, {"policy_loss": loss, **told}

    def _pair(self, result: Any) -> tuple[Any, Mapping[str, Any]]:
        if not isinstance(result, tuple):
            return result, {}
        if len(result) != 2 or not isinstance(result[1], Mapping):
            raise ConfigError(
                f"{self._who} returned a tuple of {len(result)}; expected (loss, dict of metrics)"
            )
        return result

    def _check(self, value: Any, shape: tuple[int, ...], what: str) -> None:
        got = f"a {type(value).__name__}"
        if isinstance(value, torch.Tensor):
            if tuple(value.shape) == shape and value.requires_grad:
                return
            got = f"a tensor of shape {tuple(value.shape)}"
            if tuple(value.shape) == shape:
                got += " without gradient (it does not depend on the logprobs)"
        raise ConfigError(f"{self._who} returned {got}; expected a tensor: {what}")

    def probe(self) -> None:
        """Call the function on two short rows, and look at what it returns."""
        generator = torch.Generator().manual_seed(0)
        size = (2, 4)
        data: dict[str, Any] = {}
        for name in self.required_columns - MASKS - {UNFILTERED_LOGPROBS}:
            spec = FIELDS.get(name)
            if spec is not None and (spec.kind is not Kind.PER_TOKEN or spec.trailing_dims):
                raise ConfigError(
                    f"{self._who} asks for column '{name}', which is not of numbers per token; remove it"
                )
            data[name] = -torch.rand(size if spec is not None else size[:1], generator=generator)
        scores = -torch.rand(size, generator=generator)
        if UNFILTERED_LOGPROBS in self.required_columns:
            data[UNFILTERED_LOGPROBS] = scores.clone().requires_grad_()
        data |= {"token_mask": torch.ones(size), "sample_mask": torch.ones(2)}
        counts = {"global_valid_seqs": torch.tensor(2.0), "global_valid_toks": torch.tensor(6.0)}
        self(scores.requires_grad_(), data, **counts)
