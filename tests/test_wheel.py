"""The wheel: built, installed in an environment of its own, and used from there."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PROJECT = Path(__file__).parents[1]


def run(*command: object, **options) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The `dualkg` command of a fresh environment that holds the wheel.

    Dependencies come from the environment of the tests, so that nothing is downloaded; dualkg
    itself does not.
    """
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, PROJECT)
    (wheel,) = folder.glob("dualkg-*.whl")
    environment = folder / "environment"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel)
    site = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()
    )
    (site / "dependencies.pth").write_text(
        sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8"
    )
    imported = run(
        python,
        "-c",
        "import dualkg; print(dualkg.__file__)",
        cwd=folder,
        env=own_environment(folder),
    )
    assert imported.startswith(str(site))
    return environment / "bin" / "dualkg"


def own_environment(folder: Path) -> dict[str, str]:
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return variables | {"DUALKG_CACHE": str(folder / "cache")}


def test_an_installed_wheel_runs_the_demo(installed, tmp_path):
    assert "DURA" in run(installed, "demo", cwd=tmp_path, env=own_environment(tmp_path))


def test_an_installed_wheel_trains_a_shipped_recipe_and_serves_it(installed, tmp_path, data_folder):
    variables = own_environment(tmp_path)
    assert "umls/complex-dura" in run(installed, "datasets", cwd=tmp_path, env=variables)
    report = run(installed, "train", "umls/complex-dura", "--json", cwd=tmp_path, env=variables)
    assert json.loads(report)
    (run_folder,) = (tmp_path / "runs").iterdir()
    health = run(installed, "serve", run_folder, "--get", "/health", cwd=tmp_path, env=variables)
    assert json.loads(health)["status"] == "ok"
    run(installed, "export", run_folder, "--out", tmp_path / "tables", cwd=tmp_path, env=variables)
    assert json.loads((tmp_path / "tables" / "manifest.json").read_text(encoding="utf-8"))["score"][
        "numpy"
    ]
