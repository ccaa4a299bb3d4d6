"""Options of the whole test run."""

import signal
from collections import Counter

# A shell has what it runs in the background ignore it, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


# One process of `pytest -n` runs a whole file. Those that take longest are begun first, or one
# process would be busy with them when all the others are done; then the files with most tests.
LONG = (
    *("test_vm", "test_failures", "test_golden_replay", "test_live_page", "test_nvml_counters"),
    *("test_evidence", "test_network_daemon", "test_inventory", "test_odd_hosts", "test_check"),
    *("test_nvml_cases", "test_release", "test_mig", "test_nvml_state", "test_kmsg_daemon"),
    *("test_rules_in_daemon", "test_dashboards", "test_verify_load", "test_pager"),
    *("test_prometheus", "test_canary_page", "test_canary_command"),
)


def pytest_addoption(parser):
    parser.addoption(
        "--no-vm", action="store_true", help="leave out the virtual machine, about two minutes"
    )


def pytest_configure(config):
    config.option.loadscopereorder = False  # the order below is the one to keep


def pytest_collection_modifyitems(items):
    rank = {name: number for number, name in enumerate(LONG)}
    count = Counter(item.path for item in items)
    items.sort(key=lambda item: (rank.get(item.path.stem, len(LONG)), -count[item.path]))
