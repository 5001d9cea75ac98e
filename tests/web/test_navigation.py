"""Addresses, filters, themes, keys and hostile names."""

import shutil

import pytest
from helpers.browsing import Server

from simic.telemetry.events import Anomaly, GamingSuspicion, to_json

pytestmark = pytest.mark.web

HOSTILE = "<script>alert(1)</script>"


def test_links_lead_through_the_views_and_back(server, open_page):
    page = open_page(server)
    page.click("a:text-is('first')")
    for view in ("growth", "learning", "story"):
        page.click(f"#tabs a[href='/run/first/{view}']")
        page.wait_for_selector(f"main h1:text-is('{view.capitalize()}')")
        assert page.url == f"{server.base}/run/first/{view}"
        assert page.title() == f"first · {view.capitalize()} · simic watch"
    page.go_back()
    page.go_back()
    page.wait_for_selector("h1:text-is('Growth')")
    page.go_forward()
    page.wait_for_selector("h1:text-is('Learning')")
    page.reload()
    page.wait_for_selector(".chart canvas")
    page.click(".mark")
    page.wait_for_selector("h1:text-is('Runs')")


def test_a_host_and_a_decision_have_an_address(server, open_page):
    page = open_page(server, "/run/first/growth?update=2&host=g1-e2&decision=3")
    page.wait_for_selector("h2:has-text('Host g1-e2')")
    assert page.locator(".decision h3").inner_text().startswith("Decision 3")
    assert "of update 2" in page.locator(".growth [role=status]").inner_text()
    page.locator("input[type=range]").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".decision h3:has-text('Decision 4')")
    assert page.evaluate("document.activeElement.type") == "range"
    assert page.url.endswith("update=2&host=g1-e2&decision=4")
    page.click("text=Follow the newest")
    page.wait_for_selector(".growth [role=status]:has-text('of update 4')")
    page.go_back()
    page.reload()
    page.wait_for_selector(".decision h3:has-text('Decision 4')")


def test_every_decision_says_what_was_likely_legal_and_paid(server, open_page):
    page = open_page(server, "/run/first/growth?host=g0-e0&decision=0")
    detail = page.locator(".decision")
    detail.wait_for()
    assert detail.locator(".probabilities li").first.inner_text().startswith("op")
    assert detail.locator(".chips [data-chosen]").count() == 1
    terms = [number(text) for text in detail.locator(".legend b").all_inner_texts()]
    assert sum(terms) == pytest.approx(number(detail.locator("h4 b").inner_text()), abs=0.005)
    assert page.locator(".decisions tbody tr").count() == 12
    page.click(".decisions tbody tr:nth-child(6)")
    page.wait_for_selector(".decision h3:has-text('Decision 5')")


def number(text: str) -> float:
    """The page writes a minus sign, not a hyphen."""
    return float(text.replace("\N{MINUS SIGN}", "-"))


def test_a_training_of_ones_own_is_one_host(server, open_page):
    page = open_page(server, "/run/own/story?kind=lifecycle")
    page.click(".log tbody tr:last-child .what a")
    page.wait_for_selector(".decision h3:has-text('germinate')")
    assert page.locator(".growth [role=status]").inner_text() == "12 decisions"
    assert page.locator(".garden").is_hidden()
    assert page.locator(".decisions thead").inner_text().split() == ["#", "Action", "Accuracy"]
    page.click("#tabs a:text-is('Learning')")
    page.wait_for_selector("figure:has-text('val accuracy') canvas")
    page.click("#tabs a:text-is('Now')")
    page.wait_for_selector(".fact:has-text('val loss')")
    assert page.locator("text=Health").is_hidden()


def test_the_story_is_filtered_by_kind_host_and_severity(server, open_page):
    page = open_page(server, "/run/first/story")
    page.wait_for_selector(".log tbody tr")
    page.select_option("#f-kind", "lifecycle")
    page.select_option("#f-host", "g0-e1")
    assert page.url.endswith("/story?kind=lifecycle&host=g0-e1")
    rows = page.locator(".log tbody tr")
    assert rows.count() > 0
    for reloaded in (False, True):
        if reloaded:
            page.reload()
            page.wait_for_selector(".log tbody tr")
        cells = [row.split("\t") for row in rows.all_inner_texts()]
        assert {(cell[3].strip(" ·\n").split()[-1], cell[4]) for cell in cells} == {("lifecycle", "g0-e1")}
    page.click(".log tbody tr:first-child .what a")
    page.wait_for_selector("h2:has-text('Host g0-e1')")
    page.go_back()
    page.select_option("#f-severity", "error")
    page.wait_for_selector("text=No entry passes the filter.")
    page.click("text=Clear")
    page.wait_for_selector(".log tbody tr")
    assert page.url.endswith("/story")


