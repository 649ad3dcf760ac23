"""The recipe's `policy`: the trained model, how its batches are cut, and how it is spread over workers."""

import string
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from headrace.utils.rounding import round_up
from headrace.utils.section import Decay, Fraction, Section, Settings, Strings


class SequencePackingConfig(Section):
    """Several sequences in one row, without attention between them."""

    enabled: bool = False
    """Pack. Excludes `dynamic_batching`."""
    algorithm: Literal["first_fit_decreasing", "modified_first_fit_decreasing", "concatenative"] = (
        "modified_first_fit_decreasing"
    )
    """`first_fit_decreasing`: the longest row first, into the first bin with room. `modified_...`: likewise, but bins
    of one large row are filled with smaller ones first. `concatenative`: in the order of the rows."""
    train_mb_tokens: PositiveInt = 4096
    """Tokens of a training microbatch at most; at least `max_total_sequence_length`, rounded up to
    `make_sequence_length_divisible_by`."""
    logprob_mb_tokens: PositiveInt = 8192
    """Tokens of a scoring microbatch at most; at least `max_total_sequence_length`, rounded up to
    `make_sequence_length_divisible_by`."""
    microbatch_order: Literal["planned", "longest_first"] = "planned"
    """Order of a rank's microbatches. `longest_first` shows in the first one whether memory is enough."""


class DynamicBatchingConfig(Section):
    """Microbatches of similar lengths, as many rows each as a token budget allows."""

    enabled: bool = False
    """Batch by length. Excludes `sequence_packing`."""
    train_mb_tokens: PositiveInt = 4096
    """Tokens of a training microbatch at most, padding included; at least `max_total_sequence_length`, rounded up to
    `sequence_length_round`."""
    logprob_mb_tokens: PositiveInt = 8192
    """Tokens of a scoring microbatch at most, padding included; at least `max_total_sequence_length`, rounded up to
    `sequence_length_round`."""
    sequence_length_round: PositiveInt = 1
    """A microbatch is padded to a multiple of this many tokens."""


