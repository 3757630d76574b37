"""New facts that are accepted or rejected."""

import csv
import errno
import io
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markupsafe import escape

from dualkg.delimited import FORMULA, without_formula
from dualkg.errors import DualkgError, InvalidValue, RequestError
from dualkg.inference import decision_files
from dualkg.inference.decision_files import as_csv, as_tsv, parse_decisions
from dualkg.inference.decisions import Decision, DecisionStore, as_json_lines
from dualkg.serve.app import application
from dualkg.serve.served import ServedRun, ServedRuns
from dualkg.training.ensemble import load_run
from dualkg.training.run_folder import RunFolder
from tests.processes import COMMAND, LIMIT, Started
from tests.serve.conftest import HOSTILE, serving

ACCEPT = {"head": "thing 30", "relation": "likes", "tail": "thing 31", "verdict": "accepted"}
REJECT = {"head": HOSTILE[0], "relation": "<b>bold</b>", "tail": HOSTILE[7], "verdict": "rejected"}


@pytest.fixture
def folder(untouched_folders, tmp_path):
    return shutil.copytree(untouched_folders[0], tmp_path / "mine")


@pytest.fixture
def curator(folder):
    """A client of a server of one run, whose folder may be written to."""
    with (
        serving(application(ServedRuns.load([folder], device="cpu"))) as address,
        httpx.Client(base_url=address, timeout=LIMIT) as client,
    ):
        yield client


def decide(client, *made, **choices):
    return client.post("/api/decisions", json={"decisions": made}, **choices)


def test_decisions_are_stored_in_the_run_folder(curator, folder):
    assert curator.get("/api/decisions").json()["decisions"] == []
    reply = decide(curator, ACCEPT, REJECT)
    assert reply.json() == {"run": "mine", "accepted": 1, "rejected": 1}
    lines = [
        json.loads(line) for line in (folder / "decisions.jsonl").read_text("utf-8").splitlines()
    ]
    assert [(line["head"], line["verdict"]) for line in lines] == [
        ("thing 30", "accepted"),
        (HOSTILE[0], "rejected"),
    ]
    result = curator.get("/api/decisions").json()
    assert result["decisions"] == lines
    assert result["can_decide"]
    assert 0 < result["decisions"][0]["probability"] < 1


def test_a_page_without_decisions_says_where_they_are_made(curator):
    assert "Nobody has decided" in curator.get("/decisions").text
    assert "No decision is like that." in curator.get("/decisions?q=nothing+at+all").text


def test_a_later_decision_replaces_an_earlier_one(curator):
    decide(curator, ACCEPT, REJECT, ACCEPT | {"verdict": "rejected"})
    counts = decide(curator, REJECT | {"verdict": "undecided"}).json()
    assert counts == {"run": "mine", "accepted": 0, "rejected": 1}
    counts = decide(curator, ACCEPT | {"verdict": "undecided"}).json()
    assert counts == {"run": "mine", "accepted": 0, "rejected": 0}
    assert decide(curator, ACCEPT | {"verdict": "undecided"}).status_code == 200


def test_decisions_by_id_or_label_are_stored_by_name(curator):
    decide(curator, {"head": 30, "relation": 0, "tail": "Twenty", "verdict": "accepted"})
    [stored] = curator.get("/api/decisions").json()["decisions"]
    triple = (stored["head"], stored["relation"], stored["tail"])
    assert triple == ("thing 30", "likes", "thing 20")


def test_one_wrong_name_stores_no_decision(curator, folder):
    reply = decide(curator, ACCEPT, REJECT | {"tail": "nobody"})
    assert reply.status_code == 404
    assert "No entity is named 'nobody'" in reply.json()["error"]
    assert not (folder / "decisions.jsonl").exists()


