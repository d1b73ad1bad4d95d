from __future__ import annotations

from comm_workers import exchange, members_of, workers


def test_what_a_killed_peer_had_sent_arrives_and_then_it_is_lost() -> None:
    with workers(exchange, [(rank,) for rank in range(2)]) as started:
        victim, survivor = started
        addresses = [worker.hear() for worker in started]
        for worker in started:
            worker.pipe.send(addresses)
        assert victim.hear() == "sent"
        victim.kill()
        survivor.pipe.send("it is dead")
        assert [survivor.hear() for _ in range(3)] == [[float(n)] * 5 for n in range(3)]
        assert survivor.hear() == ((members_of(2)[0],), False)
        assert survivor.hear() == (members_of(2)[0],)
