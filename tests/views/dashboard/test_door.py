"""The dashboard's door: who gets in, what requests may look like, what answers forbid browsers, and how the server ends."""

import http.client
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
from types import SimpleNamespace
from urllib.parse import urlencode, urlsplit

import pytest
from typer.testing import CliRunner

from megascale_jax.cli.main import app as command_line
from megascale_jax.cluster.link.certificates import make_folder
from megascale_jax.cluster.link.security import Security, make_token
from megascale_jax.cluster.link.tokens import Role
from megascale_jax.errors import UsageError
from megascale_jax.views.dashboard import server
from megascale_jax.views.dashboard.app import HEADERS, MOST_BODY_BYTES
from megascale_jax.views.dashboard.beside import beside_driver
from megascale_jax.views.dashboard.guard import COOKIE, MOST_SESSIONS, Guard, Sessions, guard_for, is_local
from megascale_jax.views.dashboard.page import Action, Page, Visitor
from megascale_jax.views.dashboard.pages import PAGES
from tests.views.dashboard import runs


def refuse(*_):
    raise UsageError("the node is <not> there")


BELL = Page(
    "bell",
    "Bell",
    "problem.html",
    lambda run, query: {"problem": "a bell"},
    actions={
        "ring": Action(Role.OPERATE, lambda run, visitor, form: f"rung {form['times']} times for {visitor.name}"),
        "break": Action(Role.ADMIN, refuse),
    },
)


@pytest.fixture(scope="module")
def security(tmp_path_factory):
    """Certificates, and tokens by role."""
    folder = tmp_path_factory.mktemp("security")
    make_folder(folder, ["dashboard.example"])
    found = Security.load(folder, role="driver")
    for role in Role:
        make_token(found, f"a-{role}", role, days=1, path=folder / f"{role}.token")
    make_token(found, "late", Role.ADMIN, days=-1, path=folder / "late.token")
    return found


def token(security, name):
    return (security.ca.parent / f"{name}.token").read_text().strip()


class Client:
    """Requests to one server, with what a browser would send along."""

    def __init__(self, url, context=None):
        self.origin, self.at, self.context = url.rstrip("/"), urlsplit(url), context
        self.cookie = ""

    def ask(self, method, path, form=None, **headers):
        kind = http.client.HTTPConnection if self.context is None else http.client.HTTPSConnection
        options = {} if self.context is None else {"context": self.context}
        connection = kind(self.at.hostname, self.at.port, timeout=20, **options)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.cookie:
            headers.setdefault("Cookie", self.cookie)
        body = None
        if form is not None:
            body = form if isinstance(form, bytes) else urlencode(form)
            headers = {"Content-Type": "application/x-www-form-urlencoded", "Origin": self.origin} | headers
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        text = answer.read().decode("utf-8", "replace")
        connection.close()
        return SimpleNamespace(status=answer.status, headers=answer.headers, text=text)

    def word(self, path="/login"):
        return re.findall(r'name="form_word" value="(\w+)"', self.ask("GET", path).text)[0]

    def show(self, text):
        answer = self.ask("POST", "/login", {"form_word": self.word(), "token": text, "next": "bell"})
        if answer.status == 303:
            self.cookie = answer.headers["Set-Cookie"].partition(";")[0]
        return answer


@pytest.fixture
def client(dashboard, tmp_path, security):
    """At 127.0.0.1, where tokens are known and not needed for looking."""
    with dashboard(runs.empty(tmp_path / "run"), Guard(security), (*PAGES, BELL)) as url:
        yield Client(url)


def test_every_answer_forbids_what_it_can(client):
    for path in ("/", "/heat-map", "/nothing", "/static/style.css", "/static/../app.py", "/fragment/cube", "/data/cube/cube", "/login"):
        answer = client.ask("GET", path)
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS, path
        assert "server" not in {name.lower() for name in answer.headers}
    policy = HEADERS["Content-Security-Policy"]
    assert "unsafe" not in policy and "default-src 'none'" in policy and "http" not in policy


def test_a_name_that_is_not_ours_gets_nothing(client):
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::2]", "localhost@evil.example"):
        answer = client.ask("GET", "/", Host=host)
        assert answer.status == 421 and "<html" not in answer.text, host
    for host in ("localhost", f"127.0.0.1:{client.at.port}", "[::1]:80", "LOCALHOST"):
        assert client.ask("GET", "/", Host=host).status == 200, host


