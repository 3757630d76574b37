"""Engines: which step trains a model, in which precision, and what prevents a faster one.

There are four steps:

- reference: autograd, which the other steps are tested against. Its gradients are sparse where a
  batch reads few of many entities.
- captured: the reference step as a CUDA graph.
- fused: the gradient of the softmax without autograd, by numba on a CPU and by PyTorch on a GPU.
- kernels: with bfloat16 products on a GPU, entirely in Triton kernels.

Users see the reference step and, for the last two, the fast step. A path network takes the
reference step, in which its messages are passed by PyTorch or by compiled kernels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from dualkg.errors import RequestError
from dualkg.kernels.hardware import gpu_kernels_unavailable, has_bf16_products
from dualkg.losses.base import Loss
from dualkg.losses.softmax import SampledSoftmax
from dualkg.models.base import Model, overridden
from dualkg.models.bilinear import BilinearModel
from dualkg.models.diagonal import DiagonalModel
from dualkg.regularizers import Regularizer, is_power_sum
from dualkg.training.fused import has_builtin_maps
from dualkg.training.recipe import Recipe

StepName = Literal["reference", "captured", "fused", "kernels"]
Precision = Literal["float32", "tf32", "bf16"]

MAX_MATRICES = 65_535  # the most programs that a GPU starts along the axis of relations
MAX_FORMED = 2**28  # numbers in the matrices that a step forms for all relations
ENTITIES_PER_ROW = 4  # entities for each row of a batch from which on sparse gradients are faster

PRECISION_WORDS: dict[Precision, str] = {
    "float32": "float32",
    "tf32": "TensorFloat-32 products",
    "bf16": "bfloat16 products",
}


@dataclass(frozen=True)
class Engine:
    """The step that trains a run, the precision of its products and its device."""

    step: StepName
    precision: Precision
    device: torch.device
    sparse: bool = False  # whether gradients have only the rows of a batch
    on_host: bool = False  # whether the entity tables are in host memory
    passes_messages: bool = False  # whether kernels pass the messages of a path network

    @property
    def fast(self) -> bool:
        """Whether the gradient of the softmax is computed without autograd."""
        return self.step in ("fused", "kernels")

    def __str__(self) -> str:
        """Such as `fast step, bfloat16 products, one NVIDIA H200`."""
        if self.device.type == "cuda":
            device = f"one {torch.cuda.get_device_name(self.device)}"
        else:
            threads = torch.get_num_threads()
            device = "1 CPU thread" if threads == 1 else f"{threads} CPU threads"
        words = [self._step_words(), PRECISION_WORDS[self.precision], device]
        if self.on_host:
            words.append("entity tables in host memory")
        return ", ".join(words)

    def _step_words(self) -> str:
        if self.fast:
            return "fast step"
        words = "compiled message passing" if self.passes_messages else "reference step"
        if self.sparse:
            words += " with sparse gradients"
        return f"{words} in a CUDA graph" if self.step == "captured" else words


def unavailable(what: str, reason: str, settings: Mapping[str, str]) -> RequestError:
    """The engine or the precision that was requested cannot train this model.

    `reason` completes a sentence about `what`. `settings` are recipe keys that would work.
    """
    advice = " and ".join(f"`{key}={value}`" for key, value in settings.items())
    return RequestError(f"{what} {reason}. Use {advice}.")


class Job(NamedTuple):
    """What the engine depends on."""

    model: Model
    loss: Loss
    regularizer: Regularizer
    optimizer: str
    order: str = "triples"
    sums: str = "elements"
    has_rejected: bool = False  # whether rejected triples are negatives

    @property
    def on_gpu(self) -> bool:
        return self.model.device.type == "cuda"

    @property
    def model_name(self) -> str:
        return type(self.model.whole).__name__


class Requirement(NamedTuple):
    """A condition that a job must meet, and what is said of a job that does not."""

    is_met: Callable[[Job], object]
    reason: Callable[[Job], str]


def has_one_product(job: Job) -> bool:
    """Whether all scores are one matrix product with tables that are all trained."""
    parameters = job.model.parameters()
    return bool(job.model.score_form) and all(table.requires_grad for table in parameters)


def reads_rows_elsewhere(job: Job) -> bool:
    """Whether the regularizer reads whole tables, of which this process has a part."""
    return job.regularizer.reads_whole_tables and not job.model.tables.has_all_entities


def kernels_know_relations(job: Job) -> bool:
    """Whether GPU kernels can compute with the relations of a model and the regularizer."""
    model = job.model.whole
    regularizer = job.regularizer
    if not (isinstance(model, BilinearModel) and has_builtin_maps(model)):
        return False
    if not is_power_sum(regularizer):
        return False
    if isinstance(model, DiagonalModel):
        # The kernel of penalties takes one modulus of all numbers of a coordinate; for squares that
        # is their sum.
        has_one_modulus = model.multiplicative_modulus or regularizer.power == 2
        return model.linear_in_relations and has_one_modulus
    if model.relation_kernel is None or not model.has_adjoint:
        return False
    if model.relation_kernel == "mixtures" and model.num_relation_ids * model.dim**2 > MAX_FORMED:
        return False
    predicts_relations = job.loss.predicts_relations
    has_known_penalty = regularizer.power == 2 or "relation" not in regularizer.term_weights
    is_small = model.num_relation_ids <= MAX_MATRICES
    return is_small and has_known_penalty and not predicts_relations


def shares_negatives(job: Job) -> bool:
    """Whether the loss is sampled softmax whose negatives a batch shares, as fast steps need."""
    loss = job.loss
    if not isinstance(loss, SampledSoftmax) or type(loss).bind is not SampledSoftmax.bind:
        return False
    return loss.shared


def samples_rows(job: Job) -> bool:
    """Whether the fused step on a CPU can train sampled softmax.

    Rows that a batch does not read are not updated, which is exact for Adagrad and SGD.
    """
    if job.on_gpu or not has_one_product(job) or not shares_negatives(job):
        return False
    return job.optimizer in ("Adagrad", "SGD") and not job.regularizer.reads_whole_tables


FAST = (
    Requirement(
        has_one_product,
        lambda job: (
            "needs a model whose scores are one product, as those of bilinear models and squared "
            f"distances are, and whose tables are all trained; this {job.model_name} is none"
        ),
    ),
    Requirement(
        lambda job: not job.loss.fast_step_obstacle or samples_rows(job),
        lambda job: (
            "is for OneVsAll, each triple against one whole answer; "
            f"{job.loss.fast_step_obstacle} was set"
        ),
    ),
    Requirement(
        lambda job: not job.has_rejected,
        lambda job: "has no rejected triples, and `data.decisions` has some",
    ),
    Requirement(
        lambda job: not reads_rows_elsewhere(job),
        lambda job: (
            "has a part of the tables in each process, and "
            f"{type(job.regularizer).__name__} reads whole tables"
        ),
    ),
)

# What bfloat16 products require besides the fast step.
BF16 = (
    Requirement(
        lambda job: not samples_rows(job),
        lambda job: "on a CPU is for OneVsAll",
    ),
    Requirement(
        lambda job: job.model.score_form == "products",
        lambda job: "is for models that score by products",
    ),
    Requirement(
        lambda job: job.optimizer == "Adagrad",
        lambda job: f"is for training with Adagrad; `optimizer.name` is {job.optimizer}",
    ),
    Requirement(
        lambda job: job.sums == "elements" or shares_negatives(job),
        lambda job: f"is for Adagrad with sums of single elements; `optimizer.sums` is {job.sums}",
    ),
    Requirement(
        lambda job: job.model.embedding.entities.dtype == torch.float32,
        lambda job: "is for tables of float32",
    ),
    Requirement(
        lambda job: job.on_gpu or has_bf16_products(),
        lambda job: "is not supported by this processor, and would be slow",
    ),
    Requirement(
        lambda job: not (job.on_gpu and gpu_kernels_unavailable()),
        lambda job: f"on a GPU {gpu_kernels_unavailable()}",
    ),
    Requirement(
        lambda job: not job.on_gpu or torch.cuda.get_device_capability(job.model.device) >= (8, 0),
        lambda job: "is not supported by this GPU",
    ),
    Requirement(
        lambda job: not job.on_gpu or kernels_know_relations(job),
        lambda job: (
            "on a GPU is for models and regularizers that kernels know: relations that are rows, "
            "or matrices without relation prediction, and sums of powers over a batch; this "
            f"{job.model_name} with {type(job.regularizer).__name__} is not"
        ),
    ),
)


def obstacle(requirements: Sequence[Requirement], job: Job) -> str | None:
    """The first requirement that a job does not meet, as the end of a sentence."""
    for requirement in requirements:
        if not requirement.is_met(job):
            return requirement.reason(job)
    return None


def can_capture(job: Job) -> bool:
    """Whether autograd can be captured as a CUDA graph.

    No size may depend on the content of a batch.
    """
    if not (job.on_gpu and job.optimizer == "Adam" and job.order == "triples"):
        return False
    if job.has_rejected:
        return False
    has_own_methods = not overridden(job.model) <= {"config", "entity_vectors"}
    if not job.model.capturable or has_own_methods or not is_power_sum(job.regularizer):
        return False
    return job.loss.has_fixed_shapes(reciprocal=job.model.reciprocal)


def reads_few_rows(job: Job, batch_size: int) -> bool:
    """Whether a batch reads so few entity rows that Adagrad is faster on these alone.

    It is exact, too: rows without a gradient do not change.
    """
    rows = job.loss.rows_per_batch(job.model, batch_size)
    if rows is None or job.optimizer != "Adagrad" or job.regularizer.reads_whole_tables:
        return False
    if job.has_rejected:  # whose answers are compared with all entities
        return False
    return ENTITIES_PER_ROW * rows <= job.model.shape.num_entities


def choose_engine(
    recipe: Recipe, model: Model, regularizer: Regularizer, *, has_rejected: bool = False
) -> Engine:
    """The engine that the recipe requests, or the fastest that applies if it leaves that open."""
    requested = recipe.training.engine
    precision = recipe.training.precision
    optimizer = recipe.optimizer
    sums = "rows" if optimizer.sums_by_row else "elements"
    job = Job(
        model,
        recipe.loss,
        regularizer,
        optimizer.name,
        recipe.training.order,
        sums,
        has_rejected,
    )
    if model.reads_graph:
        return _path_engine(job, requested, precision)
    not_fast = obstacle(FAST, job)
    in_kernels = job.on_gpu and shares_negatives(job) and not has_rejected
    has_fast_step = not not_fast or in_kernels
    is_fast = has_fast_step and requested != "reference"
    not_bf16 = obstacle(BF16, job) if is_fast else None
    if is_fast and not not_bf16 and precision in ("auto", "bf16"):
        step: StepName = "kernels" if job.on_gpu else "fused"
        return Engine(step, "bf16", model.device, on_host=model.tables.on_host)
    _check_available(requested, precision, not_fast, not_bf16)
    return _exact_engine(job, recipe, is_fast=is_fast and not not_fast)


def _path_engine(job: Job, requested: str, precision: str) -> Engine:
    """The engine of a path network: compiled where that is possible."""
    model = job.model
    on_gpu = job.on_gpu
    obstacle_of_paths = model.kernel_obstacle
    not_bf16 = None if on_gpu else "of a path network is for a GPU"
    _check_available(requested, precision, obstacle_of_paths, not_bf16)
    if obstacle_of_paths or requested == "reference":
        return Engine("reference", "float32", model.device)
    is_exact = precision in ("float32", "tf32") or not on_gpu
    has_fixed_shapes = job.loss.has_fixed_shapes(reciprocal=True)
    is_captured = on_gpu and model.capturable and has_fixed_shapes and job.optimizer == "Adam"
    return Engine(
        "captured" if is_captured else "reference",
        "float32" if is_exact else "bf16",
        model.device,
        passes_messages=True,
    )


def _check_available(
    requested: str, precision: str, not_fast: str | None, not_bf16: str | None
) -> None:
    """Refuse an engine or a precision that was requested and does not apply."""
    exact = {"training.precision": "float32"}
    if not_bf16 and precision == "bf16":
        raise unavailable("bf16", not_bf16, exact)
    if not_fast and (requested == "fast" or precision == "bf16"):
        settings = {"training.engine": "reference", **exact}
        raise unavailable("The fast engine", not_fast, settings)
    if requested == "reference" and precision == "bf16":
        reason = "trains in float32; bf16 was requested"
        raise unavailable("The reference engine", reason, {"training.engine": "fast"})


def _exact_engine(job: Job, recipe: Recipe, *, is_fast: bool) -> Engine:
    """The engine in float32 or TensorFloat-32."""
    training = recipe.training
    device = job.model.device
    on_host = job.model.tables.on_host
    precision: Precision = "tf32" if training.precision == "tf32" and job.on_gpu else "float32"
    if is_fast:
        return Engine("fused", precision, device, on_host=on_host)
    if training.engine != "reference":
        if can_capture(job):
            return Engine("captured", precision, device, on_host=on_host)
        if reads_few_rows(job, training.batch_size):
            return Engine("reference", precision, device, sparse=True, on_host=on_host)
    return Engine("reference", precision, device, sparse=on_host, on_host=on_host)
