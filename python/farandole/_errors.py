"""The error classes: one per row of the native error table (docs/errors.md)."""

# ruff: noqa: F403, F405 - what __all__ lists

from __future__ import annotations

from farandole._core import *

__all__ = [
    "Aborted",
    "AuthError",
    "Deadlock",
    "DeviceError",
    "EarlyExit",
    "Error",
    "ForkedEngine",
    "InternalError",
    "InvalidArgument",
    "LinkError",
    "MembershipChanged",
    "Mismatch",
    "NotInitialized",
    "NumericsError",
    "PeerHung",
    "PeerLost",
    "RemoteError",
    "RendezvousError",
    "ResourceError",
    "Stalled",
    "VersionMismatch",
]
