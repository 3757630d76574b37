"""Messages of the library in the words of the command line."""

import pytest

import dualkg as kg
from dualkg.cli import common as cli
from dualkg.cli.words import COMMAND, SETTINGS, in_words
from dualkg.errors import InvalidValue, PathExists, Sentence


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("overwrite", True, "--overwrite"),
        ("tune", False, "--no-tune"),
        ("max_size", "20G", "--max-size 20G"),
        ("columns", (1, 2, 3), "--columns 1,2,3"),
        ("delimiter", "|", "--delimiter '|'"),
        ("out", None, "--out"),
        ("k", 5, "--top 5"),
    ],
)
def test_options(name, value, text):
    assert COMMAND.option(name, value) == text


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("training.epochs", 5, "--epochs 5"),
        ("training.batch_size", None, "--batch-size"),
        ("data.columns", (1, 3, 2), "--columns 1,3,2"),
        ("loss.margin", 6.0, "--set loss.margin=6.0"),
        ("model.reciprocal", True, "--set model.reciprocal=true"),
        ("loss.margin", None, "loss.margin"),
    ],
)
def test_keys_of_recipes(key, value, text):
    assert COMMAND.key(key, value) == text


def test_calls_are_commands():
    assert COMMAND.call("resume", "runs/a b") == "dualkg resume 'runs/a b'"
    assert COMMAND.call("train", "a.toml", overwrite=True, out="runs/a") == (
        "dualkg train a.toml --overwrite --out runs/a"
    )


def test_every_setting_is_an_option_of_train(run_cli):
    text = run_cli("train", "--help").out
    assert all(option in text for option in SETTINGS.values())


def test_errors_and_notes_are_worded_by_their_reader(tmp_path):
    error = PathExists("runs/a")
    assert "Use --overwrite, or name another with --out." in error.in_words(COMMAND)
    assert "Use `overwrite=True`" in str(error)
    error = InvalidValue("training.epochs", expected="at least 1", found=0)
    assert error.in_words(COMMAND) == "--epochs should be at least 1; 0 was given."
    text = "for instance to `optimizer.learning_rate = 1e+11`."
    assert COMMAND.marked(text) == "for instance to --lr 1e+11."
    note = Sentence("If it is a triple, use {columns}.", {"columns": (1, 2, 3)})
    assert in_words(note) == "If it is a triple, use --columns 1,2,3."
    assert in_words("Plain text stays.") == "Plain text stays."


def test_a_command_prints_errors_in_its_words(run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ("--dim", 2, "--epochs", 1, "--no-tune")
    assert run_cli("train", "world", *options).code == 0
    refused = run_cli("train", "world", *options)
    assert refused.code == 2
    assert "runs/world is a finished run. Use --overwrite, or name another with --out." in (
        refused.err
    )
    with pytest.raises(PathExists) as error:
        kg.train_recipe(kg.Recipe(), out="runs/world")
    assert error.value.path.name == "world"


@pytest.mark.parametrize(
    ("parse", "text", "setting"),
    [
        (cli.parse_columns, "1,1,2", "columns"),
        (cli.parse_hits, "1,0", "hits"),
        (lambda text: cli.parse_numbers("shares", text), "a,b", "shares"),
    ],
)
def test_values_of_options_that_cannot_be_read(parse, text, setting):
    with pytest.raises(InvalidValue) as error:
        parse(text)
    assert (error.value.setting, error.value.found) == (setting, text)
