"""The command `dualkg serve`."""

import json
import os
import signal
import sys
import threading
import time

import httpx
import pytest

from tests.processes import COMMAND, LIMIT, Started, run_python, until


def test_one_request_without_a_port(run_cli, run_folders):
    result = run_cli("serve", run_folders[0], "--get", "/entity/Twenty.json")
    assert result.code == 0
    assert result.json["entity"]["label"] == "Twenty"
    result = run_cli(
        "serve", *run_folders, "--get", "/api/tails?head=thing%2030&relation=is%20a&run=plain&k=2"
    )
    assert [len(result.json["predictions"]), result.json["run"]] == [2, "plain"]


def test_one_request_with_a_token(run_cli, run_folders):
    assert run_cli("serve", run_folders[0], "--token", "secret", "--get", "/api/runs").json == {
        "runs": ["calibrated"]
    }


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("/entity/Twnty.json", "No entity is named 'Twnty'"),
        ("/nothing", "There is nothing at this address."),
    ],
)
def test_one_wrong_request(run_cli, run_folders, address, sentence):
    result = run_cli("serve", run_folders[0], "--get", address)
    assert result.code == 2
    assert result.json["error"].startswith(sentence)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("--get", "entity"),
            "An address must begin with a slash, such as /entity/France.json; got 'entity'.",
        ),
        (
            ("--host", "0.0.0.0"),
            "On 0.0.0.0 other machines could reach the server. Protect it with ",
        ),
        (
            ("--token", ""),
            "A token must consist of ASCII letters, digits and punctuation, and must not be empty.",
        ),
        (("--timeout", "0"), "A time limit must be above 0 seconds; got 0."),
    ],
)
def test_wrong_options(run_cli, run_folders, words, sentence):
    result = run_cli("serve", run_folders[0], *words)
    assert result.code == 2
    assert result.err.startswith(f"dualkg: {sentence}")


def test_a_missing_run(run_cli, tmp_path):
    result = run_cli("serve", tmp_path / "none", "--port", 0)
    assert result.code == 2
    assert "none does not exist" in result.err


@pytest.mark.slow
def test_without_the_serve_extra(run_folders):
    code = (
        "import sys; sys.modules['fastapi'] = None\n"
        f"sys.argv = ['dualkg', 'serve', {str(run_folders[0])!r}]\n"
        "from dualkg.cli import main; main()"
    )
    result = run_python(code)
    assert result.code == 2
    assert (
        result.err
        == "dualkg: Serving a run needs fastapi. Install it: pip install 'dualkg[serve]'\n"
    )


@pytest.mark.parametrize(
    "end", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_server_prints_its_address_and_stops_on_a_signal(run_folders, end):
    """A request in progress is still answered."""
    with Started(COMMAND, "serve", *run_folders, "--port", 0, "--access-log") as server:
        address = server.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:")
        assert httpx.get(f"{address}/health", timeout=LIMIT).json() == {"status": "ok"}
        replies = []
        params = {"top": 5000, "types": False}
        asking = threading.Thread(
            target=lambda: replies.append(
                httpx.get(f"{address}/api/complete", params=params, timeout=LIMIT)
            )
        )
        asking.start()
        while (
            not replies
            and "in_progress 1.0\n" in httpx.get(f"{address}/metrics", timeout=LIMIT).text
        ):
            time.sleep(0.005)  # only this request itself is in progress
        server.signal(end)
        asking.join()
        code, out, err = server.finish()
    assert replies[0].text.splitlines()[-1].startswith('{"kind":"end"')
    assert code == 0
    assert out == ""
    assert "plain has no probabilities yet: dualkg calibrate" in err
    assert err.splitlines()[-1] == "Stopped."
    assert "Traceback" not in err
    requests = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    assert {request["status"] for request in requests} == {200}


def test_a_browser_is_opened(run_folders, tmp_path):
    """The server answers while the browser runs."""
    result = tmp_path / "result"
    browser = tmp_path / "browser"
    asking = tmp_path / "asking.py"
    asking.write_text(
        "import os, sys, time, urllib.request\n"
        f"text = urllib.request.urlopen(sys.argv[1], timeout={LIMIT}).read()\n"
        f"open({str(result)!r} + '.part', 'wb').write(text)\n"
        f"os.rename({str(result)!r} + '.part', {str(result)!r})\n"
        "time.sleep(10_000)\n"
    )
    browser.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{asking}" "$1"\n')
    browser.chmod(0o755)
    words = ("serve", run_folders[0], "--port", 0, "--open")
    with Started(COMMAND, *words, environment={"BROWSER": str(browser)}) as server:
        until(result.exists)
        assert "<title>" in result.read_text()
        os.killpg(server.pid, signal.SIGKILL)


def test_a_training_of_several_seeds_is_not_shown(run_cli, tmp_path):
    words = ("--no-tune", "--seeds", "2", "--serve", "--out", tmp_path / "run")
    result = run_cli("train", "world", *words)
    assert result.code == 2
    assert "--serve shows one training" in result.err
    assert not (tmp_path / "run").exists()
