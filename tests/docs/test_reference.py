"""The generated reference pages are what the code says, and the documents' paths and links lead somewhere."""

from __future__ import annotations

import os
import re
import runpy
from functools import cache
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from deploy.alone.stages import read_stages_file
from deploy.options.config import DeployConfig, build_config
from proxy.background import Background
from proxy.metrics import Metrics
from proxy.records.counts import RequestCounts
from tests.docs.documents import DOCUMENTS, ROOT

GENERATED = runpy.run_path(str(ROOT / "docs/generate.py"))
FOLDERS = ("bench", "deploy", "proxy", "epd_serve", "store", "npu_ops", "tests", "requirements")
README = ROOT / "README.md"


@pytest.mark.parametrize("name", GENERATED["pages"]())
def test_a_generated_page_is_what_the_code_says(name):
    written = (ROOT / "docs/reference" / name).read_text(encoding="utf-8")

    assert written == GENERATED["pages"]()[name], "make it anew: make reference"


def test_every_setting_has_its_meaning():
    settings = GENERATED["settings"]()

    assert len(settings) > 100
    assert [one.key for one in settings if not one.meaning] == []


def test_every_metric_of_a_running_proxy_is_in_the_reference():
    page = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    collectors = (Metrics().registry, Background().registry, RequestCounts(0.0))
    families = [family for one in collectors for family in one.collect()]

    assert [one.name for one in families if f"`{one.name}{'_total' * (one.type == 'counter')}`" not in page] == []


def test_the_complete_file_is_what_the_code_says_and_what_is_served_without_it():
    file = ROOT / "docs/examples/deployment.yaml"

    assert file.read_text(encoding="utf-8") == GENERATED["complete_file"](), "make it anew: make reference"
    assert build_config({}, str(file)) == DeployConfig()


@pytest.mark.parametrize("path", [README, ROOT / "docs/guides/proxy.md"], ids=lambda path: path.name)
def test_files_that_a_document_shows_load(path, tmp_path):
    (shown,) = re.findall(r"```yaml\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    file = tmp_path / "shown.yaml"
    file.write_text(shown)

    if "stages:" in shown:
        assert len(read_stages_file(str(file)).instances) == 2
    else:
        assert build_config({}, str(file)).policy == "least-loaded"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_metrics_and_settings_that_a_document_names_exist(path):
    text = path.read_text(encoding="utf-8")
    reference = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`\w+`", reference))
    settings = {one.key for one in GENERATED["settings"]()}
    sections = "|".join({key.partition(".")[0] for key in settings if "." in key})

    metrics = set(re.findall(r"\bepd_(?:proxy|stage|store|kv|control)_\w+", text))
    series = {one: re.sub("_(bucket|count|sum)$", "", one) for one in metrics}  # of a histogram
    assert {one for one, family in series.items() if not {f"`{one}`", f"`{family}`"} & named} == set()
    assert set(re.findall(rf"`(?:--proxy )?((?:{sections})\.\w+)", text)) - settings - {"memory.txt"} == set()  # a file


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_rate_has_the_range_without_which_prometheus_refuses_it(path):
    text = path.read_text(encoding="utf-8")

    assert re.findall(r"\brate\((?![^()]*\[\d+[smh]\]\))[^`]*", text) == []


def test_the_readme_is_short_enough_to_be_read():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150
    assert README.stat().st_size <= 9_000


def test_the_architecture_is_short_enough_to_be_read():
    assert len((ROOT / "docs/architecture.md").read_text(encoding="utf-8").splitlines()) <= 250


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(path):
    targets = [target for target in links(path) if not re.match(r"[a-z]+:", target)]

    assert [target for target in targets if not leads_somewhere(path, target)] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_that_a_document_names_exist(path):
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./*-]*)`", path.read_text(encoding="utf-8"))

    assert [one for one in named if not list(ROOT.glob(one.rstrip("/")))] == []


def test_documents_that_the_code_names_exist():
    sources = [path for name in FOLDERS for path in (ROOT / name).rglob("*.py")] + [
        ROOT / "Makefile",
        *(ROOT / "containers").glob("*file"),
    ]
    named = {
        (str(source.relative_to(ROOT)), one)
        for source in sources
        for one in re.findall(r"\bdocs/[\w/.-]+\.(?:md|yaml)\b", source.read_text(encoding="utf-8"))
    }

    assert len(named) > 10
    assert sorted((source, one) for source, one in named if not (ROOT / one).is_file()) == []


def test_every_page_is_in_the_navigation():
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}

    assert pages - set(re.findall(r"[\w/-]+\.md", site)) == set()


def links(path: Path) -> list[str]:
    tokens = MarkdownIt().enable("table").parse(path.read_text(encoding="utf-8"))
    inline = [child for token in tokens if token.type == "inline" for child in token.children or ()]
    return [str(child.attrs[key]) for child in inline for key in ("href", "src") if key in child.attrs]


def leads_somewhere(path: Path, target: str) -> bool:
    file, _, anchor = target.partition("#")
    found = Path(os.path.normpath(path.parent / file)) if file else path
    return found.exists() and (not anchor or anchor in anchors(found))


@cache
def anchors(path: Path) -> set[str]:
    """Returns the anchors of a page's headings, as MkDocs and most hosts of Markdown make them."""
    tokens = MarkdownIt().enable("table").parse(path.read_text(encoding="utf-8"))
    titles = [tokens[at + 1].content for at, token in enumerate(tokens) if token.type == "heading_open"]
    return {slug(title) for title in titles}


def slug(title: str) -> str:
    plain = re.sub(r"[^\w\s-]", "", title.encode("ascii", "ignore").decode()).strip().lower()
    return re.sub(r"[-\s]+", "-", plain)
