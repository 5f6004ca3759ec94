"""Malformed requests over HTTP and gRPC: a small version of `benchmarks/malformed.py`, with its requests."""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc
from typing import Any

import grpc
import pytest

from quietmax.ledger import Terms
from quietmax.server import Settings
from tests.docs.scripts import script
from tests.server.running_service import FEATURES, Start, run_async

malformed = script("benchmarks/malformed.py")


@pytest.mark.parametrize("count", [500, pytest.param(20_000, marks=pytest.mark.slow)])
def test_malformed_requests_cause_no_error_of_the_service_and_charge_nothing(
    start: Start, count: int
) -> None:
    settings = Settings(header_timeout=0.5, idle_timeout=0.5, timeout=2)
    with start(
        "head", "plain", budget=Terms(10.0, 1e-5), queries=20, settings=settings, grpc=True
    ) as service:
        target = malformed.Target(
            port=int(service.url.rpartition(":")[2]),
            grpc_port=int(str(service.grpc).rpartition(":")[2]),
            key=service.key,
            free="head",
            charged="plain",
            features=FEATURES,
        )
        outcome = malformed.Outcome()
        run_async(malformed.send(target, range(count), range(count), seed=1, outcome=outcome))
        assert outcome.wrong == {}
        assert outcome.good == count // 50
        assert outcome.grpc.total() == count
        assert outcome.http.total() >= count
        assert set(outcome.http) >= {"200", "400", "401", "404", "405", "415", "422", "431"}
        assert set(outcome.grpc) >= {
            "OK",
            "INVALID_ARGUMENT",
            "NOT_FOUND",
            "UNAUTHENTICATED",
            "UNIMPLEMENTED",
        }
        assert service.ledger.account("people").spent_units == 0
        assert service.ledger.verify().sound
        assert b'"failed"' not in service.log.getvalue()
        assert service.service.bodies.held == 0


def test_a_request_is_the_same_in_every_run() -> None:
    target = malformed.Target(1, 2, "key", "free", "charged", 4)
    for kind in malformed.HTTP_KINDS:
        first, again, other = (kind(random.Random(seed), target) for seed in (1, 1, 2))
        assert first == again != other
    assert malformed.grpc_request(random.Random(1), target) == malformed.grpc_request(
        random.Random(1), target
    )


def test_the_statuses_of_all_responses_on_a_connection_are_found() -> None:
    interim, chunked = b"HTTP/1.1 100 Continue\r\n\r\n", b"5\r\nhello\r\n0\r\n\r\n"
    received = (
        interim + b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"
        b"HTTP/1.1 404 Not Found\r\ntransfer-encoding: chunked\r\n\r\n" + chunked
        + b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nx: y\r\n\r\n"
    )  # fmt: skip
    assert list(malformed.statuses(received)) == [200, 404, 503]
    assert list(malformed.statuses(received[:-1])) == [200, 404]
    to_head = b"HTTP/1.1 405 Method Not Allowed\r\ncontent-length: 9\r\n\r\n"
    assert list(malformed.statuses(to_head, bodies=False)) == [405]
    assert list(malformed.statuses(to_head)) == []


async def _serve_500(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(2**16)
    writer.write(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    await writer.drain()
    writer.close()


def test_an_error_of_the_service_would_be_noticed() -> None:
    async def send() -> Any:
        server = await asyncio.start_server(_serve_500, "127.0.0.1", 0)
        async with server:
            target = malformed.Target(server.sockets[0].getsockname()[1], 0, "key", "free", "charged", 4)
            outcome = malformed.Outcome()
            await malformed.send_http(target, range(5), 0, outcome)
            return outcome

    outcome = run_async(send())
    assert outcome.http == {"500": 5}
    assert outcome.wrong.total() == 6, "five malformed requests, and a good one that was not answered"


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_body_of_a_refused_request_is_freed_without_a_garbage_collection(
    start: Start, protocol: str
) -> None:
    size, count = 2**20, 20
    with start("plain", grpc=True) as service:
        metadata = (("authorization", f"Bearer {service.key}"),)
        message = malformed.message("ModelInferRequest", model_name="plain", raw_input_contents=[b"x" * size])
        content = message.SerializeToString()  # once: what the client keeps does not count
        body = b'{"inputs": [], "id": "' + b"x" * size + b'"}'
        target = malformed.Target(int(service.url.rpartition(":")[2]), 0, service.key, "", "plain", FEATURES)
        request = malformed.posted("/v2/models/plain/infer", body, malformed.infer_headers(target, body))
        with grpc.insecure_channel(str(service.grpc)) as channel:
            call = channel.unary_unary(f"{malformed.METHOD}ModelInfer")

            def refused() -> None:
                if protocol == "http":
                    assert run_async(malformed.exchange(target, request)) == [400]
                else:
                    with pytest.raises(grpc.RpcError) as caught:
                        call(content, metadata=metadata, timeout=30)
                    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

            refused()
            gc.collect()
            gc.disable()
            tracemalloc.start()
            try:
                for _ in range(count):
                    refused()
                held, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
                gc.enable()
        assert held < count * size / 4
