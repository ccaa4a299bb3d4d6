"""Options of the whole test run."""


def pytest_addoption(parser):
    parser.addoption(
        "--no-vm", action="store_true", help="leave out the virtual machine, about two minutes"
    )