def test_accepted_facts_as_tsv(curator):
    decide(curator, ACCEPT, REJECT, ACCEPT | {"tail": HOSTILE[1]})
    reply = curator.get("/facts.tsv")
    assert reply.headers["content-type"] == "text/tab-separated-values; charset=utf-8"
    assert reply.headers["content-disposition"] == 'attachment; filename="mine-accepted.tsv"'
    rows = [line.split("\t") for line in reply.text.splitlines()]
    assert rows[0] == list(decision_files.COLUMNS)
    assert [row[:3] for row in rows[1:]] == [
        ["thing 30", "likes", "thing 31"],
        ["thing 30", "likes", HOSTILE[1]],
    ]


def test_no_name_is_a_formula_of_a_spreadsheet(curator):
    """As CSV, for spreadsheets. As TSV names are exact, since programs read it back."""
    decide(curator, ACCEPT, ACCEPT | {"tail": HOSTILE[4]})
    reply = curator.get("/facts.csv")
    assert reply.headers["content-type"] == "text/csv; charset=utf-8"
    assert reply.headers["content-disposition"] == 'attachment; filename="mine-accepted.csv"'
    rows = list(csv.reader(io.StringIO(reply.content.decode("utf-8-sig"), newline="")))
    assert [row[:3] for row in rows[1:]] == [
        ["thing 30", "likes", "thing 31"],
        ["thing 30", "likes", HOSTILE[4]],
    ]


NAMES = st.text(st.sampled_from("=+-@＝'\"a;,\n \t"), max_size=5)


@given(NAMES, NAMES)
def test_cells_of_csv_and_tsv(name, other):
    made = [Decision(name, "r", other, "accepted", None, "now")]
    [_, row] = csv.reader(io.StringIO(as_csv(made), newline=""))
    for cell, exact in zip(row, (name, "r", other, "", "now", "accepted", "", ""), strict=True):
        assert cell.strip()[:1] not in FORMULA
        assert cell in (exact, f"'{exact}")
        assert cell == exact or exact.strip()[:1] in {*FORMULA, "＝", "'"} or exact[:1] in "\n\t"
    if not set(name + other) & set("\t\n"):
        assert as_tsv(made).splitlines()[1].split("\t")[:3] == [name, "r", other]


@given(NAMES, NAMES)
@example("a", "'=")
def test_exported_decisions_are_read_back(name, other):
    made = [
        Decision(
            name or "a", "r", other or "b", "rejected", None, "now", note="why", decided_by="me"
        ),
        Decision("c", "r", "d", "accepted", 0.25, "now"),
    ]
    listed = json.dumps([asdict(decision) for decision in made])
    assert parse_decisions(listed, "a.json") == made
    assert parse_decisions(f'{{"decisions": {listed}}}', "a.json") == made
    assert parse_decisions(as_json_lines(made), "a.jsonl") == made
    names = name + other
    if not set(names) & set("\t\n") and names.strip() == names:
        assert parse_decisions(as_tsv(made), "a.tsv") == made
        assert parse_decisions(as_csv(made), "a.CSV") == made


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.json", "{", 1),
        ("a.json", "{}", 1),
        ("a.json", "[1]", 1),
        ("a.csv", "head,relation,tail\na,b,c\n", 2),
        ("a.tsv", "head\trelation\tverdict\na\tb\taccepted", 2),
        ("a.csv", "head,relation,tail,verdict\na,b,c,maybe\n", 2),
    ],
)
def test_a_file_that_is_none_of_decisions_is_refused(name, text, line):
    with pytest.raises(RequestError, match=f"Line {line} of {name} is no decision"):
        parse_decisions(text, name)
    with pytest.raises(InvalidValue):
        parse_decisions(text, "a.xls")


def test_triples_without_a_verdict_get_one():
    [read] = parse_decisions("head,relation,tail\na,b,c", "a.csv", verdict="rejected")
    assert (read.triple, read.verdict, read.probability) == (("a", "b", "c"), "rejected", None)


def test_names_as_rdf():
    made = [
        Decision("http://e.org/é#x", "is a", "a:b> <c", "accepted", None, "now"),
    ]
    assert decision_files.as_ntriples(decision.triple for decision in made) == (
        "<http://e.org/é#x> <urn:dualkg:is%20a> <urn:dualkg:a%3Ab%3E%20%3Cc> .\n"
    )


