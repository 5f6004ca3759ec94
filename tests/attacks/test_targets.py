from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.svm import LinearSVC

import quietmax as qm
from quietmax.accounting import GaussianCost, PureCost
from quietmax.attacks import Endpoint, Threshold
from quietmax.attacks.metrics import _released_probabilities
from quietmax.attacks.targets import EndpointError, query_target
from quietmax.errors import InvalidInput
from quietmax.estimators.teachers import Teachers
from quietmax.mechanisms import Algorithm1, Answerer, NoisyMax
from quietmax.models import Model, TorchModel
from quietmax.noise import SeededNoise
from tests.attacks.conftest import World
from tests.mechanisms.made_up import bounds


@pytest.fixture
def queries(world: World) -> NDArray[np.float32]:
    return world.data.test.features[:20]


Queries = NDArray[np.float32]


def test_a_plain_model_answers_with_its_probabilities_at_no_cost(world: World, queries: Queries) -> None:
    result = query_target(world.model, queries, 3)
    np.testing.assert_array_equal(_released_probabilities(result.answers), world.model.predict_proba(queries))
    assert (result.queries, result.spent, result.target) == (20, None, "plain model")


def test_a_target_with_a_budget_is_charged_once_per_query(world: World, queries: Queries) -> None:
    quiet = qm.Predictor(world.model, Algorithm1("laplace"), qm.Budget(1.0, queries=50), noise=SeededNoise(0))
    result = query_target(quiet, queries, 3)
    assert result.queries == quiet.answered == 20
    assert result.spent == quiet.cost.times(20)
    assert result.target == "algorithm1"
    again = query_target(quiet, queries, 3)
    np.testing.assert_array_equal(_released_probabilities(again.answers), result.answers.probabilities)
    assert (again.queries, again.spent) == (0, PureCost(0.0))
    labels_only = NoisyMax(bounds=bounds())
    quiet = qm.Predictor(world.model, labels_only, qm.Budget(10.0, queries=20), noise=SeededNoise(0))
    result = query_target(quiet, queries, 3)
    assert result.answers.probabilities is None
    assert result.queries == quiet.answered == 20
    with pytest.raises(qm.BudgetExhausted):
        query_target(quiet, world.data.train.features, 3)
    train = world.data.train
    crowd = Teachers(10.0, 0.0, queries=30, teachers=4, random_state=0).fit(train.features, train.labels)
    result = query_target(crowd, queries, 3)
    assert (result.queries, result.spent) == (20, crowd.predictor_.cost.times(20))


def test_an_answerer_reports_the_cost_of_all_answers(world: World, queries: Queries) -> None:
    target = Answerer.prepare(world.model, Algorithm1("gaussian"), qm.Budget(0.5), noise=SeededNoise(1))
    result = query_target(target, queries, 3)
    assert result.spent == GaussianCost(0.5).times(20)
    plain = world.model.predict_proba(queries)
    assert np.abs(_released_probabilities(result.answers) - plain).max() > 1e-3


def test_an_estimator_answers_with_probabilities_at_their_classes_or_with_labels(
    world: World, queries: Queries
) -> None:
    features, labels = world.data.train.features, world.data.train.labels
    kept = labels != 1
    two = LogisticRegression().fit(features[kept], labels[kept])
    found = _released_probabilities(query_target(two, queries, 3).answers)
    np.testing.assert_array_equal(found[:, [0, 2]], two.predict_proba(queries))
    assert (found[:, 1] == 0).all()
    without = LinearSVC().fit(features, labels)
    result = query_target(without, queries, 3)
    assert result.answers.probabilities is None
    np.testing.assert_array_equal(result.answers.labels, without.predict(queries))
    with pytest.raises(InvalidInput, match="classes"):
        query_target(LogisticRegression().fit(features, np.array(["a", "b", "c"])[labels]), queries, 3)


