"""The tool `web_search` on recorded pages."""

import json
from pathlib import Path

import pytest

from composer_nb.harness.environment import EnvSettings
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.tools.tool_call import call
from composer_nb.harness.tools.web import read_pages
from composer_nb.trainer.records.provenance import capsule

PAGES = [
    {
        "url": "https://docs.test/bisect",
        "title": "bisect",
        "text": "Insert into a sorted list. " * 40 + "bisect_left finds it.",
    },
    {"url": "https://docs.test/heapq", "title": "heapq", "text": "A priority queue. heappush adds an item.\x1b[2J"},
    {"url": "https://docs.test/json", "title": "json", "text": "dumps encodes, loads decodes."},
]


def test_a_search_shows_passages_and_a_url_its_page(tmp_path: Path, backend: Backend) -> None:
    (tmp_path / "pages.jsonl").write_text("\n".join(map(json.dumps, PAGES)))
    tools = EnvSettings(tools="cursor", web=str(tmp_path / "pages.jsonl")).toolset
    assert tools.schemas[-1]["function"]["parameters"]["required"] == ["search_term"]
    with backend.create() as box:
        session = tools.open(box)
        queries = ["priority queue heappush", PAGES[0]["url"], "zzyzx"]
        result, page, no_result = tools.run(session, [call("web_search", search_term=query) for query in queries])
    assert result.text.startswith("https://docs.test/heapq\nheapq\n") and "\x1b" not in result.text
    assert page.text == f"{PAGES[0]['url']}\nbisect\n{PAGES[0]['text']}"
    assert no_result.error is None and no_result.text == "(nothing found)"
    assert "web_search" not in EnvSettings(tools="cursor").toolset.tools


def test_only_a_newline_ends_a_page_of_a_record(tmp_path: Path) -> None:
    page = {**PAGES[2], "text": "one\u2028two\x85three\u2029four"}
    (tmp_path / "pages.jsonl").write_text(f"{json.dumps(page, ensure_ascii=False)}\n{json.dumps(PAGES[1])}\n", "utf-8")
    pages = read_pages(str(tmp_path / "pages.jsonl"))
    assert pages is not None and pages.by_url[page["url"]].text == page["text"] and len(pages.by_url) == 2
    digests = [capsule(tmp_path, env := EnvSettings(tools="cursor", web=str(tmp_path / "pages.jsonl")))]
    (tmp_path / "pages.jsonl").write_text(json.dumps(PAGES[1]))
    digests.append(capsule(tmp_path, env))
    assert [name for name in digests[0] if digests[0][name] != digests[1][name]] == ["tools"], "pages answer a tool"


def test_a_wrong_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "pages.jsonl").write_text(json.dumps(PAGES[0]) + "\n{}\n")
    with pytest.raises(ValueError, match=r"env\.web=.*pages\.jsonl:2: a line needs"):
        _ = EnvSettings(tools="cursor", web=str(tmp_path / "pages.jsonl")).toolset
    with pytest.raises(ValueError, match=r"env\.web: web_search is beside the product's tools"):
        EnvSettings(web="pages.jsonl")
