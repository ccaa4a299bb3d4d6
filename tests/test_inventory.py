"""What belongs into a host: learned, compared, and accepted when a person says so."""

import json
import shutil
from pathlib import Path

import pytest
from fake_nvml import Script
from fake_nvml.child import play
from node import QUIET, Node, address_of, quiet
from running import Running, wait_for
from test_release import command

from gpuwatch import topology
from gpuwatch.control import request
from gpuwatch.inventory import Inventory
from gpuwatch.signals import Entity
from gpuwatch.store import SlotRow, Store
from gpuwatch.topology import SYSFS, given_gpus

FIRST = SlotRow("0000:1b:00.0", "GPU-0", "165", "NVIDIA H200", 16, 16, 5)
GPU = Entity("gpu", "0")
POWER = "gpuwatch_gpu_power_watts{"
# Alerts without their usual patience.
QUICK = "\n".join(
    f"[rules.{rule}]\nfor_seconds = 1.0\nhold_seconds = 1.0"
    for rule in ("gpu_missing", "driver_mismatch", "gpu_lost")
)


def test_links_are_the_most_ever_seen() -> None:
    """What a GPU has had is what it should have; nobody need declare it."""
    store = Store(None)
    inventory = Inventory(store)
    for links in (None, 18, 17, None):
        assert inventory.look({GPU: FIRST._replace(nvlink_links=links)}) == []
    assert Inventory(store).slots == {FIRST.pci_bus_id: FIRST._replace(nvlink_links=18)}


def test_another_gpu_in_a_slot_is_told_once_and_not_taken_for_the_old_one() -> None:
    """The slot keeps what was accepted, with its links, until the new one is accepted."""
    inventory = Inventory(Store(None))
    inventory.look({GPU: FIRST})
    other = FIRST._replace(uuid="GPU-new", serial="166", nvlink_links=12)
    (event,) = [*inventory.look({GPU: other}), *inventory.look({GPU: other})]
    assert (event.entity, event.name, event.detail) == (
        GPU,
        "gpu_replaced",
        "GPU-new is where GPU-0 was",
    )
    assert inventory.slots[FIRST.pci_bus_id] == FIRST
    assert inventory.accept([FIRST.pci_bus_id], [other]) == []
    assert inventory.slots[FIRST.pci_bus_id] == other
    assert inventory.look({GPU: other}) == []


def test_accepting_drops_what_is_gone_and_keeps_what_is_silent() -> None:
    """A GPU on the bus that does not tell who it is still belongs there."""
    inventory = Inventory(Store(None))
    slots = [FIRST._replace(pci_bus_id=f"0000:{n}:00.0", uuid=f"GPU-{n}") for n in range(3)]
    inventory.look({Entity("gpu", slot.uuid): slot for slot in slots})
    assert inventory.accept(["0000:0:00.0", "0000:1:00.0"], slots[:1]) == ["0000:2:00.0"]
    assert list(inventory.slots.values()) == slots[:2]


@pytest.mark.parametrize(
    ("configured", "given", "on_bus", "stored", "expected"),
    [
        (0, 0, 0, 0, 0),
        (0, 0, 8, 0, 8),
        (0, 0, 7, 8, 8),
        (0, 0, 8, 7, 8),
        (4, 0, 8, 8, 4),
        (0, 2, 8, 2, 2),  # a container of a host with eight
        (0, 2, 0, 1, 2),
        (9, 2, 8, 2, 9),
    ],
)
def test_how_many_gpus_are_expected(
    configured: int, given: int, on_bus: int, stored: int, expected: int
) -> None:
    """The config decides, in a container what it was given, else all that were ever seen."""
    store = Store(None)
    store.save_inventory(FIRST._replace(pci_bus_id=str(n)) for n in range(stored))
    assert Inventory(store, given).expected(configured, on_bus) == expected