class OptimizerConfig(Section):
    """AdamW."""

    lr: PositiveFloat = 1e-6
    """Learning rate at its peak."""
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.95)
    """Decay of the two moment estimates, per update."""
    eps: Annotated[float, Field(ge=1e-20)] = 1e-8  # less divides by what float32 rounds to 0
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.01
    """Decay of matrices, times the learning rate, per update; norms and biases have none."""
    kind: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw`: float32 moments. `adamw_8bit`: a byte for each of both, through torchao (docs/models.md)."""
    stochastic_rounding: bool = False
    """Hold weights of matrix products in bfloat16 alone, without float32 masters, and round each update up or down by
    chance, so that small ones are not lost (`adamw_8bit`, `policy.precision=bfloat16`, one worker)."""


class SchedulerConfig(Section):
    """Learning-rate schedule: linear warm-up, then constant, linear or cosine decay over `decay_steps`."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Updates over which the rate rises to its peak."""
    decay_steps: PositiveInt | None = None
    """Updates after warm-up until the least rate is reached (linear, cosine)."""
    min_lr_ratio: Fraction = 0.0
    """The least rate, as a share of the peak (linear, cosine)."""

    def faults(self) -> Iterator[str]:
        if self.kind != "constant" and self.decay_steps is None:
            yield f"kind={self.kind} needs decay_steps (optimizer steps after warm-up); set it as well"


class TokenizerConfig(Section):
    """Where the tokenizer comes from; None: the model's own directory."""

    path: str | None = None
    """A directory with a Hugging Face tokenizer, or a name on the hub."""
    revision: str | None = None
    """Branch, tag or commit of a name on the hub; None: its main branch."""
    builder: Literal["characters"] | None = None
    """Build a tokenizer in place of loading one: `characters` has one token per character."""
    characters: str = string.ascii_letters
    """The characters that `builder` makes tokens of, each once."""


class ModelConfig(Section):
    """Which weights: a Hugging Face directory or name, a GGUF file in a Python package, or fresh ones from `config`."""

    path: str | None = None
    """A Hugging Face model directory (config.json and safetensors), or a name on the hub: Qwen/Qwen3-0.6B."""
    revision: str | None = None
    """Branch, tag or commit of a name on the hub; None: its main branch."""
    trust_remote_code: bool = False
    """Run Python files that come with the model, for architectures that transformers does not have."""
    gguf_package: str | None = None
    """Importable package that ships a .gguf file; converted once to safetensors in `cache_dir`."""
    config: Settings | None = None
    """A transformers config with `model_type`; the weights are drawn from the run's seed."""
    cache_dir: str = "~/.cache/headrace"
    """Where a converted GGUF model is kept for the next run."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = "sdpa"
    """Attention, as transformers names it; `sdpa` takes torch's kernels for packed rows where there are any."""
    experts_implementation: Literal["eager", "grouped_mm", "batched_mm"] | None = None
    """How a mixture-of-experts layer runs its experts, as transformers names it; None: the model's own choice."""

    def faults(self) -> Iterator[str]:
        given = [k for k in ("path", "gguf_package", "config") if getattr(self, k) is not None]
        if len(given) != 1:
            yield (
                f"set exactly one of path, gguf_package and config; got {', '.join(given) or 'none of them'}"
            )


class LoraConfig(Section):
    """A low-rank adapter that trains in place of the model's weights, which stay as they are (docs/models.md)."""

    rank: PositiveInt | None = None
    """Rank of the adapter's matrices; None: no adapter, all weights train."""
    alpha: PositiveFloat = 32.0
    """What the adapter adds is scaled by alpha / rank."""
    targets: Strings = ("all",)
    """Linear layers that get an adapter, by the last part of their names (q_proj) or by whole names; `all`: every one
    but the output head and routers. Experts that share one fused weight have none."""
    dropout: Decay = 0.0
    """Share of an adapter's inputs that are dropped in training; scoring drops none."""
    base: Literal["plain", "int8", "nf4"] = "plain"
    """How matrices below the adapter are held: as `policy.precision` says, or in 8 or 4 bits by torchao (one worker).
    The generator gets the rounded values."""

    def faults(self) -> Iterator[str]:
        if self.rank is not None and not self.targets:
            yield "targets=[] gives no layer an adapter; name linear layers, or all, or set rank=null"


class ParallelConfig(Section):
    """How one replica of the policy is spread over workers; the data-parallel size is what is left.

    `policy.workers` = data x context x tensor.
    """

    tensor: PositiveInt = 1
    """Ranks that split the matrices of every layer."""
    context: PositiveInt = 1
    """Ranks that split the tokens of a row."""
    expert: PositiveInt = 1
    """Ranks that share the experts of a mixture-of-experts model. With tensor=1 they are data and context ranks, and
    each token goes to the ranks of its experts and back; else they are the tensor ranks, which 1 follows."""
    sequence_parallel: bool = False
    """Split activations between tensor-parallel ranks along tokens as well."""
    cpu_offload: bool = False
    """Keep float32 weights and optimizer state in host memory. One worker has weights in the compute precision and
    gradients on its device; several, with FSDP2, have only the layer that runs there."""
    gathered_gib: NonNegativeFloat = 4.0
    """Up to so many GiB of weights, in the precision that computes, stay whole on every rank from the first microbatch
    of a step, or of scoring, to the last, and so do float32 gradients. A larger model is gathered layer by layer, and
    its gradients are added up over ranks, in every microbatch; 0: each is."""
    launcher: Literal["auto", "spawn", "ray"] = "auto"
    """How several workers are started; auto: Ray with the transfer_queue data plane, else plain processes."""

    def keeps_gathered(self, nbytes: int) -> bool:
        """Whether so many bytes of whole weights, in the precision that computes, stay gathered."""
        return nbytes <= self.gathered_gib * 2**30

    @property
    def splits_layers(self) -> str:
        """What makes several ranks run one layer together, as `tensor=2, context=2`; empty: nothing does."""
        sizes = {"tensor": self.tensor, "context": self.context, "expert": self.expert}
        return ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)

    @property
    def expert_over_data(self) -> int:
        """How many data and context ranks share experts; 1: none do."""
        return self.expert if self.tensor == 1 else 1

    def faults(self) -> Iterator[str]:
        if self.tensor > 1 and self.expert not in (1, self.tensor):
            yield (
                f"expert={self.expert} is neither 1 nor tensor={self.tensor}: with tensor ranks, those share the "
                f"model's experts; set tensor={self.expert}, or tensor=1, or expert=1 (which follows tensor)"
            )
        if self.sequence_parallel and self.tensor == 1:
            yield (
                "sequence_parallel=true splits tokens between tensor ranks and tensor=1; raise tensor, or switch it off"
            )


class RouterReplayConfig(Section):
    """The experts that the rollout used, used again by the logprob and train forwards of an MoE model."""

    enabled: bool = False
    """Record the experts in the rollout and replay them in training."""
    max_missing_fraction: Fraction = 0.0
    """Share of a sample's (token, layer) rows that may lack a record and be routed by the trainer itself. The last
    token of a sample never has one and does not count: nothing is scored from it."""
    on_excess: Literal["refuse", "mask"] = "refuse"
    """Beyond that share: stop the run, or leave the sample out of the loss."""
    min_exact_fraction: Fraction = 0.8
    """Least share of recorded (token, layer) choices that the trainer's own routers make too, with the weights of the
    rollout: in scoring, or, without it, in the training forwards before the first update. In any one layer, half of it.
    Below it the capture is taken to be wrong, and the run stops before weights change; 0 never stops."""
    trace: bool = False
    """Write the routes of every step, recorded and used, into the run directory; see `headrace trace-check`."""


class PolicyConfig(Section):
    """The trained model, and how its batches are cut."""

    model: ModelConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    lora: LoraConfig = LoraConfig()
    precision: Literal["float32", "bfloat16"] = "float32"
    """Compute precision. Weights and optimizer state are float32, unless `optimizer` says otherwise."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the policy computes; auto: CUDA where there is a device."""
    workers: PositiveInt = 1
    """Processes that train. 1: the driver's own, unless `parallel.launcher` is ray."""
    parallel: ParallelConfig = ParallelConfig()
    max_total_sequence_length: PositiveInt = 1024
    """Tokens of a sample at most: prompt and all turns."""
    make_sequence_length_divisible_by: PositiveInt = 1
    """Rows, packed or padded, are filled to a multiple of this many tokens."""
    train_global_batch_size: PositiveInt = 256
    """Samples of one optimizer update, over all ranks; divides the samples of a step."""
    train_micro_batch_size: PositiveInt = 8
    """Rows of a training microbatch on one rank, without packing and dynamic batching."""
    logprob_batch_size: PositiveInt = 32
    """Rows of a scoring microbatch on one rank, without packing and dynamic batching."""
    sequence_packing: SequencePackingConfig = SequencePackingConfig()
    dynamic_batching: DynamicBatchingConfig = DynamicBatchingConfig()
    activation_checkpointing: bool = False
    """Keep only the inputs of each layer, and compute the rest again in the backward pass: less memory, more time."""
    compile: bool = False
    """Compile the decoder layers for scoring and training, so that norms, rotary embeddings and casts are no kernels of
    their own. Data-parallel workers only; the first microbatches take a minute more. Log-probabilities change in their
    last digits."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose [tokens, vocabulary] float32 scores are in memory at once.

    On CUDA with Triton, a head that is a plain matrix, without top-k and top-p, takes four times as many: it keeps one
    copy of the scores, in the compute dtype, where the plain path keeps several in float32. The backward pass computes
    those of all but the last chunk again; with a quarter of a microbatch's tokens there is one chunk.
    """
    max_grad_norm: PositiveFloat | None = 1.0
    """The gradient's norm is cut down to this; None: never."""
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    router_replay: RouterReplayConfig = RouterReplayConfig()

    @property
    def has_fixed_microbatches(self) -> bool:
        """Whether microbatches have a fixed number of rows: neither packing nor dynamic batching is on."""
        return not (self.sequence_packing.enabled or self.dynamic_batching.enabled)

    @property
    def replicas(self) -> int:
        """Data-parallel size: copies of the model, each on context x tensor workers."""
        return self.workers // (self.parallel.context * self.parallel.tensor)

    def faults(self) -> Iterator[str]:
        if self.sequence_packing.enabled and self.dynamic_batching.enabled:
            yield (
                "sequence_packing.enabled=true and dynamic_batching.enabled=true exclude each other; switch one off"
            )
        replica = self.parallel.context * self.parallel.tensor
        if self.workers % replica:
            yield (
                f"workers={self.workers} do not make whole replicas of parallel.context={self.parallel.context} x "
                f"parallel.tensor={self.parallel.tensor}; make workers a multiple of {replica}"
            )
        if self.workers % replica == 0 and self.workers % self.parallel.expert:
            yield (
                f"workers={self.workers} do not make whole groups of parallel.expert={self.parallel.expert} ranks that "
                f"share experts; make workers a multiple of {self.parallel.expert}, or set parallel.expert=1"
            )
        if self.lora.rank is not None and self.parallel.tensor > 1:
            yield (
                f"lora.rank={self.lora.rank} with parallel.tensor={self.parallel.tensor}: matrices with an adapter "
                "cannot be split over tensor ranks; set parallel.tensor=1"
            )
        if self.lora.rank is not None and self.lora.base != "plain" and self.workers > 1:
            yield (
                f"lora.base={self.lora.base} with workers={self.workers}: such matrices are not split over workers; "
                "set workers=1, or lora.base=plain"
            )
        if self.parallel.cpu_offload and self.workers == 1 and self.lora.rank is not None:
            yield (
                f"parallel.cpu_offload=true and lora.rank={self.lora.rank}: one worker offloads weights that "
                "train, and an adapter has few; switch it off"
            )
        if self.compile and (names := self.parallel.splits_layers):
            yield f"compile=true with parallel.{names}: layers that ranks share are not compiled; set one of them back"
        yield from self._low_bit_faults()
        if self.train_global_batch_size % self.replicas:
            yield (
                f"train_global_batch_size={self.train_global_batch_size} is not divisible by workers={self.workers} "
                f"({self.replicas} data-parallel replicas); change one of them"
            )
        per_rank = self.train_global_batch_size // self.replicas
        if self.has_fixed_microbatches and per_rank % self.train_micro_batch_size:
            yield (
                f"train_micro_batch_size={self.train_micro_batch_size} does not divide the {per_rank} rows "
                "that each replica gets of train_global_batch_size; change one of them, or switch on "
                "sequence_packing or dynamic_batching"
            )
        yield from self._budget_faults()

    def _budget_faults(self) -> Iterator[str]:
        multiples = {
            "sequence_packing": ("make_sequence_length_divisible_by", self.make_sequence_length_divisible_by),
            "dynamic_batching": (
                "dynamic_batching.sequence_length_round",
                self.dynamic_batching.sequence_length_round,
            ),
        }
        for name, (rounding, multiple) in multiples.items():
            section, longest = getattr(self, name), round_up(self.max_total_sequence_length, multiple)
            filled = "" if multiple == 1 else f" (filled to {longest} by {rounding}={multiple})"
            for key in ("train_mb_tokens", "logprob_mb_tokens"):
                if section.enabled and getattr(section, key) < longest:
                    yield (
                        f"{name}.{key}={getattr(section, key)} is less than max_total_sequence_length="
                        f"{self.max_total_sequence_length}{filled}, so the longest row fits no microbatch; raise "
                        f"{name}.{key}"
                    )

    def _low_bit_faults(self) -> Iterator[str]:
        if self.optimizer.kind != "adamw_8bit":
            return
        others = {
            f"lora.rank={self.lora.rank}": (self.lora.rank is not None, "an adapter has little state"),
            "parallel.cpu_offload=true": (self.parallel.cpu_offload, "the state is in host memory then"),
            f"parallel.tensor={self.parallel.tensor}": (
                self.parallel.tensor > 1,
                "only rows are split over ranks",
            ),
            f"parallel.expert={self.parallel.expert}": (
                self.parallel.expert_over_data > 1,
                "only rows are split over ranks",
            ),
        }
        for other, (given, why) in others.items():
            if given:
                yield f"optimizer.kind=adamw_8bit and {other} do not go together: {why}; remove one of them"
        for key, value, wanted in (("precision", self.precision, "bfloat16"), ("workers", self.workers, 1)):
            if self.optimizer.stochastic_rounding and value != wanted:
                yield (
                    f"optimizer.stochastic_rounding=true with {key}={value}: bfloat16 weights without masters need "
                    f"{key}={wanted}; set that, or switch it off"
                )