def test_a_module_or_a_function_may_return_logits_probabilities_or_labels(queries: Queries) -> None:
    module = torch.nn.Linear(40, 3)
    result = query_target(TorchModel(module, 3), queries, 3)
    expected = torch.softmax(module(torch.from_numpy(queries)), -1).detach().numpy()
    np.testing.assert_allclose(_released_probabilities(result.answers), expected, atol=1e-6)
    rows = np.tile([0.2, 0.3, 0.5], (20, 1))
    assert query_target(lambda _: rows, queries, 3).answers.labels.tolist() == [2] * 20
    assert query_target(lambda _: [1] * 20, queries, 3).answers.probabilities is None


class _Odd:
    """An estimator that predicts a label which is not among its classes."""

    classes_ = np.arange(2)

    def predict(self, features: Queries) -> NDArray[np.int64]:
        return np.full(len(features), 2)


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        (lambda _: np.zeros((20, 3)), "sum to 1"),
        (lambda _: np.full((20, 3), np.nan), "sum to 1"),
        (lambda _: np.tile([2.0, -0.5, -0.5], (20, 1)), "at least 0"),
        (lambda _: np.full((20, 2), 0.5), "shape"),
        (lambda _: np.full((19, 3), 1 / 3), "one answer per query"),
        (lambda _: np.full(20, 0.5), "must be integers"),
        (lambda _: np.full(20, 3), "from 0 to 2"),
        (lambda _: ["a"] * 20, "not numbers"),
        (3.5, "got float"),
        (_Odd(), "not among its classes_"),
    ],
)
def test_invalid_answers_and_targets_are_errors(queries: Queries, target: Any, complaint: str) -> None:
    with pytest.raises(InvalidInput, match=complaint):
        query_target(target, queries, 3)


Reply = Callable[[NDArray[np.float32]], tuple[int, Any]]


class _Handler(BaseHTTPRequestHandler):
    """Answers for one model by the server's ``reply``, which returns status and content for a batch."""

    server: Any

    def do_GET(self) -> None:
        inputs = [{"name": "rows", "shape": [-1, 40], "datatype": "FP32"}]
        self._send(200, {"inputs": inputs} if self.path == "/v2/models/income" else {})

    def do_POST(self) -> None:
        (tensor,) = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["inputs"]
        self.server.received.append(tensor)
        if self.server.key is not None and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            self._send(401, {"error": "unknown key"})
        elif self.path != "/v2/models/income/infer":
            self._send(404, {"error": "no such model"})
        else:
            rows = np.array(tensor["data"], dtype=np.float32).reshape(tensor["shape"])
            self._send(*self.server.reply(rows))

    def _send(self, status: int, content: Any) -> None:
        text = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments: Any) -> None:
        """Stay quiet."""


Serve = Callable[..., Any]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Start model servers, each of which keeps the tensors that it received."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ExitStack() as servers:

        def start(reply: Reply, key: str | None = None) -> Any:
            server: Any = servers.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), _Handler))
            server.reply, server.key, server.received = reply, key, []
            server.url = f"http://127.0.0.1:{server.server_port}/v2/models/income"
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            servers.callback(server.shutdown)
            return server

        yield start


def outputs(**tensors: NDArray[Any]) -> tuple[int, dict[str, Any]]:
    """A reply with tensors of integers or of floats."""
    described = [
        {"name": name, "shape": [*each.shape], "datatype": f"{'INT' if each.dtype.kind == 'i' else 'FP'}64"}
        | {"data": each.ravel().tolist()}
        for name, each in tensors.items()
    ]
    return 200, {"outputs": described}


def probabilities_of(model: Model) -> Reply:
    return lambda rows: outputs(label=model.predict(rows), probabilities=model.predict_proba(rows))


