"""Automatic tuning: the search by hand, its budget."""

import dataclasses
import math

import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.errors import DamagedFile, InvalidValue
from dualkg.models import MODELS, paths
from dualkg.training import costs
from dualkg.training.api import default_recipe
from dualkg.training.costs import WorkEstimate
from dualkg.training.errors import InterruptedRunError
from dualkg.training.recipe import Data
from dualkg.tuning import starting_recipe as starting_module
from dualkg.tuning.automatic import AutomaticTuner, parse_budget
from dualkg.tuning.plan import RUNGS, SMALL_RUNGS, SearchPlan, cheaper_trials
from dualkg.tuning.starting_recipe import (
    dimensions_of,
    network_start,
    other_start,
    starting_recipe,
)
from dualkg.tuning.trials import TrialOutcome

CPU = torch.device("cpu")
GPU = torch.device("cuda")


@pytest.fixture(scope="module")
def graph():
    """Thirty people in ten families; siblings of a parent's child are held out."""
    random = np.random.default_rng(0)
    people = np.arange(30)
    pairs = [(int(a), 0, int(b)) for a in people for b in people if a % 10 == b % 10 and a != b]
    pairs += [(int(a), 1, int((a + 1) % 30)) for a in people]
    triples = np.array(pairs, dtype=np.int32)[random.permutation(len(pairs))]
    names = kg.Vocabulary([f"p{i}" for i in people])
    return kg.Graph(
        "families",
        names,
        kg.Vocabulary(["sibling", "next"]),
        triples[20:],
        triples[10:20],
        triples[:10],
    )


def recipe_of(graph, **changes):
    small = {"model.dim": 8, "training.epochs": 9, "training.batch_size": 20}
    return default_recipe(Data(graph="families"), graph, {**small, **changes})


@dataclasses.dataclass
class Work:
    """The work of an epoch is given, and ranking costs nothing."""

    of_epoch: float = 1.0
    device: str = "cuda"

    def epoch(self, recipe):
        return self.of_epoch

    def ranking(self, recipe, num_triples):
        return 0.0


def tuner_of(recipe, graph, surface, *, epoch_work=1.0, small=False, other=None, **options):
    """A tuner whose trials are looked up on a surface instead of trained."""

    def run_trial(plan):
        mrr = surface(plan.params, plan.rung)
        return TrialOutcome(mrr, mrr, plan.epochs * epoch_work, epoch_work)

    work = Work(epoch_work)
    plan = SearchPlan.of(recipe, graph, work, seconds=options.get("seconds"))
    plan = dataclasses.replace(plan, rungs=SMALL_RUNGS if small else RUNGS["cuda"])
    options.setdefault("plan", plan)
    tuner = AutomaticTuner(recipe, graph, device=CPU, run_trial=run_trial, work=work, **options)
    tuner.is_small = small
    tuner.other = other
    return tuner


def bowl(params, rung):
    """Best at λ = .005, a learning rate of .15 and relation weight 0."""
    weight = math.log10(params.get("regularizer.weight", 0.05) / 0.005)
    rate = math.log10(params.get("optimizer.learning_rate", 0.3) / 0.15)
    return 0.5 - 0.1 * weight**2 - 0.1 * rate**2 - 0.02 * params.get("loss.relation_weight", 0.0)


def test_the_search_moves_to_the_maximum_of_a_smooth_surface(graph):
    tuner = tuner_of(recipe_of(graph, **{"training.epochs": 90}), graph, bowl)
    chosen = tuner.run()
    assert chosen.regularizer.weight == pytest.approx(0.005, rel=0.2)
    assert chosen.optimizer.learning_rate == pytest.approx(0.15)
    assert chosen.training.epochs == 90
    assert (chosen.validation.every, chosen.validation.keep) == (9, "best")
    assert "weight 0.005" in tuner.summary()
    assert f"{len(tuner.trials)} trials" in tuner.summary()


