"""Which events get a line in the log, and what is said of the others."""

from gpuwatch.clock import SECOND_NS
from gpuwatch.repeats import Repeats
from gpuwatch.signals import Entity, Event


def test_what_is_left_out_is_told_once_a_minute():
    """Kinds do not take lines from each other, and each minute begins anew."""
    repeats = Repeats()
    assert repeats.left_out(100 * SECOND_NS) == []
    port, gpu = Entity("rdma_port", "mlx5_0/1"), Entity("gpu", "0")
    flap = Event(0, port, "link_down", "0000:c1:00.0")
    xid = Event(0, gpu, "xid", "31: info x7: text")
    assert [repeats.worth_a_line(flap) for _ in range(7)] == [True] * 5 + [False] * 2
    assert [repeats.worth_a_line(xid) for _ in range(6)] == [True] * 5 + [False]
    assert repeats.worth_a_line(Event(0, gpu, "xid", "79: critical: text"))
    assert repeats.left_out(159 * SECOND_NS) == []
    assert repeats.left_out(160 * SECOND_NS) == [
        "link_down, rdma_port mlx5_0/1: 2 more",
        "xid, gpu 0: 31: 1 more",
    ]
    assert repeats.worth_a_line(flap)
    assert repeats.left_out(220 * SECOND_NS) == []
