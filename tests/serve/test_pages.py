"""Pages as the server sends them: their content, names as text, and no resource of another host."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from markupsafe import escape
from starlette.requests import Request

import dualkg as kg
from dualkg import serve
from dualkg.inference.explanation import share_text
from dualkg.serve.app import application
from dualkg.serve.errors import ErrorReply
from dualkg.serve.served import ServedRun, ServedRuns
from dualkg.serve.service import Limits, RequestContext, Service
from dualkg.serve.templating import entity_url, fill, frequency, percent, short, visible
from tests.processes import LIMIT
from tests.serve.conftest import HOSTILE, serving

STATIC = Path(serve.__file__).with_name("static")
TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
SVG = "http://www.w3.org/2000/svg"  # a name, not an address
QUERY = {"head": "thing 20", "relation": "likes"}
# Elements that pages do not have, and that names would like to be.
FOREIGN = {"b", "base", "embed", "iframe", "img", "object", "style"}


def context_of(served, query_string: bytes = b"") -> RequestContext:
    service = Service(served, limits=Limits(), log=False, read_only=False)
    return RequestContext(
        Request({"type": "http", "query_string": query_string}), service, served.get(None)
    )


class Audit(HTMLParser):
    """Elements, text and addresses of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, key, value) for key, value in attributes]

    def handle_data(self, data):
        self.text += data

    def values(self, tag, key):
        """The values of an attribute of all elements with a tag."""
        return [value for *attribute, value in self.attributes if attribute == [tag, key]]

    def addresses(self):
        """All that the page links to or loads."""
        return [value for _, key, value in self.attributes if key in ("href", "src", "action")]


def audited(reply) -> Audit:
    """A page in which no name is markup, and which loads nothing from another host."""
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'self'" in reply.headers["content-security-policy"]
    assert "unsafe" not in reply.headers["content-security-policy"]
    page = Audit(reply.text)
    assert not FOREIGN & set(page.tags)
    assert all(not key.startswith("on") and key != "style" for _, key, _ in page.attributes)
    assert page.tags.count("script") == len(page.values("script", "src"))
    for address in page.addresses():
        assert address[0] in "/#"
        assert not address.startswith("//")
    return page


@pytest.mark.parametrize("name", HOSTILE)
def test_an_untrusted_name_is_text(client, name):
    for address in (
        f"/entity/{quote(name, safe='')}",
        f"/entity?{quote('name')}={quote(name, safe='')}",
    ):
        if name.endswith(".json") and "?" not in address:
            continue  # that is the page of `notes`, for programs
        reply = client.get(address)
        assert reply.status_code == 200
        assert str(escape(visible(name))) in reply.text
        assert visible(name) in audited(reply).text
    reply = client.get("/", params={"find": "head", "tail": name, "relation": "<b>bold</b>"})
    assert reply.status_code == 200
    assert ("input", "data-name", name) in audited(reply).attributes


def test_links_lead_to_entities_of_any_name(client):
    page = audited(client.get("/entity", params={"name": "thing 12"}))
    addresses = {value for value in page.values("a", "href") if value.startswith("/entity")}
    assert len(addresses) > 10
    for address in addresses:
        assert client.get(address).status_code == 200


@pytest.mark.parametrize("name", [".", "..", "", "a.json"])
def test_names_that_a_browser_would_change_are_a_query_parameter(served, name):
    assert entity_url(context_of(served), name) == f"/entity?name={name}"


def test_the_start_page_has_example_queries(client):
    page = audited(client.get("/"))
    queries = [value for value in page.values("a", "href") if value.startswith("/?find=tail")]
    assert queries
    for query in queries:
        assert client.get(query).status_code == 200


@pytest.mark.parametrize(
    ("params", "find"),
    [
        (QUERY, "tail"),
        ({"tail": "Twenty", "relation": "is a"}, "head"),
        ({"head": "thing 20", "tail": "thing 30"}, "relation"),
    ],
)
def test_the_query_page_has_the_content_of_its_json(client, params, find):
    page = audited(client.get("/", params=params))
    [json] = page.values("link", "href")[-1:]
    found = client.get(json).json()
    assert found["find"] == find
    assert found["query"][find] is None
    for answer in found["known"] + found["predictions"]:
        assert short(answer["label"]) in page.text
    assert len(page.values("a", "data-why")) == len(found["predictions"])
    known = {answer["name"] for answer in found["known"]}
    predicted = {answer["name"] for answer in found["predictions"]}
    assert not known & predicted


