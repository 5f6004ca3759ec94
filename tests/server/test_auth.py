from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import time

import httpx
import pytest

from quietmax.accounting import LIMIT
from quietmax.errors import InvalidInput
from quietmax.ledger import Terms
from quietmax.server import Settings
from quietmax.server.run import Listening, check_anonymous
from tests.server.running_service import inference, running, some_rows


def test_without_a_key_only_health_the_server_and_the_login_page_are_open(plain):
    with httpx.Client(base_url=plain.url) as nobody:
        for path in ("/v2", "/v2/health/live", "/v2/health/ready", "/", "/openapi.json"):
            assert nobody.get(path).status_code == 200, path
        for path in (
            "/v2/models",
            "/v2/models/plain",
            "/v2/models/plain/ready",
            "/v2/models/plain/budget",
            "/metrics",
            "/state",
        ):
            refused = nobody.get(path)
            assert refused.status_code == 401, path
        assert "Log in" in nobody.get("/").text
        assert nobody.post("/v2/models/plain/infer", json=inference(some_rows(1))).status_code == 401
        assert nobody.post("/try", json={"model": "plain", "features": [0.5] * 6}).status_code == 401
    assert plain.ledger.account("people").spent_units == 0


@pytest.mark.parametrize("header", ["Bearer", "Bearer x", "Basic {key}", "{key}", "Bearer {key}x", "bearer"])
def test_a_wrong_key_is_401_with_a_sentence(plain, header):
    told = plain.http.get("/v2/models", headers={"authorization": header.format(key=plain.key)})
    assert told.status_code == 401
    assert told.headers["www-authenticate"] == "Bearer"
    assert told.json()["error"].endswith(".")


def test_a_revoked_key_asks_nothing_more_even_before_the_server_has_noticed(plain):
    assert plain.infer(some_rows(1)).status_code == 200
    key = next(key for key in plain.ledger.keys() if key.client == "ann")  # noqa: SIM118
    plain.ledger.revoke_key(key.id)
    refused = plain.infer(some_rows(1, 1))
    assert refused.status_code == 401
    assert plain.ledger.account("people").spent_units == LIMIT // 20
    time.sleep(1.1)
    assert plain.http.get("/v2/models").status_code == 401


def test_an_expired_key_is_refused(plain):
    shown, _ = plain.ledger.create_key("brief", days=0.6 / 86400)
    headers = {"authorization": f"Bearer {shown}"}
    time.sleep(0.7)
    assert plain.http.get("/v2/models", headers=headers).status_code == 401


def test_a_client_sees_its_own_spending_and_an_administrator_everyones(plain):
    plain.infer(some_rows(2))
    admin = {"authorization": f"Bearer {plain.admin}"}
    plain.http.post("/v2/models/plain/infer", json=inference(some_rows(1, 1)), headers=admin)
    mine = plain.http.get("/v2/models/plain/budget").json()
    assert [part["client"] for part in mine["clients"]] == ["ann"]
    assert mine["spent_fraction"] == pytest.approx(3 / 20)
    everyones = plain.http.get("/v2/models/plain/budget", headers=admin).json()
    assert {part["client"]: part["spent_fraction"] for part in everyones["clients"]} == {
        "ann": pytest.approx(0.1),
        "owner": pytest.approx(0.05),
    }


def test_anonymous_access_works_on_this_machine_and_not_through_a_proxy_or_another_name(models, tmp_path):
    settings = Settings(anonymous=True)
    with (
        running(
            f"sqlite:///{tmp_path / 'l.sqlite'}",
            [f"plain={models / 'plain'}"],
            budget=Terms(10.0),
            queries=20,
            settings=settings,
        ) as service,
        httpx.Client(base_url=service.url) as nobody,
    ):
        body = inference(some_rows(1))
        assert nobody.post("/v2/models/plain/infer", json=body).status_code == 200
        assert nobody.get("/").status_code == 200
        for header in (
            {"x-forwarded-for": "203.0.113.5"},
            {"forwarded": "for=203.0.113.5"},
            {"host": "attacker.example"},
        ):
            refused = nobody.post("/v2/models/plain/infer", json=body, headers=header)
            assert refused.status_code == 403, header
            assert nobody.get("/", headers=header).status_code == 403
        assert [part.client for part in service.ledger.subaccounts(service.ledger.account("people"))] == [
            "anonymous"
        ]
        with_key = {"authorization": f"Bearer {service.key}", "x-forwarded-for": "203.0.113.5"}
        assert nobody.post("/v2/models/plain/infer", json=body, headers=with_key).status_code == 200


