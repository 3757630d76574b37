"""The folder that each campaign begins with."""

from pathlib import Path

import pytest

from tests.campaigns.arena import make


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("good")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        make(home)
    return home
