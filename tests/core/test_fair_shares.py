"""The counters of a pool's clients, without a queue."""

from dualmap.queue.fair_shares import MAX_IDLE_CLIENTS, FairShares

ONE, TWO, THREE = 1, 2, 3


def shares_with(*counters: tuple[int, int], credit_tokens: int = 1000) -> FairShares:
    """Shares of clients that have received these tokens, the smallest number first, and wait."""
    shares = FairShares(credit_tokens)
    for client, _ in counters:
        shares.charge(0.0, client, 0)
    for client, tokens in counters:
        shares.charge(0.0, client, tokens)
        shares.wait(client)
    return shares


def test_counter_grows_by_the_tokens_of_requests() -> None:
    shares = shares_with((ONE, 300), (TWO, 500))
    shares.charge(1.0, ONE, 100)
    assert (shares.counter(ONE), shares.counter(TWO)) == (400, 500)


def test_counter_of_a_new_client_is_the_largest_when_it_begins_to_wait() -> None:
    shares = shares_with((ONE, 300), (TWO, 500))
    shares.wait(THREE)
    shares.charge(1.0, TWO, 100)
    assert (shares.counter(TWO), shares.counter(THREE)) == (600, 500)


def test_counter_is_at_most_the_credit_below_the_largest() -> None:
    shares = shares_with((ONE, 300), (TWO, 5000))
    assert shares.counter(ONE) == 4000
    shares.charge(1.0, ONE, 100)
    assert shares.counter(ONE) == 4100


def test_counters_of_idle_clients_are_bounded() -> None:
    shares = shares_with((ONE, 300))
    for client in range(2, 2 * MAX_IDLE_CLIENTS):
        shares.charge(0.0, client, 10)
    assert len(shares) == MAX_IDLE_CLIENTS + 1


def test_rivals_are_the_other_clients_that_wait() -> None:
    shares = FairShares(1000)
    assert not shares.has_rivals(ONE)
    shares.wait(ONE)
    assert not shares.has_rivals(ONE)
    assert shares.has_rivals(TWO)
    shares.leave(ONE)
    assert not shares.has_rivals(TWO)


def test_shares_are_contested_after_a_client_far_below_its_share_was_served() -> None:
    shares = shares_with((ONE, 300), (TWO, 5000))
    assert not shares.is_contested(1.0)
    shares.charge(2.0, TWO, 10)
    assert not shares.is_contested(2.0)
    shares.charge(3.0, ONE, 10)
    assert shares.is_contested(4.0)
    assert not shares.is_contested(40.0)


def test_shares_of_a_client_without_rivals_are_never_contested() -> None:
    shares = shares_with((ONE, 300), (TWO, 5000))
    shares.leave(TWO)
    shares.charge(3.0, ONE, 10)
    assert not shares.is_contested(3.0)
