"""The pages in Firefox, driven by Marionette, its own protocol.

Playwright drives a Firefox of its own alone. The packages of distributions have Marionette.
"""

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.processes import LIMIT, until

pytestmark = pytest.mark.slow
NAMES = ("firefox-esr", "firefox")
QUERY = "/?find=tail&head=thing+15&relation=likes"
# By address, an element that a script makes or fills.
PAGES = {
    "/": "[data-best] .best-fact",
    QUERY: ".answers button.figure",
    "/entity/Twenty": ".expand",
    "/relation/likes": "[data-best] .best-fact",
    "/paths?start=thing+15&end=thing+20": ".paths button.figure",
    "/facts?top=50": "[data-list][data-ready] .fact",
    "/decisions": "h1",
    "/map?entity=Twenty&relation=likes&find=tail": "[data-found] li",
    "/run": "th button.sort",
    "/docs": "h1",
}
# Errors of scripts, and what the policy of the pages stops.
LISTEN = """
window.wrong = [];
addEventListener("error", (event) => wrong.push(String(event.message)));
addEventListener("unhandledrejection", (event) => wrong.push(String(event.reason)));
addEventListener("securitypolicyviolation", (event) => wrong.push(event.violatedDirective));
"""
WAIT = """
const [selector, done] = arguments;
const look = () => document.querySelector(selector) ? done(true) : setTimeout(look, 50);
look();
"""


class Marionette:
    """A connection to Firefox: each message is its length, a colon and JSON."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=LIMIT)
        self._number = 0
        self._read()  # the greeting

    def _read(self) -> Any:
        length = b""
        while not length.endswith(b":"):
            length += self._socket.recv(1)
        text = b""
        while len(text) < int(length[:-1]):
            text += self._socket.recv(int(length[:-1]) - len(text))
        return json.loads(text)

    def call(self, command: str, **parameters: Any) -> Any:
        self._number += 1
        message = json.dumps([0, self._number, command, parameters]).encode()
        self._socket.sendall(b"%d:%s" % (len(message), message))
        _, _, error, result = self._read()
        assert error is None, error
        return result

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a script that returns."""
        result = self.call("WebDriver:ExecuteScript", script=script, args=arguments, sandbox=None)
        return result["value"]

    def wait_for(self, selector: str) -> None:
        self.call("WebDriver:ExecuteAsyncScript", script=WAIT, args=[selector], sandbox=None)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(scope="module")
def firefox(tmp_path_factory) -> Iterator[Marionette]:
    path = os.environ.get("DUALKG_FIREFOX") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("needs Firefox: apt-get install firefox-esr, or its path in DUALKG_FIREFOX")
    profile = tmp_path_factory.mktemp("firefox")
    (profile / "user.js").write_text(
        'user_pref("marionette.port", 0);\nuser_pref("app.update.enabled", false);\n'
    )
    command = [path, "--headless", "--marionette", "--no-remote", "--profile", str(profile)]
    output = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        place = profile / "MarionetteActivePort"
        until(lambda: place.exists() and place.read_text().strip())
        connection = Marionette(int(place.read_text()))
        connection.call("WebDriver:NewSession", capabilities={"alwaysMatch": {}})
        connection.call("WebDriver:SetTimeouts", script=1000 * LIMIT, pageLoad=1000 * LIMIT)
        yield connection
        connection.close()
    finally:
        process.terminate()
        process.wait()


def opened(firefox, address, where):
    firefox.call("WebDriver:Navigate", url=f"{address}{where}")
    firefox.run(LISTEN)
    firefox.wait_for(PAGES.get(where, "h1"))


@pytest.mark.parametrize("where", PAGES)
def test_a_page_works(firefox, address, where):
    opened(firefox, address, where)
    assert firefox.run("return wrong") == []
    assert firefox.run("return document.documentElement.scrollWidth - innerWidth") <= 0


def test_a_fact_is_explained_decided_and_undone(firefox, address):
    opened(firefox, address, QUERY)
    firefox.run("document.querySelector('.answer [data-why], .answer button.plain').click()")
    firefox.wait_for(".opened [data-explanation]")
    firefox.run("document.querySelector('.answer [data-wanted=accepted]').click()")
    firefox.wait_for("[data-saved=accepted]")
    opened(firefox, address, "/decisions")
    firefox.wait_for("[data-decision]")
    firefox.run(
        "[...document.querySelectorAll('[data-decision] button')]"
        ".find((button) => button.textContent.startsWith('Undo')).click()"
    )
    firefox.wait_for("[data-count=accepted]")
    assert firefox.run("return wrong") == []
