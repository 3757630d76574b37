"""The site: its pages, its links to the repository, its API reference, and its build."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dualkg as kg
from scripts import pictures

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
hooks = pytest.importorskip("scripts.site_hooks", reason="the site needs the extra docs")
notebooks = pytest.importorskip("scripts.notebooks", reason="the site needs the extra docs")


def test_every_page_is_in_the_navigation():
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    navigation = config.partition("\nnav:\n")[2]
    listed = re.findall(r"([\w/-]+\.md)$", navigation, re.M)
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    from_outside = {name for name in hooks.PAGES.values() if name != "index.md"}
    assert sorted(listed) == sorted(pages | from_outside)


def test_every_public_name_is_in_the_api_reference_once():
    pages = [path.read_text(encoding="utf-8") for path in sorted((DOCS / "api").glob("*.md"))]
    listed = re.findall(r"^::: [\w.]+\.(\w+)$", "\n".join(pages), re.M)
    assert sorted(listed) == sorted(kg.__all__)


def test_the_index_of_the_api_reference_has_the_names_of_each_page():
    index = (DOCS / "api" / "index.md").read_text(encoding="utf-8")
    for page, names in re.findall(r"^\| \[\w+\]\((\w+\.md)\) \| (.+) \|$", index, re.M):
        text = (DOCS / "api" / page).read_text(encoding="utf-8")
        assert re.findall(r"`(\w+)`", names) == re.findall(r"^::: [\w.]+\.(\w+)$", text, re.M)


@pytest.mark.parametrize(
    ("source", "address", "markdown", "expected"),
    [
        ("docs/serve.md", "serve.md", "[a](start.md#terms)", "[a](start.md#terms)"),
        ("docs/serve.md", "serve.md", "[a](../benchmarks/RESULTS.md)", "[a](benchmarks.md)"),
        ("docs/api/index.md", "api/index.md", "[a](../../CHANGELOG.md)", "[a](../changelog.md)"),
        ("CONTRIBUTING.md", "contributing.md", "[a](docs/cli.md)", "[a](cli.md)"),
        ("docs/serve.md", "serve.md", "[a](../LICENSE)", "[a](files/LICENSE)"),
        ("benchmarks/RESULTS.md", "benchmarks.md", "[the results](results)", "the results"),
        ("docs/serve.md", "serve.md", "[`a`](../LICENSE)", "[`a`](files/LICENSE)"),
        ("docs/serve.md", "serve.md", "`[a](../LICENSE)`", "`[a](../LICENSE)`"),
        ("docs/serve.md", "serve.md", "```\n[a](../LICENSE)\n```", "```\n[a](../LICENSE)\n```"),
        ("docs/serve.md", "serve.md", "[a](https://a.example/)", "[a](https://a.example/)"),
    ],
)
def test_links_to_the_repository_lead_to_pages_of_the_site(source, address, markdown, expected):
    assert hooks.with_site_links(markdown, ROOT / source, address) == expected


def test_a_resource_of_another_host_is_found():
    page = '<link href="a.css"><a href="https://a.example"></a><script src="//b.example/c.js">'
    assert hooks.RESOURCE.findall(page) == ["//b.example/c.js"]


def test_the_output_of_a_cell_is_below_its_block(tmp_path):
    notebook = tmp_path / "page.ipynb"
    outputs = [[], [{"text": "2\n"}]]
    cells = [{"cell_type": "code", "source": "", "outputs": output} for output in outputs]
    notebook.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    page = "```python\na = 2\n```\n\n```console no-run\n$ b\n```\n\n```python\nprint(a)\n```\n"
    expected = page + "\n```{.text .output}\n2\n```\n"
    assert hooks.with_outputs(page, notebook) == expected


def test_the_pictures_are_drawn_from_the_measurements():
    for name, text in pictures.pictures().items():
        assert (pictures.FOLDER / name).read_text(encoding="utf-8") == text, name


def test_a_text_that_changes_keeps_the_outputs_of_a_notebook(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n\n```python\nprint(2)\n```\n", encoding="utf-8")
    notebook = notebooks.notebook_of(page)
    printed = {"output_type": "stream", "name": "stdout", "text": "2"}
    notebooks.code_cells(notebook)[0]["outputs"] = [printed]
    saved = tmp_path / "page.ipynb"
    saved.write_text(json.dumps(notebook), encoding="utf-8")

    page.write_text("after\n\n```python\nprint(2)\n```\n", encoding="utf-8")
    assert not notebooks.is_current(page)
    again = notebooks.notebook_of(page)
    assert notebooks.keep_outputs(again, saved)
    assert notebooks.code_cells(again)[0]["outputs"] == [printed]
    page.write_text("after\n\n```python\nprint(3)\n```\n", encoding="utf-8")
    assert not notebooks.keep_outputs(notebooks.notebook_of(page), saved)


@pytest.mark.parametrize("page", notebooks.tutorials(), ids=lambda page: page.stem)
def test_a_notebook_has_the_cells_of_its_page(page):
    assert notebooks.is_current(page), "Run: python scripts/notebooks.py"


@pytest.mark.slow
@pytest.mark.parametrize("page", notebooks.tutorials(), ids=lambda page: page.stem)
def test_a_notebook_runs(page, tmp_path, request):
    if page.stem == "reproducing":
        request.getfixturevalue("data_folder")  # the tutorial that reads a benchmark graph
    notebook = notebooks.notebook_of(page)
    notebooks.execute(notebook, tmp_path)
    assert any(cell.get("outputs") for cell in notebook["cells"])


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    for page in sorted(tmp_path.rglob("*.html")):
        html = page.read_text(encoding="utf-8")
        assert hooks.RESOURCE.findall(html) == [], page
        # Markdown that was not understood is left as it is.
        assert "<p>```" not in html, page
        assert not re.search(r"<p>(?:- |\d+\. |\| )", html), page
    assert '"title":"Calibration"' in (tmp_path / "search" / "search_index.js").read_text("utf-8")
