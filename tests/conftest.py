"""Options of the whole test run."""

import signal
from collections import Counter

# A shell has what it runs in the background ignore it, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


# One process of `pytest -n` runs a whole file. Those that take longest are begun first, or one
# process would be busy with them when all the others are done; then the files with most tests.
LONG = (
    *("test_vm", "test_top", "test_failures", "test_inventory", "test_export", "test_verify"),
    *("test_golden_replay", "test_prometheus", "test_pager", "test_dashboards"),
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
