"""Attacks on `simic watch`: each is refused, or shown as text, and the server goes on."""

import socket
import time
from contextlib import suppress

import pytest
from helpers.reports import write_run
from helpers.watching import TOKEN, watching

from simic.dashboard import web_server
from simic.dashboard.web_security import CONTENT_SECURITY_POLICY, Access, names_of
from simic.telemetry.events import MAX_LINE_BYTES

SCRIPT = "<script>alert(1)</script>"
TRAVERSALS = [
    "..",
    "../secret",
    "%2e%2e/secret",
    "..%2fsecret",
    "%2e%2e%2fsecret",
    "..%5csecret",
    "....//secret",
    "%252e%252e%252fsecret",
    "..%c0%afsecret",
    "..%00/secret",
    "plain%2f..%2f..%2fsecret",
    "plain/../../secret",
    "./plain",
    "/plain",
    "link",
    "%2fetc",
]
"""Ways to spell a directory that the listing does not have; `secret`, beside the watched one, is a run."""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    place = tmp_path_factory.mktemp("watch")
    (place / "runs").mkdir()
    write_run(place / "runs" / "plain")
    write_run(place / "secret")
    (place / "runs" / "link").symlink_to(place / "secret")
    (place / "runs" / SCRIPT.partition("/")[0]).mkdir()
    write_run(place / "runs" / SCRIPT)
    with watching(place / "runs") as watched:
        yield watched
        assert watched.get("/api/runs").status == 200, "the server did not go on"


@pytest.mark.parametrize("path", ["/", "/static/index.html", "/api/runs", "/api/run/plain/stream", "/nowhere"])
def test_without_a_token_nothing_is_told(served, path):
    answer = served.get(path, cookie=False)
    assert answer.status == 401
    assert b"simic watch printed" in answer.body
    assert b"plain" not in answer.body


@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "x", "ü", "%00", f"{TOKEN}&token=wrong"])
def test_a_wrong_token_is_refused(served, token):
    quoted = token.encode().decode("latin-1") if token.isascii() else "%C3%BC"
    answer = served.get(f"/?token={quoted}", cookie=False)
    assert answer.status == 403
    assert "set-cookie" not in answer.headers
    for cookie in (f"{served.access.cookie}={quoted}; other=1", f"other={served.access.session}"):
        assert served.get("/api/runs", cookie=False, Cookie=cookie).status == 401


def test_the_token_becomes_a_cookie_that_scripts_and_other_sites_do_not_get(served):
    answer = served.get(f"/run/plain/story?kind=anomaly&token={TOKEN}&host=g0-e1", cookie=False)
    assert answer.status == 303
    assert answer.headers["location"] == "/run/plain/story?kind=anomaly&host=g0-e1"
    cookie = answer.headers["set-cookie"]
    assert TOKEN not in cookie
    assert cookie.split("; ")[1:] == ["Path=/", "HttpOnly", "SameSite=Strict"]
    assert served.get("/api/runs", cookie=False, Cookie=f"theirs=1; {cookie.partition(';')[0]}").status == 200


def test_a_key_is_good_for_one_use(served):
    served.access.keys.update(("first", "second"))
    assert served.get("/?token=first", cookie=False).status == 303
    assert served.get("/?token=first", cookie=False).status == 403
    assert served.get("/?token=second", cookie=False).status == 303
    assert served.access.keys == set()


def test_a_redirect_stays_here(served):
    for path in ("//evil.example/", "//evil.example/%2f..", "/%2fevil.example", "http://evil.example/"):
        answer = served.get(f"{path}?token={TOKEN}", cookie=False, Host="localhost")
        assert answer.status == 404, path
        assert "location" not in answer.headers
    assert served.get(f"/%5cevil.example?token={TOKEN}", cookie=False).headers["location"] == "/%5Cevil.example"
    split = served.get(f"/x%0d%0aset-cookie:y?token={TOKEN}", cookie=False)
    assert split.headers["location"] == "/x%0D%0Aset-cookie%3Ay"


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "192.168.1.7", "localhost:x", "", "[::1"],
)
def test_a_foreign_host_is_refused(served, host):
    assert served.get("/api/runs", Host=host).status == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9000", "127.0.0.1:1", "[::1]:80", "[::1]"])