def test_decisions_are_exported_and_imported_elsewhere(curator, untouched_folders, tmp_path):
    noted = REJECT | {"note": " not\n true ", "decided_by": "Ada"}
    decide(curator, ACCEPT, noted)
    first = curator.get("/decisions.json").json()["decisions"]
    assert [item["note"] for item in first] == [None, "not true"]
    assert first[1]["decided_by"] == "Ada"
    assert curator.get("/decisions.nt", params={"verdict": "rejected"}).text.count("\n") == 1
    found = curator.get("/decisions.json", params={"q": "not TRUE"}).json()["decisions"]
    assert found == first[1:]
    assert (
        curator.get("/decisions.json", params={"verdict": "accepted"}).json()["decisions"]
        == first[:1]
    )

    elsewhere = shutil.copytree(untouched_folders[0], tmp_path / "other")
    with (
        serving(application(ServedRuns.load([elsewhere], device="cpu"))) as address,
        httpx.Client(base_url=address, timeout=LIMIT) as client,
    ):
        for name in ("decisions.csv", "decisions.json"):
            file = {"name": name, "text": curator.get(f"/{name}").content.decode("utf-8-sig")}
            counts = client.post("/api/decisions/import", json=file).json()
            assert (counts["accepted"], counts["rejected"]) == (1, 1)
        assert client.get("/decisions.json").json()["decisions"] == first
        wrong = {"name": "a.csv", "text": "head,relation,tail,verdict\nnobody,likes,x,accepted"}
        assert client.post("/api/decisions/import", json=wrong).status_code == 404
        of_page = {"origin": "http://other.example"}
        reply = client.post("/api/decisions/import", json=wrong, headers=of_page)
        assert reply.status_code == 403


def test_decided_facts_are_no_predictions(curator):
    query = {"find": "tail", "head": "thing 20", "relation": "likes", "k": 3}
    before = curator.get("/query.json", params=query).json()["predictions"]
    first, second, _ = (answer["name"] for answer in before)
    triple = {"head": "thing 20", "relation": "likes"}
    decide(
        curator,
        {**triple, "tail": first, "verdict": "rejected"},
        {**triple, "tail": second, "verdict": "accepted"},
    )
    after = curator.get("/query.json", params=query).json()
    assert [item["name"] for item in after["rejected"]] == [first]
    assert [item["name"] for item in after["accepted"]] == [second]
    assert after["rejected"][0]["probability"] == pytest.approx(before[0]["probability"])
    assert not {first, second} & {item["name"] for item in after["predictions"]}
    assert len(after["predictions"]) == 3

    for k in (5, 200):  # small and large replies
        params = {**triple, "k": k}
        answers = curator.get("/api/tails", params=params).json()["predictions"]
        verdicts = {item["name"]: item["verdict"] for item in answers if item["verdict"]}
        assert verdicts.items() <= {first: "rejected", second: "accepted"}.items()
    assert verdicts == {first: "rejected", second: "accepted"}
    score = curator.get("/api/score", params={**triple, "tail": first}).json()["scores"][0]
    assert score["verdict"] == "rejected"
    explanation = curator.get("/api/explain", params={**triple, "tail": first}).json()
    assert explanation["verdict"] == "rejected"
    assert explanation["facts_of_head"]
    details = curator.get("/api/entity/thing 20").json()
    assert [fact["tail"]["name"] for fact in details["accepted"]] == [second]
    assert [fact["tail"]["name"] for fact in details["rejected"]] == [first]
    facts = []
    for fact in details["predicted"]:
        if fact["relation"]["name"] == "likes":
            facts.append((fact["head"]["name"], fact["tail"]["name"]))
    assert not {("thing 20", first), ("thing 20", second)} & set(facts)
    text = curator.get("/map/predictions?entity=thing 20&relation=likes").text
    assert "1 accepted, 1 rejected" in text


