"""Engines: which step trains a model, in which precision, and what prevents a faster one.

The reference engine is autograd, which faster steps are tested against: on a GPU captured as a CUDA
graph where that is possible, and with sparse gradients where a batch reads few of many entities.
The fast engine computes the gradient of the softmax without autograd: fused on a CPU or a GPU, and
with bfloat16 products on a GPU entirely in kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dualkg.errors import RequestError
from dualkg.kernels.hardware import gpu_kernels_unavailable, has_bf16_products
from dualkg.losses.base import BoundLoss, Loss
from dualkg.losses.softmax import BoundSampledSoftmax, SampledSoftmax
from dualkg.models.base import Model, overridden
from dualkg.models.bilinear import BilinearModel
from dualkg.models.diagonal import DiagonalModel
from dualkg.models.sharded import ShardedModel
from dualkg.regularizers import Regularizer, is_power_sum
from dualkg.training.fused import FusedStep, has_builtin_maps, stream
from dualkg.training.optimizers import AnyOptimizer
from dualkg.training.recipe import Recipe

Step = Callable[[Tensor, float], Tensor]
StepName = Literal["autograd", "captured", "sparse", "fused", "kernels"]
MAX_MATRICES = 65_535  # the most programs that a GPU starts along the axis of relations
ENTITIES_PER_ROW = 4  # of a batch: with more of them, sparse gradients are faster than dense ones
MAX_FORMED = 2**28  # numbers in the matrices that a step forms for all relations
CAPACITY_STEP = 64  # queries by which the capacity of a captured step grows
WARM_UP = 3  # eager steps before one is captured, in which libraries initialize


@dataclass(frozen=True)
class Engine:
    """The step that trains a run, the precision of its products and its device."""

    step: StepName
    precision: Literal["float32", "tf32", "bf16"]
    device: torch.device

    @property
    def fast(self) -> bool:
        return self.step in ("fused", "kernels")

    def __str__(self) -> str:
        """Such as `fused kernels, bfloat16 products, one NVIDIA H200` or `autograd, float32, 2 CPU
        threads`.
        """
        products = {
            "float32": "float32",
            "tf32": "TensorFloat-32 products",
            "bf16": "bfloat16 products",
        }
        threads = torch.get_num_threads()
        device = f"{threads} CPU thread{'' if threads == 1 else 's'}"
        if self.device.type == "cuda":
            device = f"one {torch.cuda.get_device_name(self.device)}"
        kinds = {"captured": "autograd in a CUDA graph", "sparse": "autograd with sparse gradients"}
        step = "fused kernels" if self.fast else kinds.get(self.step, "autograd")
        return f"{step}, {products[self.precision]}, {device}"


class Job(NamedTuple):
    """What the engine depends on."""

    model: Model
    loss: Loss
    regularizer: Regularizer
    optimizer: str
    order: str = "triples"
    sums: str = "elements"

    @property
    def whole(self) -> Model:
        """The model, without the wrapper of one whose tables are split over processes."""
        return self.model.model if isinstance(self.model, ShardedModel) else self.model

    @property
    def on_gpu(self) -> bool:
        return self.model.device.type == "cuda"


def kernels_know_relations(job: Job) -> bool:
    """Whether GPU kernels can compute with the relations of a model, the regularizer and relation
    prediction.
    """
    model = job.whole
    regularizer = job.regularizer
    if not (
        isinstance(model, BilinearModel) and has_builtin_maps(model) and is_power_sum(regularizer)
    ):
        return False
    if isinstance(model, DiagonalModel):
        # The kernel of penalties takes one modulus of all numbers of a coordinate; for squares that
        # is their sum.
        return model.linear_in_relations and (
            model.multiplicative_modulus or regularizer.power == 2
        )
    numbers_formed = (
        model.num_relation_ids * model.dim**2 if model.relation_kernel == "mixtures" else 0
    )
    return (
        model.relation_kernel is not None
        and model.has_adjoint
        and model.num_relation_ids <= MAX_MATRICES
        and numbers_formed <= MAX_FORMED
        and not getattr(job.loss, "relation_weight", 0)
        and (regularizer.power == 2 or "relation" not in regularizer.term_weights)
    )


def samples_in_kernels(job: Job) -> bool:
    """Whether GPU kernels can train sampled softmax: negatives that a batch shares, on tables that
    are not split.
    """
    loss = job.loss
    shared = getattr(job.loss, "shared", False)
    own_bind = type(loss).bind is SampledSoftmax.bind
    return (
        isinstance(loss, SampledSoftmax)
        and own_bind
        and shared
        and not isinstance(job.model, ShardedModel)
    )


NOT_ONE_PRODUCT = (
    "needs a model whose scores are one product, as those of bilinear models and squared "
    "distances are, and whose tables are all trained; this {job.whole.__class__.__name__} is none"
)
UNKNOWN_TO_KERNELS = (
    "on a GPU is for models and regularizers that kernels know: relations that are rows, or "
    "matrices without relation prediction, and sums of powers over a batch; this "
    "{job.whole.__class__.__name__} with {job.regularizer.__class__.__name__} is not"
)
Capability = dict[
    str, Callable[[Job], object]
]  # conditions, by the end of the sentence about a job that lacks one
FAST: Capability = {
    NOT_ONE_PRODUCT: lambda job: (
        job.model.score_form and all(one.requires_grad for one in job.model.parameters())
    ),
    "is for OneVsAll, each triple against one whole answer; {job.loss.fast_step_obstacle} was set": (
        lambda job: not job.loss.fast_step_obstacle
    ),
}
BF16: Capability = {  # of the fast engine
    "is for models that score by products": lambda job: job.model.score_form == "products",
    "is for training with Adagrad; optimizer.name is {job.optimizer}": lambda job: (
        job.optimizer == "Adagrad"
    ),
    "is for Adagrad with sums of single elements; optimizer.sums is {job.sums}": (
        lambda job: job.sums == "elements" or samples_in_kernels(job)
    ),
    "is for tables of float32": lambda job: job.model.embedding.entities.dtype == torch.float32,
    "is not supported by this processor, and would be slow": lambda job: (
        job.on_gpu or has_bf16_products()
    ),
    "on a GPU {no_kernels}": lambda job: not (job.on_gpu and gpu_kernels_unavailable()),
    "is not supported by this GPU": lambda job: (
        not job.on_gpu or torch.cuda.get_device_capability(job.model.device) >= (8, 0)
    ),
    UNKNOWN_TO_KERNELS: lambda job: not job.on_gpu or kernels_know_relations(job),
}


def obstacle(capability: Capability, job: Job) -> str | None:
    """The first condition that a job lacks, as the end of a sentence; None if it meets all."""
    found = next((sentence for sentence, holds in capability.items() if not holds(job)), None)
    return found and found.format(job=job, no_kernels=gpu_kernels_unavailable())


def can_capture(job: Job) -> bool:
    """Whether autograd can be captured as a CUDA graph: no size depends on the content of a
    batch.
    """
    return (
        job.on_gpu
        and job.optimizer == "Adam"
        and job.order == "triples"
        and getattr(job.model, "capturable", False)
        and overridden(job.model) <= {"config", "entity_vectors"}
        and is_power_sum(job.regularizer)
        and job.loss.has_fixed_shapes(reciprocal=job.model.reciprocal)
    )


def reads_few_rows(job: Job, batch_size: int) -> bool:
    """Whether a batch reads so few entity rows that Adagrad is faster, and exact, on these
    alone.
    """
    rows = job.loss.rows_per_batch(job.model, batch_size)
    return (
        job.optimizer == "Adagrad"
        and not job.regularizer.reads_whole_tables
        and rows is not None
        and ENTITIES_PER_ROW * rows <= job.model.shape.num_entities
    )


def choose_engine(recipe: Recipe, model: Model, regularizer: Regularizer) -> Engine:
    """The engine that the recipe requests, or the fastest one that applies where it leaves that
    open.
    """
    wanted = recipe.training.engine
    precision = recipe.training.precision
    choice = recipe.optimizer
    job = Job(model, recipe.loss, regularizer, choice.name, recipe.training.order, choice.sums)
    not_fast = obstacle(FAST, job)
    is_fast = wanted != "reference" and (not not_fast or (job.on_gpu and samples_in_kernels(job)))
    not_bf16 = obstacle(BF16, job) if is_fast else None
    if is_fast and not not_bf16 and precision in ("auto", "bf16"):
        return Engine("kernels" if job.on_gpu else "fused", "bf16", model.device)
    if not_bf16 and precision == "bf16":
        raise RequestError(f"bf16 {not_bf16}. Use --set training.precision=float32.")
    if not_fast and (wanted == "fast" or precision == "bf16"):
        raise RequestError(f"The fast engine {not_fast}. Use --engine reference and float32.")
    if wanted == "reference" and precision == "bf16":
        raise RequestError(
            "The reference engine trains in float32; bf16 was requested. Use --engine fast."
        )
    exact: Literal["float32", "tf32"] = "tf32" if precision == "tf32" and job.on_gpu else "float32"
    step: StepName = "autograd" if not_fast or wanted == "reference" else "fused"
    if not_fast and wanted == "auto":
        few = reads_few_rows(job, recipe.training.batch_size)
        step = "captured" if can_capture(job) else "sparse" if few else "autograd"
    return Engine(step, exact, model.device)


@dataclass
class ReferenceStep:
    """A gradient step on loss plus regularizer for one batch.

    On a GPU it may be captured as a CUDA graph; the optimizer then reads the learning rate from a
    tensor there. With `sparse`, gradients of the entity tables have only the rows of the batch, and
    the optimizer updates only these.
    """

    model: Model
    loss: BoundLoss
    regularizer: Regularizer
    optimizer: AnyOptimizer
    sparse: bool = False

    def objective(self, batch: Tensor) -> Tensor:
        """Loss plus regularizer of a batch `(batch, 3)`, a scalar."""
        factors = self.model.factors(*batch.unbind(-1))
        loss = self.loss(self.model, factors)
        return loss + self.regularizer(factors) if self.regularizer.weight else loss

    def __call__(self, batch: Tensor, learning_rate: float) -> Tensor:
        """Take one step and return the objective before it."""
        self.set_learning_rate(learning_rate)
        return self.step(batch)

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(learning_rate)
            else:
                group["lr"] = learning_rate

    def step(self, batch: Tensor) -> Tensor:
        """Take one step at the learning rate that is set."""
        self.optimizer.zero_grad(set_to_none=True)
        objective = self.gradients(batch)
        self.optimizer.step()
        return objective

    def gradients(self, batch: Tensor) -> Tensor:
        """Add the gradients of all parameters, and return the objective."""
        self.model.embedding.sparse_gradients = self.sparse
        try:
            objective = self.objective(batch)
        finally:
            self.model.embedding.sparse_gradients = False
        objective.backward()  # type: ignore[no-untyped-call]
        return objective.detach()


class CudaGraphStep:
    """Replays a captured step for batches of the largest size; others, such as a last short one,
    run eagerly.

    A step must not wait for the GPU, and reads its learning rate from a tensor there.
    """

    def __init__(self, step: Any) -> None:
        self.step = step
        self.stream = stream(step.model.device, "captured")
        self.num_taken = 0
        self.largest = 0
        self.graph: torch.cuda.CUDAGraph | None = None  # with its `batch` and `objective`

    def reserve(self, num_queries: int) -> None:
        """Provide for batches of that many queries, and a few more; a graph with less capacity is
        discarded.
        """
        if self.step.capacity is None or num_queries > self.step.capacity:
            self.step.capacity = -(-num_queries // CAPACITY_STEP) * CAPACITY_STEP
            self.num_taken = 0
            self.graph = None

    def __call__(self, batch: Tensor, learning_rate: float) -> Tensor:
        """Take one step and return the objective before it; the next step overwrites that."""
        if (
            len(batch) > self.largest
        ):  # the buffers that a graph works on are about to be replaced by larger ones
            self.largest = len(batch)
            self.num_taken = 0
            self.graph = None
        if self.graph is None and self.num_taken >= WARM_UP and len(batch) == self.largest:
            self._capture(batch)
        if self.graph is None or len(batch) != len(self.batch):
            self.num_taken += 1
            # On a separate stream, as capturing requires of the steps before it.
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                objective: Tensor = self.step(batch, learning_rate)
            torch.cuda.current_stream().wait_stream(self.stream)
            return objective
        self.batch.copy_(batch)
        self.step.set_learning_rate(learning_rate)
        self.graph.replay()
        return self.objective

    def _capture(self, batch: Tensor) -> None:
        self.batch = batch.clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog calls CUDA in a thread of its own, also while a step is captured.
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            self.objective: Tensor = self.step.step(self.batch)
        self.graph = graph


def build_step(
    engine: Engine, model: Model, loss: BoundLoss, regularizer: Regularizer, optimizer: AnyOptimizer
) -> Step:
    """The step of an engine; the fast ones take a bound `OneVsAll`, the kernels also
    `SampledSoftmax`.
    """
    if engine.step in ("autograd", "sparse"):
        return ReferenceStep(model, loss, regularizer, optimizer, sparse=engine.step == "sparse")
    if engine.step == "captured":
        return CudaGraphStep(ReferenceStep(model, loss, regularizer, optimizer))
    if engine.step == "kernels":
        from dualkg.training.gpu_step import Bf16Step, SampledBf16Step  # which import Triton

        kind = SampledBf16Step if isinstance(loss, BoundSampledSoftmax) else Bf16Step
        return CudaGraphStep(kind(model, loss, regularizer, optimizer))  # type: ignore[arg-type]
    return FusedStep(model, loss, regularizer, optimizer, bf16=engine.precision == "bf16")  # type: ignore[arg-type]
