"""Run in a network namespace of its own: a real link flaps while the real source watches it.

Writes what the source saw, and what it told, as JSON.
"""

import json
import sys
from pathlib import Path

from pyroute2 import IPRoute
from reading import Reading

from gpuwatch.network_signals import NicCounter
from gpuwatch.signals import Kind, Signal
from gpuwatch.sources import ethtool
from gpuwatch.sources.ethtool import Ethtool
from gpuwatch.sources.netdev import Netdev

SECOND = 10**9
SYS = Path("/sys")
PEER = Signal("nic_peers_total", "Index of the peer.", Kind.COUNTER, "")


def flap(route, index, times, between=lambda: None):
    """Take a link down and up that often; `between` is called after each twentieth."""
    for number in range(times):
        route.link("set", index=index, state="down")
        route.link("set", index=index, state="up")
        if number % 20 == 0:
            between()


def counted(reading, name):
    found = reading.read(name)
    return [found["nic_carrier_changes_total"], found["nic_carrier_downs_total"]]


def main():
    said = {}
    with IPRoute() as route:
        route.link("add", ifname="rail0", kind="veth", peer={"ifname": "peer0"})
        (own,), (peer,) = (route.link_lookup(ifname=name) for name in ("rail0", "peer0"))
        for index in (own, peer):
            route.link("set", index=index, state="up")
        with Reading(Netdev(), SYS, interfaces=["rail0"]) as netdev:
            before = counted(netdev, "rail0")
            flap(route, peer, 1000, lambda: netdev.read("rail0"))
            said["flaps"] = [a - b for a, b in zip(counted(netdev, "rail0"), before, strict=True)]
            # 2,000 messages did not fit into the socket: that is noticed, and nothing is lost.
            netdev.housekeep(SECOND)
            said["errors"] = netdev.errors()
            said["lost"] = netdev.told("nic_carrier_lost")
            before = counted(netdev, "rail0")
            flap(route, peer, 3)
            netdev.housekeep(2 * SECOND)
            said["after overflow"] = [
                a - b for a, b in zip(counted(netdev, "rail0"), before, strict=True)
            ]
            # Another interface under the name counts on; one that has gone is unknown.
            route.link("del", index=own)
            said["gone"] = counted(netdev, "rail0")
            netdev.housekeep(3 * SECOND)
            route.link("add", ifname="rail0", kind="veth", peer={"ifname": "peer0"})
            netdev.housekeep(4 * SECOND)
            said["back"] = counted(netdev, "rail0")
            said["told"] = [netdev.told("nic_lost"), netdev.told("nic_returned")]
        # What the driver of a veth counts first is the index of its peer.
        ethtool.NIC_COUNTERS = (NicCounter(PEER, "", ("peer_ifindex",)),)
        (peer,) = route.link_lookup(ifname="peer0")
        with Reading(Ethtool(), SYS, interfaces=["rail0", "lo"]) as source:
            said["ethtool"] = source.read("rail0") == {PEER.name: peer}
            said["counting"] = [info.entity.id for info in source.opened.entities]
            route.link("del", ifname="rail0")
            said["unplugged"] = source.read("rail0")
    json.dump(said, sys.stdout)


main()
