"""An lm-eval task that never gets its documents."""

import threading


def load(**_: object) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
