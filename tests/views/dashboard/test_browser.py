"""Every page in a headless Chromium: quiet console, no other hosts, readable, reachable by keys, and right at what it shows.

Pictures are kept in the folder that MEGASCALE_SCREENSHOTS names.
"""

import time

import pytest

from megascale_jax.views.dashboard.pages import PAGES
from tests.views.dashboard import runs
from tests.views.dashboard.browser import DESK, PHONE

LOOKS = {"light": ("light", DESK), "dark-phone": ("dark", PHONE)}
IS_SETTLED = (
    "!document.querySelector('[data-pending]') && [...document.querySelectorAll('.drawings')].every((one) => one.dataset.drawn "
    "|| one.querySelector('canvas:not([data-src])') || one.querySelector('canvas[data-src=\"\"]'))"
)
OPEN_S = 3.0
"""In which 12,288 ranks and 100 steps are to be on the screen; a busy machine gets `PATIENCE` times as long."""
PATIENCE = 10

TOO_FAINT = """(() => {
  const parse = (text) => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number); return { rgb: [r, g, b], a }; };
  const light = (rgb) => rgb.map((one) => one / 255).map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
    .reduce((sum, one, n) => sum + one * [0.2126, 0.7152, 0.0722][n], 0);
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, style = getComputedStyle(element);
    if (!walker.currentNode.data.trim() || !element.checkVisibility() || element.closest("svg, script, style, noscript")) continue;
    let ground = element;
    while (ground && parse(getComputedStyle(ground).backgroundColor).a === 0) ground = ground.parentElement;
    const a = light(parse(style.color).rgb), b = light(ground ? parse(getComputedStyle(ground).backgroundColor).rgb : [255, 255, 255]);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push(`${ratio.toFixed(2)} ${walker.currentNode.data.trim().slice(0, 40)}`);
  }
  return found;
})()"""
CONTROLS = (
    "[...document.querySelectorAll('a[href], button:not(:disabled), input:not([type=hidden]), select, summary, canvas[tabindex]')]"
    ".filter((one) => one.checkVisibility())"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Run folders by name, each made once."""
    base, made = tmp_path_factory.mktemp("runs"), {}

    def folder(name):
        if name not in made:
            made[name] = getattr(runs, name)(base / name, **({"slow": 1.2} if name == "healthy" else {}))
        return made[name]

    return folder


def check(tab, url, name):
    """What holds for every page of every run."""
    assert tab.problems == [], name
    assert [address for address in tab.requests if not address.startswith((url, "data:", "about:"))] == [], name
    assert tab.run(TOO_FAINT) == [], name
    assert tab.run("document.documentElement.scrollWidth <= innerWidth"), f"{name} is wider than the window"
    assert tab.run("document.querySelector('h1') !== null && document.title.length > 0"), name


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("name", ["healthy", "hanging", "empty", "broken", "hostile"])
def test_every_page_of_every_run(browser, dashboard, folders, tmp_path, name, look):
    theme, size = LOOKS[look]
    with dashboard(folders(name)) as url, browser.tab(None, size, theme) as tab:
        for page in PAGES:
            tab.open(url + page.path)
            tab.wait(IS_SETTLED)
            tab.picture(f"{name}-{page.key}-{look}", tmp_path)
            check(tab, url, f"{name} {page.key}")
            assert tab.run("document.title") != "owned" and tab.run("document.querySelectorAll('main img, main script').length") == 0
            assert tab.run("document.documentElement.innerHTML.includes('\\u202e')") is False


def test_keys_reach_every_control_and_focus_is_seen(browser, dashboard, folders):
    with dashboard(folders("hanging")) as url, browser.tab(url) as tab:
        for page in PAGES:
            tab.open(url + page.path)
            tab.wait(IS_SETTLED)
            tab.run("document.getElementById('main').removeAttribute('data-fragment')")
            count, reached = tab.run(f"{CONTROLS}.length"), set()
            tab.run("(document.activeElement?.blur(), getSelection().collapse(document.body, 0), true)")
            for _ in range(count + 2):
                tab.key("Tab")
                at, outline = tab.run(
                    f"[{CONTROLS}.indexOf(document.activeElement), getComputedStyle(document.activeElement).outlineStyle]"
                )
                if at >= 0:
                    assert outline != "none", (page.key, at)
                    reached.add(at)
            assert len(reached) == count, (page.key, tab.run(f"{CONTROLS}.map((one) => one.outerHTML.slice(0, 90))"), sorted(reached))


def test_a_slow_device_is_ringed_named_and_found_with_keys(browser, dashboard, folders):
    with dashboard(folders("healthy")) as url, browser.tab(f"{url}heat-map") as tab:
        tab.wait("document.querySelector('.drawings')?.dataset.drawn")
        assert "device 5" in tab.run("document.getElementById('summary').innerText")
        assert tab.run("document.querySelector('#slow tbody').innerText").split()[0] == "5"
        tab.run("document.getElementById('grid-passes').focus()")
        tab.key("ArrowRight")
        told = tab.run("document.getElementById('readout').textContent")
        assert "device 5" in told and "pipe 1 data 0 tensor 1" in told and "backward" in told and told.endswith("slow")
        tab.key("ArrowLeft")
        assert "device 4" in tab.run("document.getElementById('readout').textContent")
        tab.wait("document.querySelector('#costs table')")
        assert "device 5" in tab.run("document.getElementById('costs').innerText")


def test_a_range_of_steps_is_in_the_address(browser, dashboard, folders):
    with dashboard(folders("healthy")) as url, browser.tab(f"{url}heat-map?from=3&to=12&pass=forward") as tab:
        tab.wait("document.querySelector('.drawings')?.dataset.drawn")
        assert tab.run("document.getElementById('summary').innerText").startswith("Steps 3 to 12")
        assert tab.run("[document.getElementsByName('from')[0].value, document.getElementById('pass').value]") == ["3", "forward"]
        tab.open(f"{url}heat-map?from=12&to=3")
        assert "expected the first before the last" in tab.run("document.getElementById('problem').textContent")


def test_on_a_hang_the_rank_is_named_and_others_are_chosen_by_key_and_click(browser, dashboard, folders):
    with dashboard(folders("hanging")) as url, browser.tab(f"{url}cube") as tab:
        tab.wait("document.querySelector('.drawings')?.dataset.drawn")
        assert "rank 5" in tab.run("document.querySelector('.verdict').innerText")
        assert tab.run("document.querySelector('#panel h2').innerText").startswith("Rank 5 ◎")
        assert "waiting over tensor for G.tensor" in tab.run("document.getElementById('legend').innerText")
        tab.run("document.getElementById('cube').focus()")
        tab.key("ArrowRight")
        tab.wait("document.querySelector('#panel h2')?.innerText.startsWith('Rank 7')")
        assert "rank=7" in tab.run("location.search") and tab.run("document.activeElement.id") == "cube"
        panel = tab.run("document.getElementById('panel').innerText")
        assert "pipe 1 data 1 tensor 1" in panel and "step" in panel
        tab.key("n")
        tab.wait("document.querySelector('#panel h2')?.innerText.startsWith('Rank 5')")
        left, top, width, height = tab.run(
            "(({x, y, width, height}) => [x, y, width, height])(document.getElementById('cube').getBoundingClientRect())"
        )
        for x in range(10):  # somewhere along the middle there is a cell
            tab.click(left + width * (0.3 + 0.04 * x), top + height * 0.5)
        tab.wait("!document.querySelector('#panel h2').innerText.startsWith('Rank 5')")
        assert tab.problems == []


def test_12288_ranks_and_100_steps_open_soon_and_move_smoothly(browser, dashboard, tmp_path):
    (tmp_path / "run").mkdir()
    with dashboard(runs.LargeRun(tmp_path / "run")) as url, browser.tab() as tab:
        for page, mark in (("heat-map", "grid-steps"), ("cube", "cube")):
            began = time.monotonic()
            tab.open(url + page)
            tab.wait(f"document.querySelector('.drawings')?.dataset.drawn && document.getElementById('{mark}').width > 300")
            took_s = time.monotonic() - began
            print(f"{page}: {took_s:.2f} s")
            assert took_s < OPEN_S * PATIENCE
            tab.picture(f"large-{page}", tmp_path)
            check(tab, url, page)
        assert "rank 4321" in tab.run("document.querySelector('.verdict').innerText")
        tab.open(f"{url}heat-map")
        tab.wait("document.querySelector('.drawings')?.dataset.drawn")
        tab.run("document.getElementById('grid-steps').focus()")
        tab.key("+")
        before = tab.run(PICTURE)
        tab.run("document.getElementById('zoom-in').click()")
        tab.wait(f"({PICTURE}) !== '{before}'")


PICTURE = "String(document.getElementById('grid-steps').toDataURL().length)"


def test_the_theme_is_chosen_by_hand_and_kept(browser, dashboard, folders):
    ground = "getComputedStyle(document.body).backgroundColor"
    with dashboard(folders("empty")) as url, browser.tab(url) as tab:
        light = tab.run(ground)
        tab.run("(() => { const one = document.getElementById('theme'); one.value = 'dark'; one.dispatchEvent(new Event('change')); })()")
        dark = tab.run(ground)
        assert dark != light
        tab.open(f"{url}heat-map")
        assert tab.run(ground) == dark and tab.run("document.getElementById('theme').value") == "dark"


def test_a_page_keeps_itself_fresh(browser, dashboard, tmp_path):
    runs.empty(tmp_path / "run")
    with dashboard(tmp_path / "run") as url, browser.tab(f"{url}cube") as tab:
        tab.wait("document.getElementById('live').dataset.state === 'live'")
        assert tab.run("document.querySelector('.verdict')") is None
        (tmp_path / "made").mkdir()
        runs.hanging(tmp_path / "made" / "run")
        (tmp_path / "made" / "run" / "events").rename(tmp_path / "run" / "events")
        tab.run("(document.getElementById('main').dataset.refreshS = 0.3, dashboard.ask())")
        tab.wait("document.querySelector('.verdict.bad')")
        assert tab.problems == []


def test_a_server_that_is_gone_is_seen(browser, dashboard, tmp_path):
    runs.empty(tmp_path / "run")
    with dashboard(tmp_path / "run") as url:
        context = browser.tab(url)
        tab = context.__enter__()
    try:
        tab.run("dashboard.ask()")
        tab.wait("document.getElementById('live').dataset.state === 'gone'")
        assert tab.run("document.getElementById('live').textContent") == "server does not answer"
    finally:
        context.__exit__(None, None, None)
