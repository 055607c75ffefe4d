from __future__ import annotations

import signal

from roles.cli.terminal import Suspension


def test_a_wish_to_stop_waits_until_nothing_is_drawn() -> None:
    """Stopping draws, too: amid a write it would be a second one into the same stream."""
    happened: list[str] = []

    def stop() -> None:
        happened.append("stopped")
        if len(happened) == 4:  # asked again while it gives the terminal back
            suspension.ask(signal.SIGTSTP, None)
        happened.append("goes on")

    suspension = Suspension(stop)
    suspension.ask(signal.SIGTSTP, None)
    assert happened == ["stopped", "goes on"]
    with suspension.put_off():
        suspension.ask(signal.SIGTSTP, None)
        happened.append("drawn")
    assert happened[2:] == ["drawn", "stopped", "goes on", "stopped", "goes on"]
