"""Sentences of the library as the command line prints them."""

import pytest

import dualkg as kg
from dualkg.cli import common as cli
from dualkg.cli.words import SETTINGS, as_options
from dualkg.errors import InvalidValue, PathExists


@pytest.mark.parametrize(
    ("sentence", "printed"),
    [
        ("Use `overwrite=True`, or name another with `out`.", "Use --overwrite, or name another"),
        ("Set `tune=False`.", "Set --no-tune."),
        ("Use `max_size='20G'`.", "Use --max-size 20G."),
        ("Use `columns=(1, 2, 3)`.", "Use --columns 1,2,3."),
        ("Use `delimiter='|'`.", "Use --delimiter '|'."),
        ("`k` should be 5.", "--top should be 5."),
        ("`training.epochs` should be 5.", "--epochs should be 5."),
        ("Set `training.epochs = 5`.", "Set --epochs 5."),
        ("Set `loss.margin=6.0`.", "Set --set loss.margin=6.0."),
        ("`loss.margin` is large.", "loss.margin is large."),
        ("Plain text stays.", "Plain text stays."),
    ],
)
def test_marked_arguments_and_keys_are_options(sentence, printed):
    assert as_options(sentence).startswith(printed)


def test_every_setting_is_an_option_of_train(run_cli):
    text = run_cli("train", "--help").out
    assert all(option in text for option in SETTINGS.values())


def test_a_command_prints_errors_in_its_words(run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ("--dim", 2, "--epochs", 1, "--no-tune")
    assert run_cli("train", "world", *options).code == 0
    refused = run_cli("train", "world", *options)
    assert refused.code == 2
    assert "runs/world is a finished run. Use --overwrite, or name another with --out." in (
        refused.err
    )
    with pytest.raises(PathExists, match="Use `overwrite=True`, or name another with `out`"):
        kg.train_recipe(kg.Recipe(), out="runs/world")


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
