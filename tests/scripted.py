"""What operators do to a run, at given steps, executed in rank 0 before it starts (`EXECUTE_FIRST` names this file, see
`zygote.py`).

`SCRIPT` is JSON: `{"steps": {"12": [["set", {"changes": [...]}], ["pause", {}]]}, "held": [["save", {}]]}`. Before a
step the requests of that step are sent, and read at once; so are those of `held` while the ranks are held, one in each
round, or a list of several, and `resume` behind the last. `kill` ends the rank with SIGKILL.
"""

from __future__ import annotations

import json
import os
import signal
from typing import Any

from fsdp_pretrain.job import live_control
from fsdp_pretrain.job.live_control import LiveControl
from fsdp_pretrain.run import requests
from fsdp_pretrain.run.recorder import Recorder
from fsdp_pretrain.run.requests import Requests
from fsdp_pretrain.train.trainer import Trainer


def arm(steps: dict[str, list[tuple[str, dict[str, Any]]]], held: list[tuple[str, dict[str, Any]]]) -> None:
    """Install a script in the loop of this rank."""
    step, look = Trainer.step, LiveControl._look_while_held
    requests._POLL_INTERVAL, live_control._ROUND = 0.0, 0.001

    def act(recorder: Recorder, verb: str, content: dict[str, Any]) -> None:
        if verb == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        requests.send(recorder.run, verb, **content)

    def scripted_step(self: Trainer) -> None:
        for verb, content in steps.get(str(self.state.step + 1), []):
            act(self.recorder, verb, content)
        step(self)

    def scripted_look(self: LiveControl) -> Requests:
        given = held.pop(0) if held else ("resume", {})
        for verb, content in given if isinstance(given[0], list) else [given]:
            act(self.loop.trainer.recorder, verb, content)
        return look(self)

    Trainer.step, LiveControl._look_while_held = scripted_step, scripted_look  # type: ignore[method-assign]


if os.environ.get("RANK") == "0":
    arm(**json.loads(os.environ["SCRIPT"]))