@pytest.mark.parametrize(("kind", "given"), [("tmpfs", 3), ("overlay", 3), ("devtmpfs", 0)])
def test_a_container_counts_its_device_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, given: int
) -> None:
    """In a /dev of its own a container has nodes of its GPUs; a host's tell nothing."""
    for name in (
        "nvidia0",
        "nvidia7",
        "nvidia12",
        "nvidiactl",
        "nvidia-uvm",
        "nvidia-caps",
        "null",
    ):
        (tmp_path / name).touch()
    monkeypatch.setattr(topology, "filesystem", lambda _path: kind)
    assert given_gpus(SYSFS, tmp_path) == given
    assert given_gpus(tmp_path / "sysfs", tmp_path) == 0


def slots(running: Running) -> dict[str, dict[str, object]]:
    """Return the slots as `inventory show --json` tells them, by address."""
    answer = json.loads(command(running, "inventory", "show", "--json").stdout)
    return {slot["pci_bus_id"]: slot for slot in answer["slots"]}


def unplug(node: Node, index: int) -> str:
    """Take a GPU out of the node; return its address."""
    address = address_of(node.script.devices[index])
    shutil.rmtree(node.sysfs / "bus/pci/devices" / address)
    there = [device["i"] for device in node.script.devices if device["i"] != index]
    node.now("devices", val=there)
    return address


def test_a_gpu_that_is_gone_after_a_restart(tmp_path: Path) -> None:
    """It is missed until its absence is accepted; then the others are numbered anew."""
    node = Node(tmp_path)
    config = QUIET + QUICK
    with node.running(config=config) as running:
        wait_for(lambda: running.value("gpuwatch_gpus_visible") == 3)
        wait_for(lambda: len(slots(running)) == 3)
        assert command(running, "inventory", "show").returncode == 0
        assert running.alert("gpu_missing") is None
        assert running.stop() == 0
    gone = unplug(node, 1)
    with node.running(config=config) as running:
        alert = wait_for(lambda: running.alert("gpu_missing"))
        assert running.value("gpuwatch_gpus_expected") == 3
        assert running.value("gpuwatch_gpus_pci") == running.value("gpuwatch_gpus_visible") == 2
        assert running.value("gpuwatch_gpu_up", 'gpu="2"') == 1
        wait_for(lambda: running.alert("gpu_missing")["state"] == "firing")
        assert alert["limit"] == 1
        shown = command(running, "inventory", "show")
        assert shown.returncode == 1
        (line,) = [line for line in shown.stdout.splitlines() if gone in line]
        assert line.split()[:2] == ["1", "gone"]
        assert shown.stdout.splitlines()[-1] == "3 GPUs expected"

        daemon, state = running.child("daemon"), running.child("state")
        accepted = command(running, "inventory", "accept")
        assert (accepted.returncode, accepted.stderr) == (0, "")
        assert f"{gone}: no longer belongs here" in accepted.stdout
        assert "numbered anew" in accepted.stdout
        wait_for(lambda: running.child("daemon") != daemon)
        wait_for(running.is_ready)
        assert running.child("state") != state
        wait_for(lambda: running.value("gpuwatch_gpu_up", 'gpu="1"') == 1)
        assert running.value("gpuwatch_gpu_up", 'gpu="2"') is None
        assert running.value("gpuwatch_gpus_expected") == 2
        wait_for(lambda: running.alert("gpu_missing") is None)
        uuid = node.script.devices[2]["uuid"]
        assert running.value("gpuwatch_gpu_up", 'gpu="1"', uuid) == 1
        assert running.value("gpuwatch_child_restarts_total", 'duty="daemon"') == 0
        assert list(slots(running)) == [address_of(node.script.devices[i]) for i in (0, 2)]


def test_a_gpu_that_goes_while_gpuwatch_runs(tmp_path: Path) -> None:
    """What was accepted as gone is not learned again from what its sampler still remembers."""
    node = Node(tmp_path, 2)
    with node.running(config=QUIET + QUICK) as running:
        wait_for(lambda: running.value("gpuwatch_gpus_visible") == 2)
        wait_for(lambda: len(slots(running)) == 2)
        gone = unplug(node, 0)
        wait_for(lambda: (running.alert("gpu_missing") or {}).get("value") == 1)
        wait_for(lambda: slots(running)[gone]["state"] == "gone")
        daemon = running.child("daemon")
        answer = command(running, "inventory", "accept")
        assert f"{gone}: no longer belongs here" in answer.stdout
        wait_for(lambda: running.child("daemon") != daemon)
        wait_for(running.is_ready)
        uuid = node.script.devices[1]["uuid"]
        wait_for(lambda: running.value("gpuwatch_gpu_up", 'gpu="0"', uuid) == 1)
        assert running.value("gpuwatch_gpus_expected") == 1
        assert len(slots(running)) == 1
        wait_for(lambda: not running.status()["alerts"])


