"""Run folders: what they hold, what they refuse, and embeddings from elsewhere."""

import json

import pytest
import torch

import dualkg as kg
from dualkg.errors import DamagedFile, PathExists
from dualkg.evaluation.report import load_ranks
from dualkg.files import lock_holder, locked, write_json
from dualkg.training.checkpoint import load_tensors, save_tensors
from dualkg.training.errors import (
    DamagedRun,
    InterruptedRunError,
    NotARun,
    RunInTraining,
    RunNotFinished,
)
from dualkg.training.recipe import Recipe, load_recipe
from dualkg.training.run_folder import RunFolder
from dualkg.workflows import train_seeds
from tests.models import odd_models as odd
from tests.processes import Started, until
from tests.raising import refused
from tests.training.test_trainer import stop_after


class Killed(Exception):
    """A process that ends in the middle of its work."""


class Shifted(kg.BilinearModel):
    """A model of one's own: a relation turns the coordinates by one place and scales them."""

    def __init__(self, shape, *, places=1, **choices):
        super().__init__(shape, **choices)
        self.places = places

    @property
    def config(self):
        return {**super().config, "places": self.places}

    def map_head(self, head, relations):
        return head.roll(self.places, -1) * self.relations[relations]

    def map_tail(self, tail, relations):
        return (tail * self.relations[relations]).roll(-self.places, -1)


@pytest.fixture
def run(small_graph, tmp_path) -> kg.Run:
    model = kg.ComplEx(small_graph.shape, dim=4)
    return kg.train(
        model,
        small_graph,
        regularizer=kg.DURA(0.05, plain=0.5),
        epochs=2,
        batch_size=50,
        out=tmp_path / "run",
    )


def test_a_run_in_place_of_its_model_or_folder_gets_the_right_call(run, small_graph):
    with pytest.raises(kg.RequestError, match="takes a model and its graph"):
        kg.evaluate(run, small_graph)
    with pytest.raises(kg.RequestError, match="Use the run as it is"):
        kg.load_run(run)
    assert (
        repr(run) == f"TrainedRun(ComplEx on made, test MRR {run.report.mrr:.4f}, '{run.folder}')"
    )
    assert len(repr(run.report)) < 400


def test_files_of_a_run_folder(run, small_graph):
    folder = RunFolder(run.folder)
    assert sorted(path.name for path in run.folder.iterdir()) == [
        "costs.json",
        "environment.json",
        "graph",
        "history.json",
        "ranks-test.parquet",
        "ranks-valid.parquet",
        "recipe.toml",
        "report.json",
        "weights.safetensors",
    ]
    environment = json.loads(folder.environment.read_text())
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["device"] == "cpu"
    assert environment["threads"] == torch.get_num_threads()
    assert [entry["epoch"] for entry in json.loads(folder.history.read_text())] == [1, 2]
    ranks = load_ranks(folder.ranks("test"))
    assert (1 / ranks.mean).mean() == pytest.approx(
        folder.saved_reports()["test"]["metrics"]["mrr"]
    )
    recipe = load_recipe(folder.recipe)
    assert (recipe.regularizer.plain, recipe.regularizer.mapped, recipe.model.dim) == (0.5, 1.0, 4)


def test_a_loaded_run_has_the_same_ranks(run):
    again = kg.load_run(run.folder)
    assert kg.evaluate(again.model, again.graph).mrr == run.report.mrr
    assert again.graph.entities == run.graph.entities