def test_filters_have_all_facts(curator):
    decide(curator, ACCEPT, REJECT)
    listed = {
        show: curator.get("/facts.json", params={"top": 10, "show": show}).json()["facts"]
        for show in ("all", "open", "accepted", "rejected")
    }
    names = {
        show: [tuple(fact[part]["name"] for part in ("head", "relation", "tail")) for fact in facts]
        for show, facts in listed.items()
    }
    accepted = tuple(ACCEPT[part] for part in ("head", "relation", "tail"))
    rejected = tuple(REJECT[part] for part in ("head", "relation", "tail"))
    assert names["accepted"] == [accepted]
    assert names["rejected"] == [rejected]
    assert len(names["all"]) == len(names["open"]) == 10
    assert not {accepted, rejected} & set(names["open"])
    assert all(fact["verdict"] is None for fact in listed["open"])
    likes = {"show": "rejected", "relation": "likes"}
    assert curator.get("/facts.json", params=likes).json()["facts"] == []


def test_a_full_disk_is_named(curator, folder, monkeypatch):
    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    decide(curator, ACCEPT)
    monkeypatch.setattr("dualkg.inference.decisions.write_text", full)
    reply = decide(curator, REJECT)
    assert reply.status_code == 500
    error = reply.json()["error"]
    assert error.startswith(f"{folder / 'decisions.jsonl'} cannot be written: No space left on")
    assert error.endswith("Nothing was stored.")
    assert len(curator.get("/api/decisions").json()["decisions"]) == 1


@pytest.mark.parametrize("change", ["move", "remove", "replace", "unfinished"])
def test_a_folder_that_is_gone_gets_no_decision(curator, folder, untouched_folders, change):
    assert decide(curator, REJECT).status_code == 200
    if change == "remove":
        shutil.rmtree(folder)
    elif change == "unfinished":
        RunFolder(folder).report.unlink()
    else:
        folder.rename(folder.with_name("moved"))
    if change == "replace":
        shutil.copytree(untouched_folders[1], folder)
    files = sorted(folder.parent.rglob("*"))
    for reply in (decide(curator, ACCEPT), curator.get("/api/decisions"), curator.get("/facts")):
        assert reply.status_code == 503
    assert decide(curator, ACCEPT).json()["error"] == (
        "The folder of the run mine was moved, removed or replaced after the server had loaded "
        "it, so decisions are neither read nor saved. Put it back, or restart the server."
    )
    assert sorted(folder.parent.rglob("*")) == files
    if change == "move":
        folder.with_name("moved").rename(folder)
        assert decide(curator, ACCEPT).json() == {"run": "mine", "accepted": 1, "rejected": 1}


def test_a_store_in_a_folder_that_is_not_there(tmp_path):
    store = DecisionStore(tmp_path / "run" / "decisions.jsonl")
    decision = Decision("a", "r", "b", "accepted", None, "2026-01-01T00:00:00+00:00")
    with pytest.raises(DualkgError, match="cannot be written: No such file or directory"):
        store.update([decision])
    assert not store.path.parent.exists()


def test_a_name_that_tsv_cannot_hold(curator):
    decide(curator, ACCEPT | {"tail": HOSTILE[4]})
    reply = curator.get("/facts.tsv")
    assert reply.status_code == 400
    assert "has a tab or a line end" in reply.json()["error"]
    assert curator.get("/api/decisions").json()["decisions"][0]["tail"] == HOSTILE[4]


def test_new_facts_have_their_decisions(curator):
    facts = curator.get("/facts.json", params={"top": 5}).json()["facts"]
    assert len(facts) == 5
    assert {fact["verdict"] for fact in facts} == {None}
    second = {part: facts[1][part]["id"] for part in ("head", "relation", "tail")}
    decide(curator, second | {"verdict": "rejected"})
    again = curator.get("/facts.json", params={"top": 5}).json()["facts"]
    assert [fact["verdict"] for fact in again] == [None, "rejected", None, None, None]
    params = {"relation": "is a", "min_probability": 0.001}
    of_relation = curator.get("/facts.json", params=params).json()["facts"]
    assert {fact["relation"]["name"] for fact in of_relation} == {"is a"}


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "file://"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"Sec-Fetch-Site": "same-origin", "Origin": "http://evil.example"},
    ],
)
def test_a_page_of_another_host_cannot_decide(curator, folder, headers):
    reply = decide(curator, ACCEPT, headers=headers)
    assert reply.status_code == 403
    assert reply.json()["error"].startswith(
        "Decisions are accepted from this server's own pages only"
    )
    assert not (folder / "decisions.jsonl").exists()


