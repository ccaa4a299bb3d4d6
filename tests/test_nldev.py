"""RDMA over netlink: requests as the kernel wants them, answers of any layout, errors."""

import contextlib
import errno
import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rdma_tree import MLX5_HW, RXE_HW, Tree
from reading import Reading

from gpuwatch import nldev
from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.nldev import Link
from gpuwatch.sources import rdma as source
from gpuwatch.sources.rdma import Rdma

# include/uapi/rdma/rdma_netlink.h
NLDEV, GET, RES_GET, STAT_GET = 5 << 10, 1, 9, 17
DEV_INDEX, DEV_NAME, PORT_INDEX, NODE_GUID = 1, 2, 3, 6
SUMMARY, SUMMARY_ENTRY, SUMMARY_NAME, SUMMARY_VALUE = 15, 16, 17, 18
COUNTERS, COUNTER, COUNTER_NAME, COUNTER_VALUE = 80, 81, 82, 83
NESTED = 0x8000
GUID = 0xB8599F0300D40000


def attribute(kind, payload):
    pad = bytes(-len(payload) % 4)
    return struct.pack("=HH", 4 + len(payload), kind) + payload + pad


def nested(kind, *parts):
    return attribute(kind | NESTED, b"".join(parts))


def table(kinds, values):
    """Return a table of names and numbers, as the kernel nests them."""
    outer, entry, name, value = kinds
    return nested(
        outer,
        *(
            nested(
                entry,
                attribute(name, text.encode() + b"\0"),
                attribute(value, struct.pack("=Q", number)),
            )
            for text, number in values.items()
        ),
    )


class Kernel:
    """Answers requests sent to it; `counters` and `resources` may change at any time."""

    def __init__(self, counters):
        self.counters = dict(counters)
        self.resources = {"pd": 3, "cq": 9, "qp": 64}
        self.fault = 0
        self.asked = []
        self._answers = []

    def setblocking(self, _blocking):
        """Answer at once."""

    def close(self):
        """Hold nothing."""

    def send(self, request):
        length, kind, flags, sequence, _ = struct.unpack_from("=IHHII", request)
        assert length == len(request)
        assert flags == 1  # NLM_F_REQUEST
        attributes = dict(
            struct.unpack_from("=HI", request, place + 2) for place in range(16, length, 8)
        )
        self.asked.append((kind - NLDEV, attributes))
        if self.fault:
            body = struct.pack("=i", -self.fault) + request[:16]
            self._answers.append(struct.pack("=IHHII", 16 + len(body), 2, 0, sequence, 0) + body)
            return
        body = attribute(DEV_INDEX, struct.pack("=I", attributes[DEV_INDEX]))
        if kind - NLDEV == STAT_GET:
            body += attribute(PORT_INDEX, struct.pack("=I", attributes[PORT_INDEX]))
            body += table((COUNTERS, COUNTER, COUNTER_NAME, COUNTER_VALUE), self.counters)
        else:
            kinds = (SUMMARY, SUMMARY_ENTRY, SUMMARY_NAME, SUMMARY_VALUE)
            body += attribute(DEV_NAME, b"mlx5_0\0") + table(kinds, self.resources)
        self._answers.append(struct.pack("=IHHII", 16 + len(body), kind, 0, sequence, 0) + body)

    def recv(self, _size):
        if not self._answers:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return self._answers.pop(0)


@pytest.fixture
def kernel(monkeypatch):
    """Stand in for the kernel's RDMA netlink."""
    made = Kernel(MLX5_HW)
    monkeypatch.setattr(nldev.socket, "socket", lambda *_: made)
    return made


def test_the_counters_of_a_port_in_one_request(kernel):
    """Names in the driver's order with their numbers; asked by device and port."""
    counters = Link().counters(7, 1)
    assert dict(zip(counters.names, counters.read(), strict=True)) == MLX5_HW
    assert kernel.asked[-1] == (STAT_GET, {DEV_INDEX: 7, PORT_INDEX: 1})
    kernel.counters["packet_seq_err"] = 2**64 - 1
    found = dict(zip(counters.names, counters.read(), strict=True))
    assert found == MLX5_HW | {"packet_seq_err": 2**64 - 1}


names = st.text("abcdefghij_ ", min_size=1, max_size=12)


