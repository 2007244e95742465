"""The page of the server in a real browser, with a fake model."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from ringattn.launch.serve.http.app import read_page
from ringattn.launch.serve.scheduler import ScheduledStep
from tests.launch.serve.test_http import going_on
from tests.support.serving import STOP, FakeRunner, FakeServer, text_of
from tests.support.timing import HANGS_S

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
QUIET += ["--disable-component-update", "--disable-sync", "--disable-quic"]

SOME = re.compile(r"[\s\S]{6}")


def test_the_page_loads_nothing_from_other_servers():
    text, policy = read_page()
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:)""", text)
    assert not re.findall(r"https?://|@import|innerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.findall(r"\sstyle=|\son\w+=", text), "the policy would not let these work"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine")
    sync_api = pytest.importorskip("playwright.sync_api")
    sync_api.expect.set_options(timeout=1000 * HANGS_S)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that fails the test after an error in its console or a request to another server."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page, bad = context.new_page(), []
    page.set_default_timeout(1000 * HANGS_S)
    page.on("pageerror", lambda error: bad.append(str(error)))
    page.on(
        "console",
        lambda line: (
            bad.append(line.text) if line.type == "error" and "Failed to load resource" not in line.text else None
        ),
    )
    page.on(
        "request",
        lambda cache_id: (
            bad.append(cache_id.url) if not cache_id.url.startswith(("http://127.0.0.1", "data:")) else None
        ),
    )
    yield page
    context.close()
    assert not bad


def screenshot(page: Any, name: str) -> None:
    """Save a screenshot into the folder SERVE_SCREENSHOTS, if set."""
    if folder := os.environ.get("SERVE_SCREENSHOTS"):
        page.screenshot(path=str(Path(folder, f"{name}.png")))


def test_a_chat_streams_and_the_state_is_updated(page):
    from playwright.sync_api import expect

    with FakeServer(FakeRunner(pages=300, page_size=16, step_s=0.05)) as served:
        question = next(
            x
            for x in (going_on(f"hello {y}", 3) for y in range(10**4))
            if len(text_of(f"<user>{x}<assistant>", 100)) == 100
        )
        wanted = text_of(f"<user>{question}<assistant>", 100)
        page.goto(served.url)
        expect(page.locator("#status")).to_have_text("ready")
        expect(page.locator("#model")).to_have_text("fake")
        assert page.title() == "fake on ringattn"
        page.fill("#temperature", "0")
        page.fill("#tokens", "100")
        page.fill("#text", question)
        page.keyboard.press("Enter")
        expect(page.locator("#running")).to_have_text("1")
        answer = page.locator(".turn.assistant")
        expect(answer).to_have_text(SOME)
        part = answer.text_content()
        assert 5 < len(part) < 100, "the answer comes piece by piece"
        screenshot(page, "streaming")
        expect(answer).to_have_text(wanted, use_inner_text=False)
        expect(page.locator(".after")).to_contain_text("100 tokens, first after")
        expect(page.locator("#running")).to_have_text("0")
        expect(page.locator("#total-generated")).to_have_text("100")
        expect(page.locator("#ranks .line").first).to_contain_text("of 300 pages")
        # the second turn sends the first along, and shares it
        page.fill("#text", "and more")
        page.click("#send")
        expect(page.locator(".turn.assistant")).to_have_count(2)
        expect(page.locator(".after")).to_have_count(2)
        num_cached = page.locator("#total-shared")
        expect(num_cached).not_to_have_text("0")
        screenshot(page, "chat")
        page.click("#clear")
        expect(page.locator(".turn")).to_have_count(0)


def test_answers_are_shown_as_text_and_never_as_markup(page):
    from playwright.sync_api import expect

    class Markup(FakeRunner):
        def run(self, plan):
            logits = super().run(plan)
            logits.zero_()
            said = "<img src=x onerror=alert(1)><b>bold</b>" + "\0"
            for row, place in enumerate(plan.wanted):
                request = plan.requests[place]
                # of the tokens that are coming the last one is chosen here
                chosen = len(request.tokens) - len(request.prompt) + request.pending - 1
                logits[row, ord(said[min(chosen, len(said) - 1)])] = 10.0
            return logits

    with FakeServer(Markup(pages=300, page_size=16)) as served:
        page.goto(served.url)
        expect(page.locator("#status")).to_have_text("ready")
        page.fill("#text", "hi")
        page.click("#send")
        expect(page.locator(".turn.assistant")).to_have_text("<img src=x onerror=alert(1)><b>bold</b>")
        assert page.locator(".turn img, .turn b").count() == 0


class Endless(FakeRunner):
    """A runner whose answers never stop."""

    def run(self, plan: ScheduledStep) -> Tensor:
        logits = super().run(plan)
        logits[:, STOP] = -float("inf")
        return logits


def test_stopping_an_answer_frees_its_pages(page):
    from playwright.sync_api import expect

    with FakeServer(Endless(pages=300, page_size=16, step_s=0.02)) as served:
        page.goto(served.url)
        expect(page.locator("#status")).to_have_text("ready")
        page.fill("#tokens", "3000")
        page.fill("#temperature", "2")
        page.fill("#text", "go on")
        page.click("#send")
        expect(page.locator(".turn.assistant")).to_have_text(SOME)
        page.click("#stop")
        served.assert_idle()
        assert len(served.runner.steps) < 3000
        expect(page.locator("#stop")).to_be_hidden()
        expect(page.locator(".turn.error")).to_have_count(0)


def test_progress_of_a_long_prompt_and_errors_are_shown(page):
    from playwright.sync_api import expect

    with FakeServer(FakeRunner(pages=600, page_size=16, step_s=0.05)) as served:
        page.goto(served.url)
        expect(page.locator("#status")).to_have_text("ready")
        page.fill("#text", "x" * 5000)
        page.click("#send")
        expect(page.locator("#prefilling .line")).to_contain_text("tokens")
        screenshot(page, "prefill")
        served.state_when(lambda state: not state["prefilling"] and not state["running"])
        expect(page.locator("#prefilling")).to_have_text("none")
        page.fill("#tokens", "1000000")
        page.fill("#text", "too much")
        page.click("#send")
        expect(page.locator(".turn.error")).to_contain_text("must fit into")


def test_the_page_asks_for_a_key_and_shows_an_unreachable_server(page):
    from playwright.sync_api import expect

    with FakeServer(FakeRunner(), api_key="open sesame") as served:
        page.goto(served.url)
        expect(page.locator("#status")).to_have_text("needs a key")
        page.fill("#key", "open sesame")
        expect(page.locator("#status")).to_have_text("ready")
    expect(page.locator("#status")).to_have_text("not reachable")