def test_known_answers_are_those_of_the_graph(client, served):
    graph = served.get(None).run.graph
    head = graph.entities.id("thing 20")
    relation = graph.relations.id("likes")
    triples = [row for split in ("train", "valid", "test") for row in graph.split(split).tolist()]
    tails = {graph.entities[t] for h, r, t in triples if (h, r) == (head, relation)}
    known = client.get("/query.json", params=QUERY).json()["known"]
    assert {answer["name"] for answer in known} == tails


def test_the_prediction_set_is_that_of_the_api(client):
    for coverage in (0.5, 0.9):
        params = {"entity": "thing 20", "relation": "likes", "coverage": coverage, "k": 1000}
        found = client.get("/api/prediction-set", params=params).json()
        page = client.get("/query.json", params=QUERY | {"coverage": coverage, "k": 200}).json()
        size = page["prediction_set"]
        assert (size["coverage"], size["size"]) == (coverage, found["size"])
        assert size["num_listed"] == found["size"]
        inside = {answer["name"] for answer in page["predictions"] if answer["in_prediction_set"]}
        assert inside == {answer["name"] for answer in found["predictions"]}
        text = client.get("/", params=QUERY | {"coverage": coverage}).text
        assert f"{100 * coverage:g} % of the time" in text


def test_the_page_says_so_if_the_prediction_set_skips_rows_of_the_list(client):
    """The set has the highest scores; the list is in the order of the probability."""
    seen = set()
    for number in range(12, 40):
        query = {"find": "tail", "head": f"thing {number}", "relation": "likes"}
        query["coverage"] = 0.4 if number % 2 else 0.9
        answers = client.get("/query.json", params=query).json()
        inside = [answer["in_prediction_set"] for answer in answers["predictions"]]
        size = answers["prediction_set"]
        assert size["num_listed"] == sum(inside)
        skips = inside != sorted(inside, reverse=True)
        assert size["is_first"] != skips
        text = client.get("/", params=query).text
        assert ("Why the set skips rows" in text) == skips
        num_below = size["size"] - size["num_listed"]
        sentence = f"{num_below} {'is' if num_below == 1 else 'are'} not listed"
        assert (sentence in text) == (num_below > 0 and size["num_listed"] > 0)
        seen.add(skips)
    assert seen == {True, False}


def test_a_run_without_calibration_has_scores(client):
    page = audited(client.get("/", params=QUERY | {"run": "plain"}))
    assert "dualkg calibrate" in page.text
    assert "score " in page.text
    assert " % of the time" not in page.text


def test_links_stay_with_the_run(client):
    page = audited(client.get("/", params=QUERY | {"run": "plain"}))
    for link in page.values("a", "href"):
        assert "run=plain" in link or link.startswith("#") or link == "/docs"
    assert set(page.values("option", "value")) >= {"calibrated", "plain"}
    assert "run=" not in "".join(audited(client.get("/", params=QUERY)).values("a", "href"))


def test_the_explanation_page_has_the_content_of_the_api(client):
    params = QUERY | {"tail": "thing 30"}
    page = audited(client.get("/explain", params=params))
    found = client.get("/api/explain", params=params).json()
    assert client.get("/explain.json", params=params).json() == found
    assert found["supporting_triples"]
    for reason in found["supporting_triples"]:
        assert f"{reason['score_drop']:+.2f}".replace("-", "−") in page.text


def test_the_entity_page_has_known_and_predicted_facts(client):
    page = audited(client.get("/entity/Twenty"))
    found = client.get("/entity/Twenty.json").json()
    assert found == client.get("/entity.json", params={"name": "Twenty"}).json()
    assert "thing 20" in page.text  # the name, where people call it otherwise
    assert f"{found['num_known']} known facts" in page.text
    for kind in ("known", "predicted"):
        assert f"edge {kind}" in page.values("path", "class")
        for fact in found[kind]:
            assert short(fact["tail"]["label"]) in page.text
    for answer in found["similar"]:
        assert short(answer["label"]) in page.text


def test_an_unknown_entity_gets_a_page_with_similar_names(client):
    reply = client.get("/entity/thing%2013x")
    page = audited(reply)
    assert reply.status_code == 404
    assert "No entity is named 'thing 13x'." in page.text
    near = [value for value in page.values("a", "href") if value.startswith("/entity")]
    assert "/entity/thing%2013" in near
    assert client.get(near[0]).status_code == 200