@given(st.lists(st.dictionaries(names, st.integers(0, 2**64 - 1), max_size=6), min_size=1))
def test_answers_of_any_layout(answers):
    """Whatever names come, in whatever order, each number is found under its own."""
    kernel = Kernel(answers[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nldev.socket, "socket", lambda *_: kernel)
        counters = Link().counters(1, 1)
        for answer in answers:
            kernel.counters = answer
            numbers = counters.read()
            assert dict(zip(counters.names, numbers, strict=True)) == answer


def test_queue_pairs_of_a_device(kernel):
    """Counted by the kernel, none of them is looked at."""
    resources = Link().resources(7)
    assert dict(zip(resources.names, resources.read(), strict=True)) == kernel.resources
    assert kernel.asked[-1] == (RES_GET, {DEV_INDEX: 7})


def test_an_error_of_the_kernel_is_raised(kernel):
    """With its number; an old answer that comes late belongs to nobody."""
    counters = Link().counters(7, 1)
    kernel.fault = errno.ENODEV
    with pytest.raises(OSError, match="No such device") as fault:
        counters.read()
    assert fault.value.errno == errno.ENODEV
    kernel.fault = 0
    kernel.send(struct.pack("=IHHIIHHI", 24, NLDEV + RES_GET, 1, 999, 0, 8, DEV_INDEX, 7))
    assert dict(zip(counters.names, counters.read(), strict=True)) == MLX5_HW


@pytest.mark.parametrize("cut", range(16, 120, 4))
def test_an_answer_that_is_cut_short_is_an_error(kernel, cut):
    """Never a wrong number, never anything but OSError."""
    counters = Link().counters(7, 1)
    whole = Kernel.recv

    def short(self, size):
        answer = whole(self, size)
        return struct.pack("=I", cut) + answer[4:cut]

    kernel.recv = lambda size: short(kernel, size)
    with contextlib.suppress(OSError):
        assert counters.read() == ()


def test_without_rdma_in_the_kernel():
    """The family is not there, or has no device here; either way it is an OSError or nothing."""
    with contextlib.suppress(OSError):
        link = Link()
        assert isinstance(link.devices(), dict)
        link.close()


def test_pyroute2_finds_the_devices():
    """The message declared for it takes an answer as the kernel writes it."""
    body = attribute(DEV_INDEX, struct.pack("=I", 4)) + attribute(DEV_NAME, b"mlx5_0\0")
    body += attribute(NODE_GUID, struct.pack("=Q", GUID)) + attribute(99, b"\1\0\0\0")
    message = struct.pack("=IHHII", 16 + len(body), NLDEV + GET, 2, 1, 0) + body
    decoded = nldev.device_message()(message)
    decoded.decode()
    names = ("DEV_NAME", "DEV_INDEX", "NODE_GUID")
    assert [decoded.get_attr(name) for name in names] == ["mlx5_0", 4, GUID]


class Named(Link):
    """A link whose devices are known without pyroute2."""

    def devices(self):
        return {"mlx5_0": (7, GUID), "rxe0": (8, 0)}


@pytest.fixture
def port(tmp_path, monkeypatch, kernel):
    """Return a port whose errors come over netlink, and whose bytes come from files."""
    tree = Tree(tmp_path / "sys")
    tree.mlx5(0)
    for path in (tree.port("mlx5_0") / "hw_counters").iterdir():
        path.write_text("999\n")  # these are not read
    monkeypatch.setattr(source, "Link", Named)
    with Reading(Rdma(), tree.root) as rdma:
        yield rdma, kernel


def test_errors_come_over_netlink_and_bytes_from_files(port):
    """One request for all errors, one for the queue pairs; the port's own counters from files."""
    rdma, kernel = port
    before = len(kernel.asked)
    found = rdma.read("mlx5_0/1")
    assert found["packet_sequence_errors_total"] == 2
    assert found["rx_write_requests_total"] == 3_810_000_000
    assert found["port_data_received_bytes_total"] == 4 * 51_282_193
    assert found["queue_pairs"] == 64.0
    assert [command for command, _ in kernel.asked[before:]] == [STAT_GET, RES_GET]


def test_a_port_that_netlink_refuses_is_left_alone_and_read_from_files_then(port):
    """After a rest, where netlink still refuses, the files count."""
    rdma, kernel = port
    rdma.read("mlx5_0/1")
    kernel.fault = errno.EREMOTEIO
    assert rdma.read("mlx5_0/1")["packet_sequence_errors_total"] is None
    assert len(rdma.told("rdma_quarantined")) == 1
    asked = len(kernel.asked)
    rdma.read("mlx5_0/1")
    assert len(kernel.asked) == asked
    rdma.housekeep(monotonic_ns() + 11 * SECOND_NS)
    assert rdma.read("mlx5_0/1")["packet_sequence_errors_total"] == 999  # from 2 on
    assert rdma.errors() == {"netlink EREMOTEIO": 1}


def test_a_device_that_has_gone_is_one_event(tmp_path, port):
    """The kernel calls its number invalid before the folder is seen to be missing."""
    rdma, kernel = port
    rdma.read("mlx5_0/1")
    kernel.fault = errno.EINVAL
    Tree(tmp_path / "sys").unplug("mlx5_0")
    assert rdma.read("mlx5_0/1")["port_up"] is None
    rdma.housekeep(monotonic_ns())
    assert rdma.read("mlx5_0/1")["port_up"] == 0.0
    assert [name for name, _, _ in rdma.events] == ["rdma_device_lost"]


def test_a_driver_with_other_counters_is_opened_anew(port):
    """Names that change under us are noticed before a number is taken for another's."""
    rdma, kernel = port
    rdma.read("mlx5_0/1")
    kernel.counters = RXE_HW
    assert rdma.read("mlx5_0/1")["packet_sequence_errors_total"] is None
    assert rdma.housekeep(monotonic_ns() + 2 * SECOND_NS)
    found = rdma.read("mlx5_0/1")
    assert found["completer_retry_errors_total"] == 9
    assert rdma.told("rdma_quarantined") == []


def test_another_device_of_that_name_is_not_asked(tmp_path, monkeypatch, kernel):
    """In a container, or on another root of /sys, the name alone says nothing."""
    tree = Tree(tmp_path / "sys")
    tree.device("rxe0", None, RXE_HW)
    monkeypatch.setattr(source, "Link", Named)
    with Reading(Rdma(), tree.root) as rdma:
        assert rdma.read("rxe0/1")["packet_sequence_errors_total"] == 5
        assert kernel.asked == []
