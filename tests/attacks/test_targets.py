from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.svm import LinearSVC

import quietmax as qm
from quietmax.accounting import GaussianCost, PureCost
from quietmax.attacks import Endpoint, EndpointFailed, Threshold, ask
from quietmax.errors import InvalidInput
from quietmax.estimators.teachers import Teachers
from quietmax.mechanisms import Algorithm1, Answerer, NoisyMax
from quietmax.models import TorchModel
from quietmax.noise import SeededNoise
from quietmax.sensitivity import ScoreBounds, Sensitivity

CERTIFIED = ScoreBounds(Sensitivity(1.0, "certified", "test"), Sensitivity(1.0, "certified", "test"))


@pytest.fixture
def queries(memorised):
    return memorised.test.features[:20]


def test_a_plain_model_answers_with_its_probabilities_at_no_cost(overfitted, queries):
    asked = ask(overfitted, queries, 3)
    np.testing.assert_array_equal(asked.answers.probabilities, overfitted.predict_proba(queries))
    assert (asked.queries, asked.spent, asked.target) == (20, None, "plain model")


def test_a_predictor_is_charged_once_per_query(overfitted, queries):
    quiet = qm.Predictor(overfitted, Algorithm1("laplace"), qm.Budget(1.0, queries=50), noise=SeededNoise(0))
    asked = ask(quiet, queries, 3)
    assert asked.queries == quiet.answered == 20
    assert asked.spent == quiet.cost.times(20)
    assert asked.target == "algorithm1"
    again = ask(quiet, queries, 3)
    np.testing.assert_array_equal(again.answers.probabilities, asked.answers.probabilities)
    assert (again.queries, again.spent) == (0, PureCost(0.0))


def test_a_predictor_that_releases_labels_is_asked_for_labels_and_charged_once(overfitted, queries):
    quiet = qm.Predictor(
        overfitted, NoisyMax(bounds=CERTIFIED), qm.Budget(10.0, queries=20), noise=SeededNoise(0)
    )
    asked = ask(quiet, queries, 3)
    assert asked.answers.probabilities is None
    assert asked.queries == quiet.answered == 20


def test_an_exhausted_predictor_refuses_the_attack(overfitted, queries):
    quiet = qm.Predictor(overfitted, Algorithm1(), qm.Budget(1.0, queries=5), noise=SeededNoise(0))
    with pytest.raises(qm.BudgetExhausted):
        ask(quiet, queries, 3)


def test_an_answerer_says_what_all_its_answers_cost_together(overfitted, queries):
    target = Answerer.prepare(overfitted, Algorithm1("gaussian"), qm.Budget(0.5), noise=SeededNoise(1))
    asked = ask(target, queries, 3)
    one = target.mechanism.cost(3)
    assert one.mu == pytest.approx(0.5)
    assert asked.spent == one.times(20)
    assert isinstance(asked.spent, GaussianCost)
    assert np.abs(asked.answers.probabilities - overfitted.predict_proba(queries)).max() > 1e-3


def test_an_estimator_s_columns_are_put_at_their_classes(memorised, queries):
    kept = memorised.train.labels != 1
    estimator = LogisticRegression().fit(memorised.train.features[kept], memorised.train.labels[kept])
    asked = ask(estimator, queries, 3)
    np.testing.assert_array_equal(asked.answers.probabilities[:, [0, 2]], estimator.predict_proba(queries))
    assert (asked.answers.probabilities[:, 1] == 0).all()


def test_an_estimator_without_probabilities_gives_labels(memorised, queries):
    estimator = LinearSVC().fit(memorised.train.features, memorised.train.labels)
    asked = ask(estimator, queries, 3)
    assert asked.answers.probabilities is None
    np.testing.assert_array_equal(asked.answers.labels, estimator.predict(queries))


def test_an_estimator_fitted_on_other_labels_is_refused(memorised, queries):
    names = np.array(["a", "b", "c"])[memorised.train.labels]
    with pytest.raises(InvalidInput, match="classes"):
        ask(LogisticRegression().fit(memorised.train.features, names), queries, 3)


def test_teachers_are_charged_through_their_own_predictor(memorised, queries):
    crowd = Teachers(10.0, 0.0, queries=30, teachers=4, random_state=0).fit(
        memorised.train.features, memorised.train.labels
    )
    asked = ask(crowd, queries, 3)
    assert asked.queries == 20
    assert asked.spent == crowd.predictor_.cost.times(20)


