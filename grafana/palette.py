"""What reasons and severities are called and coloured, the same on all dashboards."""

from fields import Json, fixed

from gpuwatch.rules import RULES

# Higher is worse. Above 4 it is a fault of cooling or power; below, the clock is low by intent.
REASONS = {
    9: ("hw_power_brake", "dark-purple"),
    8: ("hw_thermal_slowdown", "dark-red"),
    7: ("hw_slowdown", "red"),
    6: ("sw_thermal_slowdown", "dark-orange"),
    5: ("sw_power_cap", "dark-yellow"),
    4: ("sync_boost", "blue"),
    3: ("applications_clocks", "light-blue"),
    2: ("display_clocks", "super-light-blue"),
    1: ("gpu_idle", "#808080"),
}
NO_ANSWER = 10
STATES = {NO_ANSWER: ("GPU does not answer", "#e040fb"), **REASONS, 0: ("none", "#3d5a40")}
SEVERITIES = {3: ("critical", "dark-red"), 2: ("warning", "dark-orange"), 1: ("info", "blue")}
VERDICTS = {
    4: ("reboot", "dark-red"),
    3: ("reset", "dark-red"),
    2: ("drain", "red"),
    1: ("watch", "dark-orange"),
    0: ("ok", "transparent"),
}
# What the driver asks for to recover a GPU; source: nvml.h, nvmlDeviceGpuRecoveryAction_t.
RECOVERY = {
    0: ("nothing", "semi-dark-green"),
    1: ("reset", "dark-red"),
    2: ("reboot", "dark-red"),
    3: ("drain", "dark-red"),
    4: ("drain, reset", "dark-red"),
    5: ("IMEX domain", "dark-red"),
    6: ("bus reset", "dark-red"),
    7: ("reboot", "dark-red"),
}
QUIET = {0: ("quiet", "transparent")}
FIRED = SEVERITIES | QUIET
YES_NO = {1: ("yes", "semi-dark-green"), 0: ("NO", "dark-red")}
NO_YES = {0: ("no", "semi-dark-green"), 1: ("YES", "dark-red")}

# Marks, not limits: each model has its own slowdown temperature.
COOL = 30  # where the axis of a temperature begins, unless one is lower
SLOW = 1e9  # the same for SM clocks
HOT = ((80, "orange"),)
MEMORY_HOT = ((95, "orange"),)
LOST = ((0.05, "semi-dark-yellow"), (0.20, "dark-orange"))
STRAGGLER = ((0.07, "dark-orange"), (0.15, "dark-red"))
FAULT = ((0.01, "dark-orange"), (0.05, "dark-red"))

ALERTS = "\n".join(f"- `{rule.name}` ({rule.severity}): {rule.help}" for rule in RULES)


def reason_colors() -> list[Json]:
    """Return overrides that give each reason its colour."""
    return [fixed(name, color) for name, color in REASONS.values()]
