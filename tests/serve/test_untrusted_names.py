"""Names and queries are data: never markup, a path, a line of a log or a command."""

import json
import re
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from dualkg.serve.app import application
from tests.processes import LIMIT
from tests.serve.conftest import HOSTILE, serving

ESCAPE = "\x1b]0;owned\x07"


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_returned_unchanged(client, name):
    reply = client.get("/api/tails", params={"head": name, "relation": "<b>bold</b>"})
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.json()["query"]["head"]["name"] == name
    assert reply.json()["query"]["relation"]["name"] == "<b>bold</b>"


@pytest.mark.parametrize(
    "path", ["../../../etc/passwd", "..%2f..%2f..%2fetc%2fpasswd", "/etc/passwd", "recipe.toml"]
)
def test_no_address_is_a_file_path(client, path):
    for address in (f"/entity/{path}.json", f"/api/entity/{path}", f"/{path}", f"/docs/{path}"):
        reply = client.get(address)
        assert reply.status_code == 404
        assert "root:" not in reply.text
        assert "[model]" not in reply.text


def test_no_query_is_a_command(client):
    client.get("/api/tails", params={"head": HOSTILE[3], "relation": "likes"})
    client.get("/api/entities", params={"q": HOSTILE[3]})
    assert not Path("/tmp/owned").exists()


@pytest.mark.parametrize("name", ["a\nb\r\n{}", ESCAPE, '","status":200,"x":"', "<script>"])
def test_a_request_is_one_line_of_the_access_log(served, capfd, name):
    # A line may be written after its response, but not after the server has stopped.
    with (
        serving(application(served, log=True)) as address,
        httpx.Client(base_url=address, timeout=LIMIT) as client,
    ):
        client.get(f"/api/entity/{quote(name)}")
        client.get("/health")
    text = capfd.readouterr().err
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["path"] for line in lines] == [f"/api/entity/{name}", "/health"]
    assert [line["status"] for line in lines] == [404, 200]
    assert "\x1b" not in text


def test_requests_are_not_logged_by_default(client_of, capfd):
    client_of().get("/api/entity/nobody")
    assert capfd.readouterr().err == ""


def test_an_error_does_not_quote_markup(client):
    reply = client.get(
        "/api/tails", params={"head": "<img src=x onerror=alert(1)>", "relation": "likes"}
    )
    assert reply.status_code == 404
    assert reply.headers["content-type"] == "application/json"
    assert "default-src 'self'" in reply.headers["content-security-policy"]


def test_the_reference_page_names_no_other_host(client):
    page = client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert "http://" not in page.text
    assert "https://" not in page.text
    for path in client.get("/openapi.json").json()["paths"]:
        assert path in page.text


def test_the_openapi_description_names_no_other_host(client):
    text = client.get("/openapi.json").text
    assert "http://" not in text
    assert "https://" not in text


def test_no_name_reverses_a_page(client):
    """A bidirectional override is displayed as its number, and returned unchanged as JSON."""
    name = HOSTILE[8]
    for address in (f"/entity/{quote(name)}", f"/entity/{quote('no ' + name)}"):
        text = client.get(address).text
        assert "⟨U+202E⟩reversed�[31m" in text
        # Scripts read names from data attributes, which are not displayed.
        displayed = re.sub(r'data-(head|relation|tail)="[^"]*"', "", text)
        assert not {"\u202e", "\x1b"} & set(displayed)
    assert client.get("/api/entity/" + quote(name)).json()["entity"]["name"] == name


def test_no_name_reverses_a_terminal(run_cli, run_folders):
    """Tables, titles, sentences and errors of commands.

    As JSON, names are the same, with escapes.
    """
    name = HOSTILE[8]
    run = run_folders[1]
    query = ("--head", name, "--relation", "likes")
    results = [
        run_cli("predict", run, *query, "--top", "40"),
        run_cli("predict", run, "--similar", name),
        run_cli("explain", run, *query, "--tail", "thing 30"),
        run_cli("predict", run, "--head", f"no {name}", "--relation", "likes"),
        run_cli("predict", run, *query, "--top", "40", "--json"),
    ]
    assert [result.code for result in results] == [0, 0, 0, 2, 0]
    for result in results:
        assert not {"\u202e", "\x1b"} & set(result.out + result.err)
    for result in results[:4]:
        assert "⟨U+202E⟩reversed�[31m" in result.out + result.err
    predictions = json.loads(results[4].out)["predictions"]
    assert name in {prediction["name"] for prediction in predictions}
