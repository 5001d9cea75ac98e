"""Every view, in both themes, on a desk and on a phone: usable for all, nothing wider than the screen, and pictured.

The pictures are in SIMIC_SCREENSHOTS, by default build/screenshots: look at them after a change of the page.
"""

import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.web

PICTURES = Path(os.environ.get("SIMIC_SCREENSHOTS", Path(__file__).parents[2] / "build" / "screenshots"))
AXE = (Path(__file__).parent / "axe.min.js").read_text()
VIEWS = {
    "runs": ("/", ".runs tbody tr"),
    "now": ("/run/first/now", ".light"),
    "growth": ("/run/first/growth?update=1", ".plot .lane"),
    "learning": ("/run/first/learning", ".chart canvas"),
    "compared": ("/run/first/learning?with=second", ".differences tbody tr:nth-child(5)"),
    "story": ("/run/first/story?host=g0-e1", ".log tbody tr"),
    "own-growth": ("/run/own/growth", "svg.network"),
    "evaluation": ("/evaluation/comparison", ".forest li"),
}
"""The address of each view, and what is on the screen when it is filled."""
WIDTHS = {"wide": 1440, "narrow": 375}
DETAILS = "document.querySelectorAll('main details').forEach(details => details.open = true)"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", VIEWS)
def test_view(server, open_page, name, theme):
    path, filled = VIEWS[name]
    page = open_page(server, path, color_scheme=theme)
    page.wait_for_selector(filled)
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 19, 23)"
    assert dark == (theme == "dark")
    for width in WIDTHS:
        set_width(page, WIDTHS[width])
        take_picture(page, f"{name}-{theme}-{width}")
    page.evaluate(DETAILS)
    for width in WIDTHS.values():
        set_width(page, width)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        if width == WIDTHS["wide"] or theme == "light":
            assert violations(page) == []


def set_width(page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 812})
    page.wait_for_timeout(150)  # charts follow in the next frame


def violations(page) -> list[str]:
    """What axe-core finds that hinders people, each with the first element that has it."""
    page.evaluate(AXE)
    found = page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
    return [f"{own['id']}: {own['nodes'][0]['html']}" for own in found if own["impact"] in ("serious", "critical")]


def take_picture(page, name: str) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    path = PICTURES / f"{name}.png"
    page.screenshot(path=path, full_page=True)
    assert path.stat().st_size > 10_000  # an empty page takes less