def test_a_relation_weight_that_pays_only_in_longer_trials_is_found(graph):
    def surface(params, rung):
        gain = {0: -0.01, 1: 0.02}[rung]
        return 0.3 + gain * (params.get("loss.relation_weight", 0.0) == 4.0)

    chosen = tuner_of(recipe_of(graph), graph, surface).run()
    assert chosen.loss.relation_weight == 4.0


def test_a_learning_rate_that_short_trials_misjudge_is_corrected_in_long_ones(graph):
    def surface(params, rung):
        best = {0: 0.3, 1: 0.15}[rung]
        return 0.5 - math.log10(params.get("optimizer.learning_rate", 0.3) / best) ** 2

    options = {"fixed": ["regularizer.weight", "loss.relation_weight", "loss.frequency_weight"]}
    chosen = tuner_of(recipe_of(graph, **{"training.epochs": 90}), graph, surface, **options).run()
    assert chosen.optimizer.learning_rate == pytest.approx(0.15)


def with_network(mrr):
    """A surface whose best embeddings have .5, and a path network this MRR."""

    def surface(params, rung):
        return mrr if "model.name" in params else bowl(params, rung)

    return surface


def network_of(graph):
    """The recipe of a path network for a device that need not be here."""
    return network_start(starting_recipe_on_gpu(graph), graph, GPU, ())


def starting_recipe_on_gpu(graph):
    return starting_recipe(Data(graph="families"), graph, GPU, {})


@pytest.mark.parametrize(("mrr", "model"), [(0.515, "PathNetwork"), (0.505, "ComplEx")])
def test_a_path_network_is_chosen_where_it_is_clearly_better(graph, mrr, model):
    tuner = tuner_of(recipe_of(graph, **{"training.epochs": 90}), graph, with_network(mrr))
    tuner.network = network_of(graph)
    chosen = tuner.run()
    assert chosen.model.name == model
    assert tuner.trials[-1].params == {"model.name": "PathNetwork"}
    if model == "PathNetwork":
        assert chosen.training.epochs == tuner.network.training.epochs
        assert chosen.optimizer.name == "Adam"
        assert "Chose model PathNetwork" in tuner.summary()
    else:
        assert "A path network has 0.5050" in tuner.summary()


def test_a_path_network_takes_work_beside_the_budget_and_no_more_than_that(graph):
    tuner = tuner_of(recipe_of(graph), graph, with_network(0.9))
    tuner.network = network_of(graph)
    # Work of one for each epoch, and a third of the epochs.
    assert tuner.budget == tuner.plan.budget + round(tuner.network.training.epochs / 3)
    tuner.plan = dataclasses.replace(tuner.plan, budget=2.0)
    assert tuner.budget == 2.0
    assert tuner.run().model.name == "ComplEx"


def test_in_a_given_time_a_path_network_is_one_of_the_trials(graph):
    tuner = tuner_of(recipe_of(graph), graph, with_network(0.9), seconds=1000)
    tuner.network = network_of(graph)
    assert tuner.budget == tuner.plan.budget == 1000
    assert tuner.run().model.name == "PathNetwork"
    assert tuner.spent <= 1000


@pytest.mark.parametrize(
    ("device", "given", "expected"),
    [
        (CPU, {}, (16, 3, "queries", 64)),
        (CPU, {"model.options.steps": 5, "training.batch_size": 8}, (16, 5, "queries", 8)),
        (GPU, {}, (32, None, "triples", 32)),
    ],
)
def test_a_path_network_begins_smaller_on_a_cpu(graph, device, given, expected):
    changes = {"model.name": "PathNetwork", **given}
    start = starting_recipe(Data(graph="families"), graph, device, changes)
    training = start.training
    steps = start.model.options.get("steps")
    assert (start.model.dim, steps, training.order, training.batch_size) == expected


def test_grouping_by_query_saves_work_of_a_path_network_on_a_cpu(graph):
    changes = {"model.name": "PathNetwork"}
    start = starting_recipe(Data(graph="families"), graph, CPU, changes)
    work = WorkEstimate.of(graph, CPU)
    single = start.with_changes({"training.order": "triples"})
    share = work.num_queries / (2 * len(graph.train))
    of_steps = (
        paths.STEP_CALLS["cpu"]
        / costs.NOMINAL["cpu"].calls
        * start.training.num_steps(2 * len(graph.train))
    )
    of_messages = work.epoch(single) - of_steps
    assert work.epoch(start) == pytest.approx(share * of_messages + of_steps)


