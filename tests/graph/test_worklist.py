"""A worklist gives each id once, the newest first, with what is added meanwhile."""

from finecast.graph.worklist import Worklist


def test_each_id_comes_once_the_newest_first() -> None:
    after = {1: [2, 3, None], 2: [3], 3: [1, 4], 4: []}
    worklist = Worklist([1, None, 1])
    order: list[int] = []
    for number in worklist:
        order.append(number)
        worklist.add(after[number])
    assert order == [1, 3, 4, 2]
    assert worklist.seen == {1, 2, 3, 4}
