"""The page while things happen: a run under way, a germination, a server that goes away, a tab that was asleep."""

import socket
import time
from dataclasses import replace
from typing import Any

import pytest
from helpers.browsing import Server, serving, training, wait_for

from simic.telemetry.events import Anomaly, EpisodeTrace, LifecycleChange, Update, to_json
from simic.telemetry.reader import read_events

pytestmark = pytest.mark.web

SECONDS = 2.0
"""From the moment an event is in its file until it is on the screen."""
HIDE = """hidden => {
  Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });
  document.dispatchEvent(new Event('visibilitychange'));
}"""


@pytest.fixture
def run(add_run):
    """A copy of the recorded run in the watched directory, to which a test may append."""
    return add_run("written")


def append(run, *events):
    with (run / "events.jsonl").open("a") as file:
        file.writelines(to_json(event) + "\n" for event in events)


def germination(slot="block1", **fields):
    fields = {"update": 4, "group": 0, "env": 1, "decision": 7, "blueprint": "mlp"} | fields
    return LifecycleChange(slot=slot, old_stage="dormant", new_stage="blending", reason="germinate", **fields)


def test_a_run_under_way_fills_every_view(server, directory, open_page):
    with training(directory / "under_way", "--updates=5000"):
        page = open_page(server)
        page.click("text=under_way", timeout=60_000)
        page.wait_for_selector(".pill[data-status=running]")
        updates = page.locator(".fact:has(dt:text-is('Updates')) dd")
        first = wait_for(lambda: count(updates) >= 1 and count(updates))
        wait_for(lambda: count(updates) >= first + 2)
        assert page.locator("#connection").inner_text() == "Live"
        for link, filled in (("Growth", ".plot .lane"), ("Learning", ".chart canvas"), ("Story", ".log tbody tr")):
            page.click(f"#tabs a:text-is('{link}')")
            page.wait_for_selector(filled)
        total = page.locator(".story [role=status]")
        before = count(total)
        wait_for(lambda: count(total) > before)
    page.click("#tabs a:text-is('Now')")
    page.wait_for_selector(".pill[data-status=stopped]")


def count(locator) -> int:
    """The first number of a text."""
    text = locator.inner_text().replace(",", "").split()
    return int(text[0]) if text and text[0].isdigit() else 0


def test_a_germination_is_told_within_two_seconds(server, run, open_page):
    page = open_page(server, "/run/written/story")
    page.wait_for_selector("#connection[data-state=live]")
    for number in range(3):
        append(run, germination(f"slot-{number}"))
        start = time.monotonic()
        page.wait_for_selector(f".log tr:first-child:has-text('slot-{number}: mlp germinated')", timeout=1000 * SECONDS)
        assert time.monotonic() - start < SECONDS


def test_a_germination_grows_in_the_garden_within_two_seconds(server, run, open_page):
    page = open_page(server, "/run/written/growth")
    page.wait_for_selector(".plot .lane")
    page.wait_for_selector("#connection[data-state=live]")
    assert page.locator("svg.network text", has_text="orchid").count() == 0
    traces = [trace for trace in read_events(run, [EpisodeTrace]) if trace.update == 4]
    slots: dict[str, Any] = {name: dict(series) for name, series in traces[0].slots.items()}
    states = len(slots["block1"]["stage"])
    slots["block1"] |= {"stage": ["dormant"] * 3 + ["blending"] * (states - 3), "blueprint": ["orchid"] * states}
    grown = [replace(trace, update=5) for trace in traces]
    append(run, replace(grown[0], slots=slots), *grown[1:], Update(update=5, metrics={"score": 50.0}))
    start = time.monotonic()
    page.wait_for_selector("svg.network text:has-text('orchid')", timeout=1000 * SECONDS)
    assert time.monotonic() - start < SECONDS
    assert page.locator(".plot[data-selected] .lane text", has_text="orchid").count() == 1
    assert "of update 5" in page.locator(".growth [role=status]").inner_text()


def test_a_server_that_goes_away_is_told_and_caught_up_with(run, directory, open_page):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with serving(directory, "--no-token", f"--port={port}") as server:
        page = open_page(server, "/run/written/story")
        page.wait_for_selector("#connection[data-state=live]")
    page.wait_for_selector("#connection[data-state=retrying]:has-text('Disconnected, retrying')")
    append(run, germination("meanwhile"))
    with serving(directory, "--no-token", f"--port={port}") as again:
        assert again == Server(server.base, "")
        page.wait_for_selector(".log tr:has-text('meanwhile: mlp germinated')")
        page.wait_for_selector("#connection[data-state=live]")
    assert all("ERR_" in fault for fault in page.faults)
    page.faults.clear()


def test_a_tab_that_was_asleep_catches_up(server, run, open_page):
    page = open_page(server, "/run/written/story")
    page.wait_for_selector("#connection[data-state=live]")
    page.evaluate(HIDE, True)
    page.wait_for_selector("#connection[data-state=idle]")
    append(run, germination("asleep"))
    page.wait_for_timeout(1000)
    assert page.locator("text=asleep: mlp germinated").count() == 0
    page.evaluate(HIDE, False)
    page.wait_for_selector(".log tr:first-child:has-text('asleep: mlp germinated')")


def test_an_anomaly_is_marked_on_the_time_axis(server, run, open_page):
    page = open_page(server, "/run/written/learning")
    page.wait_for_selector(".chart canvas")
    page.wait_for_selector("#connection[data-state=live]")
    assert marked_pixels(page) == 0
    append(run, Anomaly(update=2, name="kl_spike", value=0.5, threshold=0.1, where="op"), Update(update=5, metrics={}))
    page.click("text=1 anomaly, marked in the charts")
    assert "kl spike op: 0.500, limit 0.100" in page.locator(".anomalies li").inner_text()
    wait_for(lambda: marked_pixels(page) > 20)


def marked_pixels(page) -> int:
    """Pixels of the first chart in the colour of anomalies."""
    return page.evaluate("""() => {
      const canvas = document.querySelector('.chart canvas');
      const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
      let found = 0;
      for (let i = 0; i < data.length; i += 4) found += data[i] === 179 && data[i + 1] === 52 && data[i + 2] === 28;
      return found;
    }""")


def test_without_a_stream_the_server_is_asked_again_and_again(server, run, open_page):
    page = open_page(server, "/run/written/story")
    page.wait_for_selector(".log tbody tr")
    page.route("**/stream*", lambda route: route.fulfill(status=503, json={"error": "too many streams"}))
    page.reload()
    page.wait_for_selector("#connection[data-state=polling]")
    append(run, germination("asked"))
    page.wait_for_selector("text=asked: mlp germinated")
    assert all("503" in fault for fault in page.faults), page.faults
    page.faults.clear()


def test_a_rewound_run_is_shown_as_it_is_now(server, run, open_page):
    """A resumed run cuts its events back to its checkpoint: what the page had from later is gone."""
    page = open_page(server, "/run/written/learning")
    page.wait_for_selector(".learning [role=status]:has-text('5 updates')")
    events = run / "events.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    end = next(i for i, line in enumerate(lines) if '"kind":"update"' in line and '"update":1' in line)
    events.write_text("".join(lines[: end + 1]))
    page.wait_for_selector(".learning [role=status]:has-text('2 updates')")
