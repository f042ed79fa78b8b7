"""Deliver an outbox to a URL: python -m consumer_sdk.examples.outbox_handler URL POSITION_FILE"""

import sys
import time
import urllib.request
from itertools import count
from pathlib import Path

from consumer_sdk import Event, sync
from consumer_sdk.examples.command_line import arguments


def post(url: str, event: Event) -> None:
    """Send one message; its id lets the receiver recognise a repetition."""
    body = event.data if isinstance(event.data, bytes) else event.data.encode()
    request = urllib.request.Request(url, body, {"Idempotency-Key": event.msg_id})  # noqa: S310
    urllib.request.urlopen(request, timeout=10).close()  # noqa: S310


def deliver(url: str, position_file: Path) -> None:
    """Deliver each pg_logical_emit_message(true, 'outbox', …) in order, at least once."""
    with sync.connect() as cdc:
        seen = position_file.read_text() if position_file.exists() else ""
        for stored in cdc.messages("outbox", after=int(seen) if seen else "start"):
            for attempt in count():
                try:
                    post(url, stored.event)
                    break
                except OSError as error:
                    print(f"attempt {attempt + 1}: {error}", file=sys.stderr)
                    time.sleep(min(60, 0.1 * 2**attempt))
            position_file.with_suffix(".new").write_text(str(stored.stream_seq))
            position_file.with_suffix(".new").replace(position_file)


if __name__ == "__main__":
    with arguments(__doc__, 2) as given:
        deliver(given[0], Path(given[1]))