def test_a_folder_with_files_is_not_overwritten(run, small_graph, tmp_path):
    def train_into(folder, **more):
        return kg.train_recipe(Recipe(), graph=small_graph, out=folder, **more)

    with pytest.raises(PathExists, match="is a finished run"):
        train_into(run.folder)
    RunFolder(run.folder).report.unlink()
    with pytest.raises(RunNotFinished, match=r"or replace it with `overwrite=True`\."):
        train_into(run.folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("dear")
    with pytest.raises(kg.RequestError, match="it has letter.txt, no recipe.toml"):
        train_into(tmp_path / "other", overwrite=True)
    assert (tmp_path / "other" / "letter.txt").read_text() == "dear"


def test_decisions_are_not_overwritten(run, small_graph):
    folder = RunFolder(run.folder)
    folder.decisions.touch()
    _ = folder.saved_environment  # which is cached beside the paths of the folder
    with pytest.raises(kg.RequestError, match="has decisions on new facts"):
        folder.check_free(overwrite=True)


def forget_checksums(run: kg.Run) -> None:
    """Write a report without checksums of other files."""
    folder = RunFolder(run.folder)
    write_json(folder.report, folder.saved_reports())


@pytest.mark.parametrize("content", [b"", b"not weights at all, really"])
def test_damaged_weights_are_refused(run, content):
    RunFolder(run.folder).weights.write_bytes(content)
    with pytest.raises(DamagedRun, match=f"it has {len(content)} bytes in place of"):
        kg.load_run(run.folder)
    forget_checksums(run)
    with pytest.raises(kg.RequestError, match="cannot be read as a file of weights: .*header too"):
        kg.load_run(run.folder)


def test_weights_of_another_model_are_refused(run):
    folder = RunFolder(run.folder)
    folder.recipe.write_text(folder.recipe.read_text().replace("dim = 4", "dim = 5"))
    with pytest.raises(DamagedRun, match=r"recipe\.toml is damaged"):
        kg.load_run(run.folder)
    forget_checksums(run)
    with pytest.raises(kg.RequestError, match=r"\(30, 10\).* were expected, .*\(30, 8\)"):
        kg.load_run(run.folder)


def test_a_model_of_your_own_trains_saves_and_loads(small_graph, tmp_path):
    run = kg.train(
        Shifted(small_graph.shape, dim=6, places=2),
        small_graph,
        regularizer=kg.DURA(0.01),
        epochs=3,
        batch_size=32,
        out=tmp_path / "run",
    )
    assert run.recipe.model.name.endswith("test_run:Shifted")
    assert run.recipe.model.options == {"places": 2}
    again = kg.load_run(tmp_path / "run")
    assert again.model.places == 2
    assert kg.evaluate(again.model, again.graph).mrr == run.report.mrr


def test_finished_seeds_are_not_repeated(tmp_path):
    recipe = Recipe().with_changes(
        {"training.epochs": 1, "model.dim": 2, "data.graph": "world", "training.seed": 4}
    )
    events = []
    reports = train_seeds(recipe, 2, out=tmp_path / "runs", on_progress=events.append)
    assert list(reports) == [4, 5]
    assert reports[4]["test"]["metrics"] != reports[5]["test"]["metrics"]
    events.clear()
    first = RunFolder(tmp_path / "runs" / "seed-4")
    left = [
        first.path.with_name(".seed-4.lock"),
        first.checkpoint,
    ]  # as if killed just after its report was written
    for path in left:
        path.touch()
    again = train_seeds(recipe, 2, out=tmp_path / "runs", on_progress=events.append)
    assert not events
    assert again == reports
    assert not any(path.exists() for path in left)
    first.checkpoint.touch()
    with pytest.raises(PathExists):
        kg.train_recipe(recipe, out=first.path)
    assert not first.checkpoint.exists()


def test_a_loaded_run_still_has_its_reports(run):
    again = kg.load_run(run.folder)
    assert again.report.as_dict() == run.report.as_dict()
    assert again.report_on("train").metrics.num_queries == 2 * len(run.graph.train)


def test_a_model_of_another_seed_resumes_from_its_own_weights(small_graph, tmp_path):
    """Training may be killed before the first step; the weights it was given must not be lost."""

    def kill(event):
        raise Killed

    def start(seed, out=None, on_progress=None):
        model = kg.CP(small_graph.shape, dim=4, seed=seed)
        return kg.train(
            model, small_graph, epochs=1, batch_size=50, out=out, on_progress=on_progress
        )

    with pytest.raises(Killed):
        start(7, tmp_path / "run", kill)
    resumed = kg.resume(tmp_path / "run")
    assert torch.equal(resumed.model.entities, start(7).model.entities)


def test_a_recipe_starts_without_weights_on_disk_and_resumes_from_its_seed(small_graph, tmp_path):
    recipe = Recipe().with_changes({"training.epochs": 1, "model.dim": 40, "training.seed": 3})

    def kill(event):
        assert folder.checkpoint.stat().st_size < 1000
        raise Killed

    folder = RunFolder(tmp_path / "run")
    with pytest.raises(Killed):
        kg.train_recipe(recipe, graph=small_graph, out=folder.path, on_progress=kill)
    resumed = kg.resume(folder.path)
    assert torch.equal(
        resumed.model.entities, kg.train_recipe(recipe, graph=small_graph).model.entities
    )


@pytest.mark.parametrize(
    "changes", [{}, {"validation.keep": "best"}, {"optimizer.average_from": 0.3}]
)
def test_a_run_interrupted_in_the_evaluation_resumes_without_a_step(
    small_graph, tmp_path, monkeypatch, changes
):
    recipe = Recipe().with_changes(
        {"training.epochs": 4, "model.dim": 4, "validation.every": 1, **changes}
    )

    def kill(model, graph, **options):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("dualkg.training.api.evaluate_held_out", kill)
        with pytest.raises(Killed):
            kg.train_recipe(recipe, graph=small_graph, out=tmp_path / "run")
    events = []
    resumed = kg.resume(tmp_path / "run", on_progress=events.append)
    assert not events
    whole = kg.train_recipe(recipe, graph=small_graph)
    assert torch.equal(resumed.model.entities, whole.model.entities)
    assert [entry["loss"] for entry in resumed.history] == [
        entry["loss"] for entry in whole.history
    ]
    assert torch.equal(kg.load_run(tmp_path / "run").model.entities, whole.model.entities)


def test_a_checkpoint_without_weights_is_refused(small_graph, tmp_path):
    with pytest.raises(InterruptedRunError):
        kg.train(
            kg.CP(small_graph.shape, dim=4),
            small_graph,
            out=tmp_path / "run",
            on_progress=stop_after(1),
        )
    checkpoint = RunFolder(tmp_path / "run").checkpoint
    _, about = load_tensors(checkpoint)
    save_tensors({}, checkpoint, about=about)
    with pytest.raises(kg.RequestError, match=r"\{\} were found"):
        kg.resume(tmp_path / "run")


def test_a_failed_overwrite_keeps_the_old_run(run, small_graph):
    before = sorted(path.name for path in run.folder.rglob("*"))
    for changes in ({"model.name": "ComplX"}, {"model.name": "RESCAL", "regularizer.name": "N3"}):
        recipe = Recipe().with_changes({"regularizer.weight": 0.1, **changes})
        with pytest.raises(kg.RequestError):
            kg.train_recipe(recipe, graph=small_graph, out=run.folder, overwrite=True)
        assert sorted(path.name for path in run.folder.rglob("*")) == before
    quick = Recipe().with_changes({"training.epochs": 1, "model.dim": 2})
    kg.train_recipe(quick, graph=small_graph, out=run.folder, overwrite=True)
    assert kg.load_run(run.folder).model.dim == 2


def test_overwriting_never_removes_files_that_are_not_of_a_run(run, small_graph):
    (run.folder / "thesis.txt").write_text("years of work")
    with pytest.raises(kg.RequestError, match="is not a run"):
        kg.train_recipe(Recipe(), graph=small_graph, out=run.folder, overwrite=True)
    assert (run.folder / "thesis.txt").exists()


def test_a_run_can_be_written_to_an_empty_folder(small_graph, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kg.train_recipe(
        Recipe().with_changes({"training.epochs": 1, "model.dim": 2}), graph=small_graph, out="."
    )
    assert kg.load_run(tmp_path).model.dim == 2


def test_a_run_that_another_process_trains_is_not_to_be_resumed(run):
    folder = RunFolder(run.folder)
    folder.report.unlink()
    code = "import sys; from dualkg.files import locked\nwith locked(sys.argv[1]): input()"
    with Started(code, run.folder):
        until(lambda: lock_holder(run.folder))
        with pytest.raises(RunInTraining, match="is in training"):
            kg.load_run(run.folder)
        # A search for several seeds has no recipe yet.
        folder.recipe.unlink()
        with pytest.raises(RunInTraining):
            kg.load_run(run.folder)


def test_the_lock_of_this_process_is_no_training(run):
    RunFolder(run.folder).report.unlink()
    with locked(run.folder), pytest.raises(RunNotFinished, match="Resume it with: dualkg resume"):
        kg.load_run(run.folder)
    RunFolder(run.folder).weights.unlink()
    with pytest.raises(RunNotFinished, match="train it again: dualkg train"):
        kg.load_run(run.folder)
    with pytest.raises(RunNotFinished, match="cannot be resumed"):
        kg.resume(run.folder)


def test_folders_that_are_not_runs_are_refused(tmp_path, run):
    with pytest.raises(NotARun, match=f"does not exist. Runs nearby: {run.folder}"):
        kg.load_run(tmp_path / "runn")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotARun, match="there is no recipe.toml"):
        kg.load_run(tmp_path / "empty")
    with pytest.raises(NotARun, match="is a file"):
        kg.load_run(run.folder / "recipe.toml")
    with pytest.raises(kg.RequestError, match="is finished"):
        kg.resume(run.folder)


def test_a_damaged_file_is_named(run):
    (run.folder / "history.json").write_text("{")
    with pytest.raises(DamagedFile) as damaged:
        kg.load_run(run.folder)
    assert damaged.value.path == run.folder / "history.json"
    (run.folder / "environment.json").write_text("")
    with pytest.raises(DamagedFile) as damaged:
        _ = RunFolder(run.folder).saved_environment
    assert damaged.value.path == run.folder / "environment.json"


@pytest.mark.parametrize("records", [["recipe.toml"], {"recipe.toml": ["a", 1]}, {"graph": {}}])
def test_damaged_records_of_files_are_refused(run, records):
    folder = RunFolder(run.folder)
    write_json(folder.report, {**folder.saved_reports(), "files": records})
    with refused(DamagedFile, path=folder.report):
        kg.load_run(run.folder)


def test_a_recipe_cannot_change_during_a_run(small_graph, tmp_path):
    def kill(event):
        raise Killed

    folder = RunFolder(tmp_path / "run")
    with pytest.raises(Killed):
        kg.train(kg.CP(small_graph.shape, dim=4), small_graph, out=folder.path, on_progress=kill)
    text = folder.recipe.read_text()
    folder.recipe.write_text(text.replace("Adagrad", "Adam"))
    with pytest.raises(kg.RequestError, match="is not the recipe that"):
        kg.resume(folder.path)


def test_a_changed_digit_of_a_recipe_is_found(small_graph, tmp_path):
    def kill(event):
        raise Killed

    folder = RunFolder(tmp_path / "run")
    with pytest.raises(Killed):
        kg.train(kg.CP(small_graph.shape, dim=4), small_graph, out=folder.path, on_progress=kill)
    text = folder.recipe.read_text()
    folder.recipe.write_text(text.replace("\nseed = 0", "\nseed = 1"))
    with pytest.raises(kg.RequestError, match="is not the recipe that"):
        kg.resume(folder.path)
    folder.recipe.write_text(text.replace('name = "CP"', 'name = "CQ"'))
    with pytest.raises(kg.RequestError, match="is not the recipe that"):
        kg.resume(folder.path)
    folder.recipe.write_text(f"# mine\n\n{text}")  # a comment is no change
    assert kg.resume(folder.path).report is not None


def test_seeds_trained_on_other_data_are_refused(tmp_path):
    path = tmp_path / "mine.tsv"
    rows = [f"a{i}\tr\tb{j}\n" for i in range(6) for j in range(6)]
    recipe = Recipe().with_changes({"training.epochs": 1, "model.dim": 2, "data.graph": str(path)})
    path.write_text("".join(rows))
    train_seeds(recipe, 1, out=tmp_path / "runs")
    path.write_text("".join(rows[:-1]))
    with pytest.raises(kg.RequestError, match="was trained on other data than mine is now"):
        train_seeds(recipe, 1, out=tmp_path / "runs")


def test_the_saved_recipe_has_the_options_of_reading_the_graph(tmp_path):
    path = tmp_path / "mine.tsv"
    path.write_text("".join(f"a{i}\tr\tb{j}\n" for i in range(6) for j in range(6)))
    graph = kg.load_graph(path, split="60/20/20", seed=5)
    run = kg.train(kg.CP(graph.shape, dim=2), graph, epochs=1)
    assert (run.recipe.data.graph, run.recipe.data.split, run.recipe.data.split_seed) == (
        str(path),
        "60/20/20",
        5,
    )


def test_a_model_for_another_graph_is_refused_everywhere(small_graph):
    model = kg.CP(kg.GraphShape(30, 5), dim=2)
    for use in (kg.evaluate, kg.train, kg.Predictor):
        with pytest.raises(kg.RequestError, match="was made for 30 entities and 5 relations"):
            use(model, small_graph)


def test_settings_of_your_own_regularizer_are_saved(small_graph, tmp_path):
    model = kg.CP(small_graph.shape, dim=2)
    kg.train(
        model,
        small_graph,
        regularizer=odd.ByRelation(0.1, power=2.0),
        epochs=1,
        out=tmp_path / "run",
    )
    recipe = kg.load_run(tmp_path / "run").recipe
    assert recipe.regularizer.options == {"power": 2.0}
    assert recipe.regularizer.build().power == 2.0