def test_runs_are_compared_with_the_settings_that_differ(server, open_page):
    page = open_page(server)
    page.check("input[aria-label='Compare first']")
    page.check("input[aria-label='Compare second']")
    page.click("text=Compare 2 runs")
    page.wait_for_selector(".differences tbody tr:has-text('reward.scheme')")
    shown = page.locator(".differences tbody tr").all_inner_texts()
    settings = {name: values for name, *values in (row.split("\t") for row in shown[4:])}
    assert set(settings) == {"reward.scheme", "rng_seed", "updates"}
    assert set(settings["reward.scheme"]) == {"score", "score_with_costs"}
    legend = page.locator("figure:has(strong:text-is('Score')) .legend").inner_text()
    assert "first" in legend
    assert "second" in legend
    page.reload()
    page.wait_for_selector(".differences tbody tr:has-text('rng_seed')")


def test_a_chart_has_a_table_with_its_numbers(server, open_page):
    page = open_page(server, "/run/first/learning")
    page.click("summary:text-is('Table of Score')")
    rows = page.locator("figure:has(strong:text-is('Score')) tbody tr")
    rows.first.wait_for()  # the table is filled when it is opened
    assert rows.count() == 5
    assert rows.first.inner_text().startswith("4\t")


@pytest.mark.parametrize("system", ["light", "dark"])
def test_the_theme_follows_the_system_until_one_is_chosen(server, open_page, system):
    page = open_page(server, color_scheme=system)
    assert is_dark(page) == (system == "dark")
    page.click("#theme")
    assert is_dark(page) == (system == "light")
    page.reload()
    page.wait_for_selector("h1")
    assert is_dark(page) == (system == "light")
    page.click("#theme")
    assert is_dark(page) == (system == "dark")


def is_dark(page) -> bool:
    return page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 19, 23)"


def test_names_are_text(server, open_page):
    page = open_page(server)
    page.click(f"a:text-is('{HOSTILE}')")
    page.wait_for_selector(".light")
    assert page.locator("#crumb").inner_text() == HOSTILE
    assert page.title().startswith(HOSTILE)
    page.click("#tabs a:text-is('Learning')")
    page.wait_for_selector(".chart canvas")
    page.reload()
    page.wait_for_selector(".chart canvas")
    page.goto(f"{server.base}/evaluation/comparison")
    page.wait_for_selector(f".forest-name:text-is('{HOSTILE}')")
    assert page.evaluate("document.querySelectorAll('main script').length") == 0


def test_the_page_is_used_by_keys_alone(server, open_page):
    page = open_page(server)
    page.wait_for_selector(".runs tbody tr")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.keyboard.press("Enter")
    page.locator("a:text-is('second')").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(".light")
    assert page.evaluate("document.activeElement.id") == "main"


def test_a_run_that_was_removed_is_said_to_be_gone(server, add_run, open_page):
    run = add_run("short_lived")
    page = open_page(server, "/run/short_lived/now")
    page.wait_for_selector(".light")
    page.click(".mark")
    page.wait_for_selector("a:text-is('short_lived')")
    shutil.rmtree(run)
    page.wait_for_selector("a:text-is('short_lived')", state="detached")
    page.go_back()
    page.wait_for_selector("[role=alert]")
    assert "there is no such run" in page.locator("[role=alert]").inner_text()
    assert [fault for fault in page.faults if "404" not in fault] == []  # the browser's own words
    page.faults.clear()


def test_without_a_token_nothing_is_shown(server, open_page):
    page = open_page(Server(server.base, ""), "/run/first/now")
    assert "token" in page.locator("body").inner_text()
    assert "first" not in page.locator("body").inner_text()
    page.faults.clear()


def test_entries_older_than_those_in_the_page_are_fetched(server, add_run, open_page):
    """A page holds the latest 2,000; a filter reaches all the same back to the first update."""
    told = [
        Anomaly(update=update, name="kl_spike", value=1.0, threshold=0.1)
        if update % 50 == 0
        else GamingSuspicion(
            **{"update": update, "group": 0, "env": 0, "decision": 1, "slot": "stem", "blueprint": "mlp"},
            reason="overclaiming",
            contribution=1.0,
        )
        for update in range(5000)
    ]
    (add_run("long") / "events.jsonl").write_text("".join(to_json(event) + "\n" for event in told))
    page = open_page(server, "/run/long/story?kind=anomaly&severity=warning")
    page.wait_for_selector(".story [role=status]:has-text('40 of the latest 2,000')")
    page.click("text=Show older entries")
    page.wait_for_selector(".story [role=status]:has-text('100 pass the filter')")
    rows = page.locator(".log tbody tr")
    assert rows.count() == 100
    assert rows.last.locator("td").nth(1).inner_text() == "0"
    assert page.locator("text=Show older entries").is_hidden()
    page.click("text=Clear")
    page.wait_for_selector(".log tbody tr:nth-child(200)")
    for shown in (400, 800, 1600, 3200):
        page.click("text=Show older entries")
        page.wait_for_selector(f".log tbody tr:nth-child({shown})")
    texts = page.locator(".log tbody tr td:nth-child(2)").all_inner_texts()
    updates = [int(text.replace(",", "")) for text in texts]
    assert updates == list(range(4999, 1799, -1))
