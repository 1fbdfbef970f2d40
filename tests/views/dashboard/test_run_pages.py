"""What pages of a run know and do, asked without a browser: numbers, hostile names, commands to a living driver."""

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megascale_jax.cluster.job import job_folder
from megascale_jax.cluster.lifecycle import NodeStatus
from megascale_jax.cluster.link.audit import records
from megascale_jax.views.dashboard import overview
from megascale_jax.views.dashboard.app import make_app
from megascale_jax.views.dashboard.guard import COOKIE, guard_for
from megascale_jax.views.dashboard.overview import read_pace
from megascale_jax.views.dashboard.pages import PAGES
from megascale_jax.views.dashboard.render import content
from megascale_jax.views.dashboard.run_view import RunView
from megascale_jax.views.dashboard.server import bound, served
from megascale_jax.views.grown import Grown
from megascale_jax.views.mfu_trend import trend_of
from tests.views.dashboard import driven, runs

MINE = [page for page in PAGES if page.key in ("overview", "timeline", "incidents", "goodput", "nodes")]


def shown(folder, key, **query):
    """A page's content as text."""
    view = RunView(folder, patience_s=60)
    try:
        return str(
            content(next(page for page in PAGES if page.key == key), view, query, data_link=lambda page, name, query: f"/data/{name}")
        )
    finally:
        view.close()


def words(html):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return driven.driven(tmp_path_factory.mktemp("driven") / "run", steps=range(1, 4))


def test_the_overview_has_the_newest_numbers(run):
    text = words(shown(run, "overview"))
    assert "finished all 200 steps are done" in text and "21,004" in text and "41.2 %" in text
    assert "Incident 2 at step 20" in text and "170 steps behind" in text


def test_the_overview_says_that_the_speed_decays(run, monkeypatch):
    assert "has fallen" not in shown(run, "overview")
    seconds = np.r_[np.full(1000, 1.0), np.full(1000, 1.08)]
    trend = replace(trend_of(np.arange(2000), seconds, np.full(2000, np.nan)), grown=(Grown("<b>data wait", 0.1, 0.18, 1.0),))
    monkeypatch.setattr(overview, "booked_time", lambda run, patience_s: SimpleNamespace(found=SimpleNamespace(trend=trend)))
    html = shown(run, "overview")
    assert "Alarm: the speed has fallen by 7.4 % (&lt;b&gt;data wait takes longer): see goodput" in words(html)
    assert trend.is_alarm and "<b>" not in html


def test_a_torn_or_odd_line_of_metrics_is_left_out(tmp_path):
    lines = [{"step": step, "kind": "train", "wall_s": 0.5 * step, "loss": 2.0} for step in (1, 2, 3, 5)]
    odd = [
        "{",
        '{"step": "9", "kind": "train", "wall_s": 1}',
        '{"step": 9, "kind": "train", "wall_s": "x"}',
        "[]",
        '{"step": 7, "kind": "tr',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*map(json.dumps, lines), *odd]))
    pace = read_pace(tmp_path)
    assert (pace.step, pace.loss, pace.step_s, pace.mfu) == (5, 2.0, 0.5, None)
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe{}\n")
    assert read_pace(tmp_path) is None


def test_incidents_have_their_phases_costs_and_logs(run):
    text = words(shown(run, "incidents"))
    assert "2 incidents" in text and "exit: node-2 (rank 2): signal SIGKILL" in text and "3 steps done again" in text
    assert "Log of node-2, its last 2 lines" in text and "Killed" in text
    assert "anna and ben ordered: evict node-1" in text, "the driver's decisions"
    assert "has no driver" in words(shown(runs.healthy(run.parent / "undriven"), "incidents"))


@pytest.mark.parametrize("key", ["timeline", "goodput", "nodes", "overview", "incidents"])
def test_whatever_is_written_in_a_run_is_text(tmp_path, key):
    folder = driven.driven(tmp_path / "<img src=x onerror=alert(1)>", is_hostile=True, steps=range(1, 3))
    html = shown(folder, key)
    assert not re.search(r"<(script|img|iframe)|javascript:(?!alert\(1\)\n)|\son\w+\s*=(?=[^<]*>)", html.replace("&lt;", "")), html
    assert "\u202e" not in html and "\x1b" not in html
    if key == "incidents":
        assert "&lt;script&gt;" in html and "\\u202e" in html and "javascript:alert(1)" in html


def test_a_timeline_is_chosen_by_step_replica_and_place(run):
    assert "Step 2, attempt 0" in words(shown(run, "timeline", step="2", tensor="1"))
    text = words(shown(run, "timeline", step="2", data="7"))
    assert "the mesh has data 0 to 0, tensor 0 to 1" in text
    assert "expected a whole number" in words(shown(run, "timeline", step="'><script>"))


