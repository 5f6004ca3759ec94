"""The OpenAPI document: schemas written by hand, since the fast path knows no pydantic models."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

_TEXT = {"type": "string"}
_NUMBER = {"type": "number"}
_WHOLE = {"type": "integer"}
_TRUTH = {"type": "boolean"}


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        **more,
    }


def _list(of: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": of, **more}


def _one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


_STATUS = _one_of("proven", "conditional", "refuted")
_DESCRIBED = _list(_object({"name": _TEXT, "datatype": _TEXT, "shape": _list(_WHOLE)}))
_PARAMETERS = {"type": "object", "additionalProperties": True}
_INPUT = _object(
    {
        "name": {"type": "string", "enum": ["features"]},
        "shape": _list({"type": "integer", "minimum": 0}, minItems=2, maxItems=8),
        "datatype": _one_of(
            "FP16",
            "FP32",
            "FP64",
            "INT8",
            "INT16",
            "INT32",
            "INT64",
            "UINT8",
            "UINT16",
            "UINT32",
            "UINT64",
        ),
    },
    {"data": _list({}), "parameters": _PARAMETERS},
)
SCHEMAS: dict[str, dict[str, Any]] = {
    "Error": _object({"error": _TEXT}, {"remaining": _NUMBER, "remaining_answers": _WHOLE}),
    "Live": _object({"live": _TRUTH}),
    "Ready": _object({"ready": _TRUTH}),
    "ServerMetadata": _object({"name": _TEXT, "version": _TEXT, "extensions": _list(_TEXT)}),
    "ModelList": _object({"models": _list(_object({"name": _TEXT, "version": _TEXT}))}),
    "ModelMetadata": _object(
        {
            "name": _TEXT,
            "versions": _list(_TEXT),
            "platform": _TEXT,
            "inputs": _DESCRIBED,
            "outputs": _DESCRIBED,
            "parameters": _object(
                {
                    "classes": _list(_TEXT),
                    "mechanism": _TEXT,
                    "guarantee_status": _STATUS,
                    "guarantee": {"type": "object"},
                    "currency": _one_of("epsilon", "mu"),
                    "cost_per_answer": _NUMBER,
                    "paid_at_training": _TRUTH,
                },
                {"warning": _TEXT, "kind": _TEXT, "encoding": {"type": "object"}},
            ),
        }
    ),
    "Budget": _object(
        {
            "account": _TEXT,
            "currency": _one_of("epsilon", "mu"),
            "terms": {"type": "object"},
            "total": _NUMBER,
            "spent": _NUMBER,
            "remaining": _NUMBER,
            "spent_fraction": _NUMBER,
            "spent_in_epsilon": {"type": ["number", "null"]},
            "cost_per_answer": _NUMBER,
            "remaining_answers": {"type": ["integer", "null"]},
            "note": _TEXT,
            "unproven_models": _list(_TEXT),
            "clients": _list(
                _object(
                    {
                        "client": _TEXT,
                        "spent_fraction": _NUMBER,
                        "quota_fraction": {"type": ["number", "null"]},
                        "refused": _WHOLE,
                    }
                )
            ),
        }
    ),
    "InferenceRequest": _object(
        {"inputs": _list(_INPUT, minItems=1, maxItems=1)},
        {
            "id": {"type": "string", "maxLength": 128, "description": "Makes a retry free: the same answer."},
            "parameters": _PARAMETERS,
            "outputs": _list(
                _object({"name": _one_of("label", "probabilities")}, {"parameters": _PARAMETERS}),
                maxItems=2,
            ),
        },
    ),
    "InferenceResponse": _object(
        {
            "model_name": _TEXT,
            "model_version": _TEXT,
            "outputs": _list(
                _object(
                    {"name": _TEXT, "datatype": _TEXT, "shape": _list(_WHOLE)},
                    {"data": _list(_NUMBER), "parameters": _PARAMETERS},
                )
            ),
            "parameters": _object(
                {
                    "guarantee_status": _STATUS,
                    "currency": _one_of("epsilon", "mu"),
                    "cost": _NUMBER,
                    "new_answers": _WHOLE,
                },
                {
                    "remaining": _NUMBER,
                    "remaining_answers": _WHOLE,
                    "paid_at_training": _TRUTH,
                    "warning": _TEXT,
                },
            ),
        },
        {"id": _TEXT},
    ),
    "DashboardState": {"type": "object"},
    "Trial": _object(
        {"model": _TEXT, "features": _list(_NUMBER)},
        {"version": _TEXT},
    ),
}
_WHAT = {
    400: "Not an inference request; nothing was spent.",
    401: "No key, or a wrong, revoked or expired one.",
    403: "The budget or the quota does not pay for it (see `remaining`), or the key may not do this.",
    404: "No such model or version.",
    408: "The body did not come in time.",
    409: "The request id was used with another body; nothing was spent.",
    413: "Too many bytes or rows; nothing was spent.",
    415: "The body is compressed, or not JSON.",
    422: "An inference request that does not fit the model; nothing was spent.",
    503: "The ledger cannot be used now; nothing is answered.",
}


def _reference(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def refusals(*statuses: int) -> dict[int | str, Any]:
    """Refusals an endpoint may give, for its `responses`."""
    return {
        status: {
            "description": _WHAT[status],
            "content": {"application/json": {"schema": _reference("Error")}},
        }
        for status in statuses
    }


def responses(schema: str, *statuses: int) -> dict[int | str, Any]:
    """What an endpoint gives on success, and its refusals."""
    return {
        200: {"description": "Done.", "content": {"application/json": {"schema": _reference(schema)}}},
        **refusals(*statuses),
    }


def describe(app: FastAPI) -> None:
    """Give the application its document: FastAPI's, with our schemas, the key and the inference body."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            made["components"] = {
                "schemas": SCHEMAS,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            }
            made["security"] = [{"key": []}]
            for path, operations in made["paths"].items():
                for operation in operations.values():
                    _adjust(path, operation)
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _adjust(path: str, operation: dict[str, Any]) -> None:
    told = operation["responses"]
    if "422" in told and told["422"].get("description") != _WHAT[422]:
        del told["422"]  # a path parameter is any text: FastAPI never refuses one
    if path.endswith("/infer"):
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _reference("InferenceRequest")}},
        }
    if path == "/metrics":
        told["200"] = {
            "description": "Done.",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        }
    if path in ("/v2", "/v2/health/live", "/v2/health/ready", "/"):
        operation["security"] = []