def test_a_path_network_that_fails_is_not_chosen(graph):
    tuner = tuner_of(recipe_of(graph), graph, with_network(None))
    tuner.network = network_of(graph)
    assert tuner.run().model.name == "ComplEx"


@pytest.mark.parametrize(
    ("device", "fixed", "is_tried"),
    [
        ("cuda", (), True),
        ("cuda", ("training.seed",), True),
        ("cuda", ("model.name",), False),
        ("cuda", ("loss.name",), False),
        ("cuda", ("model.dim",), False),
        ("cpu", (), True),
        ("cpu", ("model.dim",), False),
    ],
)
def test_a_path_network_is_tried_if_the_model_is_free(graph, device, fixed, is_tried):
    device = torch.device(device)
    start = starting_recipe(Data(graph="families"), graph, device, {})
    assert (network_start(start, graph, device, fixed) is not None) == is_tried


def test_on_a_cpu_a_path_network_is_small_and_tried_for_small_graphs(graph, monkeypatch):
    start = starting_recipe(Data(graph="families"), graph, CPU, {})
    network = network_start(start, graph, CPU, ())
    assert (network.model.dim, network.model.options["steps"]) == (16, 3)
    assert network.training.epochs == 8
    monkeypatch.setattr(starting_module, "SMALL_GRAPH", len(graph.train))
    start = starting_recipe(Data(graph="families"), graph, CPU, {})
    assert network_start(start, graph, CPU, ()) is None


def test_a_path_network_is_not_tried_beside_a_recipe_of_the_user(graph):
    start = starting_recipe_on_gpu(graph).with_changes({"model.dim": 7})
    assert network_start(start, graph, GPU, ()) is None


@pytest.mark.parametrize(
    ("num_triples", "epochs", "batches"),
    # 32 examples a step: 240,000 triples are 15,000 steps, and 96,000 are 6,000.
    [(200, 8, None), (96_000, 4, None), (240_000, 3, 8000)],
)
def test_the_steps_of_a_path_network_are_limited(graph, num_triples, epochs, batches):
    random = np.random.default_rng(0)
    train = random.integers(0, (30, 2, 30), (num_triples, 3)).astype(np.int32)
    training = network_of(dataclasses.replace(graph, train=train)).training
    assert (training.epochs, training.batches_per_epoch) == (epochs, batches)


@pytest.mark.parametrize(
    ("best", "fixed", "found"), [(10, (), 10), (50, (), 50), (50, ("training.epochs",), 20)]
)
def test_the_epochs_of_a_small_graph_are_tuned(graph, best, fixed, found):
    def surface(params, rung):
        return 0.5 - 0.01 * abs(math.log10(params.get("training.epochs", 20) / best))

    recipe = recipe_of(graph, **{"training.epochs": 20})
    tuner = tuner_of(recipe, graph, surface, small=True, epoch_work=0.1, fixed=fixed)
    assert tuner.run().training.epochs == found
    assert {trial.epochs for trial in tuner.trials if trial.rung == 0} == {7}


def test_the_best_trials_are_compared_by_the_mean_of_three_seeds(graph):
    """λ = .16 has the best MRR with the first seed alone; λ = .05 has the best mean."""

    def surface(params, rung):
        weight = params.get("regularizer.weight", 0.05)
        seed = params.get("training.seed", 0)
        if weight == 0.16:
            return (0.6, 0.3, 0.3)[seed]
        return 0.5 if weight == 0.05 else 0.4

    fixed = [key for key in dimensions_of(recipe_of(graph)) if key != "regularizer.weight"]
    fixed.append("training.epochs")
    tuner = tuner_of(recipe_of(graph), graph, surface, small=True, epoch_work=0.01, fixed=fixed)
    chosen = tuner.run()
    assert (chosen.regularizer.weight, chosen.training.seed) == (0.05, 0)
    assert tuner.chosen.mrr == 0.5
    assert "mean of 3 seeds" in tuner.summary()


