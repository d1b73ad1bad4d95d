"""The event loop: one system over one trace, from change to change."""

from __future__ import annotations

import numpy as np

from everstep.sim.account import Account
from everstep.sim.setting import Setting, System
from everstep.sim.trace import Trace


def run(system: System, trace: Trace, setting: Setting) -> Account:
    """The account at the end of the trace."""
    account = Account(samples_per_step=setting.job.samples_per_step)
    system.begin(setting.workers(np.flatnonzero(trace.starts_down).tolist()), account)
    for change in trace.changes():
        account.advance(change.time_s)
        system.change(setting.workers(change.lost), setting.workers(change.joined), account)
    account.advance(trace.duration_s)
    return account