def test_a_wrapped_module_answers_with_the_softmax_of_its_logits(queries):
    module = torch.nn.Linear(40, 3)
    asked = ask(TorchModel(module, 3), queries, 3)
    expected = torch.softmax(module(torch.from_numpy(queries)), -1).detach().numpy()
    np.testing.assert_allclose(asked.answers.probabilities, expected, atol=1e-6)


def test_a_function_may_give_probabilities_or_labels(queries):
    rows = np.tile([0.2, 0.3, 0.5], (20, 1))
    assert ask(lambda _: rows, queries, 3).answers.labels.tolist() == [2] * 20
    assert ask(lambda _: [1] * 20, queries, 3).answers.probabilities is None


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (np.zeros((20, 3)), "not probabilities"),
        (np.full((20, 3), np.nan), "not probabilities"),
        (np.tile([2.0, -0.5, -0.5], (20, 1)), "not probabilities"),
        (np.full((20, 2), 0.5), "shape"),
        (np.full((19, 3), 1 / 3), "one per query"),
        (np.full(20, 0.5), "whole"),
        (np.full(20, 3), "label outside"),
        (["a"] * 20, "not numbers"),
    ],
)
def test_answers_that_are_none_are_refused(queries, answer, complaint):
    with pytest.raises(InvalidInput, match=complaint):
        ask(lambda _: answer, queries, 3)


def test_what_cannot_be_asked_is_refused(queries):
    with pytest.raises(InvalidInput, match="cannot be asked"):
        ask(3.5, queries, 3)