def test_a_page_of_this_server_can_decide(curator):
    origin = str(curator.base_url).rstrip("/")
    for headers in ({"Origin": origin}, {"Origin": origin, "Sec-Fetch-Site": "same-origin"}):
        assert decide(curator, ACCEPT, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_a_form_cannot_decide(curator, folder, kind):
    body = json.dumps({"decisions": [ACCEPT]})
    reply = curator.post(
        "/api/decisions", content=body, headers={"Content-Type": kind} if kind else {}
    )
    assert reply.status_code == 415
    assert "Content-Type: application/json" in reply.json()["error"]
    assert not (folder / "decisions.jsonl").exists()
    as_json = {"Content-Type": "application/json; charset=utf-8"}
    assert decide(curator, ACCEPT, headers=as_json).status_code == 200


def test_decisions_need_the_token(folder):
    app = application(ServedRuns.load([folder], device="cpu"), token="secret")
    with serving(app) as address, httpx.Client(base_url=address, timeout=LIMIT) as client:
        for where in ("/api/decisions", "/facts.tsv", "/facts.json", "/facts"):
            assert client.get(where).status_code == 401
        assert decide(client, ACCEPT).status_code == 401
        assert decide(client, ACCEPT, headers={"Authorization": "Bearer secret"}).status_code == 200


def test_a_read_only_server(folder):
    app = application(ServedRuns.load([folder], device="cpu"), read_only=True)
    with serving(app) as address, httpx.Client(base_url=address, timeout=LIMIT) as client:
        reply = decide(client, ACCEPT)
        assert reply.status_code == 403
        assert "--read-only" in reply.json()["error"]
        assert not client.get("/api/decisions").json()["can_decide"]
        assert "data-can-decide" not in client.get("/facts").text


def test_a_run_without_a_folder(untouched_folders):
    run = load_run(untouched_folders[0])
    run.folder = None
    app = application(ServedRuns([ServedRun.of(run, name="loose", device="cpu")]))
    with serving(app) as address, httpx.Client(base_url=address, timeout=LIMIT) as client:
        assert not client.get("/api/decisions").json()["can_decide"]
        reply = decide(client, ACCEPT)
    assert (reply.status_code, "has no folder" in reply.json()["error"]) == (400, True)


def test_concurrent_decisions_are_all_stored(curator, folder):
    made = [ACCEPT | {"tail": f"thing {number}"} for number in range(12, 40)]
    with ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(lambda decision: decide(curator, decision), made))
    assert {reply.status_code for reply in replies} == {200}
    assert len((folder / "decisions.jsonl").read_text("utf-8").splitlines()) == len(made)


def test_decisions_survive_a_kill(folder):
    with Started(COMMAND, "serve", folder, "--port", 0, "--device", "cpu") as server:
        address = server.stdout.readline().strip()
        with httpx.Client(base_url=address, timeout=LIMIT) as client:
            assert decide(client, ACCEPT).status_code == 200
        server.kill()
    [stored] = DecisionStore(RunFolder(folder).decisions).load().values()
    assert stored.triple == ("thing 30", "likes", "thing 31")


def some(tail="c", verdict="accepted"):
    return Decision(
        "a", "b", tail, verdict, probability=0.25, decided_at="2026-01-01T00:00:00+00:00"
    )


def test_a_file_written_by_another_store_is_read_again(tmp_path):
    first = DecisionStore(tmp_path / "d.jsonl")
    second = DecisionStore(tmp_path / "d.jsonl")
    first.update([some("c")])
    second.update([some("d")])
    assert [decision.tail for decision in first.load().values()] == ["c", "d"]
    assert (
        as_tsv([some()]).splitlines()[1] == "a\tb\tc\t0.25\t2026-01-01T00:00:00+00:00\taccepted\t\t"
    )