def test_the_search_takes_at_most_three_times_the_final_training(graph):
    tuner = tuner_of(recipe_of(graph, **{"training.epochs": 90}), graph, bowl)
    tuner.run()
    assert tuner.plan.budget == 3 * 90
    assert 0.5 * 3 * 90 < tuner.spent <= 3 * 90
    assert tuner.trials[-1].rung == 1


@pytest.mark.parametrize("seconds", [5.0, 100.0, 2000.0])
def test_a_given_budget_is_kept(graph, seconds):
    tuner = tuner_of(recipe_of(graph, **{"training.epochs": 90}), graph, bowl, seconds=seconds)
    tuner.run()
    assert tuner.spent <= max(seconds, 10)  # the first trial, of 10 seconds, is always made


@pytest.mark.parametrize("slowness", [0.0, 1.0, 1000.0])
def test_the_choice_does_not_depend_on_the_clock(graph, slowness):
    """A busy machine takes longer for the same trials, and chooses the same."""
    recipe = recipe_of(graph, **{"training.epochs": 90})
    quiet = tuner_of(recipe, graph, bowl)
    chosen = quiet.run()

    def slow_trial(plan):
        mrr = bowl(plan.params, plan.rung)
        return TrialOutcome(mrr, mrr, slowness * plan.epochs, slowness)

    busy = tuner_of(recipe, graph, bowl)
    busy.run_trial = slow_trial
    assert busy.run() == chosen
    assert [trial.params for trial in busy.trials] == [trial.params for trial in quiet.trials]