def test_wrong_addresses_and_methods_are_said(client):
    for path in ("/nothing", "/fragment/nothing", "/data/cube/nothing", "/static/nothing.js", "/static/%2e%2e/app.py", "/a/b/c"):
        assert client.ask("GET", path).status == 404, path
    assert client.ask("POST", "/").status == 405
    assert client.ask("DELETE", "/heat-map").status == 405


def test_a_fragment_that_is_known_is_not_sent_again(client):
    first = client.ask("GET", "/fragment/bell")
    again = client.ask("GET", "/fragment/bell", If_None_Match=first.headers["ETag"])
    assert (first.status, again.status, again.text) == (200, 304, "")


def test_an_action_needs_a_token_with_its_role(client, security):
    ring = {"times": "3"}
    assert client.ask("POST", "/action/bell/ring", {**ring, "form_word": client.word()}).status == 403
    for role, status in (("view", 403), ("operate", 200), ("admin", 200)):
        client.cookie = ""
        assert client.show(token(security, role)).status == 303
        answer = client.ask("POST", "/action/bell/ring", {**ring, "form_word": client.word()})
        assert answer.status == status, role
        assert ("rung 3 times for a-" in answer.text) == (status == 200)
    answer = client.ask("POST", "/action/bell/break", {"form_word": client.word()})
    assert answer.status == 409 and "the node is &lt;not&gt; there" in answer.text


def test_a_node_s_token_an_old_one_and_a_forged_one_are_none(client, security):
    good = token(security, "admin")
    for text in (token(security, "node"), token(security, "late"), good[:-2] + "AA", "", "x" * 5000, "<b>"):
        answer = client.show(text)
        assert answer.status == 403 and "Set-Cookie" not in answer.headers and "<b>" not in answer.text
    assert client.show(good).status == 303


def test_the_cookie_says_nothing_and_is_for_us_alone(client, security):
    cookie = client.show(token(security, "operate")).headers["Set-Cookie"]
    assert token(security, "operate") not in cookie
    assert {"httponly", "samesite=strict", "path=/"} <= {part.strip().lower() for part in cookie.split(";")}
    assert "a-operate, operate" in client.ask("GET", "/").text
    assert client.ask("POST", "/logout", {"form_word": client.word()}).status == 303
    assert "a-operate" not in client.ask("GET", "/").text


def test_other_sites_pages_change_nothing(client, security):
    client.show(token(security, "admin"))
    form = {"times": "1", "form_word": client.word()}
    for origin in ("https://evil.example", "null", f"http://localhost:{client.at.port}", client.origin + ".evil.example"):
        assert client.ask("POST", "/action/bell/ring", form, Origin=origin).status == 403, origin
    assert client.ask("POST", "/action/bell/ring", {"times": "1"}).status == 403
    assert client.ask("POST", "/action/bell/ring", {"times": "1", "form_word": "0" * 64}).status == 403
    assert client.ask("POST", "/login", {"token": token(security, "view"), "form_word": "é"}).status == 403
    assert client.ask("POST", "/action/bell/ring", form).status == 200


def test_programs_show_their_token_in_a_header(client, security):
    bearer = f"Bearer {token(security, 'operate')}"
    answer = client.ask("POST", "/action/bell/ring", {"times": "2"}, Authorization=bearer)
    assert answer.status == 200 and "rung 2 times for a-operate" in answer.text
    client.show(token(security, "admin"))
    assert client.ask("POST", "/action/bell/ring", {"times": "2"}, Authorization="Bearer x").status == 403


def test_a_form_that_is_too_large_or_none_is_refused(client, security):
    bearer = f"Bearer {token(security, 'operate')}"
    assert client.ask("POST", "/action/bell/ring", b"a" * (MOST_BODY_BYTES + 1), Authorization=bearer).status == 413
    assert client.ask("POST", "/action/bell/ring", b"\xff=1", Authorization=bearer).status in (200, 400, 500)
    assert client.ask("POST", "/action/bell/ring", b"{}", Authorization=bearer, Content_Type="application/json").status == 415
    assert client.ask("POST", "/action/bell/ring", urlencode([("a", "1")] * 100).encode(), Authorization=bearer).status == 400


def test_headers_that_are_too_long_end_the_connection(client):
    try:
        status = client.ask("GET", "/", X_Long="a" * (64 * server.MOST_HEADER_BYTES)).status
    except (ConnectionError, http.client.HTTPException):
        status = 400
    assert status in (400, 431)