def test_probabilities_of_a_server_arrive_in_order_and_in_batches(serve: Serve, world: World) -> None:
    server = serve(probabilities_of(world.model))
    features = world.data.test.features
    result = query_target(Endpoint(server.url, max_rows=30), features, 3)
    # Single-precision products of 30 rows and of 100 rows may differ in their last digit.
    np.testing.assert_allclose(
        _released_probabilities(result.answers), world.model.predict_proba(features), atol=1e-6
    )
    assert [tensor["shape"] for tensor in server.received] == [[30, 40]] * 3 + [[10, 40]]
    assert {tensor["name"] for tensor in server.received} == {"rows"}
    assert (result.queries, result.target) == (100, server.url)


def test_wide_records_are_sent_in_smaller_batches(serve: Serve) -> None:
    server = serve(lambda rows: outputs(label=np.zeros(len(rows), int)))
    query_target(Endpoint(server.url, input_name="rows"), np.zeros((7, 100_000), np.float32), 3)
    assert [tensor["shape"][0] for tensor in server.received] == [2, 2, 2, 1]


def test_a_server_that_returns_labels_is_attacked_by_labels(serve: Serve, world: World) -> None:
    server = serve(lambda rows: outputs(label=world.model.predict(rows)[:, None]))
    report = world.run(Threshold(), server.url)
    assert report.released == "labels"
    assert report.leakage == world.run(Threshold(), world.model.predict).leakage


def test_the_key_is_sent_and_an_error_quotes_the_server(serve: Serve, world: World) -> None:
    server = serve(probabilities_of(world.model), key="secret")
    features = world.data.test.features[:2]
    assert len(query_target(Endpoint(server.url, key="secret"), features, 3).answers.labels) == 2
    with pytest.raises(EndpointError, match=r"401 \(unknown key\)") as refused:
        query_target(Endpoint(server.url, key="wrong"), features, 3)
    assert "wrong" not in str(refused.value)


@pytest.mark.parametrize(
    ("status", "content", "complaint"),
    [
        (403, {"error": "the budget is spent"}, "403 .the budget is spent."),
        (500, b"oops", "500"),
        (302, {}, "redirects are not followed"),
        (200, b"<html>", "not JSON"),
        (200, {"outputs": []}, "neither probabilities"),
        (200, {"outputs": [{"name": "x", "shape": [2, 3], "datatype": "FP32", "data": [1]}]}, "neither"),
        (200, {"outputs": [{"name": "x", "shape": [1], "datatype": "INT64", "data": [1]}]}, "neither"),
        (200, {"outputs": [{"name": "x", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]}]}, "neither"),
        (200, [], "neither"),
    ],
)
def test_invalid_replies_are_errors(
    serve: Serve, world: World, status: int, content: Any, complaint: str
) -> None:
    server = serve(lambda _: (status, content))
    with pytest.raises(EndpointError, match=complaint):
        query_target(Endpoint(server.url), world.data.test.features[:2], 3)


def test_metadata_without_an_input_and_servers_that_cannot_be_reached_are_errors(
    serve: Serve, world: World
) -> None:
    server = serve(probabilities_of(world.model))
    for address, complaint in (
        (server.url + "/versions/2", "input_name"),
        ("http://127.0.0.1:9/v2/models/income", "cannot be reached"),
        (f"http://{'a' * 70}/v2/models/m", "cannot be reached"),
    ):
        with pytest.raises(EndpointError, match=complaint):
            query_target(address, world.data.test.features[:2], 3)


def test_a_server_that_does_not_speak_http_is_an_error(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def greet() -> None:
            peer, _ = listening.accept()
            with peer:
                peer.sendall(b"220 mail ready\r\n")
                peer.recv(65536)

        threading.Thread(target=greet, daemon=True).start()
        with pytest.raises(EndpointError, match="does not speak HTTP"):
            query_target(
                f"http://127.0.0.1:{listening.getsockname()[1]}/v2/models/m", world.data.test.features[:2], 3
            )


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
def test_an_invalid_address_is_an_error(address: str) -> None:
    with pytest.raises(InvalidInput, match="http"):
        Endpoint(address)
    with pytest.raises(InvalidInput, match="max_rows"):
        Endpoint("http://127.0.0.1:9/v2/models/m", max_rows=0)
