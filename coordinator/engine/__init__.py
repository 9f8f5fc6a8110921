"""The engine: the one owner of mutable cluster state; handle(event, now_s) -> commands."""