class _Server:
    """A model server that keeps what it was asked; ``reply`` makes the outputs of a batch."""

    def __init__(self, reply, *, key=None):
        self.bodies, self.headers = [], []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                metadata = {
                    "name": "income",
                    "inputs": [{"name": "rows", "shape": [-1, 40], "datatype": "FP32"}],
                }
                self._send(200, metadata if self.path == "/v2/models/income" else {})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.bodies.append(body)
                outer.headers.append(dict(self.headers))
                if key is not None and self.headers.get("Authorization") != f"Bearer {key}":
                    self._send(401, {"error": "unknown key"})
                elif self.path != "/v2/models/income/infer":
                    self._send(404, {"error": "no such model"})
                else:
                    (tensor,) = body["inputs"]
                    rows = np.array(tensor["data"], dtype=np.float32).reshape(tensor["shape"])
                    self._send(*reply(rows))

            def _send(self, status, content):
                text = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "http://127.0.0.1:9/elsewhere")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *arguments):
                """Stay quiet."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v2/models/income"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    servers = []

    def start(reply, **options):
        servers.append(_Server(reply, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.http.shutdown()
        server.http.server_close()


def tensor(name, values, datatype):
    return {
        "name": name,
        "shape": list(values.shape),
        "datatype": datatype,
        "data": values.ravel().tolist(),
    }


def probabilities_of(model):
    return lambda rows: (
        200,
        {
            "outputs": [
                tensor("label", model.predict(rows), "INT64"),
                tensor("probabilities", model.predict_proba(rows), "FP64"),
            ]
        },
    )


def labels_of(model):
    return lambda rows: (200, {"outputs": [tensor("label", model.predict(rows)[:, None], "INT64")]})


def test_a_server_s_probabilities_arrive_in_order_and_in_batches(serve, overfitted, memorised):
    server = serve(probabilities_of(overfitted))
    features = memorised.test.features
    asked = ask(Endpoint(server.url, rows_at_once=30), features, 3)
    # Single-precision products of 30 rows and of 100 rows may differ in their last digit.
    np.testing.assert_allclose(asked.answers.probabilities, overfitted.predict_proba(features), atol=1e-6)
    assert [body["inputs"][0]["shape"] for body in server.bodies] == [[30, 40]] * 3 + [[10, 40]]
    assert {body["inputs"][0]["name"] for body in server.bodies} == {"rows"}
    assert (asked.queries, asked.target) == (100, server.url)


def test_wide_records_travel_in_smaller_batches(serve):
    server = serve(lambda rows: (200, {"outputs": [tensor("label", np.zeros(len(rows), int), "INT64")]}))
    ask(Endpoint(server.url, input_name="rows"), np.zeros((7, 100_000), np.float32), 3)
    assert [body["inputs"][0]["shape"][0] for body in server.bodies] == [2, 2, 2, 1]


def test_a_server_that_gives_labels_only_is_attacked_by_labels(serve, overfitted, memorised, outside_pool):
    server = serve(labels_of(overfitted))
    report = Threshold().run(overfitted, memorised, target=server.url, pool=outside_pool)
    assert report.released == "labels"
    gap = (overfitted.predict(memorised.train.features) == memorised.train.labels).mean() - (
        overfitted.predict(memorised.test.features) == memorised.test.labels
    ).mean()
    assert report.leakage.value == pytest.approx(gap)


def test_the_key_is_sent_and_a_refusal_quotes_the_server(serve, overfitted, memorised):
    server = serve(probabilities_of(overfitted), key="secret")
    features = memorised.test.features[:2]
    assert len(ask(Endpoint(server.url, key="secret"), features, 3).answers.labels) == 2
    with pytest.raises(EndpointFailed, match=r"401 \(unknown key\)") as refused:
        ask(Endpoint(server.url, key="wrong"), features, 3)
    assert "wrong" not in str(refused.value)


@pytest.mark.parametrize(
    ("status", "content", "complaint"),
    [
        (403, {"error": "the budget is spent"}, "403 .the budget is spent."),
        (500, b"oops", "500"),
        (302, {}, "redirects are not followed"),
        (200, b"<html>", "something else than JSON"),
        (200, {"outputs": []}, "neither probabilities"),
        (200, {"outputs": [{"name": "x", "shape": [2, 3], "datatype": "FP32", "data": [1]}]}, "neither"),
        (200, {"outputs": [{"name": "x", "shape": [1], "datatype": "INT64", "data": [1]}]}, "neither"),
        (200, {"outputs": [{"name": "x", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]}]}, "neither"),
        (200, [], "neither"),
    ],
)
def test_bad_replies_are_refused_in_one_sentence(serve, memorised, status, content, complaint):
    server = serve(lambda _: (status, content))
    with pytest.raises(EndpointFailed, match=complaint):
        ask(Endpoint(server.url), memorised.test.features[:2], 3)


def test_metadata_without_an_input_ask_for_its_name(serve, overfitted, memorised):
    server = serve(probabilities_of(overfitted))
    with pytest.raises(EndpointFailed, match="input_name"):
        ask(Endpoint(server.url + "/versions/2"), memorised.test.features[:2], 3)


def test_a_server_that_does_not_listen_is_named(memorised):
    with pytest.raises(EndpointFailed, match="cannot be reached"):
        ask("http://127.0.0.1:9/v2/models/income", memorised.test.features[:2], 3)


def test_a_server_that_speaks_something_else_is_named(memorised):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def greet():
            peer, _ = listening.accept()
            with peer:
                peer.sendall(b"220 mail ready\r\n")
                peer.recv(65536)

        threading.Thread(target=greet, daemon=True).start()
        with pytest.raises(EndpointFailed, match="does not speak HTTP"):
            ask(f"http://127.0.0.1:{listening.getsockname()[1]}/v2/models/m", memorised.test.features[:2], 3)


def test_a_host_s_name_that_cannot_be_sent_is_refused_in_one_sentence(memorised):
    with pytest.raises(EndpointFailed, match="cannot be reached"):
        ask(f"http://{'a' * 70}/v2/models/m", memorised.test.features[:2], 3)


@pytest.mark.parametrize(
    "address",
    [
        "file:///etc/hosts",
        "ftp://host/x",
        "http://",
        "income",
        "http://127.0.0.1:abc/v2/models/m",
        "http://127.0.0.1:99999/v2/models/m",
        "http://:80/v2/models/m",
        "http://[::1",
        "http://127.0.0.1:9/v2/models/m m",
        "http://127.0.0.1:9/v2/models/\u00e9",
    ],
)
def test_only_web_addresses_are_asked(address):
    with pytest.raises(InvalidInput, match="http"):
        Endpoint(address)


def test_a_batch_of_no_rows_is_refused():
    with pytest.raises(InvalidInput, match="rows_at_once"):
        Endpoint("http://127.0.0.1:9/v2/models/m", rows_at_once=0)
