"""The chat page in a real browser: an answer comes into focus step by step, can be replayed, and stays text."""

from __future__ import annotations

import pytest

from tests.d1.serve.serving import serving
from tests.d1.show import browser

SHOWN = "document.querySelectorAll('.film .t:not(.off)').length"


@pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium is installed here")
def test_a_chat(tiny_model_dir):
    with serving(tiny_model_dir, api_key="secret") as served, browser.chromium() as page:
        page.send("Page.navigate", url=f"{served.url}/")
        page.wait_for("document.readyState === 'complete' && !!document.getElementById('ask')")

        def say(text: str) -> None:
            page.ask(f"byId('said').value = {text!r}, byId('length').value = 24, byId('ask').requestSubmit()")

        say("a b")
        page.wait_for("byId('trouble').textContent.includes('API key')")
        page.ask("byId('key').value = 'secret', byId('temperature').value = 1, byId('trouble').textContent = ''")
        say("a b")
        page.wait_for("document.querySelectorAll('.turn').length === 2")
        who = page.ask("[...document.querySelectorAll('.turn')].map(t => t.firstChild.textContent)")
        assert who == ["you", "model"]
        assert page.ask(SHOWN) == page.ask("document.querySelectorAll('.film .t').length") == 24
        page.ask("players[0].seek(2)")
        assert 0 < page.ask(SHOWN) < 24
        say("<img src=x onerror=document.title='owned'> a b")
        page.wait_for("document.querySelectorAll('.turn').length === 4")
        assert page.ask("document.querySelectorAll('img').length") == 0
        assert page.ask("messages.length") == 4
        page.point("#reset", click=True)
        assert page.ask("document.querySelectorAll('.turn, .film').length") == 0
        wrong = [error for error in page.errors if "401" not in error]
        assert wrong == []
        assert {address.split("/")[2] for address in page.requests if address.startswith("http")} == {served.url[7:]}
