"""Answers over HTTP: Open Inference Protocol v2, keys, a budget that cannot be overspent, metrics and a dashboard."""

from quietmax.server.application import application, documented_application
from quietmax.server.client import Client
from quietmax.server.loading import load_servables
from quietmax.server.offers import Offers, bind
from quietmax.server.service import Service
from quietmax.server.settings import Settings

__all__ = [
    "Client",
    "Offers",
    "Service",
    "Settings",
    "application",
    "bind",
    "documented_application",
    "load_servables",
]
