"""Queries to copy: each text, run as it is, has the answer of the page."""

import html
import re
import shlex
import subprocess

import pytest

from dualkg.serve.app import application
from dualkg.serve.server import request_once
from dualkg.serve.templating import command, shell_word
from tests.serve.conftest import HOSTILE


def texts_of(page) -> dict[str, str]:
    found = re.findall(r'data-copy="(\w+)".*?<code>(.*?)</code>', page, flags=re.DOTALL)
    return {title: html.unescape(text) for title, text in found}


def test_a_query_as_text(client):
    page = client.get("/?find=tail&head=thing+15&relation=likes&k=7").text
    texts = texts_of(page)
    address = str(client.base_url).rstrip("/")
    assert texts["curl"] == (
        f"curl '{address}/api/tails?head=thing+15&relation=likes&k=7&known=omit'"
    )
    assert texts["Python"] == (
        "import dualkg as kg\n\n"
        "predictor = kg.load_run('calibrated').predictor()\n"
        "predictor.tails('thing 15', 'likes', k=7, known='omit')"
    )
    assert texts["command"] == (
        "dualkg predict calibrated --head 'thing 15' --relation likes --top 7 --new"
    )


@pytest.mark.parametrize(
    "where",
    [
        "/?find=head&relation=is+a&tail=Twenty",
        "/?find=relation&head=thing+15&tail=thing+20",
        "/explain?head=thing+15&relation=likes&tail=thing+20",
        "/entity/Twenty",
        "/facts?relation=likes&min_probability=0.05&types=true",
    ],
)
def test_the_address_answers(client, where):
    texts = texts_of(client.get(where).text)
    assert list(texts) == ["curl", "Python", "command"]
    [_, url] = shlex.split(texts["curl"])
    assert client.get(url).status_code == 200


def test_python_and_the_command_have_the_answers_of_the_page(
    client, run_cli, run_folders, monkeypatch
):
    monkeypatch.chdir(run_folders[0].parent)
    for name in ("thing 15", HOSTILE[4], HOSTILE[3]):
        params = {"find": "tail", "head": name, "relation": "likes", "k": 5}
        answers = client.get("/query.json", params=params).json()["predictions"]
        texts = texts_of(client.get("/", params=params).text.replace("&#13;", "\r"))
        names: dict[str, object] = {}
        code, _, last = texts["Python"].rpartition("\n")
        exec(code, names)  # the text of a page of this test's own server
        found = eval(last, names)
        assert {item.name for item in found} == {item["name"] for item in answers}
        words = (
            subprocess.run(
                ["bash", "-c", f"printf '%s\\0' {texts['command']}"],
                capture_output=True,
                check=True,
            )
            .stdout.decode()
            .split("\0")[1:-1]
        )
        result = run_cli(*words, "--json")
        assert result.code == 0, result.err
        printed = result.json["predictions"]
        assert {item["name"] for item in printed} == {item["name"] for item in answers}


def test_the_token_is_no_part_of_a_page(served):
    app = application(served, token="secret-token")
    address = "/?find=tail&head=thing+15&relation=likes"
    page = request_once(app, address, token="secret-token").body.decode()
    assert "$DUALKG_TOKEN" in html.unescape(texts_of(page)["curl"])
    assert "secret-token" not in page


def test_words_of_a_shell():
    for text in ["a b", "it's", "two\nlines", "\u202eback\\slash", "$(id)", "", "-x"]:
        result = subprocess.run(
            ["bash", "-c", f"printf %s {shell_word(text)}" if text != "-x" else "printf -- -x"],
            capture_output=True,
            check=True,
        )
        assert result.stdout.decode() == text
        assert shell_word(text).isprintable()
    assert command("predict", "-r", {"head": "-x", "new": True, "tail": None}) == (
        "dualkg predict ./-r --head=-x --new"
    )


def test_python_is_valid_for_any_name(client):
    for name in HOSTILE:
        page = client.get("/", params={"find": "tail", "head": name, "relation": "likes"}).text
        compile(texts_of(page)["Python"], "page", "exec")
