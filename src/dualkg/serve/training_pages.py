"""Train in the browser: send a file, inspect it, train with progress, and open the result."""

from typing import Annotated, Any, Literal

from fastapi import Query, Response
from pydantic import BaseModel, Field

from dualkg.serve.runs import line_chart, metric_text
from dualkg.serve.schemas import MAX_NAME_LENGTH, FileText
from dualkg.serve.service import Context
from dualkg.serve.templating import page, page_router, page_url
from dualkg.serve.trainings import SUFFIXES, TrainingState

routes = page_router()
pages = page_router()
VALIDATION_QUERIES = 500  # of each validation while a curve is drawn
NUM_EXAMPLES = 8  # triples of a file that are shown
MODELS = ("ComplEx", "CP", "RESCAL", "DistMult", "TransE", "RotatE")


class TriplesFile(BaseModel):
    """A file of triples as text."""

    name: str = Field(max_length=MAX_NAME_LENGTH)
    text: FileText


class NewTraining(BaseModel):
    """A training on a file that was sent; without tuning it is faster and less accurate."""

    file: str = Field(max_length=MAX_NAME_LENGTH)
    name: str = Field(max_length=MAX_NAME_LENGTH)
    model: Literal["ComplEx", "CP", "RESCAL", "DistMult", "TransE", "RotatE"] = "ComplEx"
    tune: bool = False
    dim: int | None = Field(None, ge=2, le=1000)
    epochs: int | None = Field(None, ge=1, le=1000)


class TrainingName(BaseModel):
    name: str = Field(max_length=MAX_NAME_LENGTH)


@routes.post("/api/training/files")
async def receive_file(context: Context, file: TriplesFile) -> dict[str, Any]:
    """Save a file of triples, and say what it contains."""
    trainings = context.service.trainings
    upload = await context.in_thread(lambda: trainings.save_file(file.name, file.text))
    graph = upload.graph
    triples = graph.train[:NUM_EXAMPLES].tolist()
    return {
        "file": upload.file,
        "counts": graph.counts,
        "notes": upload.notes,
        "examples": [
            [
                graph.entities.label(head),
                graph.relations.label(relation),
                graph.entities.label(tail),
            ]
            for head, relation, tail in triples
        ],
    }


@routes.post("/api/training")
async def start_training(context: Context, new: NewTraining) -> dict[str, Any]:
    """Start a training; one runs at a time."""
    service = context.service
    changes: dict[str, Any] = {"model.name": new.model}
    if not new.tune:
        changes |= {"validation.every": 1, "validation.queries": VALIDATION_QUERIES}
    if new.dim is not None:
        changes["model.dim"] = new.dim
    if new.epochs is not None:
        changes["training.epochs"] = new.epochs
    taken = [*service.runs.names, *service.trainings.by_name]
    training = await service.trainings.start(
        new.file, name=new.name, changes=changes, tune=new.tune, taken=taken
    )
    return state_of(training)


@routes.post("/api/training/stop")
async def stop_training(context: Context, which: TrainingName) -> dict[str, Any]:
    """Stop the training that runs."""
    return state_of(await context.service.trainings.stop(which.name))


def state_of(training: TrainingState) -> dict[str, Any]:
    """What is known of a training, for JSON; its folder is the server's own."""
    state = vars(training).copy()
    del state["folder"]
    return state


@routes.get("/training.json")
async def training_as_json(
    context: Context, name: Annotated[str, Query(max_length=MAX_NAME_LENGTH)]
) -> dict[str, Any]:
    trainings = context.service.trainings
    return state_of(await context.in_thread(lambda: trainings.get(name)))


@pages.get("/train")
async def train_page(context: Context) -> Response:
    """The form for a file, and all trainings."""
    trainings = context.service.trainings
    states = await context.in_thread(lambda: [trainings.get(name) for name in trainings.by_name])
    return page(context, "train.html", trainings=states, suffixes=SUFFIXES, models=MODELS)


@pages.get("/training")
async def training_page(
    context: Context, name: Annotated[str, Query(max_length=MAX_NAME_LENGTH)]
) -> Response:
    """One training; a script loads it again while it goes on."""
    trainings = context.service.trainings
    training = await context.in_thread(lambda: trainings.get(name))
    return page(
        context,
        "training.html",
        json=page_url(context, "/training.json", name=name),
        training=training,
        is_served=name in context.service.runs.names,
        curves={
            "Loss": _curve(training, "loss", "{:.2f}".format),
            "Best MRR on valid": _curve(training, "valid_mrr", metric_text),
        },
    )


def _curve(training: TrainingState, key: str, text: Any) -> Any:
    points = []
    for point in training.points:
        epoch, value = point["epoch"], point.get(key)
        if epoch is not None and value is not None:
            points.append((epoch, value))
    return line_chart([points], text=text)