def test_anonymous_or_clear_text_service_beyond_this_machine_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="keys would travel in the clear"):
        Listening(host="0.0.0.0")
    with pytest.raises(InvalidInput, match="Anonymous access is only for this machine"):
        check_anonymous(Listening(host="0.0.0.0", behind_proxy=True))
    with pytest.raises(InvalidInput, match="Anonymous access is only for this machine"):
        check_anonymous(Listening(behind_proxy=True))
    with pytest.raises(InvalidInput, match="give both, or neither"):
        Listening(certificate=tmp_path / "c.pem")
    with pytest.raises(InvalidInput, match="There is no file"):
        Listening(certificate=tmp_path / "c.pem", private_key=tmp_path / "k.pem")
    check_anonymous(Listening())
    assert Listening(host="0.0.0.0", behind_proxy=True).secure_cookies
    assert not Listening().secure_cookies


def test_with_a_certificate_the_service_speaks_tls_and_nothing_else(models, tmp_path):
    files = (tmp_path / "certificate.pem", tmp_path / "key.pem")
    if shutil.which("openssl") is None:
        pytest.skip("openssl is missing; install it with: apt-get install -y openssl")
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    where = ["-addext", "subjectAltName=IP:127.0.0.1", "-out", files[0], "-keyout", files[1]]
    subprocess.run([*made, *where], check=True, capture_output=True)
    with running(
        f"sqlite:///{tmp_path / 'ledger.sqlite'}", [f"head={models / 'head'}"], tls=files
    ) as service:
        trusted = ssl.create_default_context(cafile=files[0])
        assert httpx.get(f"{service.url}/v2/health/ready", verify=trusted, timeout=120).status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{service.url.replace('https', 'http')}/v2/health/ready", timeout=120)


def test_the_session_cookie_is_for_pages_only_and_carries_no_key(plain):
    with httpx.Client(base_url=plain.url) as browser:
        login = browser.post("/login", data={"key": plain.key})
        assert login.status_code == 303
        cookie = login.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert plain.key.split("_", 2)[2] not in cookie
        assert browser.get("/state").json()["client"] == "ann"
        assert browser.get("/v2/models").status_code == 401, "a cookie is no key"
        assert browser.post("/logout").status_code == 303
        browser.cookies.clear()
        assert browser.get("/state").status_code == 401


def test_a_forged_expired_or_revoked_session_is_refused(plain):
    with httpx.Client(base_url=plain.url) as browser:
        browser.post("/login", data={"key": plain.key})
        cookie = browser.cookies["quietmax_session"]
        number, end, signature = cookie.split(".")
        for forged in (
            f"{number}.{int(end) + 1}.{signature}",
            f"{'0' * 16}.{end}.{signature}",
            f"{number}.{end}.{'0' * 64}",
            "x",
            "..",
            "",
            "a.b.ü",
        ):
            headers = {"cookie": f"quietmax_session={forged}".encode()}
            assert httpx.get(f"{plain.url}/state", headers=headers).status_code == 401, forged
        old = f"{number}.{int(time.time()) - 1}"
        expired = f"{old}.{plain.service.access._signature(old)}"
        assert httpx.get(f"{plain.url}/state", cookies={"quietmax_session": expired}).status_code == 401
        plain.ledger.revoke_key(number)
        time.sleep(1.1)
        assert browser.get("/state").status_code == 401


def test_the_pages_refuse_requests_of_other_sites(plain):
    with httpx.Client(base_url=plain.url) as browser:
        browser.post("/login", data={"key": plain.key})
        question = {"model": "plain", "features": [0.5] * 6}
        for headers in ({"origin": "https://attacker.example"}, {"sec-fetch-site": "cross-site"}):
            assert browser.post("/try", json=question, headers=headers).status_code == 403
            assert browser.post("/login", data={"key": plain.key}, headers=headers).status_code == 403
        assert plain.ledger.account("people").spent_units == 0
        own = {"origin": plain.url, "sec-fetch-site": "same-origin"}
        assert browser.post("/try", json=question, headers=own).status_code == 200


