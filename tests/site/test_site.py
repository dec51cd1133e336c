"""The site of `nox -s docs`, in the folder of TORCHKILN_SITE: links, and what readers do
in a browser."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from browser import NAMES, Browser, find

PHONE, DESK = 400, 1280
FOLDER = os.environ.get("TORCHKILN_SITE", "")
SITE = Path(FOLDER).resolve()

pytestmark = pytest.mark.skipif(not FOLDER, reason="nox -s docs builds the site and tests it")


def pages() -> list[str]:
    """The paths of all pages, relative to the site."""
    return sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html")) if FOLDER else []


class Quiet(SimpleHTTPRequestHandler):
    """Serves the site without log messages."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find()
    if program is None:
        pytest.skip(f"no Chromium: none of {', '.join(NAMES)} is on PATH")
    with Browser(program, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(autouse=True)
def usual(request: pytest.FixtureRequest) -> None:
    """Sets the size of a desktop window and light colors."""
    if "browser" in request.fixturenames:
        browser: Browser = request.getfixturevalue("browser")
        browser.size(DESK)
        browser.prefer("light")


class Links(HTMLParser):
    """The links of a page, and the anchors that other pages can link to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.to: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del tag
        for name, value in attrs:
            if name == "id" and value:
                self.places.add(value)
            elif name in ("href", "src") and value is not None:
                self.to.append(value)


def test_no_link_is_broken() -> None:
    """Linked files and anchors of the site exist; other addresses are complete."""
    found = {SITE / page: Links(SITE / page) for page in pages()}
    assert len(found) > 30
    broken = []
    for page, links in found.items():
        for link in links.to:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                good = parts.scheme in ("https", "http") and "." in parts.netloc
            else:
                target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
                places = found[target].places if target in found else set()
                good = target.is_file() and (not parts.fragment or parts.fragment in places)
            if not good:
                broken.append(f"{page.relative_to(SITE)}: {link}")
    assert broken == []


CUT_OFF = """[...document.querySelectorAll('article :is(h1, h2, h3, p, li, dt, img, code)')]
  .filter(one => !one.closest('.table-wrapper, pre, .headerlink'))
  .filter(one => one.getBoundingClientRect().right > innerWidth + 1)
  .map(one => one.innerText.slice(0, 40) || one.src)"""
"""Elements that extend beyond the right of the window, unless an ancestor hides that part."""


@pytest.mark.parametrize("page", pages())
def test_a_page_on_a_phone(browser: Browser, address: str, page: str) -> None:
    """A page has no error, no missing picture, and no text that is cut off or below 15 px."""
    browser.size(PHONE)
    browser.open(f"{address}/{page}")
    assert browser.complaints() == []
    assert browser.evaluate("document.scrollingElement.scrollWidth") <= PHONE
    assert browser.evaluate(CUT_OFF) == []
    pictures = "[...document.images].filter(one => !(one.complete && one.naturalWidth))"
    assert browser.evaluate(f"{pictures}.map(one => one.src)") == []
    text = "parseFloat(getComputedStyle(document.querySelector('article')).fontSize)"
    assert browser.evaluate(text) >= 15


def test_navigation(browser: Browser, address: str) -> None:
    browser.open(f"{address}/index.html")
    links = "[...document.querySelectorAll('.sidebar-tree a.reference')]"
    assert browser.evaluate(f"{links}.length") == len(set(pages()) - GENERATED)
    browser.evaluate(f"{links}.find(one => one.innerText == 'Quick start').click()")
    browser.wait_for("Page.loadEventFired")
    assert browser.evaluate("location.pathname") == "/quick-start.html"
    browser.evaluate("document.querySelector('a.next-page').click()")
    browser.wait_for("Page.loadEventFired")
    assert browser.evaluate("location.pathname") == "/install.html"


GENERATED = {"index.html", "genindex.html", "search.html", "py-modindex.html"}
"""Pages that the navigation does not list."""


def test_navigation_on_a_phone(browser: Browser, address: str) -> None:
    """The navigation is hidden until its button is clicked."""
    browser.size(PHONE)
    browser.open(f"{address}/index.html")
    left = "document.querySelector('.sidebar-drawer').getBoundingClientRect().right"
    assert browser.evaluate(left) <= 0
    browser.evaluate("document.querySelector('label.nav-overlay-icon').click()")
    settled = "new Promise(done => setTimeout(done, 500))"
    browser.evaluate(settled)
    assert browser.evaluate(left) > PHONE / 2


@pytest.mark.parametrize(
    ("words", "page"), [("rms_norm", "ops.html"), ("mbarrier", "learn/shipped-product.html")]
)
def test_search(browser: Browser, address: str, words: str, page: str) -> None:
    browser.open(f"{address}/index.html")
    browser.evaluate(
        f"document.querySelector('.sidebar-search').value = {json.dumps(words)};"
        "document.querySelector('.sidebar-search-container').submit()"
    )
    browser.wait_for("Page.loadEventFired")
    ended = "/found|did not match/i.test(document.querySelector('#search-results').innerText)"
    browser.evaluate(
        f"new Promise(done => setInterval(() => {{ if ({ended}) done(1) }}, 20))",
    )
    found = browser.evaluate(
        "[...document.querySelectorAll('#search-results li a')].map(one => one.pathname)"
    )
    assert f"/{page}" in found


def test_copy_buttons(browser: Browser, address: str) -> None:
    """Each block of code has a button that copies exactly its code."""
    granted = ["clipboardReadWrite", "clipboardSanitizedWrite"]
    browser.call("Browser.grantPermissions", permissions=granted, origin=address)
    for page in ("index.html", "quick-start.html", "install.html"):
        browser.open(f"{address}/{page}")
        blocks = browser.evaluate(
            "[...document.querySelectorAll('div.highlight pre')].map(one => one.innerText)"
        )
        assert blocks
        for at, code in enumerate(blocks):
            browser.evaluate(f"document.querySelectorAll('button.copybtn')[{at}].click()")
            assert browser.evaluate("navigator.clipboard.readText()").strip() == code.strip()


CONTRAST = """(() => {
  const light = color => {
    const [r, g, b] = color.match(/[\\d.]+/g).map(Number).map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = one => {
    for (let at = one; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (!/^rgba\\(.*, 0\\)$|transparent/.test(color)) return color;
    }
    return 'rgb(255, 255, 255)';
  };
  const ratio = one => {
    const pair = [light(getComputedStyle(one).color), light(ground(one))].sort((a, b) => a - b);
    return (pair[1] + 0.05) / (pair[0] + 0.05);
  };
  const seen = [...document.querySelectorAll('article :is(p, a, code, td, th, pre span)')];
  return seen.filter(one => one.innerText.trim() && !one.closest('.headerlink') && ratio(one) < 4.5)
    .map(one => `${one.innerText.slice(0, 30)}: ${ratio(one).toFixed(1)}`);
})()"""
"""Elements whose contrast is below 4.5, the minimum of WCAG."""

GROUND = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"


def test_dark_mode(browser: Browser, address: str) -> None:
    """Colors follow the system's preference until a button changes them."""
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        browser.open(f"{address}/index.html")
        assert (max(browser.evaluate(GROUND)) < 64) == (scheme == "dark")
    button = "document.querySelector('.content-icon-container .theme-toggle').click()"
    themes = []
    for _ in range(3):
        browser.evaluate(button)
        themes.append(browser.evaluate("document.body.dataset.theme"))
    assert sorted(themes) == ["auto", "dark", "light"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", ["index.html", "ops.html", "learn/square.html", "cpp.html"])
def test_text_is_legible(browser: Browser, address: str, page: str, scheme: str) -> None:
    browser.prefer(scheme)
    browser.open(f"{address}/{page}")
    assert browser.evaluate(CONTRAST) == []


def test_two_doors(browser: Browser, address: str) -> None:
    """The two entries are side by side, on a phone below each other; both have code and links."""
    doors = "['i-train-models', 'i-write-kernels'].map(id => document.getElementById(id))"
    places = f"{doors}.map(one => [one.getBoundingClientRect().x, one.getBoundingClientRect().y])"
    browser.open(f"{address}/index.html")
    (left, top), (right, other) = browser.evaluate(places)
    assert top == other
    assert right > left + 200
    assert top < 600
    for part in (".highlight-python pre", "a[href$='.html']"):
        assert min(browser.evaluate(f"{doors}.map(one => one.querySelectorAll(`{part}`).length)"))
    browser.size(PHONE)
    browser.open(f"{address}/index.html")
    (left, top), (right, other) = browser.evaluate(places)
    assert left == right
    assert other > top
