"""Who may do what at the dashboard's door: hosts, tokens, and that a request that changes something comes from our own page.

At 127.0.0.1 whoever is on this machine may look. With the certificates of `megascale certs init` the door has TLS, every look needs a
token, and it may be opened to other machines. A command needs a token with its role in both cases. A browser shows its token once and
gets a cookie with a random number, which scripts cannot read and other sites' pages do not send; the token stays in this process.
Programs show it as ``Authorization: Bearer TOKEN``. Without TLS browsers send cookies to all ports of 127.0.0.1: where others on this
machine are not trusted, name --security there too.

The ``Host`` of a request must be one of ours, so that a foreign name that is made to point here (DNS rebinding) gets nothing. A POST
must name our own origin and carry a word that only our pages know.
"""

import hashlib
import hmac
import secrets
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from starlette.requests import Request

from megascale_jax.cluster.job import SECURITY_FOLDER
from megascale_jax.cluster.link.certificates import LOCAL_HOSTS
from megascale_jax.cluster.link.security import Security
from megascale_jax.cluster.link.tokens import LONGEST_TOKEN, Role, TokenRefused, verify
from megascale_jax.errors import LinkError, UsageError
from megascale_jax.views.dashboard.page import RANKS, Visitor

COOKIE = "megascale_session"
SESSION_S, MOST_SESSIONS = 12 * 3600.0, 256
"""How long a shown token is remembered, and of how many visitors; the oldest is forgotten first."""
FORM_FIELD = "form_word"
"""Hidden field of every form."""


class Refused(LinkError):
    """A request that is not answered as asked; ``status``: of HTTP. The text is for the visitor."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


class Sessions:
    """Shown tokens by random numbers, in memory alone."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[str, tuple[float, str]] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, token: str) -> str:
        """The number under which a token is remembered."""
        number = secrets.token_urlsafe(32)
        with self._lock:
            self._tokens[number] = time.monotonic() + SESSION_S, token
            while len(self._tokens) > MOST_SESSIONS:
                self._tokens.popitem(last=False)
        return number

    def token(self, number: str) -> str:
        """The token, empty for none."""
        with self._lock:
            until_s, token = self._tokens.get(number, (0.0, ""))
        return token if time.monotonic() < until_s else ""

    def end(self, number: str) -> None:
        """Forget it."""
        with self._lock:
            self._tokens.pop(number, None)


@dataclass(frozen=True)
class Guard:
    """``security``: whose tokens count, ``None``: none do; ``needs_token``: also for looking; ``hosts``: names under which it is reached,
    without ports.
    """

    security: Security | None = None
    needs_token: bool = False
    hosts: frozenset[str] = frozenset(LOCAL_HOSTS)
    sessions: Sessions = field(default_factory=Sessions)
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def check_host(self, request: Request) -> None:
        """Raises Refused for a name that is not ours."""
        host = request.headers.get("host", "")
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if name.lower() not in self.hosts:
            raise Refused(421, f"this is not {name[:80] or 'a request with a host'}; open one of {', '.join(sorted(self.hosts))}")

    def visitor(self, request: Request) -> Visitor:
        """Who asks; a token that does not count is none."""
        kind, _, text = request.headers.get("authorization", "").partition(" ")
        shown = text.strip() if kind.lower() == "bearer" else self.sessions.token(request.cookies.get(COOKIE, ""))
        if shown:
            try:
                return self.holder(shown)
            except Refused:
                return Visitor()
        return Visitor()

    def holder(self, token: str) -> Visitor:
        """Whose token it is. Raises Refused."""
        if self.security is None:
            raise Refused(403, "tokens are not known here: start with --security, or serve the folder of a run that a driver has")
        if len(token) > LONGEST_TOKEN:
            raise Refused(403, "that is no token: it is too long")
        try:
            found = verify(self.security.read_signing_key(), token.strip(), self.security.job, time.time())
        except TokenRefused as error:
            raise Refused(403, str(error)) from error
        except UsageError as error:
            raise Refused(403, "the key of tokens cannot be read on this server") from error
        if found.role not in RANKS:
            raise Refused(403, f"the token of {found.name} is a {found.role}'s; expected one of {', '.join(RANKS)}")
        return Visitor(found.name, found.role, token.strip())

    def check_look(self, visitor: Visitor) -> None:
        """Raises Refused where looking needs a token and none was shown."""
        if self.needs_token and not visitor.may(Role.VIEW):
            raise Refused(401, "show a token of this job")

    def check_origin(self, request: Request) -> None:
        """Of a request that changes something. Raises Refused when another site's page sent it."""
        origin, own = request.headers.get("origin"), f"{request.url.scheme}://{request.headers.get('host', '')}"
        if origin != own and not (origin is None and "authorization" in request.headers):
            raise Refused(403, "this request does not come from the dashboard's own page")

    def form_word(self, visitor: Visitor) -> str:
        """What a form of this visitor's must carry."""
        return hmac.new(self._secret, visitor.token.encode(), hashlib.sha256).hexdigest()

    def check_form(self, visitor: Visitor, word: str) -> None:
        """Raises Refused when the form is not of a page that this server made for this visitor."""
        if not hmac.compare_digest(word.encode(), self.form_word(visitor).encode()):
            raise Refused(403, "this form is from before the dashboard was started again, or not from it; reload the page")


def is_local(host: str) -> bool:
    """Whether only this machine reaches an address to listen at."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def guard_for(host: str, security: Path | None, job: Path) -> Guard:
    """The guard of an address to listen at; ``job``: folder of the run's driver, whose tokens count where none are named.

    Raises UsageError for an address that others reach without TLS and tokens.
    """
    if security is not None:
        names = {*LOCAL_HOSTS, host.lower()}
        loaded = Security.load(security, role="driver")
        return Guard(loaded, needs_token=True, hosts=frozenset({*names, *certified_names(loaded)}))
    if not is_local(host):
        raise UsageError(
            f"--host {host} is reached from other machines, which needs TLS and tokens: make them with `megascale certs init FOLDER "
            f"--host {host}` and `megascale certs token FOLDER --name NAME --role view`, then add --security FOLDER; or keep 127.0.0.1 and "
            "come through a tunnel (ssh -L)"
        )
    return Guard(_own_security(job))


def certified_names(security: Security) -> frozenset[str]:
    """Names and addresses that the server's certificate is for."""
    certificate = x509.load_pem_x509_certificate(security.certificate.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return frozenset(str(name.value).lower() for name in names)


def _own_security(job: Path) -> Security | None:
    """Those of the run's own driver, if this user may read them."""
    try:
        return Security.load(job / SECURITY_FOLDER, role="driver")
    except UsageError:
        return None
