"""THE wiring: which role is an object, which a client, and what each is given. Nothing else decides that."""

from sdcp_mono.compose.models import SWITCH_SECONDS, Loaded, load
from sdcp_mono.compose.node import Node
from sdcp_mono.compose.roles import run_cache, run_drafter, run_router, run_verifier
from sdcp_mono.compose.serving import generate, serve

__all__ = [
    "Loaded",
    "Node",
    "SWITCH_SECONDS",
    "generate",
    "load",
    "run_cache",
    "run_drafter",
    "run_router",
    "run_verifier",
    "serve",
]
