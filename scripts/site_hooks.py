"""Hooks of MkDocs: pages from outside docs/, and links to files of the repository.

The pages of docs/ link to each other and to the repository by relative paths, as a reader of the
repository needs them. On the site, results, benchmarks, changelog and contributing are pages, and
any other file that a page links to, such as a recipe or a measurement, is copied beside them.
"""

import json
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# Pages of the site that are not in docs/, by their path in the repository.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "paper/records/RESULTS.md": "results.md",
    "benchmarks/RESULTS.md": "benchmarks.md",
}
# A link or an image of Markdown: what precedes the address, the address, its anchor.
LINK = re.compile(
    r"(?P<text>!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<path>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)"
)
# Where Material loads the worker of its search from, if a page is opened from disk.
SHIM = "https://unpkg.com/iframe-worker/shim"
RESOURCE = re.compile(r'<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)="((?:https?:)?//[^"]+)"')
BLOCK = re.compile(r"^```(\w+)((?: [\w-]+)*)\n.*?^```$", re.M | re.S)
logger = logging.getLogger("mkdocs.hooks.site")
CODE = re.compile(r"(^```.*?^```$|^    [^\n]*$|`[^`\n]*\]\([^`\n]*`)", re.M | re.S)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside docs/, and every file of the repository that a page links to."""
    sources = sorted(DOCS.rglob("*.md"))
    for source, target in PAGES.items():
        if source != "README.md":
            files.append(generated(config, target, ROOT / source))
            sources.append(ROOT / source)
    added: set[Path] = set()
    while sources:
        for linked in repository_files(sources.pop()):
            if linked not in added:
                added.add(linked)
                files.append(generated(config, address_of(linked), linked))
                if linked.suffix == ".md":
                    sources.append(linked)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Adapt links, and drop what only the tests of examples read."""
    source = source_of(page.file.src_uri)
    if source.with_suffix(".ipynb").exists():
        markdown = with_outputs(markdown, source.with_suffix(".ipynb"))
    markdown = re.sub(r"^```(\w+) no-run$", r"```\1", markdown, flags=re.M)
    return with_site_links(markdown, source, page.file.src_uri)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Load the worker from the site itself, and warn of anything else from another host."""
    return with_own_resources(output, page.file.dest_uri)


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """Do the same for pages without a source, such as 404.html."""
    return with_own_resources(output_content, template_name)


def with_own_resources(output: str, address: str) -> str:
    shim = os.path.relpath("assets/iframe-worker.js", Path(address).parent)
    output = output.replace(SHIM, shim)
    for resource in RESOURCE.findall(output):
        logger.warning("%s loads %s from another host.", address, resource)
    return output


def with_outputs(markdown: str, notebook: Path) -> str:
    """A tutorial with what the cells of its notebook printed, below each block."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    outputs = [
        "".join(cell["outputs"][0]["text"]) if cell["outputs"] else ""
        for cell in cells
        if cell["cell_type"] == "code"
    ]

    def shown(block: re.Match[str]) -> str:
        is_run = block[1] in ("python", "console") and "no-run" not in block[2]
        text = outputs.pop(0) if is_run else ""
        return f"{block[0]}\n\n```{{.text .output}}\n{text}```" if text else block[0]

    return BLOCK.sub(shown, markdown)


def generated(config: Any, address: str, path: Path) -> File:
    return File.generated(config, address, abs_src_path=str(path))


def source_of(address: str) -> Path:
    """The file of the repository that a page of the site is made from."""
    for source, target in PAGES.items():
        if address == target and source != "README.md":
            return ROOT / source
    if address.startswith("files/"):
        return ROOT / address.removeprefix("files/")
    return DOCS / address


def address_of(path: Path) -> str:
    """Where the site has a file of the repository."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    return PAGES.get(name, f"files/{name}")


def repository_files(source: Path) -> Iterable[Path]:
    """Files outside docs/ that a page links to, but for pages of the site."""
    for part in CODE.split(source.read_text(encoding="utf-8"))[::2]:
        for link in LINK.finditer(part):
            path = target_of(source, link["path"])
            if path and path.is_file() and address_of(path).startswith("files/"):
                yield path


def target_of(source: Path, link: str) -> Path | None:
    """The file of a relative link; nothing for a link to another host."""
    if "://" in link or link.startswith("mailto:"):
        return None
    return Path(os.path.normpath(source.parent / link))


def with_site_links(markdown: str, source: Path, address: str) -> str:
    """A page whose relative links lead to where the site has their files.

    A folder of the repository is no page, so that only the text of a link to it is left.
    """

    def rewritten(link: re.Match[str]) -> str:
        path = target_of(source, link["path"])
        if path is None or not path.exists():
            return link[0]
        if path.is_dir():
            return link["text"][1:-1]
        relative = os.path.relpath(address_of(path), Path(address).parent)
        return f"{link['text']}({Path(relative).as_posix()}{link['anchor'] or ''})"

    parts = CODE.split(markdown)
    # Code is between the other parts, and stays as it is.
    parts[::2] = [LINK.sub(rewritten, part) for part in parts[::2]]
    return "".join(parts)