def test_an_unknown_name_is_not_markup(client):
    reply = client.get("/entity/" + quote("<img src=x onerror=alert(1)>"))
    assert reply.status_code == 404
    assert "&lt;img src=x" in reply.text
    audited(reply)


def test_a_query_with_an_unknown_name_offers_others(client):
    reply = client.get("/", params={"head": "thing 13x", "relation": "likes"})
    page = audited(reply)
    assert reply.status_code == 404
    assert "No entity is named 'thing 13x'" in page.text
    offered = [value for value in page.values("a", "href") if "head=thing+13&" in value]
    assert client.get(offered[0]).status_code == 200


@pytest.mark.parametrize(
    ("where", "status", "sentence"),
    [
        ("/?head=Twenty&relation=likes&k=0", 422, "k must be at least 1; got '0'."),
        (
            "/?head=Twenty&relation=likes&find=all",
            422,
            "find must be 'head', 'relation' or 'tail'; got 'all'.",
        ),
        ("/?run=nobody", 404, "No served run is named 'nobody'."),
        ("/explain?head=Twenty&relation=likes", 422, "tail is missing."),
        ("/explain?head=nobody&relation=likes&tail=Twenty", 404, "No entity is named 'nobody'"),
        ("/entity", 422, "name is missing."),
    ],
)
def test_an_error_is_a_page_with_a_message(client, where, status, sentence):
    reply = client.get(where)
    assert reply.status_code == status
    assert sentence in audited(reply).text


BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


@pytest.mark.parametrize(
    "where", ["/nonsense", "/nonsense/<img src=x>", "/static/nothing.css", "/apiary", "/facts/"]
)
def test_a_browser_gets_a_page_for_an_unknown_address(client, where):
    reply = client.get(where, headers=BROWSER)
    page = audited(reply)
    assert reply.status_code == 404
    assert "There is nothing at this address." in page.text
    assert page.tags.count("nav") == page.tags.count("h1") == 1


@pytest.mark.parametrize(
    "where", ["/nonsense.json", "/api", "/api/nonsense", "/entity/nobody.json"]
)
def test_api_addresses_have_no_error_pages(client, where):
    reply = client.get(where, headers=BROWSER)
    assert (reply.status_code, reply.headers["content-type"]) == (404, "application/json")
    assert reply.json()["error"]


def test_a_program_gets_json_for_an_unknown_address(client):
    for headers in ({}, {"Accept": "application/json"}, {"Accept": ""}):
        error = client.get("/nonsense", headers=headers).json()["error"]
        assert error.startswith("There is nothing at this address.")


def test_a_browser_that_posts_to_a_page(client):
    reply = client.post("/map", headers=BROWSER)
    assert (reply.status_code, reply.headers["allow"]) == (405, "GET")
    assert "This address accepts GET; got POST." in audited(reply).text


def test_an_unexpected_exception_is_a_page_without_a_traceback(client_of, failing, capfd):
    reply = client_of(runs=failing).get("/entity/Twenty", headers=BROWSER)
    assert reply.status_code == 500
    assert "The server failed to answer. The error is in its log." in audited(reply).text
    for word in ("secret", "ZeroDivisionError", "Traceback", ".py"):
        assert word not in reply.text
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_page_that_takes_too_long(client_of, blocked):
    client = client_of(Limits(seconds=0.2), runs=blocked.runs)
    with blocked:
        reply = client.get("/", params=QUERY, headers=BROWSER)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert "longer than its limit of 0.2 seconds" in audited(reply).text


def test_an_incomplete_query_says_what_to_name(client):
    page = audited(client.get("/", params={"find": "tail", "head": "Twenty"}))
    assert "Name the relation to find the tail." in page.text
    offered = [value for value in page.values("a", "href") if "relation=" in value]
    assert len(offered) == 3
    for link in offered:
        assert client.get(link).status_code == 200
    other = client.get("/", params={"find": "relation", "tail": "Twenty"})
    assert "Name the head to find the relation." in other.text
    assert client.get("/", params={"find": "tail", "head": "nobody"}).status_code == 200


def test_the_error_of_an_incomplete_query_as_json(client):
    reply = client.get("/query.json", params={"head": "Twenty"})
    assert (reply.status_code, reply.json()["error"]) == (
        400,
        "Name the relation to find the tail.",
    )