def test_names_of_this_machine_are_accepted_with_any_port(served, host):
    assert served.get("/api/runs", Host=host).status == 200


def test_two_hosts_are_refused(served):
    request = f"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nCookie: {served.cookie}\r\n\r\n"
    assert b" 40" in served.raw(request.encode(), seconds=1).partition(b"\r\n")[0]


def test_a_server_of_all_addresses_answers_to_addresses_and_its_own_name():
    names, any_address = names_of("0.0.0.0")
    access = Access(token=None, names=names, any_address=any_address)
    assert access.answers_to("192.168.1.7:8620")
    assert access.answers_to("[fe80::1]:8620")
    assert access.answers_to(f"{socket.gethostname()}:8620")
    assert not access.answers_to("evil.example")


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://localhost:80", "http://localhost:9", "file://"]
)
def test_a_foreign_origin_is_refused(served, origin):
    assert served.get("/api/runs", Host="localhost:80", Origin=origin).status == 403
    assert served.get("/api/runs", Host="localhost:80", Origin="http://localhost:80").status == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site", "CROSS-SITE", "anything"])
def test_a_cross_site_fetch_is_refused(served, site):
    for path in ("/api/runs", "/", "/static/index.html", f"/?token={TOKEN}"):
        assert served.get(path, Sec_Fetch_Site=site, Sec_Fetch_Mode="no-cors").status == 403
    assert served.get("/api/runs", Sec_Fetch_Site="same-origin").status == 200
    assert served.get("/", Sec_Fetch_Site="none").status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "X"])
def test_only_reading_is_allowed(served, method):
    answer = served.get("/api/runs", method=method)
    assert answer.status == 405
    assert answer.headers["allow"] == "GET, HEAD"
    assert "access-control-allow-origin" not in answer.headers


def test_a_request_with_a_body_is_refused_unread(served):
    head = f"GET /api/runs HTTP/1.1\r\nHost: localhost\r\nCookie: {served.cookie}\r\n"
    for kind in ("Content-Length: 1000000", "Transfer-Encoding: chunked"):
        answer = served.raw(f"{head}{kind}\r\n\r\n".encode(), seconds=2)
        assert answer.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("name", TRAVERSALS)
def test_no_path_leads_out(served, name):
    for address in (
        *(f"/api/run/{name}/{what}" for what in ("view", "stream", "events")),
        *(f"/run/{name}/now", f"/evaluation/{name}", f"/api/evaluation/{name}"),
        *(f"/static/{name}", f"/static/{name}/process.jsonl", f"/{name}"),
    ):
        answer = served.get(address)
        assert answer.status == 404, address
        assert b"run_started" not in answer.body


def test_a_link_that_leads_out_is_not_listed(served):
    assert {run["id"] for run in served.get("/api/runs").json["runs"]} == {"plain", SCRIPT}


def test_a_run_named_like_a_script_is_text(served):
    quoted = "%3Cscript%3Ealert(1)%3C%2Fscript%3E"
    for path in (f"/api/run/{quoted}/view", "/api/runs"):
        answer = served.get(path)
        assert answer.status == 200
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert served.get(f"/run/{quoted}/now").body == served.get("/").body, "the page does not hold the name"
    wrong = served.get("/run/%3Cscript%3Ealert(2)/now")
    assert wrong.status == 404
    assert wrong.headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/run/plain/view", "/nowhere", "/static/index.html"])
def test_every_answer_has_the_security_headers(served, path):
    for cookie in (True, False):
        headers = served.get(path, cookie=cookie).headers
        assert headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        assert "unsafe" not in CONTENT_SECURITY_POLICY
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "server" not in headers
        if path.startswith("/api/"):
            assert headers["cache-control"] == "no-store"


