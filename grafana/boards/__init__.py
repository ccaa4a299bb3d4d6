"""The dashboards. To add one: a file with a function `build`, and a place in the list."""

from boards import fleet, gpu, itself, node

BOARDS = (fleet.build, node.build, gpu.build, itself.build)
