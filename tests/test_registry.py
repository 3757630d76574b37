"""Registries: classes that register themselves, and entry points of other packages."""

import sys

import pytest

from dualkg.errors import DualkgError, RequestError
from dualkg.registry import Registry


@pytest.fixture
def plugin_package(tmp_path, monkeypatch):
    """An installed distribution with one good and one broken entry point."""
    (tmp_path / "my_kg_models.py").write_text("class Mine: ...\n")
    info = tmp_path / "my_kg_models-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-kg-models\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[dualkg.things]\nMine = my_kg_models:Mine\nBroken = my_kg_models:Nothing\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_kg_models", None)


def test_a_class_registers_itself():
    things = Registry[type]("thing", group="dualkg.none")

    @things.register
    class Apple: ...

    @things.named("round")
    class Ball: ...

    assert dict(things) == {"Apple": Apple, "round": Ball}


def test_a_name_means_one_class():
    things = Registry[type]("thing", group="dualkg.none")
    things.add("a", int)
    things.add("a", int)
    with pytest.raises(RequestError, match="The thing a is registered already"):
        things.add("a", str)


def test_entry_points_are_found_and_imported_when_used(plugin_package):
    things = Registry[type]("thing", group="dualkg.things")
    assert set(things) == {"Mine", "Broken"}
    assert len(things) == 2
    assert "my_kg_models" not in sys.modules
    assert things["Mine"].__name__ == "Mine"


def test_a_broken_entry_point_is_reported(plugin_package):
    things = Registry[type]("thing", group="dualkg.things")
    with pytest.raises(DualkgError, match="The entry point Broken of the group dualkg.things"):
        things["Broken"]
