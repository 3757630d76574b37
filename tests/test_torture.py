"""The campaigns of `make torture`: what they change and count; a short one finds nothing."""

from __future__ import annotations

import json
import random
import struct
from importlib import import_module
from inspect import signature

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from benchmarks.torture import faults, fingerprints, inputs, kills, mutations
from benchmarks.torture.__main__ import BEGIN, END, FIGURES, joined, names, with_table
from dualkg.files import read_json

TREE = {
    "model": {"name": "ComplEx", "dim": 3, "options": {"a": [1, 2.5]}},
    "training": {"epochs": 2},
}


@given(st.integers())
def test_changes_within_a_structure_are_parsed(seed):
    draw = random.Random(seed)
    json.loads(mutations.as_json(mutations.mutated_tree(TREE, draw)))
    tree = mutations.mutated_tree(TREE, draw)
    # TOML has tables at the top, and no null.
    mutations.as_toml({key: value for key, value in tree.items() if isinstance(value, dict)})
    weights = save({"a": np.ones(3, np.float32)}, {"about": '{"b": 1}'})
    content = mutations.mutated_safetensors(weights, draw)
    [header_size] = struct.unpack("<Q", content[:8])
    json.loads(content[8 : 8 + header_size])


def test_a_changed_file_gets_the_checksum_of_what_it_is_now(tmp_path):
    path = tmp_path / "report.json"
    path.write_bytes(mutations.with_checksum(b'{"sha256": "old", "mrr": "\\ud800"}'))
    assert read_json(path, checksum=True) == {"mrr": "?"}
    assert [mutations.with_checksum(content) for content in (b"[3]", b"{")] == [b"[3]", b"{"]


def test_the_parser_of_a_format_decides_what_is_counted():
    assert mutations.is_parsed("a.toml", b"x = 1")
    assert not mutations.is_parsed("a.toml", b"x = ")
    assert mutations.is_parsed("a.tsv", b"a\tb\tc\n")
    assert not mutations.is_parsed("a.tsv.gz", b"a\tb\tc\n")
    assert not mutations.is_parsed("a.parquet", b"PAR1")


def test_the_table_of_the_page_has_a_row_for_each_campaign():
    about = {"num_failures": 0, "failures": [], "seconds": 90.0, "on": {"commit": "abc"}}
    results = {"races": {"races": 1200, "refused with a message": 3, **about}}
    page = with_table(f"Before\n\n{BEGIN}old\n{END}\nAfter\n", results)
    head = "| campaign | figures | failures | minutes | commit |\n|---|---|--:|--:|---|"
    row = "| `races` | races 1,200, refused with a message 3 | 0 | 1.5 | abc |"
    assert page == f"Before\n\n{BEGIN}{head}\n{row}\n{END}\nAfter\n"


def test_parts_of_a_campaign_are_added():
    def part(seed: int, **figures: object) -> dict[str, object]:
        about = {"seed": seed, "seconds": 60.0, "on": {"commit": f"c{seed}"}}
        return {"num_failures": seed, "failures": [{"seed": seed}], **about, **figures}

    first = part(1, inputs=5, most_mib=9, by_family={"TSV": 2}, held={"p99": True})
    second = part(2, inputs=6, most_mib=7, by_family={"TSV": 3, "CSV": 1}, held={"p99": False})
    both = joined(first, second)
    assert (both["inputs"], both["most_mib"], both["num_failures"]) == (11, 9, 3)
    assert both["by_family"] == {"TSV": 5, "CSV": 1}
    assert both["held"] == {"p99": False}
    assert both["seconds"] == 120.0
    assert [failure["seed"] for failure in both["failures"]] == [1, 2]
    thrice = joined(both, part(3, inputs=1))
    assert [part["commit"] for part in thrice["parts"]] == ["c1", "c2", "c3"]
    assert thrice["inputs"] == 12
    row = "| `inputs` | inputs 12, most mib 9 | 6 | 3.0 | c1 (5), c2 (6), c3 (1) |"
    assert row in with_table(f"{BEGIN}{END}", {"inputs": thrice})


@pytest.mark.parametrize("name", names())
def test_every_campaign_is_a_module_with_figures(name):
    module = import_module(f"benchmarks.torture.{name}")
    assert signature(module.campaign).parameters.keys() >= {"minutes", "seed"}
    assert FIGURES[name]


def test_times_alone_may_differ_after_a_kill():
    killed = {
        "seconds": 1.0,
        "started_at": "now",
        "trials": [{"mrr": 0.5, "seconds": 2}],
        "summary": "7 trials in 1 s.",
    }
    undisturbed = {
        "seconds": 2.0,
        "started_at": "then",
        "trials": [{"mrr": 0.5, "seconds": 3}],
        "summary": "7 trials in 2 s.",
    }
    assert fingerprints.without_times(killed) == fingerprints.without_times(undisturbed)
    undisturbed["trials"] = [{"mrr": 0.6}]
    assert fingerprints.without_times(killed) != fingerprints.without_times(undisturbed)
    assert json.loads(fingerprints.difference({"a": "1", "b": "1"}, {"a": "2", ".b.tmp": "1"})) == {
        "a": "differs",
        "b": "is missing",
        ".b.tmp": "is left",
    }
    assert json.loads(fingerprints.difference({"a": "1"}, {"open": "why"})) == {"open": "why"}


@pytest.mark.slow
@pytest.mark.parametrize("campaign", [inputs.campaign, faults.campaign, kills.campaign])
def test_a_short_campaign_finds_nothing(campaign):
    figures = campaign(minutes=0.5, seed=1)
    assert figures["failures"] == []
    assert figures.get("share_past_the_first_parser", 1) >= 1 / 3
