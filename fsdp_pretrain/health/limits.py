"""Thresholds of the verdicts on a run's numbers. `health.tolerance` multiplies those marked (T).

They are measured in spreads of the last steps, so that they also suit runs with noisy losses. See health.md.
"""

from __future__ import annotations

WINDOW = 128
"""Previous steps whose median and spread each loss and gradient norm is compared with."""
FLOOR = 0.02
"""Smallest spread of the loss, in nats: a smaller measured spread counts as this."""
OUTLIER = 6.0
"""(T) A single loss this many spreads above the median is reported."""
SPIKE = 4.0
"""(T) Three of the last five losses this many spreads above the median are a spike."""
PATIENCE = 50
"""Steps that a spike has to recover."""
PATIENCE_WITH_NORM = 10
"""Steps that a spike has to recover if the gradient norm is unusual as well."""
RISE = 0.1
"""(T) A spike has not recovered while the loss is this many nats, or five times the noise of its level, too high."""
QUIET = 100
"""An incident is over after this many steps without another deviation."""
LEVEL = 0.02
"""(T) Rise of the level of the loss, in nats, that is a warning, if it is also five times its noise."""
SOURCE = 0.05
"""(T) The same of one source's loss, while that of the others rises less than half as much."""
SHARES = 0.05
"""When so much of the mixture is planned to be of other sources than before, the loss is compared anew."""
NORM = 6.0
"""(T) A gradient norm whose logarithm is this many spreads above the median is reported."""
HALVINGS = 4
"""Halvings of the fp16 loss scale within 20 steps that are a collapse."""
NONFINITE_IN_A_ROW, NONFINITE_IN_20 = 2, 3
"""Non-finite steps in a row, and of the last 20, that lead to a rollback."""
DISTANCE = 50
"""A rollback goes to a checkpoint at least this many steps before the incident, if there is one."""
MARGIN = 20
"""A rollback also skips the samples of this many steps before and after the incident."""
ROLLBACKS_NEARBY = 2
"""Automatic rollbacks within 1000 steps; instead of another one the run ends with exit 93."""
ROLLBACKS_A_DAY = 3
"""Automatic rollbacks within 24 hours; instead of another one the run ends with exit 93."""
REPLAY_TOLERANCE = 1e-3
"""Largest relative difference between the loss of a repeated step and its recorded loss, where identical bits cannot be
expected: on another mesh, on GPUs, with other software."""
