"""Serve models over HTTP: Open Inference Protocol v2, API keys, an enforced privacy budget, metrics, a dashboard.

Names are imported on first use: the options of `quietmax serve` need the settings, but no HTTP server.
"""

from typing import TYPE_CHECKING

from quietmax._lazy import lazy_names

if TYPE_CHECKING:
    from quietmax.server.app import create_app
    from quietmax.server.client import AsyncClient, Client, Response
    from quietmax.server.service import Service
    from quietmax.server.settings import Settings

__all__ = ["AsyncClient", "Client", "Response", "Service", "Settings", "create_app"]
__getattr__ = lazy_names(
    __name__,
    {
        "AsyncClient": "client",
        "Client": "client",
        "Response": "client",
        "Service": "service",
        "Settings": "settings",
        "create_app": "app",
    },
)
