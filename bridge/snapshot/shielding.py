"""Work that a cancellation may follow but not cut in two."""

from __future__ import annotations

import asyncio
from typing import TypeVar

Result = TypeVar("Result")


async def uninterrupted(work: asyncio.Future[Result]) -> Result:
    """Await something to its end, and only then be cancelled."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise
