"""Serve models over HTTP: Open Inference Protocol v2, API keys, an enforced privacy budget, metrics, a dashboard.

Names are imported on first use: the options of `quietmax serve` need the settings, but no HTTP server.
"""

from typing import TYPE_CHECKING

from quietmax._lazy import lazy_names

if TYPE_CHECKING:
    from quietmax.server.app import create_app as create_app
    from quietmax.server.client import AsyncClient as AsyncClient
    from quietmax.server.client import Client as Client
    from quietmax.server.client import Response as Response
    from quietmax.server.service import Service as Service
    from quietmax.server.settings import Settings as Settings

__getattr__, _MODULES = lazy_names(__name__)
__all__ = list(_MODULES)
