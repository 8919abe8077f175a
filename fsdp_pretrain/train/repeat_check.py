"""Finds devices that now and then compute a wrong number: every rank computes a micro-batch twice, to the same bits.

Nothing else would: the gradient of such a rank is summed into all replicas, which stay equal, and the loss looks right.
In intervals, between two steps, all ranks repeat the forward and backward pass over the first micro-batch of the last
batch, and compare their own gradients. Nothing is changed: gradients are cleared, and random numbers are seeded for
every batch.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import replace

import torch

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.data.packing.loader import StepBatch
from fsdp_pretrain.errors import DeviceError, Exit
from fsdp_pretrain.heartbeat import Heartbeat, Phase
from fsdp_pretrain.models import Decoder
from fsdp_pretrain.parallel import fsdp
from fsdp_pretrain.parallel.loss_scaler import LossScaler
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.parallel.optimizer import Optimizer
from fsdp_pretrain.parallel.own_gradients import checksum, fixed_order
from fsdp_pretrain.parallel.replica_check import bit_sum
from fsdp_pretrain.run.recorder import Recorder
from fsdp_pretrain.run.step_record import HealthFinding, StepRecord
from fsdp_pretrain.severity import Severity

from .observer import AgreedActions, Observer, Verdict
from .step_metrics import StepCounts
from .update import Update

KEY = "repeat/gradients"


class RepeatCheck(Observer):
    """Checks every `health.repeat_every`, all ranks together.

    Args:
        model, optimizer, scaler: those that train.
        heartbeat: receives the phases.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        model: Decoder,
        optimizer: Optimizer,
        scaler: LossScaler | None,
        recorder: Recorder,
        heartbeat: Heartbeat,
    ) -> None:
        self._config, self._world, self._model, self._optimizer = config, world, model, optimizer
        self._recorder, self._heartbeat = recorder, heartbeat
        self._update = Update(config, world, model, optimizer, scaler, self._before_micro_batch)
        self._compiled = fsdp.compiles(config, world.device)
        self._compiled_widths = set[int]()
        every = config.health.repeat_every
        self._every = None if every is None else every.value  # seconds; None: there are no checks
        self._due, self._asked = time.monotonic() + (self._every or 0.0), False
        self._batch: StepBatch | None = None
        self._checked: int | None = None  # step after which the last check was
        self._passed: int | None = None  # and the last that passed in this start
        self._verdict: Verdict | None = None  # for the next record

    def reconfigured(self, config: Config) -> None:
        self._config = config

    def batch_read(self, batch: StepBatch) -> None:
        """Keep the first micro-batch, as a batch of its own."""
        self._batch = replace(batch, micro=batch.micro[:1], targets=batch.micro[0].targets)

    def requests(self) -> Mapping[str, int]:
        """On rank 0, whose clock decides: ask once when a check is due."""
        due = self._world.is_main and self._every is not None and time.monotonic() >= self._due and not self._asked
        self._asked |= due
        return {"repeat": due}

    def between_steps(self, agreed: AgreedActions) -> None:
        """Compute the micro-batch twice, and a third time if a rank got other gradients."""
        if not agreed.repeat or self._batch is None:
            return
        sums = self._repeat(self._batch, 2)
        if all(self._world.gather(sums[0] == sums[1])):
            self._passed = agreed.step
        else:
            self._verdict = self._judge(agreed.step, [*sums, *self._repeat(self._batch, 1)])
        self._checked = agreed.step
        self._due, self._asked = time.monotonic() + (self._every or 0.0), False

    def beside(self, step: int) -> list[str]:
        """Its time is in the iteration of the next step."""
        return ["repeat"] if step - 1 == self._checked else []

    def judge(self, record: StepRecord) -> Verdict | None:
        """The verdict of the last check, if it did not pass: before anything that follows it is saved."""
        verdict, self._verdict = self._verdict, None
        return verdict

    def end(self, step: int) -> None:
        """Raise the error of a check after the last step, if no record came after it."""
        if self._verdict is not None and self._verdict.error is not None:
            raise self._verdict.error

    def _repeat(self, batch: StepBatch, times: int) -> list[int]:
        """Checksum of this rank's gradients and losses in each of several passes. Waits for the device."""
        values = self._config.schedule.values_at(batch.position.consumed)
        sums = []
        for _ in range(times):
            counts = StepCounts.of(batch).sum_over(self._world)
            with fixed_order(), checksum(self._model, self._world.device, compiled=self._compiled) as gradients:
                losses = self._update.backward(batch, counts, values)
            self._optimizer.zero_grad()
            sums.append(gradients + bit_sum(losses.packed))
        self._heartbeat.beat(Phase.REDUCE)
        result: list[int] = torch.stack(sums).tolist()
        return result

    def _before_micro_batch(self, width: int) -> None:
        """Report the phase: the first check of samples of a width compiles for minutes, which is not a hang."""
        compiles = self._compiled and width not in self._compiled_widths
        self._compiled_widths.add(width)
        self._heartbeat.beat(Phase.LOAD if compiles else Phase.COMPUTE)

    def _judge(self, step: int, sums: list[int]) -> Verdict:
        """Tell a device from kernels that never give the same bits, and name the ranks; `sums` of three passes."""
        results = self._world.gather((len(set(sums)), socket.gethostname()))
        odd = [rank for rank, (different, _) in enumerate(results) if different > 1]
        hosts = list(dict.fromkeys(results[rank][1] for rank in odd))
        verdict, severity = Verdict(), Severity.CRIT
        if all(different == len(sums) for different, _ in results):
            text = "no rank gets the same gradients twice: a kernel adds in no fixed order, and devices are not checked"
            severity, self._every = Severity.WARN, None
        else:
            before = "no earlier one passed" if self._passed is None else f"the last passed after step {self._passed}"
            text = (
                f"rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))} on {', '.join(hosts)} did not get the same "
                f"gradients when a micro-batch of step {step} was repeated (of the checks of this start, {before})"
            )
            verdict.error = _error(text, hosts)
        finding = HealthFinding(key=KEY, severity=severity, summary=text)
        facts = {"ranks": odd, "hosts": hosts, "passed": self._passed}
        self._recorder.event("health", f"{severity.name}: {KEY}: {text}", step=step, **finding.model_dump(), **facts)
        verdict.findings.append(finding)
        return verdict


def _error(cause: str, hosts: list[str]) -> DeviceError:
    """The end of the run; without the host if it is the only one, else one of them may have misled the others."""
    alone = len(hosts) == 1
    error = DeviceError(
        cause,
        effect="a device computes wrongly. Nothing more was saved, but checkpoints since the last check that passed "
        "may hold wrong updates",
        remedy=f"test {'this host' if alone else 'these hosts'} with the vendor's tools; to leave those checkpoints, "
        "`fsdp-pretrain rollback RUN --to STEP`. If kernels of your own add in no fixed order, leave "
        "health.repeat_every out",
    )
    error.avoid_hosts = hosts if alone else ()
    error.exit = Exit.RESUME_AVOIDING_HOSTS if alone else Exit.NEEDS_PERSON
    error.shared = True
    return error