def test_a_page_has_landmarks(client):
    for address in ("/", "/entity/Twenty", "/entity/nobody"):
        page = audited(client.get(address))
        for landmark in ("header", "nav", "main", "footer", "h1"):
            assert page.tags.count(landmark) == 1
        assert page.values("html", "lang") == ["en"]
        assert page.values("a", "href")[0] == "#main"


def test_static_files_are_revalidated_by_etag(client):
    for path in STATIC.iterdir():
        reply = client.get(f"/static/{path.name}")
        assert reply.headers["content-type"].split(";")[0] == TYPES[path.suffix]
        assert reply.headers["cache-control"] == "no-cache"
        assert reply.content == path.read_bytes()
        again = client.get(f"/static/{path.name}", headers={"If-None-Match": reply.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert client.head(f"/static/{path.name}").headers["etag"] == reply.headers["etag"]


@pytest.mark.parametrize(
    "name", ["nothing.css", "..%2flayout.py", "../layout.py", "%2e%2e/layout.py", ""]
)
def test_no_other_file_is_sent(client, name):
    assert client.get(f"/static/{name}").status_code == 404


def test_pages_load_files_of_the_package(client):
    for address in ("/", "/entity/Twenty", "/explain?head=Twenty&relation=likes&tail=Twenty-one"):
        page = audited(client.get(address))
        scripts = page.values("script", "src")
        styles = [value for value in page.values("link", "href") if "static" in value]
        loaded = {name.removeprefix("/static/") for name in scripts + styles}
        assert loaded <= {path.name for path in STATIC.iterdir()}


def test_no_file_of_a_page_names_another_host():
    for path in [*STATIC.iterdir(), *STATIC.with_name("templates").iterdir()]:
        text = path.read_text(encoding="utf-8").replace(SVG, "")
        external = r"https?:|url\([\"']?http|@import|[\"'`]//"
        as_markup = r"innerHTML|outerHTML|insertAdjacentHTML|eval\("
        assert not re.search(f"{external}|{as_markup}", text), path


def luminance(colour: str) -> float:
    """The relative luminance of `#rrggbb` by WCAG."""
    red, green, blue = (linear(int(colour[i : i + 2], 16) / 255) for i in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def linear(part: float) -> float:
    return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4


def contrast(a: str, b: str) -> float:
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_contrast_in_both_themes(theme):
    """WCAG AA: 4.5 for text, 3 for bars, borders and the ring of what has the focus."""
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    tokens = {
        name: pair[theme]
        for name, *pair in re.findall(r"--([\w-]+): light-dark\((#\w+), (#\w+)\)", style)
    }
    for text in ("ink", "soft", "predicted"):
        for ground in ("paper", "surface"):
            assert contrast(tokens[text], tokens[ground]) >= 4.5, (text, ground)
    assert contrast(tokens["predicted"], tokens["predicted-soft"]) >= 4.5
    assert contrast(tokens["ink"], tokens["predicted-soft"]) >= 4.5
    assert contrast(tokens["paper"], tokens["predicted"]) >= 4.5
    for shape in ("edge", "predicted-bar", "focus"):
        assert contrast(tokens[shape], tokens["paper"]) >= 3, shape


def test_templates_escape_names_and_spell_out_carriage_returns(served):
    reply = ErrorReply(404, "'", suggestions=["<b>", '"&', "a\r\nb"])
    context = context_of(served, b"key=a%0Db&run=calibrated")
    page = fill(context, "error.html", json=None, title="<i>", reply=reply)
    assert "<h1>&lt;i&gt;</h1>" in page
    assert "<bdi>&lt;b&gt;</bdi>" in page
    assert 'name="key" value="a&#13;b"' in page
    assert "\r" not in page
    assert "\n" not in page  # line breaks of a template add no space


def test_invisible_names_are_made_visible():
    assert visible(" ") == "“ ”"
    assert visible("a\r\nb\tc\x1b") == "a↵b⇥c\ufffd"
    assert len(short("long " * 200)) <= 160


@pytest.mark.parametrize(
    ("probability", "text"),
    [
        (0.0, "<0.1 %"),
        (0.0042, "0.4 %"),
        (0.0531, "5.3 %"),
        (0.531, "53 %"),
        (0.9962, "99.6 %"),
        (1.0, ">99.9 %"),
    ],
)
def test_percent(probability, text):
    assert percent(probability) == text


def test_a_counted_share_may_be_all_or_nothing():
    shares = (0.0, 0.0004, 0.25, 0.9999, 1.0)
    assert [frequency(share) for share in shares] == ["0 %", "<0.1 %", "25 %", ">99.9 %", "100 %"]


def test_pages_of_an_ensemble_offer_no_explanation(run_folders):
    ensemble = ServedRun.of(kg.Ensemble(run_folders, weights="equal"), name="both")
    member = ServedRun.of(kg.load_run(run_folders[1]), name="member")
    app = application(ServedRuns([ensemble, member]))
    with serving(app) as address, httpx.Client(base_url=address, timeout=LIMIT) as client:
        query = {"head": "Twenty", "relation": "likes"}
        assert "Why?" not in client.get("/", params=query).raise_for_status().text
        assert "Why?" in client.get("/", params={**query, "run": "member"}).text
        refused = client.get("/api/explain", params={**query, "tail": "Twenty-one"})
        assert "has no embeddings of its own" in refused.text


def test_pages_of_a_path_network_have_no_similar_entities(run_folders):
    graph = kg.load_run(run_folders[1]).graph
    model = kg.PathNetwork(graph, dim=16, steps=2)
    run = kg.train(model, graph, epochs=1)
    app = application(ServedRuns([ServedRun.of(run, name="paths")]))
    with serving(app) as address, httpx.Client(base_url=address, timeout=LIMIT) as client:
        assert "Similar entities" not in client.get("/entity/Twenty").raise_for_status().text
        assert client.get("/api/entity/Twenty").raise_for_status().json()["similar"] == []
        for address in ("/api/similar", "/map.json"):
            refused = client.get(address, params={"entity": "Twenty"})
            assert refused.status_code == 400
            assert "PathNetwork has no embeddings of its own" in refused.json()["error"]


def test_pages_of_a_path_network_explain_by_paths(run_folders):
    embeddings = kg.load_run(run_folders[1])
    graph = embeddings.graph
    network = kg.train(kg.PathNetwork(graph, dim=16, steps=2), graph, epochs=2, batch_size=64)
    runs = [ServedRun.of(network, name="network"), ServedRun.of(embeddings, name="embeddings")]
    with (
        serving(application(ServedRuns(runs))) as address,
        httpx.Client(base_url=address, timeout=LIMIT) as client,
    ):
        query = QUERY | {"tail": "thing 30"}
        own = client.get("/api/explain", params=query).raise_for_status().json()
        wanted = network.predictor().explain(*query.values())
        assert own["sentences"] == wanted.sentences()
        assert (own["network"], own["supporting_triples"]) == ("network", None)
        assert own["supporting_paths"]
        page = audited(client.get("/explain", params=query))
        for path in own["supporting_paths"]:
            assert share_text(path["share"]) in page.text
            assert path["rule"]["sentence"] in page.text
            for edge in path["edges"]:
                tail = graph.entities.label(graph.entities.id(edge["triple"]["tail"]))
                assert short(tail) in page.text

        # The paths of the network explain the predictions of embeddings, too.
        both = client.get("/api/explain", params=query | {"run": "embeddings"}).json()
        assert both["supporting_paths"] == own["supporting_paths"]
        assert both["supporting_triples"]
        page = audited(client.get("/explain", params=query | {"run": "embeddings"}))
        assert both["network"] == "network"
        assert "Paths that lead to it in network" in page.text
        assert "Supporting training triples" in page.text

        for address in ("/", "/entity/Twenty", "/run", "/map", "/facts"):
            client.get(address, params=QUERY).raise_for_status()
        assert "Why?" in client.get("/", params=QUERY).text


def test_every_known_answer_has_a_figure(client, served):
    """Those of train have no probability; a score says what the model makes of them."""
    params = {"find": "tail", "head": "thing 30", "relation": "likes", "k": 1}
    content = client.get("/query.json", params=params).json()
    assert len(content["known"]) == content["num_known"] > 1
    page = client.get("/", params=params).text
    listed = re.search(r'<ul class="list known-answers">(.*?)</ul>', page, flags=re.DOTALL)[1]
    items = listed.split("<li>")[1:]
    assert len(items) == content["num_known"]
    assert all("model: " in item or "score " in item for item in items)