def test_torn_huge_and_unreadable_lines_are_skipped(tmp_path):
    run = write_run(tmp_path / "broken")
    good = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    huge = b'{"kind":"update","update":1,"x":"' + b"x" * (2 * MAX_LINE_BYTES) + b'"}\n'
    bad = [b'{"kind":"update","upd\n', huge, b"\xff\xfe\x00\n", b"[]\n", b'{"kind":"update","update":"' + b"[" * 5000]
    (run / "events.jsonl").write_bytes(b"".join([*good[:2], *bad[:4], *good[2:], bad[4]]))
    with watching(tmp_path) as served:
        view = served.get("/api/run/broken/view")
        assert view.status == 200
        assert [row["update"] for row in view.json["learning"]["rows"]] == [0, 1, 2, 3]
        assert view.json["now"]["damaged_lines"] == 4
        assert len(view.body) < 10**6
        assert served.get("/api/runs").status == 200
        with served.stream("broken") as messages:
            assert next(messages)[1]["learning"]["rows"] == view.json["learning"]["rows"]


def test_200_slow_clients_do_not_keep_others_out(served, monkeypatch):
    monkeypatch.setattr(web_server, "HEAD_SECONDS", 1.0)
    clients = []
    try:
        clients += (socket.create_connection(("127.0.0.1", served.port), timeout=5) for _ in range(200))
        silent, trickling = clients[:100], clients[100:]
        for number, client in enumerate(trickling):
            client.sendall(b"GET /api/runs HTTP/1.1\r\nX-Slow: "[: 1 + number % 30])
        start = time.monotonic()
        assert served.get("/api/runs").status == 200
        assert time.monotonic() - start < 3
        for _ in range(12):  # a byte now and then does not buy time
            time.sleep(0.1)
            for client in trickling:
                _try_to_send(client, b"x")
        deadline = time.monotonic() + 5
        while len(served.server.server_state.connections) > 5 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(served.server.server_state.connections) <= 5, "slow clients were not dropped"
        assert [client.recv(1) for client in silent] == [b""] * 100
    finally:
        for client in clients:
            client.close()


def _try_to_send(client, data):
    with suppress(OSError):
        client.send(data)


def test_more_clients_than_allowed_are_closed_at_once(served, monkeypatch):
    monkeypatch.setattr(web_server, "MAX_CONNECTIONS", 20)
    clients = [socket.create_connection(("127.0.0.1", served.port), timeout=5) for _ in range(30)]
    try:
        time.sleep(0.2)
        assert len(served.server.server_state.connections) <= 20
    finally:
        for client in clients:
            client.close()
    time.sleep(0.2)
    assert served.get("/api/runs").status == 200


@pytest.mark.parametrize("pieces", [1, 40])
def test_huge_heads_are_refused(served, pieces):
    end = b"Host: localhost\r\nConnection: close\r\n\r\n"
    many = b"".join(b"X-%d: 1\r\n" % i for i in range(5000))
    for head in (b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\n" + end, b"GET / HTTP/1.1\r\n" + many + end):
        with socket.create_connection(("127.0.0.1", served.port), timeout=5) as client:
            for start in range(0, len(head), len(head) // pieces):
                _try_to_send(client, head[start : start + len(head) // pieces])
                time.sleep(0.001)
            assert client.recv(12) in (b"HTTP/1.1 400", b"HTTP/1.1 431")


def test_a_head_without_end_is_not_collected(served):
    with socket.create_connection(("127.0.0.1", served.port), timeout=3) as client:
        for _ in range(40):
            _try_to_send(client, b"X" * 1000)
            time.sleep(0.001)
        assert client.recv(12) == b"HTTP/1.1 400"


def test_what_is_no_http_is_refused(served):
    for request in (
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"\xff" * 100 + b"\r\n\r\n",
        b"GET /\xc3\xbc HTTP/1.1\r\n\r\n",
    ):
        assert served.raw(request, seconds=2).startswith(b"HTTP/1.1 400")
    upgrade = "GET /api/runs HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: websocket\r\n"
    assert b" 401 " in served.raw(f"{upgrade}Sec-WebSocket-Version: 13\r\n\r\n".encode(), seconds=1)


def test_requests_are_not_logged(served, capfd, caplog):
    served.get(f"/?token={TOKEN}", cookie=False)
    served.raw(b"nonsense\r\n\r\n")
    captured = capfd.readouterr()
    assert TOKEN not in captured.out + captured.err + caplog.text
    assert captured.err == ""
