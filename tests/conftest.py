"""Options of the whole test run."""

import signal

# A shell has what it runs in the background ignore it, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption(
        "--no-vm", action="store_true", help="leave out the virtual machine, about two minutes"
    )
