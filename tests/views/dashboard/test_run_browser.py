"""Pages of a driven run and its report in a headless Chromium: looked at, zoomed, steered by keys, and a command given by hand."""

import pytest

from megascale_jax.cluster.job import job_folder
from megascale_jax.cluster.lifecycle import NodeStatus
from megascale_jax.views.dashboard.guard import guard_for
from megascale_jax.views.dashboard.pages import PAGES
from megascale_jax.views.dashboard.report import report_html
from megascale_jax.views.dashboard.run_view import RunView
from tests.views.dashboard import driven, runs
from tests.views.dashboard.browser import DESK, PHONE
from tests.views.dashboard.test_browser import IS_SETTLED, LOOKS, check

MINE = [page for page in PAGES if page.key in ("overview", "timeline", "incidents", "goodput", "nodes")]
FAINT_WORDS = """(() => {
  const light = (text) => text.match(/[\\d.]+/g).map(Number).slice(0, 3).map((one) => one / 255)
    .map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
    .reduce((sum, one, n) => sum + one * [0.2126, 0.7152, 0.0722][n], 0);
  const ratio = (one, other) => (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
  const found = [];
  for (const word of document.querySelectorAll("svg text")) {
    if (!word.checkVisibility()) continue;
    let ground = null;
    if (word.classList.contains("unit")) {
      const at = word.getBoundingClientRect(), x = at.x + at.width / 2, y = at.y + at.height / 2;
      const box = [...document.querySelectorAll(".timeline rect:not(.ideal)")].find((one) => {
        const b = one.getBoundingClientRect(); return b.left <= x && x <= b.right && b.top <= y && y <= b.bottom; });
      if (box) ground = getComputedStyle(box).fill;
    }
    ground ??= getComputedStyle(word.closest(".card") ?? document.body).backgroundColor;
    const value = ratio(light(getComputedStyle(word).fill), light(ground));
    if (value < 4.5) found.push(`${value.toFixed(2)} ${word.textContent}`);
  }
  return [...new Set(found)];
})()"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return driven.driven(tmp_path_factory.mktemp("driven") / "quickstart", steps=range(1, 5))


@pytest.mark.parametrize("look", ["light", "dark", "phone"])
def test_every_page_of_a_driven_run(browser, dashboard, folder, tmp_path, look):
    theme, size = {"light": ("light", DESK), "dark": ("dark", DESK), "phone": ("dark", PHONE)}[look]
    with dashboard(folder) as url, browser.tab(f"{url}login", size, theme) as tab:
        for page in MINE:
            tab.open(url + page.path)
            tab.wait(IS_SETTLED)
            tab.picture(f"driven-{page.key}-{look}", tmp_path)
            check(tab, url, page.key)
            assert tab.run(FAINT_WORDS) == [], page.key


def test_hostile_names_of_a_driven_run_are_text(browser, dashboard, tmp_path):
    run = driven.driven(tmp_path / "<img src=x onerror=alert(1)>", is_hostile=True, steps=[1])
    with dashboard(run) as url, browser.tab(f"{url}login") as tab:
        for page in MINE:
            tab.open(url + page.path)
            tab.wait(IS_SETTLED)
            tab.run("(() => { for (const one of document.querySelectorAll('details')) one.open = true; })()")
            tab.picture(f"hostile-driven-{page.key}", tmp_path)
            check(tab, url, page.key)
            assert tab.run("document.title") != "owned" and tab.run("document.querySelectorAll('main img, main script').length") == 0
            assert tab.run("document.documentElement.innerHTML.includes('\\u202e')") is False


def test_a_step_is_zoomed_and_panned_with_keys_and_buttons(browser, dashboard, folder, tmp_path):
    wide = "document.querySelector('.shapes').getBoundingClientRect().width"
    named = "[...document.querySelectorAll('text.unit')].filter((one) => one.checkVisibility()).length"
    with dashboard(folder) as url, browser.tab(f"{url}timeline") as tab:
        tab.wait("document.querySelector('.timeline .view')")
        before, words = tab.run(wide), tab.run(named)
        tab.run("document.querySelector('.timeline .view').focus()")
        tab.key("+")
        tab.key("+")
        assert tab.run(wide) == pytest.approx(4 * before, rel=0.01) and tab.run(named) > words
        assert tab.run("document.getElementById('zoom').textContent") == "4×"
        at = tab.run("document.querySelector('.timeline .view').scrollLeft")
        tab.key("ArrowRight")
        tab.wait(f"document.querySelector('.timeline .view').scrollLeft > {at}")
        assert tab.run(FAINT_WORDS) == []
        tab.picture("timeline-zoomed", tmp_path)
        tab.run("document.querySelector('[data-zoom-by=\"0\"]').click()")
        assert tab.run(wide) == pytest.approx(before, rel=0.01)
        assert (
            tab.run("fetch(document.querySelector('a[download]').href).then((one) => one.arrayBuffer()).then((one) => one.byteLength)")
            > 1000
        )
        assert tab.problems == []


def show(tab, token):
    """Type a token into the page that asks for it."""
    tab.run(f"(document.getElementById('token').value = {token!r}, document.querySelector('form.stack button').click())")


def test_an_eviction_is_read_confirmed_and_told_to_the_driver(browser, dashboard, tmp_path):
    folder = driven.trained(tmp_path / "quickstart", steps=[1])
    world = driven.world_of(folder)
    with driven.answering(folder, world) as token:
        guard = guard_for("127.0.0.1", None, job_folder(folder))
        with dashboard(folder, guard) as url, browser.tab(f"{url}login?next=nodes") as tab:
            show(tab, token("anna", "admin"))
            tab.wait("document.querySelector('#rows table')")
            tab.picture("nodes-live", tmp_path)
            check(tab, url, "nodes")
            tab.run("[...document.querySelectorAll('#rows a')].find((one) => one.textContent === 'evict').click()")
            tab.wait("document.getElementById('ask')")
            assert "Another admin must confirm it" in tab.run("document.getElementById('ask').innerText")
            tab.picture("nodes-ask", tmp_path)
            check(tab, url, "nodes, asked")
            tab.run("document.querySelector('#ask button.danger').click()")
            tab.wait("document.querySelector('[role=alert]')")
            assert "another admin must confirm it" in tab.run("document.querySelector('[role=alert]').innerText")
            assert "v1." not in tab.run("location.href") and not any("v1." in address for address in tab.requests)
            number = tab.run("document.querySelector('[role=alert]').innerText").split()[-1]
        with dashboard(folder, guard_for("127.0.0.1", None, job_folder(folder))) as url, browser.tab(f"{url}login?next=nodes") as tab:
            show(tab, token("ben", "admin"))
            tab.wait("document.querySelector('#rows table')")
            tab.open(f"{url}nodes?ask=confirm")
            tab.run(f"(document.getElementById('number').value = '{number}', document.querySelector('#ask button').click())")
            tab.wait("document.querySelector('.notice.good')")
    evicted = [name for name, node in world.driver.state.nodes.items() if node.status == NodeStatus.EVICTED]
    assert len(evicted) == 2
    world.journal.close()


@pytest.fixture(scope="module")
def reports(folder, tmp_path_factory):
    """Files with reports, by run."""
    base = tmp_path_factory.mktemp("reports")
    for name, run in (("driven", folder), ("broken", runs.broken(base / "run"))):
        view = RunView(run, patience_s=60)
        (base / f"{name}.html").write_bytes(report_html(view, 1.8e9))
        view.close()
    return base


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("name", ["driven", "broken"])
def test_a_report_is_a_page_by_itself(browser, reports, tmp_path, name, look):
    theme, size = LOOKS[look]
    address = (reports / f"{name}.html").as_uri()
    with browser.tab(address, size, theme) as tab:
        tab.picture(f"report-{name}-{look}", tmp_path)
        check(tab, address, f"report of {name}")
        assert tab.run(FAINT_WORDS) == []
        tab.call("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": theme}])
        assert tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        check(tab, address, f"printed report of {name}")
