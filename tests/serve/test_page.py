"""The page in a browser: a conversation of two turns, and what of the cache it shows."""

from __future__ import annotations

import json

import pytest

from .browser import CHROMIUM, Browser
from .serving import Stand, wait_for

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (Debian's package chromium)")
ENTER, ESCAPE = ("Enter", 13), ("Escape", 27)


def turns(browser: Browser, count: int) -> None:
    browser.wait(f"document.getElementById('chat').dataset.turns === '{count}'")


def number(browser: Browser, name: str) -> float:
    return float(browser.value(f"document.getElementById({json.dumps(name)}).textContent").replace(",", ""))


def test_second_turn_hits_the_blocks_of_the_first(tmp_path, stand):
    assert stand.post("/reset_prefix_cache", {})[0] == 200
    (tmp_path / "profile").mkdir()
    with Browser(tmp_path / "profile") as browser:
        browser.open(f"{stand.url}/")
        browser.wait("document.getElementById('model').textContent === 'tiny'")
        browser.wait("document.getElementById('state').className === 'up'")
        browser.value("document.getElementById('most').value = 60")
        assert browser.value("document.activeElement.id") == "text", "one can begin to write at once"
        browser.type("What is a cache? " * 8)
        browser.press(*ENTER)
        turns(browser, 1)
        assert number(browser, "last-cached") == 0
        browser.type("And what does it hold?")
        browser.press(*ENTER)
        turns(browser, 2)
        cached, prompt = number(browser, "last-cached"), number(browser, "last-prompt")
        assert cached >= 128 and cached % 16 == 0 and cached < prompt
        assert browser.value("document.querySelectorAll('.turn').length") == 4
        browser.wait(f"Number(document.getElementById('hit-device').textContent.replace(',', '')) === {cached:.0f}")
        browser.wait("Number(document.getElementById('tier-device').dataset.cached) > 8")
        assert browser.value("document.querySelectorAll('#slots i').length") == 8
        # The keyboard alone: Esc ends an answer, Alt+N begins another conversation.
        browser.value("document.getElementById('most').value = 1500")
        browser.type("Once upon a time")
        browser.press(*ENTER)
        browser.press(*ESCAPE)
        turns(browser, 3)
        wait_for(lambda: not stand.engine.stats().live)
        browser.call("Input.dispatchKeyEvent", type="keyDown", key="n", modifiers=1, windowsVirtualKeyCode=78)
        assert browser.value("document.querySelectorAll('.turn').length") == 0
        # Another one that begins while an answer comes has nothing of that.
        browser.type("Once upon a time")
        browser.press(*ENTER)
        browser.wait("document.querySelector('.turn.assistant .body')?.textContent")
        browser.call("Input.dispatchKeyEvent", type="keyDown", key="n", modifiers=1, windowsVirtualKeyCode=78)
        browser.wait("!document.getElementById('send').hidden")
        browser.value("document.getElementById('most').value = 5")
        browser.type("Hi")
        browser.press(*ENTER)
        turns(browser, 1)
        assert browser.value("document.querySelectorAll('.turn').length") == 2
        browser.resize(390, 844)
        assert browser.value("document.documentElement.scrollWidth") <= 390, "nothing stands out on a narrow window"
        assert browser.problems == []


@pytest.mark.slow
def test_page_says_what_is_wrong(tmp_path):
    (tmp_path / "profile").mkdir()
    with Stand(tmp_path, keys={"me": "a-secret-key"}) as stand, Browser(tmp_path / "profile") as browser:
        browser.open(f"{stand.url}/")
        browser.wait("document.getElementById('state').className === 'down'")
        assert "API key" in browser.value("document.getElementById('state-text').textContent")
        browser.value("document.getElementById('key').value = 'a-secret-key'")
        browser.wait("document.getElementById('state').className === 'up'")
        browser.wait("document.getElementById('model').textContent === 'tiny'")
        stand.engine.close()
        browser.wait("document.getElementById('send') && document.getElementById('text').focus() === undefined")
        browser.type("Hi")
        browser.press(*ENTER)
        browser.wait("document.querySelector('.note.bad')?.textContent.includes('closed')")
