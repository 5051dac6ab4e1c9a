"""An agent in JupyterLab: it works behind a server, its turns unfold, and a click on Accept writes its change."""

from collections.abc import Callable

import pytest
from screen import Lab, Notebook

pytestmark = pytest.mark.browser
BOOK = "08_product.ipynb"


def test_a_click_accepts_what_the_agent_did(
    lab: Lab, notebook: Callable[[str], Notebook], picture: Callable[[str], None]
) -> None:
    from playwright.sync_api import expect

    path = lab.folder / BOOK
    text = path.read_text()
    assert 'verdict: str = \\"accept\\"' in text and "tasks_wanted: int = 10" in text
    path.write_text(
        text.replace('verdict: str = \\"accept\\"', 'verdict: str = \\"later\\"').replace(
            "tasks_wanted: int = 10", "tasks_wanted: int = 8"
        )
    )
    book = notebook(BOOK)
    book.run_all()
    book.ran_cleanly()
    talk = book.cell("views.conversation(work.conversation.turns)")
    fold = talk.locator("details", has_text="codebase_search")
    fold.locator("summary").click()
    expect(fold.locator("pre")).to_contain_text("def parse_day")
    picture("agent_conversation")
    buttons = book.cell("views.verdict(work)")
    expect(buttons.get_by_text("+    year, month, day = (int")).to_be_visible()
    buttons.get_by_role("button", name="Accept").click()
    expect(buttons.get_by_text("accepted: 1 files changed")).to_be_visible()
    expect(buttons.get_by_role("button", name="Reject")).to_be_disabled()
    picture("agent_accepted")