class Clock:
    """A clock that a trial advances."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def timed_tuner(graph, seconds, seconds_of_trial):
    clock = Clock()
    tuner = tuner_of(recipe_of(graph), graph, bowl, seconds=seconds, clock=clock, epoch_work=0.01)
    run_trial = tuner.run_trial

    def timed_trial(plan):
        clock.now += seconds_of_trial
        return run_trial(plan)

    tuner.run_trial = timed_trial
    return tuner


def test_when_the_time_is_up_the_search_ends_and_says_what_was_not_tried(graph):
    tuner = timed_tuner(graph, seconds=10, seconds_of_trial=4)
    tuner.run()
    assert len(tuner.trials) == 3
    assert tuner.time_is_up
    assert tuner.tuned == ["regularizer.weight"]
    assert "The 10 s for tuning are up." in tuner.summary()
    assert "Not tried: other values of relation_weight" in tuner.summary()


def test_one_trial_is_not_called_a_choice(graph):
    tuner = timed_tuner(graph, seconds=10, seconds_of_trial=40)
    assert tuner.run().regularizer.weight == 0.05
    assert len(tuner.trials) == 1
    assert tuner.summary().startswith("Nothing was compared: one trial, with the starting values")


def test_time_that_ends_in_the_first_trial_leaves_the_starting_values(graph):
    def on_progress(event):
        clock.now += 5

    clock = Clock()
    recipe = recipe_of(graph)
    tuner = AutomaticTuner(recipe, graph, device=CPU, seconds=1, clock=clock)
    tuner.on_progress = on_progress
    chosen = tuner.run()
    assert chosen.regularizer == recipe.regularizer
    assert not tuner.trials
    assert "The first trial did not end" in tuner.summary()


def test_a_single_long_trial_is_not_made(graph):
    """It would be compared with nothing."""
    recipe = recipe_of(graph, **{"training.epochs": 90})
    plan = SearchPlan(max_trials=(4, 5))
    tuner = tuner_of(recipe, graph, bowl, plan=plan)
    tuner.run()
    assert [trial.rung for trial in tuner.trials] == [0, 0, 0, 0]
    two = tuner_of(recipe, graph, bowl, plan=SearchPlan(max_trials=(4, 6)))
    two.run()
    assert [trial.rung for trial in two.trials] == [0, 0, 0, 0, 1, 1]


def test_a_failed_trial_is_recorded_and_passed_over(graph):
    def surface(params, rung):
        return None if params.get("regularizer.weight") == 0.16 else bowl(params, rung)

    tuner = tuner_of(recipe_of(graph), graph, surface, seconds=1000)
    assert tuner.run().regularizer.weight < 0.05
    assert any(trial.mrr is None for trial in tuner.trials)


def test_if_every_trial_diverges_the_first_reason_is_reported(graph):
    recipe = recipe_of(graph, **{"optimizer.name": "SGD", "optimizer.learning_rate": 1e30})
    with pytest.raises(kg.DualkgError, match=r"that train on families: .* diverged"):
        AutomaticTuner(recipe, graph, device=CPU, fixed=["optimizer.learning_rate"]).run()


def test_the_dimensions_follow_the_loss_and_leave_fixed_keys_alone(graph):
    keys = list(dimensions_of(recipe_of(graph), ["optimizer.learning_rate"]))
    assert keys == [
        "regularizer.weight",
        "loss.relation_weight",
        "loss.frequency_weight",
        "training.batch_size",
    ]
    rotate = starting_recipe(Data(), graph, CPU, {"model.name": "RotatE"})
    keys = list(dimensions_of(rotate))
    assert keys[:2] == ["loss.margin", "loss.adversarial_temperature"]
    assert "regularizer.weight" not in keys


@pytest.mark.parametrize(
    "changes",
    [
        {"model.name": "TuckER", "model.options.batch_norm": True},
        {"model.name": "RESCAL", "loss.name": "KvsAll"},
    ],
)
def test_a_search_begins_without_dura_where_it_is_not_defined(graph, changes):
    recipe = starting_recipe(Data(), graph, CPU, changes)
    assert recipe.regularizer.name == "none"
    assert recipe.regularizer.plain is None


@pytest.mark.parametrize("model", MODELS)
def test_every_model_has_a_starting_recipe_that_trains(graph, model):
    recipe = starting_recipe(
        Data(), graph, CPU, {"model.name": model, "model.dim": 4, "training.epochs": 9}
    )
    tuner = AutomaticTuner(recipe, graph, device=CPU, plan=SearchPlan(max_trials=(1, 1)))
    tuner.run()
    assert tuner.trials[0].error == ""


def graph_of_size(num_entities, num_triples, num_used):
    """A graph whose triples use some of the entities: the fewer, the more answers has a query."""
    numbers = np.arange(num_triples)
    heads = numbers % num_used
    relations = numbers // num_used % 5
    tails = numbers * 7919 % num_used
    triples = np.stack([heads, relations, tails], axis=1).astype(np.int32)
    return kg.Graph(
        "sized",
        kg.Vocabulary([f"e{number}" for number in range(num_entities)]),
        kg.Vocabulary([f"r{number}" for number in range(5)]),
        triples,
        triples[:1],
        triples[:1],
    )


@pytest.mark.parametrize(
    ("sizes", "device", "loss", "num_negatives", "order", "dim"),
    [
        ((1000, 30_000, 1000), "cpu", "OneVsAll", None, "triples", 400),
        ((8000, 40_000, 400), "cpu", "SampledSoftmax", 2000, "queries", 300),
        ((8000, 40_000, 8000), "cpu", "SampledSoftmax", 2000, "triples", 200),
        ((8000, 40_000, 8000), "cuda", "OneVsAll", None, "triples", 2000),
        ((250_000, 40_000, 8000), "cuda", "SampledSoftmax", 10_000, "triples", 1000),
    ],
)
def test_the_softmax_of_large_graphs_is_approximated(
    sizes, device, loss, num_negatives, order, dim
):
    sized = graph_of_size(*sizes)
    recipe = starting_recipe(Data(graph="sized"), sized, torch.device(device), {})
    assert type(recipe.loss).__name__ == loss
    assert getattr(recipe.loss, "num_negatives", None) == num_negatives
    assert recipe.training.order == order
    assert recipe.model.dim == dim


def test_trials_on_a_cpu_are_cheaper_unless_the_user_chose_a_value(graph):
    exact = recipe_of(graph, **{"model.dim": 400})
    assert cheaper_trials(exact, ()) == {"model.dim": 100, "training.order": "queries"}
    assert cheaper_trials(exact, ("model.dim", "training.order")) == {}
    sampled = {"loss.name": "SampledSoftmax", "loss.num_negatives": 2000, "model.dim": 64}
    assert cheaper_trials(recipe_of(graph, **sampled), ()) == {"loss.num_negatives": 500}
    assert cheaper_trials(recipe_of(graph, **sampled), ("loss.num_negatives",)) == {}


def test_the_chosen_recipe_is_not_as_cheap_as_its_trials(graph):
    recipes = []

    def run_trial(plan):
        recipes.append(plan.recipe)
        return TrialOutcome(0.5, 0.5, 1.0, 1.0)

    recipe = recipe_of(graph)
    plan = SearchPlan(max_trials=(2, 4), trial_changes={"model.dim": 4})
    tuner = AutomaticTuner(recipe, graph, device=CPU, plan=plan, run_trial=run_trial)
    assert tuner.run().model.dim == recipe.model.dim
    assert {trial.model.dim for trial in recipes} == {4}


@pytest.mark.parametrize("model", ["TransE", "RotatE", "HAKE", "MuRP"])
def test_distance_models_start_with_a_larger_learning_rate_on_small_graphs(graph, model):
    data = Data(graph="families")
    large = dataclasses.replace(graph, train=np.tile(graph.train, (400, 1)))
    on_small = starting_recipe(data, graph, CPU, {"model.name": model})
    on_large = starting_recipe(data, large, CPU, {"model.name": model})
    assert on_small.optimizer.learning_rate == 0.01 > on_large.optimizer.learning_rate
    given = {"model.name": model, "optimizer.learning_rate": 0.5}
    assert starting_recipe(data, graph, CPU, given).optimizer.learning_rate == 0.5


def test_the_initial_scale_of_distance_models_follows_the_margin(graph):
    """Sun et al. (2019): uniform within (γ + 2) / dim, with √3 times less standard deviation."""

    def chosen_scale(**given):
        changes = {"model.name": "RotatE", "model.dim": 10, **given}
        recipe = starting_recipe(Data(), graph, CPU, changes)
        tuner = tuner_of(
            recipe, graph, lambda params, rung: params.get("loss.margin", 6.0), fixed=tuple(changes)
        )
        chosen = tuner.run()
        assert (recipe.loss.margin, chosen.loss.margin) == (6.0, 18.0)
        return recipe.model.init_scale, chosen.model.init_scale

    assert chosen_scale() == pytest.approx((8 / 10 / 3**0.5, 20 / 10 / 3**0.5), abs=1e-5)
    assert chosen_scale(**{"model.init_scale": 0.25}) == (0.25, 0.25)
    recipe = starting_recipe(Data(), graph, CPU, {"model.name": "RotatE"}).with_changes(
        {"model.init_scale": 0.25}
    )
    of_a_recipe = tuner_of(recipe, graph, lambda params, rung: params.get("loss.margin", 6.0)).run()
    assert (of_a_recipe.loss.margin, of_a_recipe.model.init_scale) == (18.0, 0.25)


def test_distance_models_on_small_graphs_may_also_be_trained_1_vs_all(graph):
    """The loss of training without tuning wins here, and its λ is tuned in long trials."""
    large = dataclasses.replace(graph, train=np.tile(graph.train, (400, 1)))
    fixed = ("model.name", "model.dim")
    start = starting_recipe(Data(), graph, CPU, {"model.name": "RotatE", "model.dim": 10})
    other = other_start(start, graph, CPU, fixed)
    assert isinstance(start.loss, kg.NegativeSampling)
    assert (type(other.loss), other.regularizer.name, other.model.dim) == (kg.OneVsAll, "DURA", 10)
    assert other_start(start, large, CPU, fixed) is None
    assert other_start(start, graph, CPU, (*fixed, "loss.name")) is None
    assert other_start(recipe_of(graph), graph, CPU, ()) is None
    of_user = start.with_changes({"loss.margin": 9.0})
    assert other_start(of_user, graph, CPU, fixed) is None

    def surface(params, rung):
        if "loss.name" not in params:
            return 0.4
        return 0.3 if rung == 0 else 0.5 + 0.1 * (params.get("regularizer.weight") == 0.016)

    options = {"small": True, "epoch_work": 0.1, "fixed": fixed, "other": other}
    chosen = tuner_of(start, graph, surface, **options).run()
    assert (type(chosen.loss), chosen.regularizer.weight) == (kg.OneVsAll, 0.016)
    tuner = tuner_of(
        start, graph, lambda params, rung: 0.3 if "loss.name" in params else 0.4, other=other
    )
    assert isinstance(tuner.run().loss, kg.NegativeSampling)
    assert {"loss.name": "OneVsAll"} in [trial.params for trial in tuner.trials]


def test_without_time_for_a_long_trial_the_short_ones_have_the_whole_budget(graph):
    recipe = recipe_of(graph, **{"training.epochs": 30})
    tuner = tuner_of(recipe, graph, bowl, small=True, seconds=35.0)  # trials take 10 and 30 s
    tuner.run()
    assert [trial.epochs for trial in tuner.trials] == [10, 10, 10]
    assert "the best of 3 trials in 30 s" in tuner.summary()


def test_far_worse_trials_stop_half_way(graph):
    tuner = AutomaticTuner(recipe_of(graph, **{"training.epochs": 36}), graph, device=CPU)
    good = tuner._train({}, 0)
    tuner.trials.append(dataclasses.replace(good, half_way=100.0))
    assert tuner._train({"regularizer.weight": 0.01}, 0).error == "stopped half-way"
    tuner.other = tuner.start
    # With another loss, half of the time is another stage.
    assert not tuner._train({"loss.name": "OneVsAll"}, 0).error


def stop_after(num_trials):
    """A progress callback that stops a search in the trial after so many."""

    def on_tuning(event):
        if event.num_trials == num_trials:
            raise InterruptedRunError("Stopped.")

    return on_tuning


def test_a_damaged_search_is_refused(graph, tmp_path):
    path = tmp_path / "tuning.json"
    path.write_text('{"trials": []}')
    with pytest.raises(DamagedFile) as damaged:
        AutomaticTuner.load(path, graph, CPU)
    assert str(damaged.value) == (
        f"{path} is damaged: KeyError 'start'. Train again with `overwrite=True`."
    )


def test_the_test_split_does_not_matter(graph):
    plan = SearchPlan(max_trials=(6, 8))
    other_test = dataclasses.replace(graph, test=graph.test[::-1][:3])
    results = []
    for tuned in (graph, other_test):
        tuner = AutomaticTuner(recipe_of(tuned), tuned, device=CPU, plan=plan)
        tuner.run()
        results.append([(trial.params, trial.mrr) for trial in tuner.trials])
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("changes", "every", "keep"),
    [
        ({}, 2, "best"),
        ({"validation.patience": 3}, 1, "best"),
        ({"validation.every": 4}, 4, "best"),
        ({"validation.every": 4, "validation.keep": "last"}, 4, "last"),
        ({"optimizer.average_from": 0.5}, 2, "last"),
    ],
)
def test_given_validation_settings_are_those_of_the_final_training(graph, changes, every, keep):
    recipe = recipe_of(graph, **{"training.epochs": 20, **changes})
    chosen = tuner_of(recipe, graph, bowl, fixed=changes).run()
    assert (chosen.validation.every, chosen.validation.keep) == (every, keep)
    assert chosen.validation.patience == changes.get("validation.patience", 0)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400)]
)
def test_times(text, seconds):
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "soon", "10 minutes", "-1m"])
def test_other_times_are_refused(text):
    with pytest.raises(InvalidValue, match="a time such as 90s, 10m or 1.5h") as refused:
        parse_budget(text)
    assert refused.value.found == text