def test_who_asks_for_nothing_is_hung_up_on(dashboard, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "REQUEST_S", 0.2)
    with dashboard(runs.empty(tmp_path / "run")) as url:
        at = urlsplit(url)
        with socket.create_connection((at.hostname, at.port), timeout=20) as silent:
            assert silent.recv(1) == b""
        with socket.create_connection((at.hostname, at.port), timeout=20) as slow:
            slow.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
            assert slow.recv(1) == b""


def test_with_certificates_every_look_needs_a_token(dashboard, tmp_path, security):
    guard = guard_for("127.0.0.1", security.ca.parent, tmp_path)
    assert guard.needs_token and "dashboard.example" in guard.hosts
    with dashboard(runs.empty(tmp_path / "run"), guard, (*PAGES, BELL), guard.security) as url:
        assert url.startswith("https://")
        context = ssl.create_default_context(cafile=security.ca)
        client = Client(url, context)
        answer = client.ask("GET", "/heat-map")
        assert answer.status == 303 and answer.headers["Location"] == "/login?next=heat-map"
        assert [client.ask("GET", path).status for path in ("/fragment/cube", "/data/cube/cube", "/static/style.css")] == [401, 401, 200]
        shown = client.show(token(security, "view"))
        assert shown.status == 303 and "secure" in shown.headers["Set-Cookie"].lower() and shown.headers["Location"] == "/bell"
        assert client.ask("GET", "/heat-map").status == 200
        assert client.ask("GET", "/", Authorization=f"Bearer {token(security, 'view')}", Cookie="").status == 200
        old = ssl.create_default_context(cafile=security.ca)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError):
            Client(url, old).ask("GET", "/")


def test_an_address_that_others_reach_needs_certificates(tmp_path):
    run = runs.empty(tmp_path / "run")
    result = CliRunner().invoke(command_line, ["serve", str(run), "--host", "0.0.0.0"])
    assert isinstance(result.exception, UsageError)  # `main` makes exit code 2 of it
    assert "megascale certs init" in str(result.exception) and "--security" in str(result.exception)
    assert [is_local(host) for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost", "0.0.0.0", "::", "10.0.0.1", "host-7", "")] == [
        True, True, True, True, False, False, False, False, False,
    ]  # fmt: skip


def test_without_a_driver_nobody_may_command(dashboard, tmp_path):
    guard = guard_for("127.0.0.1", None, tmp_path / "run" / "cluster")
    with dashboard(runs.empty(tmp_path / "run"), guard, (*PAGES, BELL)) as url:
        client = Client(url)
        assert client.ask("POST", "/action/bell/ring", {"times": "1"}, Authorization="Bearer v1.a.b").status == 403
        assert "Tokens are not known here" in client.ask("GET", "/login").text


def test_roles_have_the_rights_of_those_before_them():
    assert [Visitor("a", role, "t").may("operate") for role in (Role.VIEW, Role.OPERATE, Role.ADMIN, Role.NODE)] == [
        False,
        True,
        True,
        False,
    ]
    assert not Visitor(role=Role.ADMIN).may("view")


def test_few_sessions_are_remembered():
    sessions = Sessions()
    numbers = [sessions.begin(str(number)) for number in range(MOST_SESSIONS + 1)]
    assert sessions.token(numbers[0]) == "" and sessions.token(numbers[-1]) == str(MOST_SESSIONS)
    assert COOKIE not in numbers and len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_until_it_is_told_to_stop(tmp_path, number):
    run = runs.empty(tmp_path / "run")
    command = [sys.executable, "-m", "megascale_jax.cli.main", "serve", str(run), "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    try:
        url = re.findall(r"http://\S+", process.stdout.readline())[0]
        assert Client(url).ask("GET", "/").status == 200
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert errors == ""
    finally:
        process.kill()


def test_beside_a_driver_it_comes_and_goes_and_a_port_that_is_taken_disturbs_nobody(tmp_path):
    run = runs.empty(tmp_path / "run")
    (run / "cluster").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port, said = taken.getsockname()[1], []
        with beside_driver(run, port, None, said.append):
            log = run / "cluster" / "dashboard.log"
            assert log.exists()
        assert len(said) == 1 and f"http://127.0.0.1:{port}/" in said[0]
    with beside_driver(tmp_path / "nothing", port, None, said.append):
        assert said[1].startswith("no dashboard: ")
