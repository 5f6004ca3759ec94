"""Answers over HTTP: Open Inference Protocol v2, keys, a budget that cannot be overspent, metrics and a dashboard."""

from quietmax.server.app import application, documented_application
from quietmax.server.client import Client
from quietmax.server.deployment import Deployments, deploy
from quietmax.server.repository import load_servables
from quietmax.server.service import Service
from quietmax.server.settings import Settings

__all__ = [
    "Client",
    "Deployments",
    "Service",
    "Settings",
    "application",
    "deploy",
    "documented_application",
    "load_servables",
]