class Site:
    """A dashboard beside a driver that answers."""

    def __init__(self, url, token, world, folder):
        self.url, self.token, self.world, self.folder = url, token, world, folder

    def ask(self, path, token=None, headers=None, **form):
        """Status and text of a page, or of a command if there is a form."""
        headers = {**({"Authorization": f"Bearer {token}"} if token else {}), **(headers or {})}
        data = urllib.parse.urlencode(form).encode() if form else None
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, words(answer.read().decode())
        except urllib.error.HTTPError as error:
            return error.code, words(error.read().decode())


@pytest.fixture
def site(tmp_path):
    folder = driven.trained(tmp_path / "run", steps=range(1, 2))
    world = driven.world_of(folder)
    with driven.answering(folder, world) as token:
        view = RunView(folder, patience_s=20)
        with served(make_app(view, guard_for("127.0.0.1", None, job_folder(folder))), bound("127.0.0.1", 0)) as url:
            yield Site(url, token, world, folder)
        view.close()
    world.journal.close()


def test_commands_go_to_the_driver_with_the_visitors_own_token(site, caplog):
    caplog.set_level("DEBUG")
    olga, anna, ben = site.token("olga", "operate"), site.token("anna", "admin"), site.token("ben", "admin")
    nodes = site.world.driver.state.nodes
    status, text = site.ask("action/nodes/cordon", olga, node="node-0")
    assert status == 200 and "cordon node-0: done" in text
    assert site.world.driver.state.nodes["node-0"].status == NodeStatus.CORDONED
    status, text = site.ask("action/nodes/evict", olga, node="node-0")
    assert status == 403 and "admin" in text and "operate" in text
    status, text = site.ask("action/nodes/evict", anna, node="node-0")
    number = re.search(r"confirm RUN (\d+)", text).group(1)
    assert status == 200 and "another admin must confirm" in text
    waiting = words(shown(site.folder, "nodes"))
    assert re.search(rf"evict node-0 waits for another admin than anna, \d+ min \d+ s more: request {number}", waiting), waiting
    status, text = site.ask("action/nodes/confirm", anna, number=number)
    assert status == 409 and "another admin must confirm it" in text and "own" in text
    assert site.world.driver.state.nodes["node-0"].status == NodeStatus.CORDONED
    status, text = site.ask("action/nodes/confirm", ben, number=number)
    assert status == 200 and site.world.driver.state.nodes["node-0"].status == NodeStatus.EVICTED != nodes["node-0"].status
    status, text = site.ask("action/nodes/cordon", anna, node="no-such")
    assert status == 409 and "no node no-such" in text
    log = list(records(job_folder(site.folder) / "audit.jsonl"))
    assert [one.action for one in log if one.actor == "olga" and one.action != "asked"] == ["cordon"], "an app's refusal never gets there"
    kept = caplog.text + (job_folder(site.folder) / "audit.jsonl").read_text()
    assert not any(token in kept for token in (olga, anna, ben))


@pytest.mark.parametrize(
    ("name", "form", "words_of_it"),
    [
        ("cordon", {"node": ""}, "needs the name of a node"),
        ("cordon", {"node": "../<b>"}, "no command to a driver"),
        ("confirm", {"number": "x"}, "expected a whole number"),
        ("rewind", {"step": "10", "first": "9", "end": "3"}, "expected an end above the first"),
        ("rewind", {"step": "1", "first": "3", "end": "9"}, "no checkpoint of step 1"),
    ],
)
def test_a_command_that_makes_no_sense_is_refused_with_the_reason(site, name, form, words_of_it):
    status, text = site.ask(f"action/nodes/{name}", site.token("anna", "admin"), **form)
    assert status in (400, 409) and words_of_it in text, text


def test_nobody_gives_commands_without_a_token_or_from_another_page(site):
    assert site.ask("action/nodes/stop", form_word="x")[0] == 403
    anna = site.token("anna", "admin")
    assert site.ask("action/nodes/stop", anna, {"Origin": "http://evil.example"}, x="1")[0] == 403
    status, text = site.ask("action/nodes/stop", None, {"Cookie": f"{COOKIE}=guess", "Origin": site.url.rstrip("/")}, x="1")
    assert status == 403 and "form" in text
    assert site.world.driver.state.phase == "running"


def test_commands_are_shown_disabled_with_how_to_get_at_them(site):
    assert "megascale certs token" in site.ask("nodes")[1]
    _, text = site.ask("nodes?ask=evict&node=node-0", site.token("olga", "operate"))
    assert "This needs a token with the role admin; olga has operate" in text
    _, text = site.ask("nodes?ask=evict&node=node-0", site.token("anna", "admin"))
    assert "node-0 is assigned and has rank 0" in text and "Another admin must confirm" in text and "Evict node-0, as anna" in text
    assert "there is no command" in site.ask("nodes?ask=<script>")[1]


def test_without_a_driver_nodes_are_those_of_its_journal(run):
    html = shown(run, "nodes")
    assert "No driver has this run now" in html and 'aria-disabled="true"' in html and "<form" not in html
    assert "evicted: by anna and ben" in words(html).replace(" :", ":")
