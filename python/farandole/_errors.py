"""The error classes: one per row of the native error table (docs/errors.md)."""

from __future__ import annotations

from farandole._core import (
    Aborted,
    AuthError,
    Deadlock,
    EarlyExit,
    Error,
    ForkedEngine,
    InternalError,
    InvalidArgument,
    LinkError,
    MembershipChanged,
    Mismatch,
    NotInitialized,
    NumericsError,
    PeerHung,
    PeerLost,
    RemoteError,
    RendezvousError,
    ResourceError,
    Stalled,
    VersionMismatch,
)

__all__ = [
    "Aborted",
    "AuthError",
    "Deadlock",
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
