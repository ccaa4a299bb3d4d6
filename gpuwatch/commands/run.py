"""`gpuwatch run`: the daemon, in the foreground."""

from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from typing import Any


class Run:
    """Supervises samplers and the HTTP endpoint until SIGTERM or SIGINT."""

    name = "run"
    help = "watch this node and serve its metrics"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the config file and what overrides it."""
        add_config_arguments(parser)

    def run(self, arguments: Namespace) -> int:
        """Return 0 after SIGTERM or SIGINT."""
        from gpuwatch.supervisor import run

        return run(config_request(arguments))


class _Switch(Action):
    """`--collector.NAME` and `--no-collector.NAME`, which the parser sees as `--collector=NAME`."""

    def __call__(
        self, _parser: ArgumentParser, namespace: Namespace, name: Any, flag: str | None = None
    ) -> None:
        setattr(namespace, f"collectors.{name}", flag == "--collector")


def add_config_arguments(parser: ArgumentParser) -> None:
    """Declare the flags of a command that reads the config."""
    parser.add_argument("--config", metavar="FILE", help="config file (default: none)")
    parser.add_argument(
        "--source",
        default="nvml",
        help="nvml (default), simulated[:SCENARIO], replay:FILE or replay:bundled",
    )
    parser.add_argument(
        "--web.listen-address",
        dest="web.listen_addresses",
        action="append",
        metavar="ADDRESS",
        help="host:port, [ipv6]:port or :port to serve on; may be repeated",
    )
    parser.add_argument(
        "--web.config.file",
        dest="web.config_file",
        metavar="FILE",
        help="TLS and passwords, in the YAML file that Prometheus' exporters take",
    )
    parser.add_argument(
        "--web.max-requests",
        dest="web.max_requests",
        type=int,
        metavar="NUMBER",
        help="scrapes of /metrics answered at the same time (default: 40); 0 = no limit",
    )
    group = parser.add_argument_group(
        "collectors", "--collector.NAME, --no-collector.NAME: turn one on or off"
    )
    group.add_argument("--collector", "--no-collector", action=_Switch, help=SUPPRESS)


def config_request(arguments: Namespace) -> dict[str, Any]:
    """Return what `gpuwatch.config` is asked: {"config", "overrides", "source"}."""
    overrides: dict[str, dict[str, Any]] = {}
    for name, value in vars(arguments).items():
        section, dot, key = name.partition(".")
        if dot and value is not None:
            overrides.setdefault(section, {})[key] = value
    return {"config": arguments.config, "overrides": overrides, "source": arguments.source}