@pytest.mark.parametrize(
    ("question", "status"),
    [
        (b"", 400),
        (b"[]", 400),
        (b'{"model": 5}', 400),
        (b'{"model": "plain", "version": 5}', 400),
        (b'{"model": "nobody", "features": []}', 404),
        (b'{"model": "plain"}', 422),
        (b'{"model": "plain", "features": ["1"]}', 422),
        (b'{"model": "plain", "features": [1, 2]}', 422),
        (b'{"model": "plain", "features": [1, 2, 3, 4, 5, 1e30]}', 422),
        (b'{"model": "plain", "features": [true, 2, 3, 4, 5, 6]}', 422),
        (b"x" * (2**20 + 1), 413),
    ],
)
def test_a_wrong_trial_is_refused_unpaid(plain, question, status):
    with httpx.Client(base_url=plain.url) as browser:
        browser.post("/login", data={"key": plain.key})
        refused = browser.post("/try", content=question)
        assert refused.status_code == status
        assert refused.json()["error"].endswith(".")
    assert plain.ledger.account("people").spent_units == 0


def test_the_page_has_no_external_resource_and_allows_only_its_own_script(plain):
    login = plain.http.post("/login", data={"key": plain.admin})
    response = plain.http.get("/", headers={"cookie": login.headers["set-cookie"].partition(";")[0]})
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    for word in ("http://", "https://", "//cdn", "src="):
        assert word not in response.text
    assert response.headers["cache-control"] == "no-store"
    assert "as owner (administrator)" in response.text


def test_names_on_the_page_are_escaped(models, tmp_path):
    import shutil

    folder = tmp_path / "odd"
    shutil.copytree(models / "plain", folder)
    description = json.loads((folder / "model.json").read_text())
    description["dataset"] = "<script>alert(1)</script>"
    (folder / "model.json").write_text(json.dumps(description))
    with running(
        f"sqlite:///{tmp_path / 'l.sqlite'}",
        [str(folder)],
        budget=Terms(10.0),
        settings=Settings(anonymous=True),
    ) as service:
        page = httpx.get(service.url).text
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page


def test_metrics_count_requests_answers_and_the_budget_but_name_no_client(plain):
    plain.infer(some_rows(4))
    plain.infer(some_rows(4))
    plain.infer([[0.0]])
    text = plain.http.get("/metrics").text
    assert 'quietmax_requests_total{model="plain",status="200",version="1"} 2.0' in text
    assert 'quietmax_requests_total{model="plain",status="422",version="1"} 1.0' in text
    assert 'quietmax_answers_total{model="plain",origin="new",version="1"} 4.0' in text
    assert 'quietmax_answers_total{model="plain",origin="stored",version="1"} 4.0' in text
    assert 'quietmax_budget_spent_fraction{account="people"} 0.2' in text
    assert "quietmax_ledger_up 1.0" in text
    assert "ann" not in text


def test_the_log_tells_of_requests_but_never_of_inputs_outputs_ids_or_keys(plain):
    rows = some_rows(1)
    answer = plain.infer(rows, id="my-secret-id").json()
    plain.infer(rows, id="x" * 200)
    httpx.post(f"{plain.url}/login", data={"key": plain.admin})
    plain.service.log.flush()
    text = plain.log.getvalue().decode()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["event"] for line in lines] == ["started", "request", "request", "login"]
    assert lines[1]["model"] == "plain"
    assert (lines[1]["client"], lines[1]["rows"], lines[1]["status"]) == ("ann", 1, 200)
    assert lines[2]["status"] == 400
    for secret in (
        plain.key,
        plain.key.split("_", 2)[2],
        plain.admin.split("_", 2)[2],
        "my-secret-id",
        *(str(value) for value in rows[0]),
        *(str(value) for value in answer["outputs"][1]["data"]),
    ):
        assert secret not in text


@pytest.mark.parametrize(
    "headers",
    [{"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}],
)
def test_a_page_of_another_site_cannot_spend_an_anonymous_budget(start, headers):
    with start("plain", budget=Terms(10.0), queries=20, settings=Settings(anonymous=True)) as service:
        body = json.dumps(inference(some_rows(1)))
        asked = httpx.post(
            f"{service.url}/v2/models/plain/infer",
            content=body,
            headers={"content-type": "text/plain", **headers},
        )
        assert (asked.status_code, "other sites" in asked.json()["error"]) == (403, True)
        assert service.ledger.account("people").spent_units == 0
        own = httpx.post(
            f"{service.url}/v2/models/plain/infer", content=body, headers={"origin": service.url}
        )
        assert own.status_code == 200
