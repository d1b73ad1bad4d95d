"""Gives what this worker has logged to those who replay, from its log, on a thread of its own.

So entries are read, checked and on their way while the replayers still load their checkpoint, and
a helper computes while it gives. At most a step ahead of what peers take: the rest stays on disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from everstep.comm.channels import Channels
from everstep.comm.framing import Direction
from everstep.core.errors import GenerationEnded, PeerLost, PeerRefused, PeerSilent
from everstep.core.ids import WorkerId
from everstep.training.replay_share import Share, entry_of, key_of
from everstep.training.stage_log import StageLog

LOG_WITHIN_S = 600.0
"""Between two entries: a peer that reads its disk is slow, but not so slow."""


class Giver:
    """Of one worker, in one replay."""

    def __init__(
        self,
        share: Share,
        log: StageLog,
        channels: Channels,
        *,
        me: WorkerId,
        check: Callable[[], None],
    ) -> None:
        """`check` raises when the generation is over."""
        self._share = share
        self._log = log
        self._channels = channels
        self._me = me
        self._check = check

    def give(self) -> None:
        """All that is asked of this worker."""
        for step in self._share.steps():
            self._check()
            if self._give_step(step):
                self._channels.flush(timeout_s=LOG_WITHIN_S)

    @contextmanager
    def giving(self, *, on_failed: Callable[[str], None]) -> Iterator[None]:
        """Gives meanwhile. `on_failed` hears at once of what cannot be given: this worker may be
        waiting for peers that wait for just that."""

        def run() -> None:
            try:
                self.give()
            except (GenerationEnded, PeerLost, PeerSilent, PeerRefused):
                return  # training hears of it by itself
            except Exception as error:  # noqa: BLE001 nobody may wait for it in vain
                with suppress(GenerationEnded):  # then nobody waits for it any more
                    self._check()
                    on_failed(str(error))

        thread = threading.Thread(target=run, name="everstep giver of logs", daemon=True)
        thread.start()
        yield
        # Not after an error: the thread then ends when the channels are closed.
        thread.join(LOG_WITHIN_S)

    def _give_step(self, step: int) -> bool:
        """In the order in which replayers ask: micro-batch by micro-batch, forward first."""
        is_any = False
        sources = [s for s in self._share.replay.sources if s.first_step <= step <= s.last_step]
        for number in range(self._share.num_microbatches):
            others = [owner for owner in self._share.owners(number) if owner != self._me]
            for source in sources:
                if source.holders[number] != self._me or not others:
                    continue
                is_any = True
                tensors, structure = self._log.read(entry_of(source, step, number))
                for other in others:
                    key = key_of(source, step, number)
                    self._channels.send(other, Direction.LOG, key, tensors, structure)
        return is_any
