"""Serve models over HTTP: Open Inference Protocol v2, API keys, an enforced privacy budget, metrics, a dashboard."""

from quietmax.server.app import create_api, create_app
from quietmax.server.client import Client, Response
from quietmax.server.deployment import Deployment, deploy
from quietmax.server.repository import load_models
from quietmax.server.service import Service
from quietmax.server.settings import Settings

__all__ = [
    "Client",
    "Deployment",
    "Response",
    "Service",
    "Settings",
    "create_api",
    "create_app",
    "deploy",
    "load_models",
]