def test_all_gpus_gone_after_a_restart(tmp_path: Path) -> None:
    """A driver that works and lists no GPU leaves nothing to watch, and all of them missing."""
    node = Node(tmp_path, 2)
    with node.running() as running:
        wait_for(lambda: running.value("gpuwatch_gpus_visible") == 2)
        wait_for(lambda: len(slots(running)) == 2)
        assert running.stop() == 0
    shutil.rmtree(node.sysfs / "bus/pci/devices")
    node.now("devices", val=[])
    with node.running(config=QUIET + QUICK) as running:
        wait_for(lambda: (running.alert("gpu_missing") or {}).get("value") == 2)
        assert running.value("gpuwatch_gpus_expected") == 2
        answer = command(running, "inventory", "accept")
        assert answer.returncode == 3
        assert "no GPU answers now" in answer.stderr


def test_another_gpu_in_the_same_slot(tmp_path: Path) -> None:
    """It is told as an event, raises nothing, and is taken in without a new number."""
    node = Node(tmp_path, 2)
    with node.running() as running:
        wait_for(lambda: running.value("gpuwatch_gpus_visible") == 2)
        wait_for(lambda: len(slots(running)) == 2)
        assert running.stop() == 0
    node.now("nvmlDeviceGetUUID", dev=1, val="GPU-11111111-0000-4000-8000-000000000000")
    with node.running(config=QUIET + QUICK) as running:
        (event,) = wait_for(lambda: running.events("gpu_replaced"))
        assert event["entity"] == ["gpu", "1"]
        address = address_of(node.script.devices[1])
        assert slots(running)[address]["state"] == "replaced"
        assert running.alert("gpu_missing") is None
        daemon = running.child("daemon")
        answer = request(running.runtime / "control.sock", {"command": "accept"}, 20)
        assert answer == {"accepted": 2, "gone": [], "acknowledged": 0, "renumbered": False}
        assert slots(running)[address]["state"] == "present"
        assert slots(running)[address]["uuid"].startswith("GPU-1111")
        assert running.child("daemon") == daemon


def test_a_gpu_on_the_bus_that_the_driver_does_not_have(tmp_path: Path) -> None:
    """Eight on the bus and seven in NVML, with no Xid seen: the eighth is missing."""
    node = Node(tmp_path, 7)
    node.plug("0000:df:00.0")
    with node.running(config=QUIET + QUICK) as running:
        wait_for(lambda: running.value("gpuwatch_gpus_visible") == 7)
        assert running.value("gpuwatch_gpus_pci") == running.value("gpuwatch_gpus_expected") == 8
        wait_for(lambda: (running.alert("gpu_missing") or {}).get("value") == 1)


def test_a_lost_gpu_that_is_back_is_acknowledged(tmp_path: Path) -> None:
    """The sticky alert stays after the recovery, until the inventory is accepted."""
    node = Node(tmp_path, 2)
    with node.running(config=QUIET + QUICK) as running:
        wait_for(lambda: running.value("gpuwatch_gpus_visible") == 2)
        node.now("any", "GPU_IS_LOST", dev=1)
        wait_for(lambda: (running.alert("gpu_lost", "1") or {}).get("state") == "firing")
        assert request(running.runtime / "control.sock", {"command": "accept"}, 20) == {
            "accepted": 2,
            "gone": [],
            "acknowledged": 0,
            "renumbered": False,
        }
        node.heal()
        wait_for(lambda: running.value("gpuwatch_gpus_visible") == 2)
        assert running.alert("gpu_lost", "1")["state"] == "firing"
        answer = command(running, "inventory", "accept")
        assert "alerts acknowledged: 1" in answer.stdout
        wait_for(lambda: running.alert("gpu_lost", "1") is None)


