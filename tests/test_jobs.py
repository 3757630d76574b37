"""Job files of clusters, by the validators of their tools where these are installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

JOBS = Path(__file__).parents[1] / "jobs"
NAMES = ("slurm.sh", "kubernetes.yaml", "skypilot.yaml")


@pytest.mark.parametrize("name", NAMES)
def test_a_job_resumes_and_can_be_restarted(name):
    text = (JOBS / name).read_text(encoding="utf-8")
    assert "--resume" in text
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in text
    assert "--rdzv-backend" in text
    page = (JOBS.parent / "docs" / "distributed.md").read_text(encoding="utf-8")
    assert f"(../jobs/{name})" in page


def test_the_slurm_job_is_bash():
    checked = subprocess.run(["bash", "-n", JOBS / "slurm.sh"], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_slurm_takes_its_job():
    if shutil.which("sinfo") is None:
        pytest.skip("Slurm is not installed")
    if subprocess.run(["sinfo"], capture_output=True).returncode:
        pytest.skip("no controller of Slurm is running")
    size = ("--nodes=1", "--gpus-per-node=0", "--cpus-per-task=1")
    checked = subprocess.run(
        ["sbatch", "--test-only", *size, JOBS / "slurm.sh", "recipe.toml", "run"],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stderr


def test_kubernetes_takes_its_objects():
    validator = pytest.importorskip("kubernetes_validate")
    yaml = pytest.importorskip("yaml")
    objects = list(yaml.safe_load_all((JOBS / "kubernetes.yaml").read_text(encoding="utf-8")))
    assert [found["kind"] for found in objects] == ["Service", "Job"]
    for found in objects:
        validator.validate(found, validator.latest_version(), strict=True)
    service, job = (found["spec"] for found in objects)
    pod = job["template"]
    # The name of a pod is looked up in the headless service, which selects it by its label.
    assert pod["spec"]["subdomain"] == objects[0]["metadata"]["name"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    endpoint = next(word for word in container["args"] if word.startswith("--rdzv-endpoint="))
    name = objects[1]["metadata"]["name"]
    assert endpoint == f"--rdzv-endpoint={name}-0.{pod['spec']['subdomain']}:29500"
    assert f"--nnodes={job['completions']}" in container["command"]


def test_skypilot_takes_its_task():
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml(str(JOBS / "skypilot.yaml"))
    assert task.num_nodes == 2
