"""How late the event loop is: what every answer, health checks included, waits on top of its own work."""

import asyncio

from prometheus_client import Histogram

INTERVAL_S = 0.05


async def watch_event_loop(lag_seconds: Histogram) -> None:
    """Sleep and see how much longer it took, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        lag_seconds.observe(max(0.0, loop.time() - due))  # uvloop's clock ticks in milliseconds: it can be early