WRITER = """
import sys
from pathlib import Path
from dualkg.inference.decisions import Decision, DecisionStore

store = DecisionStore(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for number in range(50):
    names = sys.argv[2], "likes", str(number)
    store.update([Decision(*names, "accepted", 0.5, "2026-01-01T00:00:00+00:00")])
"""


def test_two_processes_that_decide_at_once(tmp_path):
    path = tmp_path / "decisions.jsonl"
    with Started(WRITER, path, "a") as first, Started(WRITER, path, "b") as second:
        for writer in (first, second):
            assert writer.stdout.readline() == "ready\n"
        for writer in (first, second):
            writer.write("go")
        assert [first.finish().code, second.finish().code] == [0, 0]
    expected = {(head, "likes", str(number)) for head in ("a", "b") for number in range(50)}
    assert set(DecisionStore(path).load()) == expected
    assert [file.name for file in tmp_path.iterdir()] == ["decisions.jsonl"]  # no lock stays behind


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"head": "a"', "Invalid JSON: EOF while parsing an object at line 1 column 12"),
        ("[1]", "Input should be an object"),
        (
            json.dumps(some().__dict__ | {"verdict": "maybe"}),
            "verdict: Input should be 'accepted' or 'rejected'",
        ),
    ],
)
def test_a_damaged_file(tmp_path, line, reason):
    store = DecisionStore(tmp_path / "d.jsonl")
    store.update([some()])
    with store.path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(RequestError) as caught:
        DecisionStore(store.path).load()
    assert str(caught.value) == (
        f"Line 2 of {store.path} is no decision ({reason}). Correct or remove it."
    )


def test_training_again_does_not_delete_decisions(folder):
    DecisionStore(RunFolder(folder).decisions).update([some()])
    with pytest.raises(RequestError):
        RunFolder(folder).check_free(overwrite=True)
    RunFolder(folder).decisions.unlink()
    RunFolder(folder).check_free(overwrite=True)


def test_the_page_of_new_facts(curator):
    page = curator.get("/facts")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert "&lt;b&gt;bold&lt;/b&gt;" in page.text
    assert "<b>bold" not in page.text
    assert "data-can-decide" in page.text
    assert "/facts.tsv" in page.text


def test_the_rows_of_the_page(curator):
    """The stream of the page has the facts of `/facts.json` as rows, with their decisions."""
    facts = curator.get("/facts.json", params={"top": 5}).json()["facts"]
    decide(
        curator,
        {part: facts[1][part]["id"] for part in ("head", "relation", "tail")}
        | {"verdict": "accepted"},
    )
    lines = [
        json.loads(line) for line in curator.get("/facts/rows", params={"top": 5}).text.splitlines()
    ]
    rows = [line["html"] for line in lines if line["kind"] == "triple"][-5:]
    assert lines[-1] == {"kind": "end", "num_triples": 5}
    assert [
        f'data-head="{escape(fact["head"]["name"])}"' in row
        for fact, row in zip(facts, rows, strict=True)
    ] == [True] * 5
    assert ["data-verdict" in row for row in rows] == [False, True, False, False, False]
    assert not any("<b>bold" in row or "<script>alert" in row for row in rows)


@pytest.mark.parametrize(
    "cell",
    ["=1+1", " =1", "\ufeff=1", "\x00@a", "\t=1", "\r-1", "＝1", "⁺1", "\u202e=1", "\u0301=1"],
)
def test_formulas_behind_characters_that_are_not_seen_are_guarded(cell):
    assert without_formula(cell) == f"'{cell}"


@pytest.mark.parametrize("cell", ["France", "", "a=1", "é", " a", "日本", "'a", "5"])
def test_other_cells_are_as_they_were(cell):
    assert without_formula(cell) == cell


def test_a_cell_that_looks_guarded_is_guarded_itself():
    """Otherwise the reader, which takes one guard off, would change the name."""
    assert without_formula("'=1") == "''=1"