def test_one_lost_gpu_stops_no_other(tmp_path: Path) -> None:
    """The others go on; the lost one keeps its name and address, and the page its status."""
    node = Node(tmp_path, 8)
    with node.running() as running:
        wait_for(lambda: running.value("gpuwatch_gpus_visible") == 8)
        lost = node.script.devices[3]
        for ret in ("GPU_IS_LOST", "UNKNOWN"):
            node.now("nvmlDeviceGetHandleByPciBusId", ret, dev=3)
            node.now("nvmlDeviceGetHandleByIndex", ret, dev=3)
            node.now("any", ret, dev=3)
            wait_for(lambda: running.value("gpuwatch_gpus_visible") == 7)
            assert running.value("gpuwatch_gpu_up", 'gpu="3"', lost["uuid"]) == 0
            assert running.value("gpuwatch_gpu_info", 'gpu="3"', address_of(lost)) == 1
            wait_for(lambda: running.alert("gpu_lost", "3"))
            wait_for(lambda: len([one for one in running.scrape() if POWER in one]) == 7)
            node.heal()
            wait_for(lambda: running.value("gpuwatch_gpus_visible") == 8)
        assert running.stop() == 0


def test_library_and_driver_of_different_versions(tmp_path: Path) -> None:
    """It is an alert of its own; no GPU counts as missing, and it ends without a restart."""
    node = Node(tmp_path, 2)
    with node.running() as running:
        wait_for(lambda: len(slots(running)) == 2)
        assert running.stop() == 0
    node.now("nvmlInit", "LIB_RM_VERSION_MISMATCH")
    with node.running(config=QUIET + QUICK) as running:
        wait_for(lambda: (running.alert("driver_mismatch") or {}).get("state") == "firing")
        assert running.value("gpuwatch_nvml_up") == 0
        assert running.alert("gpu_missing") is None
        node.heal()
        wait_for(lambda: running.value("gpuwatch_gpus_visible") == 2)
        wait_for(lambda: running.alert("driver_mismatch") is None)
        assert running.value("gpuwatch_child_restarts_total", 'duty="state"') == 0


def test_links_of_a_running_node_are_learned(tmp_path: Path) -> None:
    """What the counters say of links and PCIe is in the inventory, and is served as expected."""
    config = quiet("nvml_state", "nvml_counters")
    with Running(tmp_path, "--source", "simulated", config=config) as running:
        links = ("gpuwatch_gpu_nvlink_links_expected", 'gpu="0"')
        wait_for(lambda: running.value(*links) == 18)
        slot = slots(running)["0000:1b:00.0"]
        assert slot["nvlink_links"] == 18
        assert slot["state"] == "present"
        wait_for(lambda: slots(running)["0000:1b:00.0"]["pcie_width"] == 16)
        shown = command(running, "inventory", "show").stdout.splitlines()
        assert len(shown) == 1 + 8 + 1
        assert shown[1].endswith("18       5 x16")


IN_A_CONTAINER = """
from gpuwatch import roster, topology
from gpuwatch.pulse import Pulse
from gpuwatch.source import Context, Findings
topology.pci_gpus = lambda sysfs: [f"0000:{bus:02x}:00.0" for bus in (0x1b, 0x43, 0x52, 0x61)]
for given in (0, 2):
    topology.given_gpus = lambda sysfs: given
    gpus = roster.Roster(Findings(), tells=True)
    gpus.open(Context({}, Pulse.create(1)))
    say([gpu.bus_id for gpu in gpus.gpus if gpu.handle], len(gpus.gpus))
"""


def test_a_container_watches_the_gpus_it_was_given(tmp_path: Path) -> None:
    """Those that only its host has are on the bus it sees, and are not its own that are lost."""
    script = Script(4).step(0, "devices", val=[1, 3])
    ours = ["0000:43:00.0", "0000:61:00.0"]
    assert play(tmp_path, script, IN_A_CONTAINER) == [[ours, 4], [ours, 2]]
